"""A view as a torch tensor, of any element type, without a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import InvalidRequestError
from .array import Array
from .dlpack import DeviceType

if TYPE_CHECKING:
    import torch


class _DeviceBytes:
    """The bytes of an array, as torch takes device memory; torch keeps it, and so the array, alive."""

    def __init__(self, array: Array) -> None:
        self._array = array
        self.__cuda_array_interface__ = {
            **array.__cuda_array_interface__,
            "shape": (array.nbytes,),
            "typestr": "|u1",
            "strides": None,
            "data": (array.ptr, False),
        }


class _HostBytes:
    """The same for host memory, by NumPy."""

    def __init__(self, array: Array) -> None:
        self._array = array
        self.__array_interface__ = {
            "version": 3,
            "shape": (array.nbytes,),
            "typestr": "|u1",
            "data": (array.ptr, False),
        }


def as_tensor(array: Array) -> torch.Tensor:
    """A tensor over the memory of `array`: on its device, or on the CPU.

    The tensor is used in the order of the streams that may use the view; torch does not check that.

    Raises
    ------
    InvalidRequestError
        The array is read-only, and torch knows no such tensors.
    """
    import numpy as np
    import torch

    if array.read_only:
        raise InvalidRequestError(
            "as_tensor: the view only reads, and torch would write to it without a word; acquire it with "
            "Mode.READ_WRITE, or make the array with promise_not_to_write=True"
        )
    dtype: Any = getattr(torch, array.kind.name)
    on_device = array.device[0] is DeviceType.CUDA
    device = torch.device("cuda", array.device[1]) if on_device else torch.device("cpu")
    if array.nbytes == 0:
        return torch.empty(array.shape, dtype=dtype, device=device)
    if on_device:
        flat = torch.as_tensor(_DeviceBytes(array), device=device)
    else:
        flat = torch.from_numpy(np.asarray(_HostBytes(array)))
    return flat.view(dtype).view(array.shape)
