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

from ..errors import InvalidRequestError
from ..shadow import ElementType, Place, View
from ..shadow.typed import fit
from .cuda_array import LEGACY_DEFAULT, cuda_array_interface
from .dlpack import DeviceType, contiguous_strides, make_capsule
from .dtypes import element_type, typestr

_NO_SYNCHRONISATION = -1
_PER_THREAD_DEFAULT = 2


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
        device = self._face(dl_device)
        versioned = max_version is not None and max_version[0] >= 1
        if self.read_only and not versioned:
            raise BufferError(
                "a view that reads is read-only, which DLPack before 1.0 cannot say; acquire it with "
                "Mode.READ_WRITE, use a consumer that asks for version 1, or pass promise_not_to_write=True"
            )
        self._admit(stream)
        return make_capsule(
            self,
            self.ptr if self.nbytes else 0,
            self.shape,
            contiguous_strides(self.shape),
            self.kind,
            device,
            read_only=self.read_only,
            versioned=versioned,
        )

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.device[0] is not DeviceType.CUDA:
            raise AttributeError("__cuda_array_interface__: the memory is the host's")
        [stream, *_] = self.view.streams
        return cuda_array_interface(
            self.view.ptr and self.ptr, self.shape, None, self.kind, stream=stream, read_only=self.read_only
        )

    @property
    def __array_interface__(self) -> dict[str, Any]:
        if self.device[0] is DeviceType.CUDA or self.kind.numpy is None:
            raise AttributeError("__array_interface__: the memory or the element type is not NumPy's")
        _ = self.view.ptr  # refused once released
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": typestr(self.kind),
            "data": (self.ptr, self.read_only),
        }

    def _face(self, wanted: tuple[int, int] | None) -> tuple[int, int]:
        mine = (int(self.device[0]), self.device[1])
        if wanted is None or (int(wanted[0]), wanted[1]) == mine:
            return mine
        if self.device[0] is DeviceType.CUDA_HOST and int(wanted[0]) == DeviceType.CPU:
            return (int(DeviceType.CPU), 0)
        raise BufferError(f"the memory is on DLPack device {mine}, not on {(int(wanted[0]), wanted[1])}")

    def _admit(self, handle: int | None) -> None:
        """Order the consumer's stream behind what makes the bytes valid."""
        _ = self.view.ptr
        if not self.view.streams or self.device[0] is not DeviceType.CUDA:
            if handle not in (None, _NO_SYNCHRONISATION):
                raise BufferError(f"host memory has no stream, {handle} was named")
            return
        if handle == _NO_SYNCHRONISATION:
            return
        if handle == 0:
            raise BufferError("stream 0 is ambiguous: name 1, the legacy default stream, or 2, the thread's own")
        [mine, *_] = self.view.streams
        if (handle or LEGACY_DEFAULT) == (int(mine.handle) or LEGACY_DEFAULT) and handle != _PER_THREAD_DEFAULT:
            return
        self.view.record_stream(mine.driver.stream_from_handle(mine.device, handle or LEGACY_DEFAULT))


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
    return _array(view, dtype, shape, (Place.HOST,), (DeviceType.CPU, 0), promise_not_to_write)


def as_pinned(
    view: View, dtype: Hashable, shape: Sequence[int] | None = None, *, promise_not_to_write: bool = False
) -> Array:
    """A HOST view as page-locked memory, for libraries that know of it; the others see it as the CPU's."""
    pinned = _require_view(view).partition.space.driver.name == "cuda"
    return _array(
        view,
        dtype,
        shape,
        (Place.HOST,),
        (DeviceType.CUDA_HOST if pinned else DeviceType.CPU, 0),
        promise_not_to_write,
    )


def as_device(
    view: View, dtype: Hashable, shape: Sequence[int] | None = None, *, promise_not_to_write: bool = False
) -> Array:
    """A DEVICE or MAPPED view for libraries that compute on the device.

    On the emulated device, whose memory is the host's, it is the CPU's.
    """
    space = _require_view(view).partition.space
    device = (DeviceType.CUDA, space.device) if space.driver.name == "cuda" else (DeviceType.CPU, 0)
    return _array(view, dtype, shape, (Place.DEVICE, Place.MAPPED), device, promise_not_to_write)


def _array(
    view: View,
    dtype: Hashable,
    shape: Sequence[int] | None,
    places: tuple[Place, ...],
    device: tuple[DeviceType, int],
    promise: bool,
) -> Array:
    if _require_view(view).place not in places:
        raise InvalidRequestError(
            f"array of {view.partition.name}: it is a view in {view.place.value}, not in "
            f"{' or '.join(place.value for place in places)}"
        )
    kind = element_type(dtype)
    fitting = fit(view, kind, shape)
    ptr = view.ptr
    if view.place is not Place.HOST and device[0] is not DeviceType.CUDA:
        ptr = _address_of(view)
    return Array(view, ptr, fitting, kind, device, read_only=not (view.mode.writes or promise))


def _require_view(view: object) -> View:
    if not isinstance(view, View):
        raise InvalidRequestError(f"array: {view!r} is no view; take one with partition.acquire(...)")
    return view


def _address_of(view: View) -> int:
    """Where the host finds the bytes of an emulated device."""
    data = view.partition.space.driver.host_bytes(view.ptr, view.nbytes)
    assert data is not None, "only a real device's memory is out of the host's reach"
    return int(np.frombuffer(data, np.uint8).ctypes.data)
