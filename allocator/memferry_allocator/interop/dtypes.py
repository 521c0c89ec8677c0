"""Element types, as the exchange protocols call them."""

from __future__ import annotations

from collections.abc import Hashable
from enum import IntEnum
from functools import cache, lru_cache
from typing import Any

import numpy as np

from ..errors import InvalidRequestError, UnsupportedError
from ..shadow import ElementType
from ..shadow import element_type as plain_element_type


class Code(IntEnum):
    """DLPack's kinds of element types."""

    INT = 0
    UINT = 1
    FLOAT = 2
    BFLOAT = 4
    COMPLEX = 5
    BOOL = 6
    FLOAT8_E4M3FN = 10
    FLOAT8_E5M2 = 12


_KINDS = {"i": Code.INT, "u": Code.UINT, "f": Code.FLOAT, "c": Code.COMPLEX, "b": Code.BOOL}
_NAMES = ["bool", "float16", "float32", "float64", "complex64", "complex128"]
_NAMES += [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
_CODES = {name: _KINDS[np.dtype(name).kind] for name in _NAMES}
_CODES |= {"bfloat16": Code.BFLOAT, "float8_e4m3fn": Code.FLOAT8_E4M3FN, "float8_e5m2": Code.FLOAT8_E5M2}
_TYPES = {name: plain_element_type(name) for name in _CODES}
DLPACK_TYPES = {name: int(_CODES[name]) | kind.itemsize << 11 | 1 << 16 for name, kind in _TYPES.items()}
"""DLPack's data type by name: its code, the bits from bit 8 on, and one lane from bit 16 on."""
_BY_PACKED = {packed: _TYPES[name] for name, packed in DLPACK_TYPES.items()}


def element_type(dtype: Hashable) -> ElementType:
    """The type meant by a name, a NumPy dtype, or a framework's own dtype object.

    Raises
    ------
    InvalidRequestError
        It is none of those that can be exchanged.
    """
    try:
        return _element_type(dtype)
    except TypeError:  # a list, say, has no hash
        raise InvalidRequestError(
            f"dtype: {dtype!r} cannot be exchanged; it is one of {', '.join(_TYPES)}"
        ) from None


@lru_cache(maxsize=256)
def _element_type(dtype: Hashable) -> ElementType:
    printed = str(dtype)
    wanted: Any = printed.removeprefix("torch.") if printed.startswith("torch.") else dtype
    kind = plain_element_type(wanted)
    if _TYPES.get(kind.name) != kind:
        raise InvalidRequestError(f"dtype: {dtype!r} cannot be exchanged; it is one of {', '.join(_TYPES)}")
    return kind


def type_from_dlpack(packed: int) -> ElementType:
    """The type that a DLPack tensor says it has, packed as in `DLPACK_TYPES`.

    Raises
    ------
    UnsupportedError
        It has another.
    """
    found = _BY_PACKED.get(packed)
    if found is None:
        code, bits, lanes = packed & 255, packed >> 8 & 255, packed >> 16
        raise UnsupportedError(f"DLPack: type code {code} with {bits} bits and {lanes} lanes is not supported")
    return found


@cache
def typestr(kind: ElementType) -> str:
    """NumPy's string for a type; opaque bytes of its size where NumPy has none."""
    if kind.numpy is not None:
        return str(kind.numpy.newbyteorder("<").str)
    return f"{'<' if kind.itemsize > 1 else '|'}V{kind.itemsize}"
