"""Host memory of somebody else, registered where it lies."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..driver import Driver, Span
from ..errors import ClosedError, InvalidRequestError
from . import libc
from .checks import require_driver
from .handle import Registration
from .ledger import Foreign
from .pages import as_array
from .registration import registrations


class AdoptedRange:
    """The bytes of an object, registered for devices and kept: it can be neither unmapped nor resized meanwhile.

    Made by `adopt`; a context manager.  Dropping it closes it, after the work of every device.

    Attributes
    ----------
    driver : Driver
    span : Span
        Address and size in bytes.
    read_only : bool
        Devices and `array` only read it.
    registration : Registration
    """

    def __init__(self, driver: Driver, view: memoryview, registration: Registration) -> None:
        self.driver = driver
        self.span = Span(registration.address, registration.nbytes)
        self.read_only = registration.read_only
        self.registration = registration
        self._view: memoryview | None = view

    def __enter__(self) -> AdoptedRange:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def nbytes(self) -> int:
        return self.span.nbytes

    @property
    def closed(self) -> bool:
        return self._view is None

    def array(self) -> npt.NDArray[np.uint8]:
        """The bytes as an array, which keeps the object's memory in place, and this range registered."""
        if self._view is None:
            raise ClosedError("adopted range: it was closed; adopt the object again")
        return as_array(self.span, (self, memoryview(self._view)), read_only=self.read_only)

    def close(self) -> None:
        """Unregister and let go of the object; a second call does nothing.  No device may use it any more.

        Arrays of it stay valid for the host and keep the object's memory in place.

        Raises
        ------
        DriverError, RaceError
            Work on the bytes is not over; nothing was let go of.
        """
        self.registration.close()
        self._view = None


def adopt(
    driver: Driver,
    obj: Any,
    *,
    read_only: bool | None = None,
    name: str = "",
    foreign: Foreign = Foreign.REFUSE,
) -> AdoptedRange:
    """Register the memory of `obj` where it lies.

    Parameters
    ----------
    driver : Driver
    obj : object with the buffer protocol
        A bytearray, NumPy array, mmap of a file or of anonymous memory, ctypes array, memoryview, ...;
        contiguous in C or Fortran order.
    read_only : bool, optional
        Whether devices only read it; by default what `obj` itself allows.
    name : str
        Shown by `describe`; the type of `obj` by default.
    foreign : Foreign
        What to do if somebody else has registered the memory.

    Raises
    ------
    InvalidRequestError
        No buffer, not contiguous, or to be written although `obj` cannot be.
    RegistrationError, UnsupportedError, ForkedError
        See `RegistrationMap.register`.
    """
    require_driver(driver, "adopt").require_usable()
    kind = type(obj).__name__
    view = _contiguous(obj, kind)
    if read_only is None:
        read_only = view.readonly
    if view.readonly and not read_only:
        raise InvalidRequestError(f"adopt: the {kind} cannot be written; ask for read_only=True or a copy of it")
    address = libc.address_of(view) if view.nbytes else 0
    registration = registrations(driver).register(
        address, view.nbytes, read_only=read_only, owner=view, name=name or kind, foreign=foreign
    )
    return AdoptedRange(driver, view, registration)


def _contiguous(obj: Any, kind: str) -> memoryview:
    """A view of `obj` in C order; it keeps the memory in place."""
    try:
        view = memoryview(obj)
    except TypeError:
        raise InvalidRequestError(
            f"adopt: a {kind} has no buffer protocol; give an array over its memory, or register the range"
        ) from None
    except (ValueError, BufferError) as error:
        raise InvalidRequestError(f"adopt: the {kind} does not give its memory away: {error}") from None
    if not view.contiguous:
        raise InvalidRequestError(
            f"adopt: the {kind} of {view.nbytes} bytes is not contiguous; adopt the whole of what it is a part of"
        )
    if view.nbytes and not view.c_contiguous:
        view = memoryview(np.asarray(view).T)
    return view
