"""Views with a shape and an element type: NumPy arrays on the host, descriptions for kernels on the device."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..driver import Stream
from ..errors import InvalidRequestError

if TYPE_CHECKING:
    from .view import View

_MOST_DIMENSIONS = 64  # of NumPy and of DLPack
_WIDEST = 16  # what kernels load at once, at most


class ElementType(NamedTuple):
    """What an array holds: its name, bytes an element, and NumPy's dtype where NumPy has one."""

    name: str
    itemsize: int
    numpy: np.dtype[Any] | None

    @property
    def alignment(self) -> int:
        """Bytes of which an element's address is a multiple."""
        size = self.itemsize
        return size & -size if self.numpy is None or size & (size - 1) == 0 else self.numpy.alignment


_BEYOND_NUMPY = {
    name: ElementType(name, itemsize, None)
    for name, itemsize in (("bfloat16", 2), ("float8_e4m3fn", 1), ("float8_e5m2", 1))
}


def element_type(dtype: Any) -> ElementType:
    """The element type meant by a NumPy dtype, a scalar type or a name.

    Raises
    ------
    InvalidRequestError
        None of them, or one whose elements are no plain bytes.
    """
    if isinstance(dtype, ElementType):
        return dtype
    if isinstance(dtype, str) and dtype in _BEYOND_NUMPY:
        return _BEYOND_NUMPY[dtype]
    try:
        found = None if dtype is None else np.dtype(dtype)
    except (TypeError, ValueError):
        found = None
    if found is None or found.hasobject or found.itemsize == 0:
        raise InvalidRequestError(
            f"dtype: {dtype!r} is no element type of plain bytes; give a NumPy dtype such as 'float32', or one of "
            f"{', '.join(map(repr, _BEYOND_NUMPY))}"
        )
    return ElementType(found.name, found.itemsize, found)


class TypedView:
    """A contiguous array in a view's bytes, for kernels of the view's streams.

    It is valid as long as its view is open: `ptr` raises `ClosedError` from the release on.

    Attributes
    ----------
    dtype : ElementType
    shape : tuple of int
    strides : tuple of int
        In bytes, row-major.
    nbytes : int
    """

    __slots__ = ("_offset", "_view", "dtype", "nbytes", "shape", "strides")

    def __init__(self, view: View, dtype: Any, shape: Any = None, offset: int = 0) -> None:
        if not view.streams:
            raise InvalidRequestError(
                f"view of {view.partition.name}: typed views are for DEVICE and MAPPED; use array() for HOST"
            )
        self._view = view
        self.dtype = element_type(dtype)
        self.shape = fit(view, self.dtype, shape, offset)
        self._offset = offset
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize
        self.strides = _row_major(self.shape, self.dtype.itemsize)

    @property
    def ptr(self) -> int:
        """Device pointer of the first element."""
        return self._view.ptr + self._offset

    @property
    def stream(self) -> Stream:
        """The stream in whose order the elements are valid; `View.streams` names further readers."""
        return self._view.streams[0]

    @property
    def read_only(self) -> bool:
        """Whether the view does not allow writing."""
        return not self._view.mode.writes

    def part(self, start: int, shape: Any = None) -> TypedView:
        """`shape` elements from element `start` on, counted through the whole array; up to its end by default.

        Raises
        ------
        ClosedError
            The view was released.
        InvalidRequestError
            The part reaches beyond this array.
        """
        count = math.prod(self.shape)
        start = _whole(start, "start")
        wanted = (count - start,) if shape is None else _dimensions(shape)
        if start > count or start + math.prod(wanted) > count:
            raise InvalidRequestError(
                f"part of a view of {self._view.partition.name}: {math.prod(wanted)} elements from {start} on "
                f"reach beyond its {count}; ask for fewer"
            )
        return TypedView(self._view, self.dtype, wanted, self._offset + start * self.dtype.itemsize)


def host_array(view: View, dtype: Any, shape: Any, offset: int) -> npt.NDArray[Any]:
    """See `View.array`."""
    if view.streams:
        raise InvalidRequestError(
            f"view of {view.partition.name}: its bytes are for kernels; use typed(), or acquire HOST for an array"
        )
    element = element_type(dtype)
    if element.numpy is None:
        raise InvalidRequestError(
            f"dtype: NumPy has no {element.name}; take 'uint{8 * element.itemsize}' for the bits"
        )
    fitting = fit(view, element, shape, offset)
    data = np.asarray(_HostBytes(view))[offset : offset + math.prod(fitting) * element.itemsize]
    return data.view(element.numpy).reshape(fitting)


class _HostBytes:
    """What NumPy holds on to: a view's bytes under the array interface, and the pages if they are the space's."""

    def __init__(self, view: View) -> None:
        self._view = view  # one that nobody else holds stays open as long as its arrays are used
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (view.nbytes,),
            "data": (view.ptr, not view.mode.writes),
        }


def fit(view: View, element: ElementType, shape: Any, offset: Any = 0) -> tuple[int, ...]:
    """The dimensions of an array of a view's bytes, from byte `offset` on; refused as `View.typed` says."""
    ptr, room = view.ptr, view.nbytes - _whole(offset, "offset")
    if room < 0 or (ptr + offset) % min(element.alignment, _WIDEST):
        raise InvalidRequestError(
            f"{_named(view, element)}: offset {offset} is beyond its {view.nbytes} bytes, or not aligned to "
            f"{element.alignment}; give a smaller offset, a multiple of the alignment"
        )
    if shape is None:
        if room % element.itemsize:
            raise InvalidRequestError(
                f"{_named(view, element)}: {room} bytes are no whole number of {element.itemsize}-byte elements; "
                "give a shape"
            )
        return (room // element.itemsize,)
    wanted = _dimensions(shape)
    if math.prod(wanted) * element.itemsize > room:
        raise InvalidRequestError(
            f"{_named(view, element)}: shape {wanted} takes {math.prod(wanted) * element.itemsize} bytes, {room} "
            "are there; ask for fewer elements"
        )
    return wanted


def _named(view: View, element: ElementType) -> str:
    return f"view of {view.partition.name} as {element.name}"


def _dimensions(shape: Any) -> tuple[int, ...]:
    parts: Iterable[Any] = shape
    if not isinstance(shape, (tuple, list)) and (not isinstance(shape, Iterable) or isinstance(shape, str)):
        parts = (shape,)
    dimensions = tuple([_whole(part, "shape") for part in parts])
    if len(dimensions) > _MOST_DIMENSIONS:
        raise InvalidRequestError(f"shape: {len(dimensions)} dimensions, at most {_MOST_DIMENSIONS}; use fewer")
    return dimensions


def _whole(value: Any, name: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidRequestError(f"{name}: {value!r} is not an integer") from None
    if number < 0:
        raise InvalidRequestError(f"{name}: {number} is negative; give a number from 0 on")
    return number


def _row_major(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = [itemsize] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)
