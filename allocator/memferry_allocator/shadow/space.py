"""The shadow space: buffers whose partitions live in host memory, device memory, or both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..device import ALIGNMENT, DevicePool
from ..driver import Driver, Event, Span, Stream
from ..errors import DriverError, InvalidRequestError, OutOfMemory
from ..sizes import align_up, format_size
from .copier import Copier, DirectCopier
from .lock import SpaceLock
from .partition import Partition


class ShadowBuffer(Sequence[Partition]):
    """One logical range cut in partitions; a sequence of them."""

    def __init__(self, name: str, partitions: Iterable[Partition]) -> None:
        self.name = name
        self._partitions = tuple(partitions)
        self.nbytes = sum(partition.nbytes for partition in self._partitions)

    def __len__(self) -> int:
        return len(self._partitions)

    def __getitem__(self, index: int) -> Partition:  # type: ignore[override]  # no slices of partitions
        return self._partitions[index]


class ShadowSpace:
    """The unified address space over host pages and one device's budget.

    Parameters
    ----------
    driver : Driver
    device : int
    device_budget : int
        Bytes of device memory, reserved at once.
    copier : Copier, optional
        Who moves bytes; plain copies on one stream a direction by default, which the space then owns.
    """

    def __init__(
        self, driver: Driver, device: int = 0, *, device_budget: int, copier: Copier | None = None
    ) -> None:
        self.driver = driver
        self.device = device
        self.lock = SpaceLock(driver)
        self.pool = DevicePool(driver, device, device_budget)
        self._own_copier = DirectCopier(driver, device) if copier is None else None
        self.copier: Copier = self._own_copier if copier is None else copier  # type: ignore[assignment]
        self._partitions: list[Partition] = []
        self._clock = 0

    def buffer(self, name: str, host: Sequence[Span]) -> ShadowBuffer:
        """A buffer over registered host ranges, one partition each.  The caller keeps the pages alive.

        Raises
        ------
        InvalidRequestError
            A range is empty, or larger than the whole device budget.
        """
        for index, span in enumerate(host):
            if span.nbytes <= 0 or align_up(span.nbytes, ALIGNMENT) > self.pool.nbytes:
                raise InvalidRequestError(
                    f"buffer {name!r}: partition {index} has {format_size(span.nbytes)}; a partition needs "
                    f"more than 0 bytes and, as a multiple of {ALIGNMENT}, at most the device budget, "
                    f"{format_size(self.pool.nbytes)}"
                )
        with self.lock:
            partitions = [Partition(self, f"{name}[{index}]", span) for index, span in enumerate(host)]
            self._partitions += partitions
            return ShadowBuffer(name, partitions)

    def resize(self, device_budget: int) -> None:
        """Exchange the device budget.  Drops every device copy; no view may be open.

        Raises
        ------
        InvalidRequestError
            A view is open.
        DriverOutOfMemory
            The device has less; the space then has its old budget again.
        """
        if device_budget <= 0:
            raise InvalidRequestError(f"device budget: {device_budget} is not more than zero bytes")
        with self.lock:
            self._forbid_views("resize")
            for partition in self._partitions:
                partition.evict()
            old = self.pool.nbytes
            self.pool.close()
            try:
                self.pool = DevicePool(self.driver, self.device, device_budget)
            except BaseException:
                self.pool = DevicePool(self.driver, self.device, old)
                raise

    def close(self) -> None:
        """Write everything home, wait until no stream uses the host pages, and free the device budget.

        A second call does nothing.

        Raises
        ------
        InvalidRequestError
            A view is open; nothing was changed.
        """
        with self.lock:
            self._forbid_views("close")
            for partition in self._partitions:
                partition.evict()
                partition.settle()
            self.pool.close()
            if self._own_copier is not None:
                self._own_copier.close()

    def tick(self) -> int:
        """A number larger than every one before: the order of uses."""
        self._clock += 1
        return self._clock

    def allocate(self, nbytes: int, stream: Stream) -> int:
        """Memory of the budget for `stream`, evicting the least recently used copies if it must."""
        while True:
            try:
                return self.pool.allocate(nbytes, stream=stream)
            except OutOfMemory:
                victim = self._victim()
                if victim is None:
                    raise
                victim.evict()

    def deallocate(self, ptr: int, nbytes: int, uses: Mapping[Stream, Event]) -> None:
        """Give memory back whose last uses were recorded in `uses`."""
        stream = next(iter(uses))
        self.pool.deallocate(ptr, nbytes, stream=stream, uses=uses)

    def abandon(self, ptr: int, nbytes: int, stream: Stream) -> dict[Stream, Event]:
        """Give memory back that was allocated for `stream` a moment ago, and whose use failed; its last uses."""
        try:
            uses = {stream: stream.record()}
        except DriverError:  # a closed stream has no work any more
            uses = {}
        self.pool.deallocate(ptr, nbytes, stream=stream, uses=uses)
        return uses

    def _forbid_views(self, what: str) -> None:
        used = [partition.name for partition in self._partitions if partition.in_use]
        if used:
            raise InvalidRequestError(f"{what}: views of {', '.join(used)} are open; release them first")

    def _victim(self) -> Partition | None:
        idle = [partition for partition in self._partitions if partition.resident and not partition.in_use]
        return min(idle, key=lambda partition: partition.last_use, default=None)
