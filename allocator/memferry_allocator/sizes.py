"""Sizes as people write them, at the edges of the API; inside, a size is an ``int`` of bytes."""

from __future__ import annotations

import operator
import re

from .errors import InvalidRequestError

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_DECIMAL = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_MOST_BITS = 128
_PATTERN = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]*)\s*")


def parse_size(text: str | int, *, name: str = "size") -> int:
    """Bytes meant by ``text``: an integer, or a number with B, KiB, MiB, GiB or TiB.

    Decimal units (``"24GB"``) are refused: tools disagree by 7% on what they mean.  What ``"0.7GiB"`` has
    beyond whole bytes is left out.

    Raises
    ------
    InvalidRequestError
        Not a size, negative, or less than one byte.
    """
    if isinstance(text, bool):
        raise InvalidRequestError(f"{name}: {text!r} is not a size; write 1073741824 or '1GiB'")
    if isinstance(text, str):
        nbytes = _parse_text(text, name)
    else:
        try:
            nbytes = operator.index(text)
        except TypeError:
            raise InvalidRequestError(f"{name}: {text!r} is not a size; write 1073741824 or '1GiB'") from None
    if nbytes <= 0:
        raise InvalidRequestError(f"{name}: {text!r} is not more than zero bytes; write for example '1GiB'")
    return nbytes


def _parse_text(text: str, name: str) -> int:
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise InvalidRequestError(f"{name}: {text!r} is not a size; write for example '24GiB' or '512MiB'")
    number, unit = match.groups()
    decimal = {key.lower(): value for key, value in _DECIMAL.items()}.get(unit.lower())
    if decimal is not None and unit not in _UNITS:
        exact = _times(number, decimal)
        binary = f"{number}{unit[0].upper()}iB"
        raise InvalidRequestError(
            f"{name}: {text!r} is ambiguous; write {binary!r} (binary, {format_size(_scaled(number, unit))}) "
            f"or {exact} for that many bytes ({format_size(exact)})"
        )
    units = {key.lower(): value for key, value in _UNITS.items()}
    if unit.lower() not in units:
        raise InvalidRequestError(f"{name}: unknown unit in {text!r}; units are B, KiB, MiB, GiB, TiB")
    return _times(number, units[unit.lower()])


def _scaled(number: str, unit: str) -> int:
    return _times(number, _UNITS[f"{unit[0].upper()}iB"])


def _times(number: str, unit: int) -> int:
    whole, _, decimals = number.partition(".")
    return int(whole + decimals) * unit // int("1" + "0" * len(decimals))


def format_size(nbytes: int) -> str:
    """``nbytes`` in the largest binary unit up to GiB that leaves at least 1, e.g. ``"5.50 GiB"``."""
    size, sign = abs(nbytes), "-" if nbytes < 0 else ""
    if size.bit_length() > _MOST_BITS:  # Python refuses to write out numbers of thousands of digits
        return f"{sign}2**{size.bit_length() - 1} B or more"
    if size < 1024:
        return f"{sign}{size} B"
    unit = next((unit for unit in ("KiB", "MiB") if size < _UNITS[unit] << 10), "GiB")
    hundredths = _divide(100 * size, _UNITS[unit])
    return f"{sign}{hundredths // 100}.{hundredths % 100:02} {unit}"


def _divide(number: int, by: int) -> int:
    """The nearest integer; the even one of two."""
    whole, rest = divmod(number, by)
    return whole + (2 * rest > by or (2 * rest == by and whole % 2))


def align_up(value: int, alignment: int) -> int:
    """The smallest multiple of ``alignment`` (a power of two) that is at least ``value``."""
    return (value + alignment - 1) & -alignment
