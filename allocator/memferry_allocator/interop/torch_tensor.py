"""A view as a torch tensor, of any element type, without a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import InvalidRequestError
from .array import Array
from .dlpack import DeviceType, make_capsule
from .dtypes import element_type

if TYPE_CHECKING:
    import torch.utils.dlpack


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
    import torch.utils.dlpack

    if array.read_only:
        raise InvalidRequestError(
            "as_tensor: the view only reads, and torch would write to it without a word; acquire it with "
            "Mode.READ_WRITE, or make the array with promise_not_to_write=True"
        )
    dtype: Any = getattr(torch, array.kind.name)
    if array.nbytes == 0:
        device = f"cuda:{array.device[1]}" if array.device[0] is DeviceType.CUDA else "cpu"
        return torch.empty(array.shape, dtype=dtype, device=device)
    return torch.utils.dlpack.from_dlpack(_bytes_of(array)).view(dtype).view(array.shape)


def _bytes_of(array: Array) -> Any:
    """All of it as bytes, which every torch takes; a bare capsule, since the order is the caller's."""
    _ = array.view.ptr  # refused once released
    return make_capsule(
        array, array.ptr, (array.nbytes,), (1,), _BYTES, array.device, read_only=False, versioned=False
    )


_BYTES = element_type("uint8")
