"""A view as a torch tensor, of any element type, without a copy."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from ..errors import InvalidRequestError
from .array import Array
from .dlpack import EXCHANGE, DeviceType, extension
from .dtypes import DLPACK_TYPES

if TYPE_CHECKING:
    import torch

_CPU, _CUDA, _CUDA_HOST = DeviceType.CPU, DeviceType.CUDA, DeviceType.CUDA_HOST


def as_tensor(array: Array) -> torch.Tensor:
    """A tensor over the memory of `array`: on its device, or on the CPU.

    The tensor is used in the order of the streams that may use the view; torch does not check that.

    Raises
    ------
    InvalidRequestError
        The array is read-only, and torch knows no such tensors.
    UnsupportedError
        The package was installed without a C compiler.
    """
    if array.read_only:
        raise InvalidRequestError(
            "as_tensor: the view only reads, and torch would write to it without a word; acquire it with "
            "Mode.READ_WRITE, or make the array with promise_not_to_write=True"
        )
    _ = array.view.ptr  # refused once released
    device_type, number = array.device
    if device_type is _CUDA_HOST:  # the CPU's to torch, which asks the driver whether memory is page-locked
        device_type = _CPU
    table = _exchange(device_type is _CUDA)
    if table is None or 0 in array.shape:
        return _by_capsule(array, device_type, number)
    tensor: torch.Tensor = extension().make_object(
        array, array.ptr, array.shape, DLPACK_TYPES[array.kind.name], device_type, number, table
    )
    return tensor


@cache
def _exchange(on_device: bool) -> object:
    """torch's C functions that make tensors, which know every element type; None where it is too old for them."""
    import torch

    if on_device:
        torch.cuda.init()  # which they leave out
    return getattr(torch.Tensor, EXCHANGE, None)


def _by_capsule(array: Array, device_type: int, number: int) -> torch.Tensor:
    """All of it as bytes, which every torch takes; a bare capsule, since the order is the caller's."""
    import torch.utils.dlpack

    dtype: Any = getattr(torch, array.kind.name)
    if 0 in array.shape:
        device = f"cuda:{number}" if device_type == _CUDA else "cpu"
        return torch.empty(array.shape, dtype=dtype, device=device)
    capsule = extension().make(
        array, array.ptr, (array.nbytes,), DLPACK_TYPES["uint8"], device_type, number, False, False
    )
    return torch.utils.dlpack.from_dlpack(capsule).view(dtype).view(array.shape)
