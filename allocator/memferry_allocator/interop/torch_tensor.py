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
    table = _exchange()
    if table is None or 0 in array.shape:
        return _by_capsule(array)
    tensor: torch.Tensor = extension().make_object(
        array, array.ptr, array.shape, DLPACK_TYPES[array.kind.name], *array.device, table
    )
    return tensor


@cache
def _exchange() -> object:
    """torch's C functions that make tensors, since 2.10, which know every element type; None before."""
    import torch

    return getattr(torch.Tensor, EXCHANGE, None)


def _by_capsule(array: Array) -> torch.Tensor:
    """All of it as bytes, which every torch takes; a bare capsule, since the order is the caller's."""
    import torch.utils.dlpack

    dtype: Any = getattr(torch, array.kind.name)
    if 0 in array.shape:
        device = f"cuda:{array.device[1]}" if array.device[0] is DeviceType.CUDA else "cpu"
        return torch.empty(array.shape, dtype=dtype, device=device)
    capsule = extension().make(
        array, array.ptr, (array.nbytes,), DLPACK_TYPES["uint8"], *array.device, False, False
    )
    return torch.utils.dlpack.from_dlpack(capsule).view(dtype).view(array.shape)
