"""DLPack, both ways: capsules of our memory for others, and others' memory taken without a copy.

After the DLPack specification 1.0 and the Python array API: a consumer names the stream on which it will use
the memory, versioned capsules carry a read-only flag, and the producer's memory lives as long as the consumer's
tensor.
"""

from __future__ import annotations

import atexit
import math
from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from typing import Any

from ..driver import Span, Stream
from ..errors import InvalidRequestError, UnsupportedError
from ..shadow import ElementType
from .cuda_array import LEGACY_DEFAULT
from .dtypes import type_from_dlpack

VERSION = (1, 0)
EXCHANGE = "__dlpack_c_exchange_api__"  # of a tensor type: DLPack's table of C functions, since 1.3


class DeviceType(IntEnum):
    """Where the memory is, as DLPack numbers it."""

    CPU = 1
    CUDA = 2
    CUDA_HOST = 3
    CUDA_MANAGED = 13


_ON_DEVICE = (2, 13)


@cache
def extension() -> Any:
    """The compiled part; once the interpreter goes, a consumer's deleter calls into it no more.

    Raises
    ------
    UnsupportedError
        There is none.
    """
    try:
        from . import _dlpack  # type: ignore[attr-defined]  # compiled at installation
    except ImportError:
        raise UnsupportedError(
            "DLPack: memferry-rt was installed without a C compiler; install it again with gcc, or use "
            "__cuda_array_interface__ and NumPy's array interface instead"
        ) from None
    atexit.register(_dlpack.going)
    return _dlpack


class Imported:
    """Somebody else's memory, kept alive by this object.  It does not change.

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

    __slots__ = ("__weakref__", "_holder", "device", "kind", "ptr", "read_only", "shape", "strides")

    def __init__(self, learnt: tuple[Any, ...]) -> None:
        self._holder: object
        self.ptr: int
        self.shape: tuple[int, ...]
        self.device: tuple[int, int]
        self.read_only: bool
        self._holder, self.ptr, self.shape, strides, dtype, self.device, self.read_only = learnt
        self.strides: tuple[int, ...] = contiguous_strides(self.shape) if strides is None else strides
        self.kind: ElementType = type_from_dlpack(dtype)

    def __repr__(self) -> str:
        return (
            f"Imported(ptr={self.ptr:#x}, shape={self.shape}, strides={self.strides}, kind={self.kind.name!r}, "
            f"device={self.device}, read_only={self.read_only})"
        )

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
    direct = _take_directly(source)
    if direct is None:
        return Imported(_take(source, stream))
    learnt, producer = direct
    imported = Imported(learnt)
    handle = _handle(imported.device, stream)
    if stream is not None and handle != (producer or LEGACY_DEFAULT):
        _follow(stream, imported.device[1], producer)
    return imported


def _take(source: Any, stream: Stream | None) -> tuple[Any, ...]:
    """By the protocol: the producer orders the stream."""
    try:
        device_type, number = map(int, source.__dlpack_device__())
        export = source.__dlpack__
    except (AttributeError, TypeError, ValueError):
        raise InvalidRequestError(
            f"from_dlpack: {type(source).__name__} has no __dlpack__, or no usable __dlpack_device__"
        ) from None
    handle = _handle((device_type, number), stream)
    try:
        capsule = export(stream=handle, max_version=VERSION)
    except TypeError:  # a producer from before versions
        capsule = export(stream=handle)
    try:
        learnt: tuple[Any, ...] = extension().take(capsule)
    except ValueError as error:
        raise InvalidRequestError(f"from_dlpack: {error}") from None
    return learnt


def _take_directly(source: Any) -> tuple[tuple[Any, ...], int] | None:
    """By the C functions of the producer's type, and the stream on which the producer works; None without them.

    They take what the protocol must refuse, or would misread, so that is left to the protocol: tensors of
    subclasses, those that require gradients, and conjugated ones.
    """
    table = type(source).__dict__.get(EXCHANGE)
    if table is None or getattr(source, "requires_grad", False):
        return None
    is_conj = getattr(source, "is_conj", None)
    if is_conj is not None and is_conj():
        return None
    try:
        taken: tuple[tuple[Any, ...], int] = extension().take_object(source, table)
    except (BufferError, RuntimeError, ValueError):  # the protocol says why
        return None
    return taken


def _handle(device: tuple[int, int], stream: Stream | None) -> int | None:
    """DLPack's name of the stream on which memory of `device` will be used."""
    on_device = device[0] in _ON_DEVICE
    if on_device != (stream is not None):
        raise InvalidRequestError(
            f"from_dlpack: the memory is on DLPack device {device}; "
            + ("name the stream on which it will be used" if on_device else "host memory takes no stream")
        )
    return None if stream is None else int(stream.handle) or LEGACY_DEFAULT


def _follow(stream: Stream, device: int, producer: int) -> None:
    """Order `stream` behind what has been enqueued on the stream with the handle `producer` of `device`."""
    stream.wait(stream.driver.stream_from_handle(device, producer).record())


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of an array in C order."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
