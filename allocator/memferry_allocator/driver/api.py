"""The driver seam: what MemFerry asks of an accelerator.

One contract, held by every implementation (`cuda`, `emulated`) and checked by one test suite.
All calls are thread-safe.  Nothing here assumes which device is current, and nothing changes it.
"""

from __future__ import annotations

import itertools
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from ..errors import DeviceLostError, ForkedError, InvalidRequestError, UnsupportedError


class Span(NamedTuple):
    """``nbytes`` bytes from address ``ptr``, a host address or a device pointer."""

    ptr: int
    nbytes: int


@dataclass(frozen=True)
class DeviceInfo:
    """What a device is; nothing in it changes while the process lives."""

    ordinal: int
    name: str
    uuid: str
    capacity: int
    pci_address: str | None
    numa_node: int | None
    compute_capability: tuple[int, int] | None
    capabilities: dict[str, int] = field(default_factory=dict)


class MemoryInfo(NamedTuple):
    """Bytes free and in total on a device."""

    free: int
    total: int


class PageKind(Enum):
    """Where physical pages of a virtual range lie."""

    DEVICE = "device"
    HOST = "host"  # on a NUMA node of the host, reached by the device over its link


@dataclass(frozen=True)
class PageLocation:
    """A place for physical pages: a device by its ordinal, or a NUMA node of the host."""

    kind: PageKind
    ordinal: int = 0


class CaptureMode(Enum):
    """Which calls a capture forbids meanwhile, as in CUDA: to everybody, to the capturing thread, to nobody."""

    GLOBAL = "global"
    THREAD_LOCAL = "thread-local"
    RELAXED = "relaxed"


@dataclass(frozen=True, eq=False)
class Stream:
    """Work that runs in order on one device; ``int(stream.handle)`` is the driver's own name for it.

    A stream made by `Driver.create_stream` belongs to its creator, who closes it; one taken over with
    `Driver.stream_from_handle` (a framework's own stream) is borrowed and closing it does nothing.
    """

    driver: Driver
    device: int
    handle: Any
    owned: bool
    recording: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)
    _aware: WeakKeyDictionary[Stream, int] = field(default_factory=WeakKeyDictionary, init=False, repr=False)

    def wait(self, event: Event) -> None:
        """Order everything enqueued here from now on after what `event` has recorded.

        What is ordered already costs nothing: an event of this very stream, or one of a stream for whose
        later event this one has waited before.
        """
        origin, number = event.recorded
        if origin is self or (origin is not None and self._aware.get(origin, 0) >= number):
            return
        self.driver.stream_wait(self, event)
        if origin is not None:
            self._aware[origin] = number

    def record(self, event: Event | None = None) -> Event:
        """Record what has been enqueued so far, in `event` or a new one, and return it."""
        if event is None:
            event = self.driver.create_event(self.device)
        self.driver.event_record(event, self)
        return event

    def synchronize(self) -> None:
        """Block the calling thread until everything enqueued so far is done."""
        self.driver.stream_synchronize(self)

    def query(self) -> bool:
        """Whether everything enqueued so far is done; does not block."""
        return self.driver.stream_query(self)

    def close(self) -> None:
        """Destroy an owned stream once its work is done; a second call does nothing."""
        if self.owned:
            self.driver.destroy_stream(self)


@dataclass(eq=False)
class Event:
    """A point in a stream's order.  Its driver handle goes back to the driver when this object dies.

    `recorded` is the stream on which it was recorded last, and the number of that recording, which grows with
    every one in this process: of two events of one stream, the one with the larger number covers the other.
    """

    driver: Driver
    device: int
    handle: Any
    timing: bool
    recorded: tuple[Stream | None, int] = (None, 0)

    @property
    def sequence(self) -> int:
        """The number of its last recording."""
        return self.recorded[1]

    def recorded_on(self, stream: Stream) -> None:
        """Note a recording; for drivers, which let no other recording on that stream come between."""
        self.recorded = (stream, next(_sequence))

    def captured(self) -> None:
        """Note a recording into a graph: it is a point in no stream's order, so waiting for it proves nothing."""
        self.recorded = (None, next(_sequence))

    def query(self) -> bool:
        """Whether the recorded work is done; an event never recorded is done."""
        return self.driver.event_query(self)

    def synchronize(self) -> None:
        """Block the calling thread until the recorded work is done."""
        self.driver.event_synchronize(self)

    def elapsed_since(self, earlier: Event) -> float:
        """Seconds on the device between two events made with ``timing=True``, both done."""
        return self.driver.event_elapsed(earlier, self)


class Bracket:
    """The extent of accesses that happen outside the driver's sight; a context manager.

    On a real device it does nothing: the hardware keeps the order.  On the emulated device it runs what
    must have run before, and checks that nothing unordered touches the same bytes until it ends.
    """

    def __enter__(self) -> Bracket:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Close the bracket, from any thread that was handed the bytes; a second call does nothing."""


NO_BRACKET = Bracket()
_sequence = itertools.count(1)
_opened: WeakSet[Driver] = WeakSet()


def _disown() -> None:
    """In a child process: no driver that the parent opened may be used."""
    for driver in list(_opened):
        driver._forked = True


os.register_at_fork(after_in_child=_disown)


class Driver(ABC):
    """An accelerator driver.  Errors are `DriverError` with the driver's own code, or a subclass."""

    name: ClassVar[str]
    _forked = False

    def __init__(self) -> None:
        _opened.add(self)

    # -- devices ------------------------------------------------------------------------------------
    @property
    @abstractmethod
    def device_count(self) -> int:
        """Number of devices; their ordinals are 0 … n-1."""

    @abstractmethod
    def device_info(self, device: int) -> DeviceInfo:
        """What device `device` is."""

    @abstractmethod
    def memory_info(self, device: int) -> MemoryInfo:
        """Memory of `device` as the driver counts it now, all processes included."""

    @abstractmethod
    def synchronize(self, device: int) -> None:
        """Block until everything enqueued on `device` by this process is done."""

    def synchronize_all(self) -> None:
        """Block until everything enqueued by this process is done, on whatever device.

        Raises
        ------
        DeviceLostError
            A device is lost; the others have been waited for all the same.
        """
        lost: DeviceLostError | None = None
        for device in self._busy():
            try:
                self.synchronize(device)
            except DeviceLostError as error:
                lost = error
        if lost is not None:
            raise lost

    # -- memory -------------------------------------------------------------------------------------
    @abstractmethod
    def malloc(self, device: int, nbytes: int) -> int:
        """Device memory, 256-byte aligned, contents undefined.

        Raises
        ------
        DriverOutOfMemory
            The device has less than `nbytes`.
        DriverError
            `nbytes` is not more than zero.
        """

    @abstractmethod
    def free(self, device: int, ptr: int) -> None:
        """Give back what `malloc` returned.  Pending work on it must have been waited for; 0 is ignored.

        Raises
        ------
        DriverError
            `ptr` is not the start of a live allocation: freed twice, interior, or of somebody else.
        """

    @abstractmethod
    def host_register(self, address: int, nbytes: int, *, read_only: bool = False) -> None:
        """Pin host pages and map them into every device's address space.

        Parameters
        ----------
        address, nbytes : int
            Any range of mapped memory; it need not begin or end at a page.
        read_only : bool
            Devices only read it; needed where the mapping itself is read-only.

        Raises
        ------
        DriverError
            The range is empty, not mapped, or overlaps one that is registered; nothing was changed.
        """

    @abstractmethod
    def host_unregister(self, address: int) -> None:
        """Undo `host_register`; `address` is the start given there.  Pending work must have been waited for."""

    @abstractmethod
    def host_registration(self, address: int) -> Span | None:
        """The registration, by whomever in this process, that holds host memory at `address`; None without one."""

    @abstractmethod
    def host_device_pointer(self, address: int, device: int) -> int:
        """The pointer under which kernels of `device` reach registered host memory at `address`."""

    @abstractmethod
    def host_bytes(self, ptr: int, nbytes: int) -> memoryview | None:
        """The bytes behind a device pointer or registered host address; None where the host cannot reach them.

        Emulated device memory is host memory, so that kernels can be stood in for; bracket such accesses with
        `launch`.
        """

    # -- order --------------------------------------------------------------------------------------
    @abstractmethod
    def create_stream(self, device: int, *, priority: int = 0) -> Stream:
        """A stream that does not synchronise with the default stream; lower priority numbers go first."""

    @abstractmethod
    def stream_from_handle(self, device: int, handle: int) -> Stream:
        """Borrow a stream somebody else owns, by its native handle."""

    @abstractmethod
    def destroy_stream(self, stream: Stream) -> None:
        """See `Stream.close`.  A borrowed stream is left alone."""

    @abstractmethod
    def stream_wait(self, stream: Stream, event: Event) -> None:
        """See `Stream.wait`.  The event may be of another device; one never recorded orders nothing."""

    @abstractmethod
    def stream_synchronize(self, stream: Stream) -> None:
        """See `Stream.synchronize`."""

    @abstractmethod
    def stream_query(self, stream: Stream) -> bool:
        """See `Stream.query`."""

    @abstractmethod
    def create_event(self, device: int, *, timing: bool = False) -> Event:
        """An event on `device`; it may be recorded again and again, on streams of that device."""

    @abstractmethod
    def event_record(self, event: Event, stream: Stream) -> None:
        """See `Stream.record`.  Waits already enqueued for an earlier recording keep waiting for that one.

        Raises
        ------
        DriverError
            Event and stream are of different devices, or the stream is closed.
        """

    @abstractmethod
    def event_query(self, event: Event) -> bool:
        """See `Event.query`."""

    @abstractmethod
    def event_synchronize(self, event: Event) -> None:
        """See `Event.synchronize`."""

    @abstractmethod
    def event_elapsed(self, start: Event, end: Event) -> float:
        """See `Event.elapsed_since`.

        Raises
        ------
        DriverError
            An event was made without ``timing=True``, was never recorded, or is not done.
        """

    # -- copies -------------------------------------------------------------------------------------
    @abstractmethod
    def copy(self, dst: int, src: int, nbytes: int, *, stream: Stream) -> None:
        """Enqueue a copy between any two of device memory, registered and pageable host memory.

        `dst` and `src` are device pointers or host addresses.  With pageable host memory the call may
        return only when the copy is done.  Zero bytes do nothing.

        Raises
        ------
        DriverError
            A range leaves its allocation, crosses the edge of a registration, or is unknown.
        """

    @abstractmethod
    def fill(self, ptr: int, value: int, nbytes: int, *, stream: Stream) -> None:
        """Enqueue setting `nbytes` bytes behind a device pointer to `value` (0 … 255).  Zero bytes do nothing."""

    # -- driver pools ---------------------------------------------------------------------------------
    def malloc_async(self, device: int, nbytes: int, *, stream: Stream) -> int:
        """Memory of the driver's own stream-ordered pool, usable in `stream`'s order.

        Raises
        ------
        UnsupportedError
            This driver has no such pools.
        DriverOutOfMemory
            The device has less than `nbytes`.
        """
        raise self._unsupported("driver pools")

    def free_async(self, device: int, ptr: int, *, stream: Stream) -> None:
        """Give back what `malloc_async` returned, after what is enqueued on `stream`."""
        raise self._unsupported("driver pools")

    def trim_pool(self, device: int, keep: int = 0) -> None:
        """Let the driver's pool give unused memory beyond `keep` bytes back to the device."""
        raise self._unsupported("driver pools")

    # -- virtual memory -------------------------------------------------------------------------------
    def page_granularity(self, location: PageLocation) -> int:
        """Bytes that sizes and offsets of physical pages at `location` are multiples of.

        Raises
        ------
        UnsupportedError
            This driver or device has no virtual memory management; so does every call below.
        """
        raise self._unsupported("virtual memory management")

    def reserve_addresses(self, nbytes: int, *, alignment: int = 0) -> int:
        """Reserve device addresses with nothing behind them; `nbytes` is a multiple of the granularity."""
        raise self._unsupported("virtual memory management")

    def release_addresses(self, address: int, nbytes: int) -> None:
        """Undo `reserve_addresses`; nothing may be mapped there any more."""
        raise self._unsupported("virtual memory management")

    def create_pages(self, location: PageLocation, nbytes: int) -> int:
        """Physical pages without an address; a handle for `map_pages`.

        Raises
        ------
        DriverOutOfMemory
            `location` has less than `nbytes`.
        """
        raise self._unsupported("virtual memory management")

    def release_pages(self, handle: int) -> None:
        """Give the handle up; the pages go once nothing is mapped to them either."""
        raise self._unsupported("virtual memory management")

    def map_pages(self, address: int, nbytes: int, handle: int, *, device: int) -> None:
        """Put pages behind a whole part of a reserved range and let kernels of `device` read and write them."""
        raise self._unsupported("virtual memory management")

    def unmap_pages(self, address: int, nbytes: int) -> None:
        """Undo `map_pages`.  Pending work on the range must have been waited for."""
        raise self._unsupported("virtual memory management")

    # -- graph capture --------------------------------------------------------------------------------
    def begin_capture(self, stream: Stream, mode: CaptureMode = CaptureMode.GLOBAL) -> None:
        """Record what is enqueued on `stream` from now on into a graph instead of running it."""
        raise self._unsupported("graph capture")

    def end_capture(self, stream: Stream) -> None:
        """End the capture and drop its graph.

        Raises
        ------
        DriverError
            A forbidden call has invalidated the capture, which is over all the same; or there is none, or
            another thread began it.
        """
        raise self._unsupported("graph capture")

    def is_capturing(self, stream: Stream) -> bool:
        """Whether `stream` is being captured, by whomever; cheap, and harmless to the capture.

        Raises
        ------
        DriverError
            The stream is closed, or of another driver.
        """
        return False

    def capture_under_way(self) -> bool:
        """Whether a capture begun here has not ended: to wait for its device would break it.

        Those that a framework begins by itself are not known; `is_capturing` asks about one stream.
        """
        return False

    def beside_captures(self) -> AbstractContextManager[None]:
        """Calls inside that a capture on another stream would forbid are allowed, and leave it unharmed."""
        return nullcontext()

    # -- peers --------------------------------------------------------------------------------------
    @abstractmethod
    def can_access_peer(self, device: int, peer: int) -> bool:
        """Whether kernels of `device` could address memory of `peer`."""

    @abstractmethod
    def enable_peer_access(self, device: int, peer: int) -> None:
        """Let kernels of `device` address memory of `peer`; refused where they can already."""

    @abstractmethod
    def disable_peer_access(self, device: int, peer: int) -> None:
        """Undo `enable_peer_access`; refused where it was never enabled."""

    # -- work the driver does not see -----------------------------------------------------------------
    def launch(
        self, stream: Stream, *, reads: Iterable[Span] = (), writes: Iterable[Span] = (), label: str = ""
    ) -> Bracket:
        """Declare work enqueued on `stream` by somebody else (a framework's kernels) and what it touches."""
        return NO_BRACKET

    def host_access(self, *, reads: Iterable[Span] = (), writes: Iterable[Span] = (), label: str = "") -> Bracket:
        """Declare that the calling thread touches host memory until the bracket ends."""
        return NO_BRACKET

    def publish(self) -> Any:
        """A token of everything the calling thread has done and waited for, to hand to another thread."""
        return None

    def observe(self, token: Any) -> None:
        """Take over the knowledge in a token of `publish`; pair it with a lock, queue or join."""
        return

    # -- life -----------------------------------------------------------------------------------------
    def require_usable(self) -> None:
        """Refuse, before any lock is taken, what this process may not do with this driver any more.

        Raises
        ------
        ForkedError
            This process is a child of the one that opened the driver.
        """
        if self._forked:
            raise forked(self.name)

    def _busy(self) -> Sequence[int]:
        """The devices that may have work."""
        return range(self.device_count)

    def _unsupported(self, what: str) -> UnsupportedError:
        return UnsupportedError(f"{what}: the {self.name} driver has none; use another resource or mapping")

    # -- end ----------------------------------------------------------------------------------------
    def finalise(self, action: Callable[[], None]) -> None:
        """Run a finaliser's `action`, which may call this driver.

        A garbage collection can happen anywhere, also in the middle of a driver call of the same thread; a
        driver that cannot be re-entered there puts the action off until that call is over.  In a child of the
        process that opened the driver nothing runs: what is to be released belongs to the parent.
        """
        if not self._forked:
            action()

    @abstractmethod
    def close(self) -> None:
        """Release contexts and pooled handles; a second call, or one in a forked child, does nothing.

        Every other call is refused from then on, but for closing streams, which does nothing.
        """


def forked(name: str) -> ForkedError:
    return ForkedError(
        f"the {name} driver was opened before fork(); start workers with the 'spawn' method, or open a driver "
        "after the fork only"
    )


def require_stream(stream: object, device: int | None = None) -> Stream:
    """`stream` if it is one (and on `device`), else a typed error.  None never means the default stream."""
    if not isinstance(stream, Stream):
        raise InvalidRequestError(
            f"stream: expected a memferry_allocator Stream, got {stream!r}; make one with "
            "driver.create_stream(device), or wrap a framework's with driver.stream_from_handle"
        )
    if device is not None and stream.device != device:
        raise InvalidRequestError(f"stream: it is on device {stream.device}, this memory is on device {device}")
    return stream
