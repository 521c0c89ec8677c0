"""The memories of an emulated machine: devices with a capacity, and host pages that are registered.

Device memory is host memory under other addresses: a device pointer used as a host address, or the
other way round, is refused like any other unknown address.  So is the host address of registered memory
where its device pointer was meant, by whoever asks `Memory.locate` for a device pointer.
"""

from __future__ import annotations

import bisect
import mmap
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from ...errors import DriverError, DriverOutOfMemory
from ..types import Span

HOST_END = 1 << 48  # no host address lies beyond
DEVICE_BASE = 1 << 50  # device d's addresses start at (d + 1) times this
VIRTUAL_BASE = 1 << 56  # reserved ranges start here
MAPPED_OFFSET = 1 << 60  # a registered host address, as kernels see it
ALIGNMENT = 2 << 20
POISON_NEW, POISON_FREED = 0xFF, 0xFE  # as bf16, fp16 and fp32: NaN, and a huge or NaN value

Bytes = npt.NDArray[np.uint8]


class Kind(Enum):
    DEVICE = "device"
    PINNED = "registered host"
    PAGEABLE = "pageable host"
    PAGED = "virtual range not on one device"


@dataclass(frozen=True)
class Place:
    """Where an address leads.

    Attributes
    ----------
    real : int
        The address at which this process reaches the bytes.
    lines : tuple of Span
        Where the bytes are on the checker's line, in order; aliases of the same bytes have the same place.
    users : frozenset of int, optional
        The devices whose kernels the mapping admits; None where the kind of memory decides.
    owner : object, optional
        What must live as long as the bytes are looked at.
    """

    kind: Kind
    device: int
    real: int
    lines: tuple[Span, ...]
    read_only: bool = False
    users: frozenset[int] | None = None
    owner: object = None


@dataclass(frozen=True)
class _Allocation:
    base: int
    nbytes: int
    data: Bytes
    real: int


class DeviceMemory:
    """One device's memory; addresses are never used twice, so that a stale pointer is always unknown."""

    def __init__(self, device: int, capacity: int) -> None:
        self.device = device
        self.capacity = capacity
        self.used = 0
        self._next = DEVICE_BASE * (device + 1)
        self._bases: list[int] = []
        self._allocations: list[_Allocation] = []

    def malloc(self, nbytes: int) -> int:
        if nbytes <= 0:
            raise DriverError("CUDA_ERROR_INVALID_VALUE", "malloc", f"nbytes={nbytes}")
        if self.used + nbytes > self.capacity:
            raise self._out_of_memory(nbytes)
        try:
            data = np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)
        except (OSError, OverflowError):  # the host, which lends the memory, has less than the device should
            raise self._out_of_memory(nbytes) from None
        data[:] = POISON_NEW
        base = self._next
        self._next += -(-nbytes // ALIGNMENT) * ALIGNMENT + ALIGNMENT
        self._bases.append(base)
        self._allocations.append(_Allocation(base, nbytes, data, data.ctypes.data))
        self.used += nbytes
        return base

    def extent(self, ptr: int) -> int:
        """Bytes of the allocation that starts at `ptr`."""
        allocation = self._find(ptr, 1)
        if allocation is None or allocation.base != ptr:
            raise DriverError("CUDA_ERROR_INVALID_VALUE", "free", f"no allocation starts at {ptr:#x}")
        return allocation.nbytes

    def free(self, ptr: int) -> None:
        index = bisect.bisect_left(self._bases, ptr)
        allocation = self._allocations.pop(index)
        del self._bases[index]
        allocation.data[:] = POISON_FREED
        self.used -= allocation.nbytes

    def spoil(self) -> None:
        """The contents of every allocation are lost."""
        for allocation in self._allocations:
            allocation.data[:] = POISON_FREED

    def real(self, ptr: int, nbytes: int) -> int | None:
        """The real address of a range that lies inside one allocation."""
        allocation = self._find(ptr, nbytes)
        return None if allocation is None else allocation.real + ptr - allocation.base

    def data(self, ptr: int, nbytes: int) -> Bytes | None:
        """The bytes of a range that lies inside one allocation; they outlive the allocation, poisoned."""
        allocation = self._find(ptr, nbytes)
        if allocation is None:
            return None
        return allocation.data[ptr - allocation.base : ptr - allocation.base + nbytes]

    def _out_of_memory(self, nbytes: int) -> DriverOutOfMemory:
        return DriverOutOfMemory(
            "CUDA_ERROR_OUT_OF_MEMORY",
            "malloc",
            size=nbytes,
            used=self.used,
            limit=self.capacity,
            budget=f"emulated:{self.device}",
        )

    def _find(self, ptr: int, nbytes: int) -> _Allocation | None:
        index = bisect.bisect_right(self._bases, ptr) - 1
        if index < 0:
            return None
        allocation = self._allocations[index]
        return allocation if ptr + nbytes <= allocation.base + allocation.nbytes else None


@dataclass(frozen=True)
class _Registration:
    start: int
    nbytes: int
    read_only: bool


class HostMemory:
    """Registered host ranges, by exact bytes, as the driver keeps them."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ranges: list[_Registration] = []

    @property
    def total(self) -> int:
        """Bytes registered now."""
        return sum(found.nbytes for found in self._ranges)

    def register(self, address: int, nbytes: int, *, read_only: bool) -> None:
        if address <= 0 or nbytes <= 0 or not _is_mapped(address, nbytes, writable=not read_only):
            raise DriverError(
                "CUDA_ERROR_INVALID_VALUE",
                "host_register",
                f"{nbytes} bytes at {address:#x} are not mapped {'readable' if read_only else 'writable'}",
            )
        if self._overlaps(address, nbytes):
            raise DriverError(
                "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
                "host_register",
                f"{nbytes} bytes at {address:#x}",
            )
        index = bisect.bisect_left(self._starts, address)
        self._starts.insert(index, address)
        self._ranges.insert(index, _Registration(address, nbytes, read_only))

    def extent(self, address: int) -> int:
        """Bytes of the registration that starts at `address`."""
        found = self.find(address, 1)
        if found is None:
            raise DriverError("CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "host_unregister", f"{address:#x}")
        if found.start != address:
            raise DriverError("CUDA_ERROR_INVALID_VALUE", "host_unregister", f"{address:#x} is inside a range")
        return found.nbytes

    def unregister(self, address: int) -> None:
        index = bisect.bisect_left(self._starts, address)
        del self._starts[index]
        del self._ranges[index]

    def find(self, address: int, nbytes: int) -> _Registration | None:
        """The registration that holds the whole range."""
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        found = self._ranges[index]
        return found if address + nbytes <= found.start + found.nbytes else None

    def place(self, address: int, nbytes: int, call: str) -> Place:
        """PINNED or PAGEABLE; a range that is partly registered, or spans two, is refused."""
        found = self.find(address, nbytes)
        if found is not None:
            return Place(Kind.PINNED, -1, address, (Span(address, nbytes),), found.read_only)
        if self._overlaps(address, nbytes):
            raise DriverError(
                "CUDA_ERROR_INVALID_VALUE",
                call,
                f"{nbytes} bytes at {address:#x} span a registration's edge",
            )
        return Place(Kind.PAGEABLE, -1, address, (Span(address, nbytes),))

    def _overlaps(self, address: int, nbytes: int) -> bool:
        index = bisect.bisect_left(self._starts, address + nbytes) - 1
        return index >= 0 and self._ranges[index].start + self._ranges[index].nbytes > address


def _is_mapped(address: int, nbytes: int, *, writable: bool) -> bool:
    """Whether every page of a host range is mapped with the rights asked for."""
    position, end = address, address + nbytes
    with open("/proc/self/maps") as maps:
        for line in maps:
            bounds, rights = line.split(maxsplit=2)[:2]
            low, high = (int(part, 16) for part in bounds.split("-"))
            if high <= position:
                continue
            if low > position or "r" not in rights or (writable and "w" not in rights):
                return False
            position = high
            if position >= end:
                return True
    return False
