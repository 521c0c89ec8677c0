"""The shadow space: buffers whose partitions live in host memory, device memory, or both."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

from ..device import ALIGNMENT, DevicePool
from ..device.resource import MemoryResource
from ..driver import Driver, Span
from ..errors import AllocatorError, CaptureError, ClosedError, DriverError, InvalidRequestError
from ..host import ArenaOptions, HostArena
from ..sizes import parse_size
from .buffer import ShadowBuffer
from .copier import Copier, DirectCopier
from .eviction import EvictionPolicy, LeastRecentlyUsed, PlannedOrder
from .gate import StreamGate, over
from .lock import overrides, space_lock
from .partition import Partition
from .ranges import HostBudget, HostRanges, cut, host_span, layout, require_fitting
from .room import Room
from .view import Lease


class ShadowSpace:
    """The unified address space over host pages and one device's budget.

    A context manager that closes it.  Thread-safe: one lock, held while a call enqueues copies and also while
    a HOST view waits for the device.

    Parameters
    ----------
    driver : Driver
    device : int
    device_budget : int or str
        Bytes of device memory, reserved at once unless `pool` is given.
    host_budget : int or str, optional
        Most bytes of host pages that `allocate` may have at once; no limit by default.  Pages of the caller
        do not count.
    copier : Copier, optional
        Who moves bytes; plain copies on one stream a direction by default, which the space then owns.
    eviction : EvictionPolicy, optional
        Whose copy goes when there is no room; `LeastRecentlyUsed` by default.
    pool : MemoryResource, optional
        Where device memory comes from, at most `device_budget` of it; it stays the caller's.  By default a
        `DevicePool` of exactly the budget, which the space owns.

    Raises
    ------
    InvalidRequestError
        An argument is none of these, or `pool` is of another driver or device.
    DriverOutOfMemory
        The device has less than `device_budget`; nothing was made.
    """

    def __init__(
        self,
        driver: Driver,
        device: int = 0,
        *,
        device_budget: int | str,
        host_budget: int | str | None = None,
        copier: Copier | None = None,
        eviction: EvictionPolicy | None = None,
        pool: DevicePool | MemoryResource | None = None,
    ) -> None:
        if not isinstance(driver, Driver):
            raise InvalidRequestError(f"shadow space: {driver!r} is no Driver; make one with open_driver()")
        driver.require_usable()
        budget = parse_size(device_budget, name="device_budget")
        self.driver = driver
        self.device = device
        self._host = HostBudget(None if host_budget is None else parse_size(host_budget, name="host_budget"))
        self.lock = space_lock(driver)
        self.bracketed = overrides(driver, "launch")
        self.gate = StreamGate(driver, device)
        self._buffers: dict[ShadowBuffer, bool] = {}  # and whether every partition must fit
        self._ranges = HostRanges()
        self.leases: set[Lease] = set()
        self._closed = False
        policy = eviction or LeastRecentlyUsed()
        self._require_policy(policy)
        self._owns_pool = pool is None
        self.room = Room(self._pool(pool, budget), budget, policy, whole=self._owns_pool)
        try:
            self._own_copier = DirectCopier(driver, device) if copier is None else None
        except BaseException:
            self._close_pool()
            raise
        self.copier: Copier = self._own_copier if copier is None else copier  # type: ignore[assignment]

    # -- what it has ------------------------------------------------------------------------------------
    @property
    def pool(self) -> Any:
        """Where device memory comes from: a `DevicePool` unless another resource was given."""
        return self.room.pool

    @property
    def device_budget(self) -> int:
        return self.room.budget

    @property
    def device_used(self) -> int:
        """Bytes of the device budget that copies take now, alignment included."""
        return self.room.taken

    @property
    def host_budget(self) -> int | None:
        return self._host.limit

    @property
    def host_used(self) -> int:
        """Bytes of the host budget in use: sizes of partitions and the padding between them."""
        return self._host.used

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def eviction(self) -> EvictionPolicy:
        """Whose copy goes when there is no room; may be exchanged at any time, say for the plan of a step."""
        return self.room.policy

    @eviction.setter
    def eviction(self, policy: EvictionPolicy) -> None:
        self.driver.require_usable()
        with self.lock:
            self._require_open()
            self._require_policy(policy)
            self.room.policy = policy

    # -- buffers ----------------------------------------------------------------------------------------
    def allocate(
        self,
        name: str,
        nbytes: int | str | None = None,
        *,
        partitions: Sequence[int | str] | None = None,
        partition_nbytes: int | str | None = None,
        options: ArenaOptions | None = None,
    ) -> ShadowBuffer:
        """A buffer over zeroed host pages that the space takes, and gives back when the buffer is closed.

        Parameters
        ----------
        name : str
            What errors call it.
        nbytes : int or str
            Its size: one partition, or as many of `partition_nbytes` as it takes, the last one smaller.
            0 is a valid empty buffer.
        partitions : sequence of int or str
            Or: the size of each partition.  Each begins at a multiple of 256 bytes; none is rounded up.
        partition_nbytes : int or str
        options : ArenaOptions, optional
            How the pages come to be.

        Raises
        ------
        InvalidRequestError
            Sizes that are none, or a partition larger than the device budget; nothing was changed.
        OutOfMemory
            The host budget (``budget="host budget"``) or the machine has no room; nothing was changed.
        DriverError
            The pages cannot be registered; nothing was changed.
        """
        self.driver.require_usable()
        sizes = cut(name, nbytes, partitions, partition_nbytes, device_budget=self.room.budget, host=self._host)
        require_fitting(name, sizes, self.room.budget)
        offsets, total = layout(sizes, ALIGNMENT)
        with self.lock:
            self._require_open()
            self._host.reserve(name, total)
        try:  # outside the lock: taking and registering pages is slow
            with self.driver.beside_captures():
                pages = HostArena(self.driver, total, options) if total else None
        except BaseException:
            with self.lock:
                self._host.used -= total
            raise
        start = 0 if pages is None else pages.cut(total).ptr
        spans = [Span(start + offset, size) for offset, size in zip(offsets, sizes, strict=True)]
        return self._add(name, spans, pages, total)

    def buffer(self, name: str, host: Iterable[Span], *, fitting: bool = True) -> ShadowBuffer:
        """A buffer over registered host ranges, one partition each.  The caller keeps the pages alive.

        Parameters
        ----------
        name : str
        host : iterable of Span
        fitting : bool
            Refuse partitions larger than the device budget, here and in `resize`.  Otherwise those can be used in
            the host pages alone; a device copy is out of memory.

        Raises
        ------
        InvalidRequestError
            A range is empty, larger than the whole device budget (if that counts), not aligned to 16 bytes, or has
            bytes of another partition; nothing was changed.
        """
        self.driver.require_usable()
        if not isinstance(host, Iterable):
            raise InvalidRequestError(
                f"buffer {name!r}: {host!r} is no list of ranges; give [Span(address, bytes)]"
            )
        spans = [host_span(name, index, span) for index, span in enumerate(host)]
        return self._add(name, spans, None, 0, fitting=fitting)

    def owns(self, buffer: ShadowBuffer) -> bool:
        """Whether a buffer is this space's and open."""
        return buffer in self._buffers

    # -- the space itself -------------------------------------------------------------------------------
    def resize(self, device_budget: int | str) -> None:
        """Exchange the device budget.  Drops every device copy; no view may be open and nothing pinned.

        Raises
        ------
        InvalidRequestError
            A view is open, something is pinned, or a partition would be larger than the budget.
        DriverOutOfMemory
            The device has less; the space then has its old budget again.
        """
        self.driver.require_usable()
        budget = parse_size(device_budget, name="device_budget")
        with self.lock, self.driver.beside_captures():
            self._require_open()
            self._forbid("resize")
            for buffer in (buffer for buffer, fitting in self._buffers.items() if fitting):
                require_fitting(buffer.name, [partition.nbytes for partition in buffer], budget)
            for buffer in self._buffers:
                for partition in buffer:
                    partition._give_up()
            if self._owns_pool:
                old = self.room.budget
                self.room.pool.close()
                try:
                    self.room.pool = DevicePool(self.driver, self.device, budget)
                except BaseException:
                    self.room.pool = DevicePool(self.driver, self.device, old)
                    raise
            self.room.budget = budget

    def close(self) -> None:
        """Close every buffer, as `ShadowBuffer.close` does, and free the device budget.

        A second call does nothing.

        Raises
        ------
        InvalidRequestError
            A view is open or a partition is pinned; nothing was changed.
        """
        self.driver.require_usable()
        with self.lock, self.driver.beside_captures():
            if self._closed:
                return
            self._forbid("close")
            for buffer in list(self._buffers):
                self._close_buffer(buffer)
            self._close_pool()
            if self._own_copier is not None:
                self._own_copier.close()
            self._closed = True

    def __enter__(self) -> ShadowSpace:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        with contextlib.suppress(*(() if error is None else (AllocatorError,))):
            self.close()

    # -- inside -----------------------------------------------------------------------------------------
    def reap(self) -> bool:
        """End the views that nobody can release any more, under the lock; whether there were any.

        It is called where an open view would have a call refused: the ends of views cost nothing until then.
        """
        before = len(self.leases)
        for lease in list(self.leases):
            view = lease()
            if view is None:
                with contextlib.suppress(CaptureError):
                    lease.partition._release(lease)
            elif lease.abandoned:
                with contextlib.suppress(CaptureError, InvalidRequestError):
                    view.release()
        return len(self.leases) < before

    def _pool(self, pool: DevicePool | MemoryResource | None, budget: int) -> DevicePool | MemoryResource:
        if pool is None:
            return DevicePool(self.driver, self.device, budget)
        if pool.driver is not self.driver or pool.device != self.device:
            raise InvalidRequestError(
                f"pool: it is of device {pool.device} of the {pool.driver.name} driver, the space of device "
                f"{self.device} of its {self.driver.name} driver; give one of the same device"
            )
        return pool

    def _close_pool(self) -> None:
        if self._owns_pool:
            try:
                self.room.pool.close()
            except DriverError as error:
                if not over(error):
                    raise
            except InvalidRequestError:  # what it counts as live went with the device
                if not self.room.gone:
                    raise

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("shadow space: it was closed; make a new one")

    def _require_policy(self, policy: EvictionPolicy) -> None:
        if not callable(getattr(policy, "victim", None)):
            raise InvalidRequestError(f"eviction: {policy!r} has no victim(candidates); give an EvictionPolicy")
        for partition in policy.sequence if isinstance(policy, PlannedOrder) else ():
            if not isinstance(partition, Partition) or partition.space is not self:
                raise InvalidRequestError(f"eviction: the plan has {partition!r}, which is none of this space")

    def _add(
        self, name: str, spans: list[Span], pages: HostArena | None, host_nbytes: int, *, fitting: bool = True
    ) -> ShadowBuffer:
        with self.lock:
            try:
                self._require_open()
                require_fitting(name, [span.nbytes for span in spans], self.room.budget if fitting else None)
                self._ranges.add(f"buffer {name!r}", spans)
            except BaseException:
                self._host.used -= host_nbytes
                raise
            buffer = ShadowBuffer(self, name, spans, pages, host_nbytes)
            self._buffers[buffer] = fitting
            return buffer

    def _close_buffer(self, buffer: ShadowBuffer) -> None:
        self.driver.require_usable()
        with self.lock, self.driver.beside_captures():
            if buffer not in self._buffers:
                return
            buffer._forbid(f"close of buffer {buffer.name!r}")
            buffer._retire()
            self._ranges.remove(partition.host for partition in buffer)
            del self._buffers[buffer]
            self._host.used -= buffer.host_nbytes

    def _forbid(self, what: str) -> None:
        for buffer in self._buffers:
            buffer._forbid(what)
