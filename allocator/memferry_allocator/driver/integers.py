"""Integers of any library, NumPy's among them, as Python's own: those neither wrap round nor surprise ctypes."""

from __future__ import annotations

import operator
from typing import Any

from ..errors import InvalidRequestError


def integer(call: str, value: Any) -> int:
    """`value` as an ``int``.

    Raises
    ------
    InvalidRequestError
        It is no integer.
    """
    if type(value) is int:
        return value
    try:
        return int(operator.index(value))
    except TypeError:
        raise InvalidRequestError(
            f"{call}: {value!r} is not an integer; give addresses and sizes as int"
        ) from None


def integers(call: str, *values: Any) -> list[int]:
    """`values` as ``int``, each as by `integer`."""
    return [integer(call, value) for value in values]
