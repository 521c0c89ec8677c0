"""The emulated accelerator: a `Driver` in host memory, strict about order.

Five rules make it worth testing on.  Work runs as late as the program allows; every access is checked by
vector clocks; work outside the driver is bracketed and so checked too; memory is poisoned, capacities hold
and misuse gets the real driver's answers; and a virtual clock moves by links given as plain data.
Not emulated: device kernels, driver pools, inter-process handles.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ...errors import DriverError
from ..api import Bracket, DeviceInfo, Driver, Event, MemoryInfo, Span, Stream, next_sequence
from .clock import Link, VirtualClock
from .memory import MAPPED_OFFSET, Kind, Memory, Place
from .options import EmulatedOptions
from .order import Access, AccessLog, Clock, OpenAccess, join
from .work import Queue, Scheduler, Work


@dataclass(eq=False)
class _StreamState:
    device: int
    actor: int
    queue: Queue
    clock: Clock = field(default_factory=dict)
    closed: bool = False


@dataclass(eq=False)
class _EventState:
    work: Work | None = None
    clock: Clock = field(default_factory=dict)


@dataclass(frozen=True)
class _Touch:
    place: Place
    nbytes: int
    write: bool


class _HostThreads(threading.local):
    """What each host thread knows; a thread is an actor of its own."""

    def __init__(self, actors: itertools.count[int]) -> None:
        self.actor = next(actors)
        self.clock: Clock = {}


class _EmulatedBracket(Bracket):
    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish

    def end(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class EmulatedDriver(Driver):
    """1 to 8 emulated accelerators.

    Parameters
    ----------
    options : EmulatedOptions, optional
        The machine; one device by default.
    """

    name: ClassVar[str] = "emulated"

    def __init__(self, options: EmulatedOptions | None = None) -> None:
        self.options = options or EmulatedOptions()
        count = self.options.device_count
        self._lock = threading.RLock()
        self._actors = itertools.count(1)
        self._threads = _HostThreads(self._actors)
        self._memory = Memory(count, self.options.device_memory)
        self._log = AccessLog()
        self._scheduler = Scheduler(self.options.seed, self.options.eagerness)
        self._streams: dict[int, _StreamState] = {}
        self._peers: set[tuple[int, int]] = set()
        self._clock = VirtualClock()
        opts = self.options
        self._h2d = [Link(opts.host_to_device) for _ in range(count)]
        self._d2h = [Link(opts.device_to_host) for _ in range(count)]
        self._local = [Link(opts.on_device) for _ in range(count)]
        self._peer = {(a, b): Link(opts.peer) for a in range(count) for b in range(count) if a != b}

    # -- devices ------------------------------------------------------------------------------------
    @property
    def device_count(self) -> int:
        return self.options.device_count

    def device_info(self, device: int) -> DeviceInfo:
        self._device(device)
        return DeviceInfo(
            ordinal=device,
            name="Emulated accelerator",
            uuid=f"emulated-{device}",
            capacity=self.options.device_memory,
            pci_address=None,
            numa_node=None,
            compute_capability=None,
            capabilities={"HOST_REGISTER_SUPPORTED": 1, "READ_ONLY_HOST_REGISTER_SUPPORTED": 1},
        )

    def memory_info(self, device: int) -> MemoryInfo:
        memory = self._memory.devices[self._device(device)]
        return MemoryInfo(memory.capacity - memory.used, memory.capacity)

    def synchronize(self, device: int) -> None:
        with self._lock:
            for state in [s for s in self._streams.values() if s.device == self._device(device)]:
                self._reach(state.queue.last, state.clock)

    # -- memory -------------------------------------------------------------------------------------
    def malloc(self, device: int, nbytes: int) -> int:
        with self._lock:
            return self._memory.devices[self._device(device)].malloc(nbytes)

    def free(self, device: int, ptr: int) -> None:
        if ptr == 0:
            return
        with self._lock:
            memory = self._memory.devices[self._device(device)]
            self._retire(ptr, memory.extent(ptr), "free")
            memory.free(ptr)

    def host_register(self, address: int, nbytes: int, *, read_only: bool = False) -> None:
        with self._lock:
            self._memory.host.register(address, nbytes, read_only=read_only)

    def host_unregister(self, address: int) -> None:
        with self._lock:
            self._retire(address, self._memory.host.extent(address), "host_unregister")
            self._memory.host.unregister(address)

    def host_device_pointer(self, address: int, device: int) -> int:
        self._device(device)
        if self._memory.host.find(address, 1) is None:
            raise DriverError("CUDA_ERROR_INVALID_VALUE", "host_device_pointer", f"{address:#x} is not registered")
        return address + MAPPED_OFFSET

    def host_bytes(self, ptr: int, nbytes: int) -> memoryview | None:
        place = self._memory.locate(ptr, nbytes, "host_bytes")
        if place.kind is Kind.DEVICE:
            data = self._memory.devices[place.device].data(ptr, nbytes)
            assert data is not None
            return memoryview(data)  # type: ignore[arg-type]  # arrays are buffers; the stubs say so from 3.12
        return memoryview((ctypes.c_uint8 * nbytes).from_address(place.real)).cast("B")

    # -- order --------------------------------------------------------------------------------------
    def create_stream(self, device: int, *, priority: int = 0) -> Stream:
        with self._lock:
            state = _StreamState(self._device(device), next(self._actors), self._scheduler.queue())
            self._streams[state.actor] = state
            return Stream(self, device, state, owned=True)

    def stream_from_handle(self, device: int, handle: int) -> Stream:
        state = self._streams.get(handle)
        if state is None or state.device != device:
            raise DriverError("CUDA_ERROR_INVALID_HANDLE", "stream_from_handle", f"no stream {handle} here")
        return Stream(self, device, state, owned=False)

    def destroy_stream(self, stream: Stream) -> None:
        with self._lock:
            state: _StreamState = stream.handle
            if not state.closed:
                self._reach(state.queue.last, state.clock)
                self._scheduler.remove(state.queue)
                del self._streams[state.actor]
                state.closed = True

    def stream_wait(self, stream: Stream, event: Event) -> None:
        with self._lock:
            state, recorded = self._state(stream), self._event(event)
            join(state.clock, recorded.clock)
            earlier = () if recorded.work is None else (recorded.work,)
            self._enqueue(state, None, (), after=earlier)

    def stream_synchronize(self, stream: Stream) -> None:
        with self._lock:
            state = self._state(stream)
            self._reach(state.queue.last, state.clock)

    def stream_query(self, stream: Stream) -> bool:
        with self._lock:
            state = self._state(stream)
            return self._poll(state.queue.last, state.clock)

    def create_event(self, device: int, *, timing: bool = False) -> Event:
        return Event(self, self._device(device), _EventState(), timing)

    def event_record(self, event: Event, stream: Stream) -> None:
        with self._lock:
            state, recorded = self._state(stream), self._event(event)
            if event.device != state.device:
                raise DriverError(
                    "CUDA_ERROR_INVALID_HANDLE",
                    "event_record",
                    f"an event of device {event.device} on a stream of device {state.device}",
                )
            recorded.work = self._enqueue(state, None, ())
            recorded.clock = dict(state.clock)
            event.sequence = next_sequence()

    def event_query(self, event: Event) -> bool:
        with self._lock:
            recorded = self._event(event)
            return self._poll(recorded.work, recorded.clock)

    def event_synchronize(self, event: Event) -> None:
        with self._lock:
            recorded = self._event(event)
            self._reach(recorded.work, recorded.clock)

    def event_elapsed(self, start: Event, end: Event) -> float:
        if not (start.timing and end.timing):
            raise DriverError("CUDA_ERROR_INVALID_HANDLE", "event_elapsed", "make both events with timing=True")
        first, last = self._event(start).work, self._event(end).work
        if first is None or last is None:
            raise DriverError("CUDA_ERROR_INVALID_HANDLE", "event_elapsed", "an event was never recorded")
        if not (first.done and last.done):
            raise DriverError("CUDA_ERROR_NOT_READY", "event_elapsed", "synchronise the events first")
        return last.end - first.end

    # -- copies -------------------------------------------------------------------------------------
    def copy(self, dst: int, src: int, nbytes: int, *, stream: Stream) -> None:
        if nbytes == 0:
            return
        with self._lock:
            target = self._memory.locate(dst, nbytes, "copy")
            source = self._memory.locate(src, nbytes, "copy")
            to, of = target.real, source.real
            work = self._enqueue(
                self._state(stream),
                lambda: _ignore(ctypes.memmove(to, of, nbytes)),
                (_Touch(source, nbytes, False), _Touch(target, nbytes, True)),
                link=self._link(source, target),
                nbytes=nbytes,
                label=f"copy {source.kind.value} to {target.kind.value}",
            )
            if Kind.PAGEABLE in (source.kind, target.kind):
                self._scheduler.force(work)

    def fill(self, ptr: int, value: int, nbytes: int, *, stream: Stream) -> None:
        if nbytes == 0:
            return
        with self._lock:
            target = self._memory.locate(ptr, nbytes, "fill")
            if target.kind is Kind.PAGEABLE:
                raise DriverError("CUDA_ERROR_INVALID_VALUE", "fill", f"{ptr:#x} is not device memory")
            to = target.real
            self._enqueue(
                self._state(stream),
                lambda: _ignore(ctypes.memset(to, value, nbytes)),
                (_Touch(target, nbytes, True),),
                link=self._local[stream.device],
                nbytes=nbytes,
                label="fill",
            )

    # -- peers --------------------------------------------------------------------------------------
    def can_access_peer(self, device: int, peer: int) -> bool:
        return self._device(device) != self._device(peer)

    def enable_peer_access(self, device: int, peer: int) -> None:
        if not self.can_access_peer(device, peer):
            raise DriverError("CUDA_ERROR_INVALID_DEVICE", "enable_peer_access", f"device {device} to itself")
        if (device, peer) in self._peers:
            raise DriverError(
                "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "enable_peer_access", f"{device} to {peer}"
            )
        self._peers.add((device, peer))

    def disable_peer_access(self, device: int, peer: int) -> None:
        if (device, peer) not in self._peers:
            raise DriverError("CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", "disable_peer_access", f"{device} to {peer}")
        self._peers.remove((device, peer))

    # -- work the driver does not see -----------------------------------------------------------------
    def launch(
        self, stream: Stream, *, reads: Iterable[Span] = (), writes: Iterable[Span] = (), label: str = ""
    ) -> Bracket:
        with self._lock:
            state = self._state(stream)
            touches = [self._kernel_touch(span, False) for span in reads]
            touches += [self._kernel_touch(span, True) for span in writes]
            label = label or "launch"
            work = self._enqueue(state, None, ())
            opened = self._open(touches, state.actor, state.clock, label)
            self._scheduler.force(work)

            def finish() -> None:
                with self._lock:
                    work = self._enqueue(state, None, ())
                    self._close(opened, state.actor, state.clock)
                    self._scheduler.force(work)

            return _EmulatedBracket(finish)

    def host_access(self, *, reads: Iterable[Span] = (), writes: Iterable[Span] = (), label: str = "") -> Bracket:
        with self._lock:
            touches = [self._host_touch(span, False) for span in reads]
            touches += [self._host_touch(span, True) for span in writes]
            threads, actor, clock = self._threads, self._threads.actor, self._threads.clock
            opened = self._open(touches, actor, clock, label or "host access")

            def finish() -> None:
                with self._lock:
                    clock[actor] = clock.get(actor, 0) + 1
                    self._close(opened, actor, clock)
                    join(threads.clock, clock)  # if another thread ends it, it has been handed the bytes

            return _EmulatedBracket(finish)

    def publish(self) -> Any:
        with self._lock:
            return dict(self._threads.clock)

    def observe(self, token: Any) -> None:
        with self._lock:
            join(self._threads.clock, token)

    def close(self) -> None:
        with self._lock:
            for state in list(self._streams.values()):
                self._scheduler.force(state.queue.last)

    # -- the emulated machine itself --------------------------------------------------------------------
    @property
    def now(self) -> float:
        """The virtual clock: seconds that the host has waited for devices."""
        return self._clock.now

    @property
    def registered(self) -> int:
        """Bytes of host memory registered now."""
        return self._memory.host.total

    # -- inside -------------------------------------------------------------------------------------
    def _device(self, device: int) -> int:
        if not 0 <= device < self.options.device_count:
            raise DriverError(
                "CUDA_ERROR_INVALID_DEVICE",
                "device",
                f"{device} of {self.options.device_count} emulated devices",
            )
        return device

    def _state(self, stream: Stream) -> _StreamState:
        state = stream.handle
        if stream.driver is not self or not isinstance(state, _StreamState) or state.closed:
            raise DriverError("CUDA_ERROR_INVALID_HANDLE", "stream", "closed, or of another driver")
        return state

    def _event(self, event: Event) -> _EventState:
        if event.driver is not self or not isinstance(event.handle, _EventState):
            raise DriverError("CUDA_ERROR_INVALID_HANDLE", "event", "of another driver")
        return event.handle

    def _enqueue(
        self,
        state: _StreamState,
        run: Callable[[], None] | None,
        touches: Iterable[_Touch],
        *,
        after: tuple[Work, ...] = (),
        link: Link | None = None,
        nbytes: int = 0,
        label: str = "",
    ) -> Work:
        clock, actor = state.clock, state.actor
        join(clock, self._threads.clock)
        for touch in touches:
            line = touch.place.line
            self._log.check(line, line + touch.nbytes, write=touch.write, actor=actor, clock=clock, label=label)
        clock[actor] = clock.get(actor, 0) + 1
        for touch in touches:
            line = touch.place.line
            self._log.record(
                line, line + touch.nbytes, write=touch.write, access=Access(actor, clock[actor], label)
            )
        before = after if state.queue.last is None else (state.queue.last, *after)
        ready = self._clock.ready(work.end for work in before)
        end = ready if link is None else link.reserve(ready, nbytes)
        work = Work(run, tuple(earlier for earlier in before if not earlier.done), end)
        self._scheduler.append(state.queue, work)
        return work

    def _open(self, touches: list[_Touch], actor: int, clock: Clock, label: str) -> list[OpenAccess]:
        opened = []
        for touch in touches:
            line, end = touch.place.line, touch.place.line + touch.nbytes
            self._log.check(line, end, write=touch.write, actor=actor, clock=clock, label=label)
            opened.append(OpenAccess(line, end, touch.write, actor, label))
        for access in opened:
            self._log.begin(access)
        return opened

    def _close(self, opened: list[OpenAccess], actor: int, clock: Clock) -> None:
        for access in opened:
            self._log.finish(access)
            entry = Access(actor, clock[actor], access.label)
            self._log.record(access.start, access.end, write=access.write, access=entry)

    def _kernel_touch(self, span: Span, write: bool) -> _Touch:
        place = self._memory.locate(span.ptr, span.nbytes, "launch")
        if place.kind is not Kind.DEVICE and span.ptr < MAPPED_OFFSET:
            raise DriverError(
                "CUDA_ERROR_ILLEGAL_ADDRESS",
                "launch",
                f"{span.ptr:#x} is a host address; kernels need host_device_pointer(address, device)",
            )
        return _Touch(place, span.nbytes, write)

    def _host_touch(self, span: Span, write: bool) -> _Touch:
        place = Place(Kind.PAGEABLE, -1, span.ptr, span.ptr)
        return _Touch(place, span.nbytes, write)

    def _retire(self, start: int, nbytes: int, label: str) -> None:
        threads = self._threads
        self._log.check(start, start + nbytes, write=True, actor=threads.actor, clock=threads.clock, label=label)
        self._log.forget(start, start + nbytes)

    def _reach(self, work: Work | None, clock: Clock) -> None:
        self._scheduler.force(work)
        join(self._threads.clock, clock)
        if work is not None:
            self._clock.reach(work.end)
            for link in (*self._h2d, *self._d2h, *self._local, *self._peer.values()):
                link.settle(self._clock.now)

    def _poll(self, work: Work | None, clock: Clock) -> bool:
        self._scheduler.tick()
        if work is not None and not work.done:
            return False
        self._reach(work, clock)
        return True

    def _link(self, source: Place, target: Place) -> Link | None:
        if source.kind is Kind.DEVICE and target.kind is Kind.DEVICE:
            if source.device == target.device:
                return self._local[source.device]
            return self._peer[source.device, target.device]
        if target.kind is Kind.DEVICE:
            return self._h2d[target.device]
        return self._d2h[source.device] if source.kind is Kind.DEVICE else None


def _ignore(_: object) -> None:
    return None
