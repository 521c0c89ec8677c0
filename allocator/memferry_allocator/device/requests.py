"""What every resource asks of the arguments of a request, before it changes anything."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import NoReturn

from ..driver import Driver, Event, Stream, require_stream
from ..errors import CaptureError, DriverError, InvalidRequestError
from ..sizes import align_up

ALIGNMENT = 256
MOST = 1 << 100  # bytes; a request for more is a mistake rather than too much
CLOSED = "CUDA_ERROR_INVALID_HANDLE"  # the answer to whoever uses a closed stream


def block_size(nbytes: object, name: str) -> int:
    """Bytes that a request for `nbytes` takes: the next multiple of 256.

    Raises
    ------
    InvalidRequestError
        Not an integer, negative, or more than anybody can mean.
    """
    size = whole_number(nbytes, f"{name}: bytes")
    if size < 0:
        raise InvalidRequestError(f"{name}: cannot allocate {size} bytes; ask for 0 or more")
    return align_up(size, ALIGNMENT)


def whole_number(value: object, what: str) -> int:
    """`value` as an int, of NumPy's kinds too.

    Raises
    ------
    InvalidRequestError
        Not an integer, or more than anybody can mean.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]  # what is none raises
    except TypeError:
        raise InvalidRequestError(f"{what}: {value!r} is not a whole number; pass an int") from None
    if abs(number) > MOST:
        raise InvalidRequestError(f"{what}: a number of {number.bit_length()} bits is no size of memory")
    return number


def known_driver(driver: object, name: str) -> Driver:
    """`driver` if it is one and may be used here."""
    if not isinstance(driver, Driver):
        raise InvalidRequestError(f"{name}: expected a Driver, got {driver!r}; open one with open_driver")
    driver.require_usable()
    return driver


def recorded_uses(uses: object, driver: Driver, name: str) -> Mapping[Stream, Event]:
    """`uses` if it maps streams to events of this driver that say when a use is over.

    Raises
    ------
    InvalidRequestError
        It does not, or an event was recorded into a graph or not at all, so that waiting for it proves nothing.
    """
    if not isinstance(uses, Mapping):
        raise InvalidRequestError(f"{name}: uses={uses!r} is no mapping of Stream to Event; pass {{}} for none")
    for stream, event in uses.items():
        if not isinstance(stream, Stream) or not isinstance(event, Event):
            raise InvalidRequestError(f"{name}: uses has {stream!r}: {event!r}; it maps Stream to Event")
        if stream.driver is not driver or event.driver is not driver:
            raise InvalidRequestError(f"{name}: uses has a stream or event of another driver; use this one's")
        if event.recorded[0] is None:
            raise InvalidRequestError(
                f"{name}: uses has an event that was recorded into a graph or not at all; record it on the stream"
            )
    return uses


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


def captured(driver: Driver, stream: Stream) -> bool:
    """Whether `stream`, which another thread may close meanwhile, is being captured; one that is closed is not."""
    try:
        with stream.recordings.lock:
            return driver.is_capturing(stream)
    except DriverError as error:
        if error.code != CLOSED:
            raise
        return False


def refuse_capture(name: str) -> NoReturn:
    raise CaptureError(
        f"{name}: the stream is being captured into a graph; allocate before the capture begins and give back "
        "after it has ended"
    )


def refuse_pointer(name: str, ptr: object, nbytes: object) -> NoReturn:
    shown = f"{ptr:#x}" if isinstance(ptr, int) else repr(ptr)
    raise InvalidRequestError(
        f"{name}: {shown} with {nbytes} bytes is not a live allocation here; it was freed twice, or pointer and "
        "size do not belong together"
    )
