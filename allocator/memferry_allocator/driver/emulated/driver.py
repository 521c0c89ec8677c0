"""The emulated accelerator: a `Driver` in host memory, strict about order.

Five rules make it worth testing on.  Work runs as late as the program allows; every access is checked by
vector clocks; work outside the driver is bracketed and so checked too; memory is poisoned, capacities hold
and misuse gets the real driver's answers; and a virtual clock moves by links given as plain data.
Not emulated: device kernels, driver pools, inter-process handles.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from ...errors import DriverError
from ..api import Bracket, DeviceInfo, Driver, Event, MemoryInfo, Span, Stream, require_stream
from .clock import Link, Links, VirtualClock
from .memory import HOST_END, MAPPED_OFFSET, Kind, Memory, Place
from .monitor import Monitor
from .options import EmulatedOptions
from .order import Access, AccessLog, Clock, OpenAccess, join
from .state import EmulatedBracket, EventState, HostThreads, StreamState, Touch
from .work import Scheduler, Work

PATIENCE = 16  # a program that has asked so often whether work is done does not let it wait any longer


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
        self._lock = Monitor()
        self._closed = False
        self._actors = itertools.count(1)
        self._threads = HostThreads(self._actors)
        self._memory = Memory(count, self.options.device_memory)
        self._log = AccessLog()
        self._scheduler = Scheduler(self.options.seed, self.options.eagerness)
        self._streams: dict[int, StreamState] = {}
        self._peers: set[tuple[int, int]] = set()
        self._clock = VirtualClock()
        self._links = Links(self.options)

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
            self._device(device)
            for state in [s for s in self._streams.values() if s.device == device]:
                self._reach(state.queue.last, state.clock)

    # -- memory -------------------------------------------------------------------------------------
    def malloc(self, device: int, nbytes: int) -> int:
        with self._lock:
            return self._memory.devices[self._device(device)].malloc(nbytes)

    def free(self, device: int, ptr: int) -> None:
        with self._lock:
            memory = self._memory.devices[self._device(device)]
            if ptr != 0:
                self._retire(ptr, memory.extent(ptr), "free")
                memory.free(ptr)

    def host_register(self, address: int, nbytes: int, *, read_only: bool = False) -> None:
        with self._lock:
            self._alive()
            self._memory.host.register(address, nbytes, read_only=read_only)

    def host_unregister(self, address: int) -> None:
        with self._lock:
            self._alive()
            self._retire(address, self._memory.host.extent(address), "host_unregister")
            self._memory.host.unregister(address)

    def host_registration(self, address: int) -> Span | None:
        with self._lock:
            self._alive()
            found = self._memory.host.find(address, 1)
            return None if found is None else Span(found.start, found.nbytes)

    def host_device_pointer(self, address: int, device: int) -> int:
        with self._lock:
            self._device(device)
            if self._memory.host.find(address, 1) is None:
                raise DriverError(
                    "CUDA_ERROR_INVALID_VALUE", "host_device_pointer", f"{address:#x} is not registered"
                )
            return address + MAPPED_OFFSET

    def host_bytes(self, ptr: int, nbytes: int) -> memoryview | None:
        with self._lock:
            place = self._locate(ptr, nbytes, "host_bytes")
            if place.kind is Kind.PAGEABLE:
                raise DriverError("CUDA_ERROR_INVALID_VALUE", "host_bytes", f"{ptr:#x} is not registered")
            if place.kind is Kind.DEVICE:
                data = self._memory.devices[place.device].data(ptr, nbytes)
                assert data is not None
                return memoryview(data)  # type: ignore[arg-type]  # arrays are buffers; stubs say so from 3.12
            return memoryview((ctypes.c_uint8 * nbytes).from_address(place.real)).cast("B")

    # -- order --------------------------------------------------------------------------------------
    def create_stream(self, device: int, *, priority: int = 0) -> Stream:
        with self._lock:
            state = StreamState(self._device(device), next(self._actors), self._scheduler.queue())
            self._streams[state.actor] = state
            return Stream(self, device, state, owned=True)

    def stream_from_handle(self, device: int, handle: int) -> Stream:
        with self._lock:
            self._device(device)
            state = self._streams.get(handle)
            if state is None or state.device != device:
                raise DriverError("CUDA_ERROR_INVALID_HANDLE", "stream_from_handle", f"no stream {handle} here")
            return Stream(self, device, state, owned=False)

    def destroy_stream(self, stream: Stream) -> None:
        with self._lock:
            if not stream.owned or self._closed or (stream.driver is self and stream.handle.closed):
                return
            state = self._state(stream)
            self._reach(state.queue.last, state.clock)
            self._scheduler.remove(state.queue)
            del self._streams[state.actor]
            state.closed = True

    def stream_wait(self, stream: Stream, event: Event) -> None:
        with self._lock:
            state, recorded = self._state(stream), self._event(event)
            known = dict(state.clock)
            join(known, recorded.clock)
            state.clock = known
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
        return Event(self, self._device(device), EventState(), timing)

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
            recorded.clock = state.clock
            event.recorded_on(stream)

    def event_query(self, event: Event) -> bool:
        with self._lock:
            recorded = self._event(event)
            return self._poll(recorded.work, recorded.clock)

    def event_synchronize(self, event: Event) -> None:
        with self._lock:
            recorded = self._event(event)
            self._reach(recorded.work, recorded.clock)

    def event_elapsed(self, start: Event, end: Event) -> float:
        with self._lock:
            first, last = self._event(start).work, self._event(end).work
            if start.device != end.device:
                raise DriverError("CUDA_ERROR_INVALID_HANDLE", "event_elapsed", "events of two devices")
            if not (start.timing and end.timing):
                raise DriverError(
                    "CUDA_ERROR_INVALID_HANDLE", "event_elapsed", "make both events with timing=True"
                )
            if first is None or last is None:
                raise DriverError("CUDA_ERROR_INVALID_HANDLE", "event_elapsed", "an event was never recorded")
            if not (first.done and last.done):
                raise DriverError("CUDA_ERROR_NOT_READY", "event_elapsed", "synchronise the events first")
            return last.end - first.end

    # -- graph capture --------------------------------------------------------------------------------
    def is_capturing(self, stream: Stream) -> bool:
        state = stream.handle
        if state.__class__ is not StreamState or state.closed or stream.driver is not self:
            self._state(stream)
        return False

    # -- copies -------------------------------------------------------------------------------------
    def copy(self, dst: int, src: int, nbytes: int, *, stream: Stream) -> None:
        if nbytes == 0:
            return
        with self._lock:
            state = self._state(stream)
            target = self._locate(dst, nbytes, "copy")
            source = self._locate(src, nbytes, "copy")
            if target.read_only:
                raise DriverError("CUDA_ERROR_INVALID_VALUE", "copy", f"{dst:#x} is registered read-only")
            to, of = target.real, source.real
            work = self._enqueue(
                state,
                lambda: _ignore(ctypes.memmove(to, of, nbytes)),
                (Touch(source, nbytes, False), Touch(target, nbytes, True)),
                link=self._links.between(source, target),
                nbytes=nbytes,
                label=f"copy {source.kind.value} to {target.kind.value}",
            )
            if Kind.PAGEABLE in (source.kind, target.kind):
                self._scheduler.force(work)

    def fill(self, ptr: int, value: int, nbytes: int, *, stream: Stream) -> None:
        if nbytes == 0:
            return
        with self._lock:
            state = self._state(stream)
            target = self._locate(ptr, nbytes, "fill")
            if not 0 <= value <= 255:
                raise DriverError("CUDA_ERROR_INVALID_VALUE", "fill", f"{value} is not a byte")
            if target.read_only or not self._reachable(target, ptr, state.device):
                raise DriverError(
                    "CUDA_ERROR_INVALID_VALUE", "fill", f"device {state.device} cannot write at {ptr:#x}"
                )
            to = target.real
            self._enqueue(
                state,
                lambda: _ignore(ctypes.memset(to, value, nbytes)),
                (Touch(target, nbytes, True),),
                link=self._links.filling(state.device, target),
                nbytes=nbytes,
                label="fill",
            )

    # -- peers --------------------------------------------------------------------------------------
    def can_access_peer(self, device: int, peer: int) -> bool:
        return self._device(device) != self._device(peer)

    def enable_peer_access(self, device: int, peer: int) -> None:
        with self._lock:
            if not self.can_access_peer(device, peer):
                raise DriverError("CUDA_ERROR_INVALID_CONTEXT", "enable_peer_access", f"{device} to itself")
            if (device, peer) in self._peers:
                raise DriverError(
                    "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "enable_peer_access", f"{device} to {peer}"
                )
            self._peers.add((device, peer))

    def disable_peer_access(self, device: int, peer: int) -> None:
        with self._lock:
            if (self._device(device), self._device(peer)) not in self._peers:
                raise DriverError(
                    "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", "disable_peer_access", f"{device} to {peer}"
                )
            self._peers.remove((device, peer))

    # -- work the driver does not see -----------------------------------------------------------------
    def launch(
        self, stream: Stream, *, reads: Iterable[Span] = (), writes: Iterable[Span] = (), label: str = ""
    ) -> Bracket:
        with self._lock:
            state = self._state(stream)
            touches = [self._kernel_touch(span, False, state.device) for span in reads if span.nbytes]
            touches += [self._kernel_touch(span, True, state.device) for span in writes if span.nbytes]
            opened = self._open(touches, state.actor, self._known(state), label or "launch")
            self._scheduler.force(self._enqueue(state, None, ()))

            def finish() -> None:
                with self._lock:
                    work = self._enqueue(state, None, ())
                    self._close(opened, state.actor, state.clock)
                    self._scheduler.force(work)

            return EmulatedBracket(finish)

    def host_access(self, *, reads: Iterable[Span] = (), writes: Iterable[Span] = (), label: str = "") -> Bracket:
        with self._lock:
            touches = [self._host_touch(span, False) for span in reads if span.nbytes]
            touches += [self._host_touch(span, True) for span in writes if span.nbytes]
            known, actor = dict(self._threads.clock), self._threads.actor
            opened = self._open(touches, actor, known, label or "host access")

            def finish() -> None:
                with self._lock:
                    ending = self._threads  # perhaps another thread, which was handed the bytes
                    if ending.actor != actor:
                        join(ending.clock, known)
                        self._recheck(opened, ending.actor, ending.clock)
                    ending.clock[ending.actor] = ending.clock.get(ending.actor, 0) + 1
                    self._close(opened, ending.actor, ending.clock)

            return EmulatedBracket(finish)

    def publish(self) -> Any:
        with self._lock:
            return dict(self._threads.clock)

    def observe(self, token: Any) -> None:
        with self._lock:
            join(self._threads.clock, token)

    # -- end ----------------------------------------------------------------------------------------
    def finalise(self, action: Callable[[], None]) -> None:
        self._lock.finalise(action)

    def close(self) -> None:
        with self._lock:
            for state in self._streams.values():
                self._scheduler.force(state.queue.last)
            self._closed = True

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
    def _alive(self) -> None:
        if self._closed:
            raise DriverError("CUDA_ERROR_DEINITIALIZED", "driver", "this driver object was closed")

    def _device(self, device: int) -> int:
        self._alive()
        if not 0 <= device < self.options.device_count:
            raise DriverError(
                "CUDA_ERROR_INVALID_DEVICE",
                "device",
                f"{device} of {self.options.device_count} emulated devices",
            )
        return device

    def _state(self, stream: Stream) -> StreamState:
        self._alive()
        state = require_stream(stream).handle
        if stream.driver is not self or not isinstance(state, StreamState) or state.closed:
            if stream.driver is self and isinstance(state, StreamState):
                join(self._threads.clock, state.clock)  # who is told so knows that all its work is done
            raise DriverError("CUDA_ERROR_INVALID_HANDLE", "stream", "closed, or of another driver")
        return state

    def _event(self, event: Event) -> EventState:
        self._alive()
        if event.driver is not self or not isinstance(event.handle, EventState):
            raise DriverError("CUDA_ERROR_INVALID_HANDLE", "event", "of another driver")
        return event.handle

    def _locate(self, ptr: int, nbytes: int, call: str) -> Place:
        self._alive()
        return self._memory.locate(ptr, nbytes, call)

    def _known(self, state: StreamState) -> Clock:
        """What comes before whatever the calling thread enqueues on a stream next."""
        known = dict(state.clock)
        join(known, self._threads.clock)
        return known

    def _enqueue(
        self,
        state: StreamState,
        run: Callable[[], None] | None,
        touches: Sequence[Touch],
        *,
        after: tuple[Work, ...] = (),
        link: Link | None = None,
        nbytes: int = 0,
        label: str = "",
    ) -> Work:
        known, actor = self._known(state), state.actor
        for touch in touches:
            line = touch.place.line
            self._log.check(line, line + touch.nbytes, write=touch.write, actor=actor, clock=known, label=label)
        time = known[actor] = known.get(actor, 0) + 1
        state.clock = known  # only now: what was refused has not happened
        for touch in touches:
            if touch.lasting:
                line = touch.place.line
                access = Access(actor, time, label)
                self._log.record(line, line + touch.nbytes, write=touch.write, access=access)
        before = after if state.queue.last is None else (state.queue.last, *after)
        ready = self._clock.ready(work.end for work in before)
        end = ready if link is None else link.reserve(ready, nbytes)
        work = Work(run, tuple(earlier for earlier in before if not earlier.done), end)
        self._scheduler.append(state.queue, work)
        return work

    def _open(self, touches: list[Touch], actor: int, clock: Clock, label: str) -> list[OpenAccess]:
        opened = []
        for touch in touches:
            line, end = touch.place.line, touch.place.line + touch.nbytes
            self._log.check(line, end, write=touch.write, actor=actor, clock=clock, label=label)
            opened.append(OpenAccess(line, end, touch.write, actor, label))
        for access in opened:
            self._log.begin(access)
        return opened

    def _recheck(self, opened: list[OpenAccess], actor: int, clock: Clock) -> None:
        """Check accesses that change hands: who began them must not have touched the bytes since."""
        for access in opened:
            self._log.finish(access)
        try:
            for access in opened:
                start, end, label = access.start, access.end, access.label
                self._log.check(start, end, write=access.write, actor=actor, clock=clock, label=label)
        finally:
            for access in opened:
                self._log.begin(access)

    def _close(self, opened: list[OpenAccess], actor: int, clock: Clock) -> None:
        for access in opened:
            self._log.finish(access)
            entry = Access(actor, clock[actor], access.label)
            self._log.record(access.start, access.end, write=access.write, access=entry)

    def _reachable(self, place: Place, ptr: int, device: int) -> bool:
        """Whether kernels of `device` may use `ptr` for what is at `place`."""
        if place.kind is not Kind.DEVICE:
            return ptr >= MAPPED_OFFSET
        return place.device == device or (device, place.device) in self._peers

    def _kernel_touch(self, span: Span, write: bool, device: int) -> Touch:
        place = self._locate(span.ptr, span.nbytes, "launch")
        if not self._reachable(place, span.ptr, device):
            wrong = (
                f"{span.ptr:#x} is memory of device {place.device}; enable peer access first"
                if place.kind is Kind.DEVICE
                else f"{span.ptr:#x} is a host address; kernels need host_device_pointer(address, device)"
            )
            raise DriverError("CUDA_ERROR_ILLEGAL_ADDRESS", "launch", wrong)
        if write and place.read_only:
            raise DriverError("CUDA_ERROR_ILLEGAL_ADDRESS", "launch", f"{span.ptr:#x} is registered read-only")
        return Touch(place, span.nbytes, write)

    def _host_touch(self, span: Span, write: bool) -> Touch:
        self._alive()
        if not 0 < span.ptr < HOST_END or span.nbytes < 0:
            raise DriverError(
                "CUDA_ERROR_INVALID_VALUE", "host_access", f"{span.nbytes} bytes at {span.ptr:#x} in host memory"
            )
        return Touch(Place(Kind.PINNED, -1, span.ptr, span.ptr), span.nbytes, write)

    def _retire(self, start: int, nbytes: int, label: str) -> None:
        threads = self._threads
        self._log.check(start, start + nbytes, write=True, actor=threads.actor, clock=threads.clock, label=label)
        self._log.forget(start, start + nbytes)

    def _reach(self, work: Work | None, clock: Clock) -> None:
        self._scheduler.force(work)
        join(self._threads.clock, clock)
        if work is not None:
            self._clock.reach(work.end)
            self._links.settle(self._clock.now)

    def _poll(self, work: Work | None, clock: Clock) -> bool:
        self._scheduler.tick()
        if work is not None and not work.done:
            work.polls += 1
            if work.polls < PATIENCE:
                return False
        self._reach(work, clock)
        return True


def _ignore(_: object) -> None:
    return None
