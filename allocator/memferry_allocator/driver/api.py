"""The driver seam: what MemFerry asks of an accelerator.

One contract, held by every implementation (`cuda`, `emulated`) and checked by one test suite.
All calls are thread-safe.  Nothing here assumes which device is current, and nothing changes it.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar
from weakref import WeakSet

from ..errors import DeviceLostError, DriverError, ForkedError, UnsupportedError
from .handles import NO_BRACKET, Bracket, Event, Stream
from .types import CaptureMode, DeviceInfo, MemoryInfo, PageLocation, Span

COPY_BLOCKS = 8  # of a copy by a kernel: enough for a link to the host, and few of a device's multiprocessors
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
        self._put_off: deque[Callable[[], None]] = deque()
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

    def several_calls(self, device: int) -> AbstractContextManager[None]:
        """Calls of this thread about `device` inside cost less than one by one; what they do is the same."""
        return nullcontext()

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

    def device_of(self, ptr: int) -> int | None:
        """The device on which the allocation at `ptr` lies, if its peers reach it once that is enabled.

        None for host memory, driver pools and mapped pages, whose reach is their own matter, and for the unknown.
        What others in this process allocated is found as well.
        """
        raise self._unsupported("finding an allocation's device")

    # -- order --------------------------------------------------------------------------------------
    @abstractmethod
    def create_stream(self, device: int, *, priority: int = 0) -> Stream:
        """A stream that does not synchronise with the default stream; lower priority numbers go first."""

    @abstractmethod
    def stream_from_handle(self, device: int, handle: int) -> Stream:
        """Borrow a stream somebody else owns, by its native handle.

        Raises
        ------
        UnsupportedError
            The per-thread default stream of CUDA, which is another stream in every thread.
        """

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

    def copy_rows(
        self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, rows: int, *, stream: Stream
    ) -> None:
        """Enqueue copies of `rows` rows of `width` bytes, which begin every `dst_pitch` and `src_pitch` bytes.

        As one copy where the driver has such; what `copy` says holds for every row.

        Raises
        ------
        DriverError
            As for `copy`, or rows overlap: a pitch is less than `width`.  Rows before a refused one may be under
            way.
        """
        self._require_pitches(dst_pitch, src_pitch, width, rows)
        for row in range(rows):
            self.copy(dst + row * dst_pitch, src + row * src_pitch, width, stream=stream)

    @abstractmethod
    def fill(self, ptr: int, value: int, nbytes: int, *, stream: Stream) -> None:
        """Enqueue setting `nbytes` bytes behind a device pointer to `value` (0 … 255).  Zero bytes do nothing."""

    def copy_beside(
        self, pieces: Sequence[tuple[int, int, int]], *, stream: Stream, lane: Stream, begin: Event
    ) -> Event:
        """Copies on `lane`, after what `stream` holds and before what it gets later.

        As recording, waiting and copying one by one do; it costs less, for the path of every small copy.

        Parameters
        ----------
        pieces : sequence of (int, int, int)
            Destination, source and bytes of each copy.
        stream, lane : Stream
            Of one device; if they are the same, nothing need wait.
        begin : Event
            Of that device, to be recorded on `stream`.

        Returns
        -------
        Event
            Recorded behind the last copy.

        Raises
        ------
        DriverError
            As for `copy`.  The copies before are under way, and `stream` comes after them all the same.
        """
        if stream is not lane:
            lane.wait(stream.record(begin))
        try:
            for dst, src, nbytes in pieces:
                self.copy(dst, src, nbytes, stream=lane)
        finally:
            end = lane.record()
            if stream is not lane:
                stream.wait(end)
        return end

    def prepare_kernel_copy(self, device: int) -> None:
        """Get ready what `kernel_copy` needs on a device, which may take a second the first time.

        Raises
        ------
        UnsupportedError
            This driver or machine cannot.
        """
        raise self._unsupported("copies by a kernel")

    def kernel_copy(self, dst: int, src: int, nbytes: int, *, stream: Stream, blocks: int = COPY_BLOCKS) -> None:
        """Enqueue a copy by a kernel of the stream's device, over that device's own links.

        `copy` goes over the link of the device whose memory it is, whatever the stream.  This one goes over the
        links of the device that runs the kernel: from host memory over its own, and on to a peer's memory, or the
        other way.  Of any alignment; fastest where both pointers are the same modulo 16.  Zero bytes do nothing.

        Parameters
        ----------
        dst, src : int
            Pointers that kernels of the device reach: of its own memory, of a peer's once access is enabled, and
            those of `host_device_pointer`.
        blocks : int
            Thread blocks that do it.

        Raises
        ------
        DriverError
            A range is not all in one allocation or registration that the kernel reaches; nothing was enqueued.
        UnsupportedError
            As `prepare_kernel_copy` says.
        """
        raise self._unsupported("copies by a kernel")

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
        ForkedError
            As `require_usable` says.
        """
        self.require_usable()
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

    def _require_pitches(self, dst_pitch: int, src_pitch: int, width: int, rows: int) -> None:
        if rows > 1 and not 0 <= width <= min(dst_pitch, src_pitch):
            raise DriverError(
                "CUDA_ERROR_INVALID_VALUE",
                "copy_rows",
                f"rows of {width} bytes do not fit pitches of {dst_pitch} and {src_pitch}",
            )

    def _unsupported(self, what: str) -> UnsupportedError:
        return UnsupportedError(f"{what}: the {self.name} driver has none; use another resource or mapping")

    # -- end ----------------------------------------------------------------------------------------
    def finalise(self, action: Callable[[], None]) -> None:
        """Run a finaliser's `action`, which may call this driver, wait for its devices, and never raises.

        A garbage collection can happen anywhere: a driver that cannot be re-entered in the middle of a call of
        the same thread puts the action off until that call is over, and so does every driver while a capture
        begun here is under way, which waiting for a device would break.  In a child of the process that opened
        the driver nothing runs: what is to be released belongs to the parent.
        """
        if self._forked:
            return
        self._put_off.append(action)
        self._finish_late()

    def _finish_late(self) -> None:
        """Run what finalisers have left, unless it must wait still."""
        while self._put_off and not self.capture_under_way():
            try:
                action = self._put_off.popleft()
            except IndexError:  # another thread was quicker
                return
            self._run_finaliser(action)

    def _run_finaliser(self, action: Callable[[], None]) -> None:
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
