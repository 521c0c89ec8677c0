"""DLPack, both ways: capsules of our memory for others, and others' memory taken without a copy.

After the DLPack specification 1.0 and the Python array API: a consumer names the stream on which it will use
the memory, versioned capsules carry a read-only flag, and the producer's memory lives as long as the consumer's
tensor.
"""

from __future__ import annotations

import atexit
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from ..driver import Span, Stream
from ..errors import InvalidRequestError, UnsupportedError
from ..shadow import ElementType
from .dtypes import dlpack_type, type_from_dlpack

VERSION = (1, 0)


class DeviceType(IntEnum):
    """Where the memory is, as DLPack numbers it."""

    CPU = 1
    CUDA = 2
    CUDA_HOST = 3
    CUDA_MANAGED = 13


def _extension() -> Any:
    try:
        from . import _dlpack  # type: ignore[attr-defined]  # compiled at installation
    except ImportError:
        raise UnsupportedError(
            "DLPack: memferry-rt was installed without a C compiler; install it again with gcc, or use "
            "__cuda_array_interface__ and NumPy's array interface instead"
        ) from None
    return _dlpack


def make_capsule(
    owner: object,
    ptr: int,
    shape: Sequence[int],
    strides: Sequence[int],
    kind: ElementType,
    device: tuple[int, int],
    *,
    read_only: bool,
    versioned: bool,
) -> object:
    """A capsule that keeps `owner` alive until its consumer lets go of the memory.

    Parameters
    ----------
    ptr : int
        0 where there are no elements.
    shape, strides : sequence of int
        In elements.
    device : tuple of (DeviceType, int)
    """
    extension = _extension()
    _leak_at_exit(extension)
    return extension.make(
        owner,
        ptr,
        tuple(shape),
        tuple(strides),
        dlpack_type(kind),
        (int(device[0]), device[1]),
        read_only,
        versioned,
    )


_exit_is_watched: list[Any] = []


def _leak_at_exit(extension: Any) -> None:
    """Once the interpreter goes, a consumer's deleter must not call into it any more."""
    if not _exit_is_watched:
        _exit_is_watched.append(extension)
        atexit.register(extension.going)


@dataclass(frozen=True, eq=False)
class Imported:
    """Somebody else's memory, kept alive by this object.

    Attributes
    ----------
    ptr : int
    shape, strides : tuple of int
        In elements.
    kind : ElementType
    device : tuple of (int, int)
        DLPack's device type and number.
    read_only : bool
    """

    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    kind: ElementType
    device: tuple[int, int]
    read_only: bool
    _holder: object

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.kind.itemsize

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie one behind the other in C order."""
        return self.nbytes == 0 or all(
            size == 1 or stride == expected
            for size, stride, expected in zip(
                self.shape, self.strides, contiguous_strides(self.shape), strict=True
            )
        )

    @property
    def span(self) -> Span:
        """The bytes, if they are one piece.

        Raises
        ------
        InvalidRequestError
            The array is not contiguous.
        """
        if not self.contiguous:
            raise InvalidRequestError(
                f"DLPack: shape {self.shape} with strides {self.strides} is not contiguous; make a contiguous copy"
            )
        return Span(self.ptr, self.nbytes)


def from_dlpack(source: Any, *, stream: Stream | None = None) -> Imported:
    """Take over an array of another library, without a copy.

    Parameters
    ----------
    source
        Anything with ``__dlpack__`` and ``__dlpack_device__``.
    stream : Stream, optional
        Where the memory will be used; needed for memory of a device, not taken for memory of the host.

    Raises
    ------
    InvalidRequestError
        `source` speaks no DLPack, or `stream` does not suit where its memory is.
    UnsupportedError
        An element type without a name here, or a newer DLPack.
    BufferError
        The producer refuses.
    """
    try:
        device_type, number = map(int, source.__dlpack_device__())
        export = source.__dlpack__
    except (AttributeError, TypeError, ValueError):
        raise InvalidRequestError(
            f"from_dlpack: {type(source).__name__} has no __dlpack__, or no usable __dlpack_device__"
        ) from None
    on_device = device_type in (DeviceType.CUDA, DeviceType.CUDA_MANAGED)
    if on_device != (stream is not None):
        raise InvalidRequestError(
            f"from_dlpack: the memory is on DLPack device {(device_type, number)}; "
            + ("name the stream on which it will be used" if on_device else "host memory takes no stream")
        )
    handle = None if stream is None else int(stream.handle) or 1  # 1 is the legacy default stream
    try:
        capsule = export(stream=handle, max_version=VERSION)
    except TypeError:  # a producer from before versions
        capsule = export(stream=handle)
    extension = _extension()
    try:
        holder, ptr, shape, strides, dtype, device, read_only = extension.take(capsule)
    except ValueError as error:
        raise InvalidRequestError(f"from_dlpack: {error}") from None
    return Imported(
        ptr=ptr,
        shape=shape,
        strides=contiguous_strides(shape) if strides is None else strides,
        kind=type_from_dlpack(*dtype),
        device=device,
        read_only=read_only,
        _holder=holder,
    )


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of an array in C order."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
