"""A view with a shape and an element type, in the forms in which other libraries take memory.

What is made from a view shares its bytes and keeps the view from being released, as an export keeps a
`memoryview` from being: drop every array first.  A view that only reads gives read-only arrays; libraries that
know no read-only memory get it against the promise not to write.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InvalidRequestError, UnsupportedError
from ..shadow import ElementType, Place, View
from ..shadow.typed import fit
from .cuda_array import LEGACY_DEFAULT, cuda_array_interface
from .dlpack import DeviceType, extension
from .dtypes import DLPACK_TYPES, element_type, typestr

_NO_SYNCHRONISATION = -1
_PER_THREAD_DEFAULT = 2

_CUDA = DeviceType.CUDA  # in Python 3.11 to look up a member of an enumeration is slow
_HOST = (Place.HOST,)
_DEVICE = (Place.DEVICE, Place.MAPPED)
_CPU = (DeviceType.CPU, 0)
_PINNED = (DeviceType.CUDA_HOST, 0)
_ALIGNED = 16  # bytes, enough for every element type


class Array:
    """The memory of one view; made by `as_host`, `as_pinned` and `as_device`.

    Has ``__dlpack__``, and ``__cuda_array_interface__`` or NumPy's ``__array_interface__`` by where it is: any
    library that takes one of them shares the memory without a copy.

    Attributes
    ----------
    view : View
    ptr : int
        As the library that takes it addresses it.
    shape : tuple of int
    kind : ElementType
    device : tuple of (DeviceType, int)
    read_only : bool
    """

    __slots__ = ("__weakref__", "device", "kind", "ptr", "read_only", "shape", "view")

    def __init__(
        self,
        view: View,
        ptr: int,
        shape: tuple[int, ...],
        kind: ElementType,
        device: tuple[DeviceType, int],
        *,
        read_only: bool,
    ) -> None:
        self.view = view
        self.ptr = ptr
        self.shape = shape
        self.kind = kind
        self.device = device
        self.read_only = read_only
        view.export(self)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.kind.itemsize

    def numpy(self) -> npt.NDArray[Any]:
        """A NumPy array of the same memory.

        Raises
        ------
        InvalidRequestError
            NumPy has no such element type, or the memory is a device's.
        """
        if not hasattr(self, "__array_interface__"):
            raise InvalidRequestError(
                f"numpy: it has no view of {self.kind.name} on DLPack device {tuple(map(int, self.device))}; "
                "use as_host with a type that NumPy has"
            )
        return np.asarray(self)

    def __dlpack_device__(self) -> tuple[DeviceType, int]:
        return self.device

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """See the Python array API.  The consumer's stream must be one that may use the view.

        Raises
        ------
        BufferError
            A copy is asked for, another device, or read-only memory in a form that cannot say so.
        InvalidRequestError
            The view writes, and `stream` is not the stream it was acquired on.
        """
        if copy:
            raise BufferError("this memory is shared, not copied; copy the array that you make of it")
        kind, number = self.device if dl_device is None else self._face(dl_device)
        versioned = max_version is not None and max_version[0] >= 1
        read_only, shape = self.read_only, self.shape
        if read_only and not versioned:
            raise BufferError(
                "a view that reads is read-only, which DLPack before 1.0 cannot say; acquire it with "
                "Mode.READ_WRITE, use a consumer that asks for version 1, or pass promise_not_to_write=True"
            )
        self._admit(stream)
        ptr, dtype = 0 if 0 in shape else self.ptr, DLPACK_TYPES[self.kind.name]
        return extension().make(self, ptr, shape, dtype, kind, number, read_only, versioned)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.device[0] is not _CUDA:
            raise AttributeError("__cuda_array_interface__: the memory is the host's")
        [stream, *_] = self.view.streams
        return cuda_array_interface(
            self.view.ptr and self.ptr, self.shape, None, self.kind, stream=stream, read_only=self.read_only
        )

    @property
    def __array_interface__(self) -> dict[str, Any]:
        if self.device[0] is _CUDA or self.kind.numpy is None:
            raise AttributeError("__array_interface__: the memory or the element type is not NumPy's")
        _ = self.view.ptr  # refused once released
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": typestr(self.kind),
            "data": (self.ptr, self.read_only),
        }

    def _face(self, wanted: tuple[int, int]) -> tuple[int, int]:
        if tuple(wanted) == self.device:
            return self.device
        if self.device[0] is DeviceType.CUDA_HOST and wanted[0] == DeviceType.CPU:
            return _CPU
        mine = tuple(map(int, self.device))
        raise BufferError(f"the memory is on DLPack device {mine}, not on {tuple(map(int, wanted))}")

    def _admit(self, handle: int | None) -> None:
        """Order the consumer's stream behind what makes the bytes valid."""
        view = self.view
        _ = view.ptr  # refused once released
        if self.device[0] is not _CUDA:
            if handle not in (None, _NO_SYNCHRONISATION):
                raise BufferError(f"host memory has no stream, {handle} was named")
            return
        if handle == _NO_SYNCHRONISATION:
            return
        if handle == 0:
            raise BufferError("stream 0 is ambiguous: name 1, the legacy default stream, or one that was created")
        if handle == _PER_THREAD_DEFAULT:
            raise BufferError(
                "the per-thread default stream is another one in every thread, and the view may end in any of "
                "them; name a stream that was created"
            )
        wanted = handle or LEGACY_DEFAULT
        if all(wanted != (int(known.handle) or LEGACY_DEFAULT) for known in view.streams):
            mine = view.streams[0]
            view.record_stream(mine.driver.stream_from_handle(mine.device, wanted))


def as_host(
    view: View, dtype: Hashable, shape: Sequence[int] | None = None, *, promise_not_to_write: bool = False
) -> Array:
    """A HOST view for libraries that compute on the CPU.

    Parameters
    ----------
    view : View
    dtype
        A name, a NumPy dtype, or a framework's own: integers, floats, complex, bool, bfloat16, float8.
    shape : sequence of int, optional
        In C order from the view's first byte; one dimension over all of it by default.
    promise_not_to_write : bool
        Do not call the memory read-only though the view only reads: nothing else then keeps consumers from
        writing to it.

    Raises
    ------
    InvalidRequestError
        Another place, or a shape that does not fit.
    ClosedError
        The view was released.
    """
    if not isinstance(view, View):
        raise _no_view(view)
    return _array(view, dtype, shape, _HOST, _CPU, promise_not_to_write)


def as_pinned(
    view: View, dtype: Hashable, shape: Sequence[int] | None = None, *, promise_not_to_write: bool = False
) -> Array:
    """A HOST view as page-locked memory, for libraries that know of it; the others see it as the CPU's."""
    if not isinstance(view, View):
        raise _no_view(view)
    pinned = view.partition.space.driver.name == "cuda"
    return _array(view, dtype, shape, _HOST, _PINNED if pinned else _CPU, promise_not_to_write)


def as_device(
    view: View, dtype: Hashable, shape: Sequence[int] | None = None, *, promise_not_to_write: bool = False
) -> Array:
    """A DEVICE or MAPPED view for libraries that compute on the device.

    On the emulated device, whose memory is the host's, it is the CPU's.

    Raises
    ------
    UnsupportedError
        Of another driver's devices libraries have no common name.
    """
    if not isinstance(view, View):
        raise _no_view(view)
    space = view.partition.space
    if space.driver.name not in ("cuda", "emulated"):
        raise UnsupportedError(
            f"array of {view.partition.name}: which device the {space.driver.name} driver's memory is to other "
            "libraries is not known; use the view's address with its own library"
        )
    device = (_CUDA, space.device) if space.driver.name == "cuda" else _CPU
    return _array(view, dtype, shape, _DEVICE, device, promise_not_to_write)


def _array(
    view: View,
    dtype: Hashable,
    shape: Sequence[int] | None,
    places: tuple[Place, ...],
    device: tuple[DeviceType, int],
    promise: bool,
) -> Array:
    if view.place not in places:
        raise InvalidRequestError(
            f"array of {view.partition.name}: it is a view in {view.place.value}, not in "
            f"{' or '.join(place.value for place in places)}"
        )
    kind = element_type(dtype)
    ptr, nbytes = view.ptr, view.nbytes
    if shape is None and nbytes % kind.itemsize == 0 and ptr % _ALIGNED == 0:
        fitting: tuple[int, ...] = (nbytes // kind.itemsize,)
    else:
        fitting = fit(view, kind, shape)
    if places is _DEVICE and device is _CPU:
        ptr = _address_of(view)
    return Array(view, ptr, fitting, kind, device, read_only=not (view.mode.writes or promise))


def _no_view(view: object) -> InvalidRequestError:
    return InvalidRequestError(f"array: {view!r} is no view; take one with partition.acquire(...)")


def _address_of(view: View) -> int:
    """Where the host finds the bytes of an emulated device."""
    data = view.partition.space.driver.host_bytes(view.ptr, view.nbytes)
    assert data is not None, "only a real device's memory is out of the host's reach"
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])
