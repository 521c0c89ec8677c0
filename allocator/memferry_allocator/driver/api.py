"""The driver seam: what MemFerry asks of an accelerator.

One contract, held by every implementation (`cuda`, `emulated`) and checked by one test suite.
All calls are thread-safe.  Nothing here assumes which device is current, and nothing changes it.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from ..errors import InvalidRequestError


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


@dataclass(frozen=True, eq=False)
class Stream:
    """Work that runs in order on one device.

    A stream made by `Driver.create_stream` belongs to its creator, who closes it; one taken over with
    `Driver.stream_from_handle` (a framework's own stream) is borrowed and closing it does nothing.
    """

    driver: Driver
    device: int
    handle: Any
    owned: bool

    def wait(self, event: Event) -> None:
        """Order everything enqueued here from now on after what `event` has recorded."""
        self.driver.stream_wait(self, event)

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

    `sequence` grows with every recording in this process: of two events of one stream, the one with the
    larger number covers the other.
    """

    driver: Driver
    device: int
    handle: Any
    timing: bool
    sequence: int = 0

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
        """Close the bracket; a second call does nothing."""


NO_BRACKET = Bracket()
_sequence = itertools.count(1)


def next_sequence() -> int:
    """The number of a recording; for drivers."""
    return next(_sequence)


class Driver(ABC):
    """An accelerator driver.  Errors are `DriverError` with the driver's own code, or a subclass."""

    name: ClassVar[str]

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

    # -- memory -------------------------------------------------------------------------------------
    @abstractmethod
    def malloc(self, device: int, nbytes: int) -> int:
        """Device memory, 256-byte aligned, contents undefined.  `DriverOutOfMemory` when there is none."""

    @abstractmethod
    def free(self, device: int, ptr: int) -> None:
        """Give back what `malloc` returned.  Pending work on it must have been waited for; 0 is ignored."""

    @abstractmethod
    def host_register(self, address: int, nbytes: int, *, read_only: bool = False) -> None:
        """Pin host pages and map them into every device's address space."""

    @abstractmethod
    def host_unregister(self, address: int) -> None:
        """Undo `host_register`; `address` is the start given there."""

    @abstractmethod
    def host_device_pointer(self, address: int, device: int) -> int:
        """The pointer under which kernels of `device` reach registered host memory at `address`."""

    @abstractmethod
    def host_bytes(self, ptr: int, nbytes: int) -> memoryview | None:
        """The bytes behind a device pointer, if the host can touch them; None on real device memory."""

    # -- order --------------------------------------------------------------------------------------
    @abstractmethod
    def create_stream(self, device: int, *, priority: int = 0) -> Stream:
        """A stream that does not synchronise with the default stream; lower priority numbers go first."""

    @abstractmethod
    def stream_from_handle(self, device: int, handle: int) -> Stream:
        """Borrow a stream somebody else owns, by its native handle."""

    @abstractmethod
    def destroy_stream(self, stream: Stream) -> None: ...

    @abstractmethod
    def stream_wait(self, stream: Stream, event: Event) -> None: ...

    @abstractmethod
    def stream_synchronize(self, stream: Stream) -> None: ...

    @abstractmethod
    def stream_query(self, stream: Stream) -> bool: ...

    @abstractmethod
    def create_event(self, device: int, *, timing: bool = False) -> Event:
        """An event on `device`; it may be recorded again and again, on streams of that device."""

    @abstractmethod
    def event_record(self, event: Event, stream: Stream) -> None: ...

    @abstractmethod
    def event_query(self, event: Event) -> bool: ...

    @abstractmethod
    def event_synchronize(self, event: Event) -> None: ...

    @abstractmethod
    def event_elapsed(self, start: Event, end: Event) -> float: ...

    # -- copies -------------------------------------------------------------------------------------
    @abstractmethod
    def copy(self, dst: int, src: int, nbytes: int, *, stream: Stream) -> None:
        """Enqueue a copy between any two of device memory, registered and pageable host memory.

        `dst` and `src` are device pointers or host addresses.  With pageable host memory the call may
        return only when the copy is done.  Zero bytes do nothing.
        """

    @abstractmethod
    def fill(self, ptr: int, value: int, nbytes: int, *, stream: Stream) -> None:
        """Enqueue setting `nbytes` bytes of device memory to `value` (0 … 255)."""

    # -- peers --------------------------------------------------------------------------------------
    @abstractmethod
    def can_access_peer(self, device: int, peer: int) -> bool:
        """Whether kernels of `device` could address memory of `peer`."""

    @abstractmethod
    def enable_peer_access(self, device: int, peer: int) -> None: ...

    @abstractmethod
    def disable_peer_access(self, device: int, peer: int) -> None: ...

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

    # -- end ----------------------------------------------------------------------------------------
    @abstractmethod
    def close(self) -> None:
        """Release contexts and pooled handles; a second call does nothing."""


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
