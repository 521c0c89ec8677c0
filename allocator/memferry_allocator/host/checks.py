"""What callers hand in, looked at before anything is changed."""

from __future__ import annotations

import operator
from collections.abc import Mapping

from ..driver import Driver, Event, Span, Stream
from ..errors import InvalidRequestError

_MOST_BITS = 64


def require_driver(driver: object, name: str) -> Driver:
    """`driver` if it is one."""
    if not isinstance(driver, Driver):
        raise InvalidRequestError(f"{name}: {driver!r} is not a Driver; open one with open_device or open_driver")
    return driver


def require_int(value: object, name: str) -> int:
    """`value` as an integer; what has an index is one, a truth value is not."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]  # what is none raises
    except TypeError:
        raise InvalidRequestError(f"{name}: {value!r} is not a number; give an integer") from None


def require_span(span: object, name: str) -> Span:
    """`span` if it is one of two integers, neither of which is beyond 64 bits."""
    if not isinstance(span, Span):
        raise InvalidRequestError(f"{name}: {span!r} is not a Span; give one that the arena has handed out")
    found = Span(*(require_int(value, name) for value in span))
    if max(value.bit_length() for value in found) > _MOST_BITS:
        raise InvalidRequestError(f"{name}: the span has numbers beyond {_MOST_BITS} bits; give the arena's own")
    return found


def require_uses(uses: object, driver: Driver, name: str) -> dict[Stream, Event]:
    """`uses` if it says for streams of `driver` after which event the last use is over.

    An event that was recorded into a graph is a point in no stream's order: it would say so too early.
    """
    if uses is None:
        return {}
    if not isinstance(uses, Mapping):
        raise InvalidRequestError(f"{name}: uses={uses!r} is not a mapping; give {{stream: stream.record()}}")
    found = dict(uses)
    for stream, event in found.items():
        if not isinstance(stream, Stream) or not isinstance(event, Event):
            raise InvalidRequestError(
                f"{name}: uses has {stream!r}: {event!r}; give each Stream the Event after its last use"
            )
        if stream.driver is not driver or event.driver is not driver:
            raise InvalidRequestError(
                f"{name}: uses has a stream or event of another driver; record it with this one"
            )
        if event.recorded[0] is None and event.sequence:
            raise InvalidRequestError(
                f"{name}: uses has an event recorded in a graph capture, which never tells that the work is over; "
                "record one on the stream that the graph is launched on"
            )
    return found
