"""Torch tensors over memory that MemFerry owns."""

from __future__ import annotations

from typing import Any

import torch

from memferry_allocator import Driver, Span, UnsupportedError

from ...pages import SlabPages

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def torch_device_of(driver: Driver, device: int) -> torch.device:
    """Torch's device for one of a driver's; the emulated device's is the CPU.

    Raises
    ------
    UnsupportedError
        Of another driver: how torch sees its memory is not known here.
    """
    if driver.name == "emulated":
        return torch.device("cpu")
    if driver.name == "cuda":
        return torch.device("cuda", device)
    raise UnsupportedError(
        f"device: the {driver.name} driver can be opened, and torch tensors over its memory cannot be made; "
        "docs/new-accelerator.md says what the torch adapter needs beside a driver"
    )


class _CudaBytes:
    """Device-visible bytes under the CUDA array interface; a tensor over it keeps `owner` alive."""

    def __init__(self, ptr: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (ptr, False),
            "strides": None,
        }


class TensorFactory:
    """Makes flat byte tensors over device memory, and over host pages as either side sees them.

    On the emulated device, and only there, all of them are CPU tensors.
    """

    def __init__(self, driver: Driver, device: int) -> None:
        self._driver = driver
        self._device = device
        self.emulated = driver.name == "emulated"
        self.torch_device = torch_device_of(driver, device)

    def device(self, span: Span) -> torch.Tensor:
        """Over device memory, shape (nbytes,), uint8.  It does not own the memory."""
        if self.emulated:
            return _from_buffer(self._driver.host_bytes(span.ptr, span.nbytes))
        return self._cuda(span.ptr, span.nbytes, None)

    def mapped(self, arena: SlabPages, span: Span) -> torch.Tensor:
        """Over registered host pages as the device's kernels see them; keeps the arena."""
        if self.emulated:
            return self.host(arena, span)
        ptr = self._driver.host_device_pointer(span.ptr, self._device)
        return self._cuda(ptr, span.nbytes, arena)

    def host(self, arena: SlabPages, span: Span) -> torch.Tensor:
        """Over host pages as the CPU sees them; keeps the arena."""
        return _from_buffer(arena.array(span))

    def _cuda(self, ptr: int, nbytes: int, owner: object) -> torch.Tensor:
        return torch.as_tensor(_CudaBytes(ptr, nbytes, owner), device=self.torch_device)


def _from_buffer(buffer: Any) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8)


def shaped(
    flat: torch.Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    """A view of ``flat`` (uint8) from byte `offset` as a dense tensor."""
    numel = 1
    for size in shape:
        numel *= size
    part = flat[offset : offset + numel * dtype.itemsize].view(dtype)
    return part.as_strided(shape, stride)


def storage_references(tensor: torch.Tensor) -> int | None:
    """How many tensors share the storage of `tensor`; None where this torch cannot tell."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return None if count is None else int(count(tensor.untyped_storage()._cdata))
