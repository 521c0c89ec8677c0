"""What every resource asks of the arguments of a request, before it changes anything."""

from __future__ import annotations

import operator
from typing import NoReturn

from ..driver import Driver, Stream, require_stream
from ..errors import CaptureError, InvalidRequestError
from ..sizes import align_up

ALIGNMENT = 256


def block_size(nbytes: object, name: str) -> int:
    """Bytes that a request for `nbytes` takes: the next multiple of 256.

    Raises
    ------
    InvalidRequestError
        Not an integer, or negative.
    """
    try:
        if isinstance(nbytes, bool):
            raise TypeError
        size = operator.index(nbytes)  # type: ignore[arg-type]  # what is none raises
    except TypeError:
        raise InvalidRequestError(f"{name}: {nbytes!r} is not a number of bytes; pass an int") from None
    if size < 0:
        raise InvalidRequestError(f"{name}: cannot allocate {size} bytes; ask for 0 or more")
    return align_up(size, ALIGNMENT)


def usable_stream(stream: object, driver: Driver, device: int, name: str) -> Stream:
    """`stream` if memory of `device` can be ordered on it now.

    Raises
    ------
    InvalidRequestError
        It is no stream, or one of another device or driver.
    CaptureError
        It is being captured.
    """
    found = require_stream(stream, device)
    if found.driver is not driver:
        raise InvalidRequestError(f"{name}: the stream belongs to another driver; make one with this one's")
    if driver.is_capturing(found):
        refuse_capture(name)
    return found


def refuse_capture(name: str) -> NoReturn:
    raise CaptureError(
        f"{name}: the stream is being captured into a graph; allocate before the capture begins and give back "
        "after it has ended"
    )


def refuse_pointer(name: str, ptr: int, nbytes: object) -> NoReturn:
    raise InvalidRequestError(
        f"{name}: {ptr:#x} with {nbytes} bytes is not a live allocation here; it was freed twice, or pointer and "
        "size do not belong together"
    )
