"""Device memory, the driver's own pools, and registered host memory."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver as cu

from ...errors import DriverOutOfMemory
from ..handles import Stream, require_stream
from ..types import Span
from .core import CudaCore
from .errors import OUT_OF_MEMORY, SUCCESS, require_size

_ATTRIBUTE = cu.CUpointer_attribute
_ORDINAL = int(_ATTRIBUTE.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
_HOST, _DEVICE = (int(kind) for kind in (cu.CUmemorytype.CU_MEMORYTYPE_HOST, cu.CUmemorytype.CU_MEMORYTYPE_DEVICE))
_PORTABLE_MAPPED, _READ_ONLY = 1 | 2, 8
_LARGEST = 1 << 60  # beyond, the driver's own size arithmetic comes near its end
_NO_MEMORY = (cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY,)


class MemoryCalls(CudaCore):
    """Taking memory and giving it back."""

    def malloc(self, device: int, nbytes: int) -> int:
        require_size("malloc", nbytes)
        with self._on(device):
            result = cu.cuMemAlloc(nbytes) if nbytes <= _LARGEST else _NO_MEMORY
            return self._taken(device, "malloc", result, nbytes)

    def free(self, device: int, ptr: int) -> None:
        with self._on(device):
            self._check(device, "free", cu.cuMemFree(ptr), f"ptr={ptr:#x}")

    # -- driver pools ---------------------------------------------------------------------------------
    def malloc_async(self, device: int, nbytes: int, *, stream: Stream) -> int:
        require_size("malloc_async", nbytes)
        handle = self._pooled(device, stream)
        with self._on(device):
            result = cu.cuMemAllocAsync(nbytes, handle) if nbytes <= _LARGEST else _NO_MEMORY
            return self._taken(device, "malloc_async", result, nbytes)

    def free_async(self, device: int, ptr: int, *, stream: Stream) -> None:
        handle = self._pooled(device, stream)
        if ptr == 0:
            return
        with self._on(device):
            self._check(device, "free_async", cu.cuMemFreeAsync(ptr, handle), f"ptr={ptr:#x}")

    def trim_pool(self, device: int, keep: int = 0) -> None:
        require_size("trim_pool", keep)
        self._require_pools(device)
        with self._on(device):
            pool = self._check(device, "default pool", cu.cuDeviceGetDefaultMemPool(device))
            self._check(device, "trim_pool", cu.cuMemPoolTrimTo(pool, keep))

    # -- registered host memory -----------------------------------------------------------------------
    def host_register(self, address: int, nbytes: int, *, read_only: bool = False) -> None:
        require_size("host_register", min(address, nbytes))
        flags = _PORTABLE_MAPPED | (_READ_ONLY if read_only else 0)
        with self._on_any():
            result = cu.cuMemHostRegister(address, nbytes, flags)
            self._check(self._some(), "host_register", result, f"{nbytes} bytes at {address:#x}")

    def host_unregister(self, address: int) -> None:
        with self._on_any():
            self._check(self._some(), "host_unregister", cu.cuMemHostUnregister(address), f"{address:#x}")

    def host_registration(self, address: int) -> Span | None:
        with self._on_any():
            kind = cu.cuPointerGetAttribute(_ATTRIBUTE.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)
            if int(kind[0]) != SUCCESS or int(kind[1]) != _HOST:
                return None
            start, nbytes = (
                int(self._check(self._some(), "host_registration", cu.cuPointerGetAttribute(attribute, address)))
                for attribute in (
                    _ATTRIBUTE.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
                    _ATTRIBUTE.CU_POINTER_ATTRIBUTE_RANGE_SIZE,
                )
            )
            return Span(start, nbytes)

    def device_of(self, ptr: int) -> int | None:
        if self._addresses is not None:
            with self._lock:
                if self._addresses.find(ptr, 1) is not None:
                    return None
        with self._on_any():
            kind = cu.cuPointerGetAttribute(_ATTRIBUTE.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, ptr)
            if int(kind[0]) != SUCCESS or int(kind[1]) != _DEVICE:
                return None
            pool = cu.cuPointerGetAttribute(_ATTRIBUTE.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, ptr)
            if int(pool[0]) == SUCCESS and int(pool[1]):
                return None
            # Not by the bindings: some of their versions answer 0 for every device.
            answer = self._answers.number
            code = self._library.cuPointerGetAttribute(answer, _ORDINAL, ptr)
            if code != SUCCESS:
                raise self._error(self._some(), code, "device_of")
            return int(answer[0])

    def host_device_pointer(self, address: int, device: int) -> int:
        with self._on(device):
            result = cu.cuMemHostGetDevicePointer(address, 0)
            return int(self._check(device, "host_device_pointer", result, f"{address:#x} is not registered"))

    def host_bytes(self, ptr: int, nbytes: int) -> memoryview | None:
        self._known(0)
        return None

    # -- inside -------------------------------------------------------------------------------------
    def _pooled(self, device: int, stream: Stream) -> int:
        """The handle of a stream of a device that has pools."""
        handle = self._stream(require_stream(stream, device))
        self._require_pools(device)
        return handle

    def _require_pools(self, device: int) -> None:
        if not self.device_info(device).capabilities["MEMORY_POOLS_SUPPORTED"]:
            raise self._unsupported("driver pools")

    def _taken(self, device: int, call: str, result: tuple[Any, ...], nbytes: int) -> int:
        """The value of a call that takes device memory, or how much there was of it."""
        if int(result[0]) == OUT_OF_MEMORY:
            raise self._out_of_memory(device, call, nbytes)
        return int(self._check(device, call, result, f"nbytes={nbytes}"))

    def _out_of_memory(self, device: int, call: str, nbytes: int) -> DriverOutOfMemory:
        free, total = self.memory_info(device)
        code, budget = "CUDA_ERROR_OUT_OF_MEMORY", f"cuda:{device}"
        return DriverOutOfMemory(code, call, size=nbytes, used=total - free, limit=total, budget=budget)
