"""Copies by a kernel: over the links of the device that runs it, whoever's memory it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cuda.bindings import driver as cu

from ...errors import DriverError
from ..api import COPY_BLOCKS
from ..handles import Stream, require_stream
from .compile import compile_kernels
from .core import CudaCore
from .errors import SUCCESS, require_size

SOURCE = Path(__file__).with_name("copy_kernel.cu")
THREADS = 512  # of a block
_DEVICE = 2  # as a type of memory
_READ_AND_WRITE = 3  # as flags of access


class KernelCalls(CudaCore):
    """What the multiprocessors copy."""

    def prepare_kernel_copy(self, device: int) -> None:
        if device not in self._copy_kernels:
            self._load_copy_kernel(device)

    def kernel_copy(self, dst: int, src: int, nbytes: int, *, stream: Stream, blocks: int = COPY_BLOCKS) -> None:
        handle = self._stream(require_stream(stream))
        if nbytes == 0:
            return
        require_size("kernel_copy", nbytes)
        device = stream.device
        function = self._copy_kernels.get(device) or self._load_copy_kernel(device)
        with self._on(device):
            for ptr in (dst, src):  # an access out of bounds would end the device's context
                self._require_reach(device, ptr, nbytes)
            arguments = self._answers.arguments
            arguments.values[0], arguments.values[1], arguments.values[2] = dst, src, nbytes
            shape = (blocks, 1, 1, THREADS, 1, 1, 0)
            code = self._library.cuLaunchKernel(function, *shape, handle, arguments.pointers, arguments.none)
        if code != SUCCESS:
            raise self._error(device, code, "kernel_copy", f"{nbytes} bytes from {src:#x} to {dst:#x}")

    def _load_copy_kernel(self, device: int) -> int:
        capability = self.device_info(device).compute_capability
        assert capability is not None
        code = compile_kernels(SOURCE, capability)
        with self._lock:
            known = self._copy_kernels.get(device)
            if known is not None:
                return known
            with self._on(device):
                module: Any = self._check(device, "load kernels", cu.cuModuleLoadData(code))
                found = self._check(device, "find kernel", cu.cuModuleGetFunction(module, b"memferry_copy"))
            self._copy_kernels[device] = int(found)
            return int(found)

    def _has_rights(self, ptr: int) -> bool:
        """Whether the current context's device may read and write at `ptr`."""
        found = self._answers.attributes
        code = self._library.cuPointerGetAttribute(found.access, found.ACCESS, ptr)
        return code == SUCCESS and int(found.flags[0]) & _READ_AND_WRITE == _READ_AND_WRITE

    def _require_reach(self, device: int, ptr: int, nbytes: int) -> None:
        """Refuse a range that is not all in one allocation or registration that kernels of a device may touch."""
        own = None
        if self._addresses is not None:
            with self._lock:
                own = self._addresses.find(ptr, 1)
                if own is not None:
                    self._addresses.check_access("kernel_copy", ptr, nbytes)
        found = self._answers.attributes
        code = self._library.cuPointerGetAttributes(len(found.keys), found.keys, found.pointers, ptr)
        if code != SUCCESS:
            raise self._error(device, code, "kernel_copy", f"{ptr:#x}")
        kind, home, plain, start, size = (int(value[0]) for value in found.values)
        inside = own is not None or (kind and start <= ptr and ptr + nbytes <= start + size)
        # Plain memory is reached once peer access is enabled; pages and pools have rights of their own.
        reached = kind != _DEVICE or home == device or plain or self._has_rights(ptr)
        if not (inside and reached):
            wrong = f"out of reach of device {device}" if inside else "not all in one allocation or registration"
            raise DriverError(
                "CUDA_ERROR_INVALID_VALUE", "kernel_copy", f"the {nbytes} bytes at {ptr:#x} are {wrong}"
            )
