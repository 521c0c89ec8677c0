"""PyTorch's CUDA memory from MemFerry's device pool: as the global allocator, or through `torch.cuda.MemPool`."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import AllocatorError, InvalidRequestError, UnsupportedError
from ..native import bindings, torch_library_path
from ..sizes import format_size, parse_size

_SLOTS = 8


@dataclass(frozen=True)
class PoolStatistics:
    """What a pool holds now; bytes, but for the four counts at the end.

    Attributes
    ----------
    budget, reserved, used, peak, cached, largest_free : int
        Allowed, taken from the device, allocated, most ever allocated, kept aside by exact size, largest request
        that fits.
    live, allocations, frees, waits : int
        Allocations now and so far, and waits of a stream for another's last use.
    """

    budget: int
    reserved: int
    used: int
    peak: int
    cached: int
    largest_free: int
    live: int
    allocations: int
    frees: int
    waits: int


class PoolAllocator(torch.cuda.memory.CUDAPluggableAllocator):
    """What torch calls for memory: one of MemFerry's pools for every device, each with the same budget.

    It stays for the life of the process, since torch frees its last blocks while the process exits.  Thread-safe.
    """

    def __init__(self, device_budget: int | str, *, null_when_full: bool) -> None:
        _require_cuda_build()
        self.device_budget = parse_size(device_budget, name="device_budget")
        self._slot = _take(self.device_budget, null_when_full)
        path = str(torch_library_path())
        super().__init__(path, f"memferry_torch_allocate_{self._slot}", f"memferry_torch_free_{self._slot}")
        callbacks: Any = self._allocator
        callbacks.set_record_stream_fn(_address(f"memferry_torch_record_stream_{self._slot}"))
        callbacks.set_reset_fn(_address(f"memferry_torch_trim_{self._slot}"))
        _kept.append(self)

    @property
    def handle(self) -> Any:
        """Torch's own object for this allocator."""
        return self._allocator

    def statistics(self, device: int = 0) -> PoolStatistics:
        """What the pool on `device` holds; zeros, but for the budget, before its first allocation.

        Raises
        ------
        AllocatorError
            The pool may not be used by this process any more.
        """
        out = _Statistics()
        if _library().memferry_torch_statistics(self._slot, device, ctypes.byref(out)) != 0:
            ffi, lib = bindings()
            raise AllocatorError(ffi.string(lib.memferry_last_error()).decode())
        return PoolStatistics(**{name: getattr(out, name) for name in PoolStatistics.__dataclass_fields__})

    def trim(self) -> None:
        """Give pools without live allocations back to their devices, after their work.  Blocks the caller.

        Under a `torch.cuda.MemPool`, what torch caches is live.
        """
        _library()[f"memferry_torch_trim_{self._slot}"]()


def pluggable_allocator(*, device_budget: int | str) -> PoolAllocator:
    """An allocator for `torch.cuda.memory.change_current_allocator`, to be called before torch's first CUDA use.

    A request beyond the budget joins what is free, tries once more, and raises ``torch.OutOfMemoryError`` (a plain
    ``RuntimeError`` with the same words under a torch that does not let us); torch may go on after it.

    Parameters
    ----------
    device_budget : int or str
        Bytes on each device, such as ``"24GiB"``; taken at the first allocation there.

    Raises
    ------
    UnsupportedError
        The package was installed without a C++ compiler, or torch without CUDA.
    InvalidRequestError
        Not a size, or too many allocators were made.
    """
    return PoolAllocator(device_budget, null_when_full=False)


class MemFerryPool(torch.cuda.MemPool):
    """A `torch.cuda.MemPool` whose memory comes from `memferry`, a `PoolAllocator`."""

    def __init__(self, memferry: PoolAllocator) -> None:
        super().__init__(memferry.handle)
        self.memferry = memferry


def mem_pool(*, device_budget: int | str) -> MemFerryPool:
    """A `torch.cuda.MemPool` over a pool of MemFerry's, for ``with torch.cuda.use_mem_pool(pool):``.

    torch caches on top of it: it asks for whole segments (2 MiB and more), and gives them back when the pool
    object dies.  Whether it first gives back what it caches when the budget is reached depends on its version;
    ``torch.OutOfMemoryError`` comes then.  ``pool.memferry`` is the `PoolAllocator`, for statistics.

    Parameters and errors are those of `pluggable_allocator`.
    """
    return MemFerryPool(PoolAllocator(device_budget, null_when_full=True))


_kept: list[PoolAllocator] = []  # blocks may outlive whoever asked for the allocator


class _Statistics(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("budget", "reserved", "used", "peak", "cached", "largest_free")),
        *((name, ctypes.c_uint64) for name in ("live", "allocations", "frees", "hits", "waits")),
    ]


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(torch_library_path()))
    library.memferry_torch_take.argtypes = [ctypes.c_size_t, ctypes.c_int]
    return library


def _address(name: str) -> int:
    address = ctypes.cast(_library()[name], ctypes.c_void_p).value
    assert address is not None
    return address


def _take(budget: int, null_when_full: bool) -> int:
    slot = int(_library().memferry_torch_take(budget, null_when_full))
    if slot < 0:
        raise InvalidRequestError(
            f"torch allocator: asked for one with {format_size(budget)}, this process has {_SLOTS} already, and "
            "they stay for its life; use one of them again"
        )
    return slot


def _require_cuda_build() -> None:
    if not hasattr(torch._C, "_cuda_customAllocator"):
        raise UnsupportedError(
            f"torch allocator: torch {torch.__version__} is built without CUDA; install a CUDA build of it"
        )


__all__ = ["MemFerryPool", "PoolAllocator", "PoolStatistics", "mem_pool", "pluggable_allocator"]
