"""Element types by the names that every framework knows them by, and what the exchange protocols call them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from ..errors import InvalidRequestError, UnsupportedError


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


@dataclass(frozen=True)
class ElementType:
    """One element type.

    Attributes
    ----------
    name : str
        ``"float32"``, ``"bfloat16"``, ...
    itemsize : int
        Bytes.
    code : Code
        DLPack's.
    typestr : str or None
        NumPy's; None for what NumPy has no type for.
    """

    name: str
    itemsize: int
    code: Code
    typestr: str | None

    @property
    def bits(self) -> int:
        return self.itemsize * 8


def _numpy_type(name: str, code: Code) -> ElementType:
    dtype = np.dtype(name)
    return ElementType(name, dtype.itemsize, code, dtype.newbyteorder("<").str)


_KINDS = {"i": Code.INT, "u": Code.UINT, "f": Code.FLOAT, "c": Code.COMPLEX, "b": Code.BOOL}
_NAMES = ["bool", "float16", "float32", "float64", "complex64", "complex128"]
_NAMES += [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
_TYPES = {name: _numpy_type(name, _KINDS[np.dtype(name).kind]) for name in _NAMES}
_TYPES["bfloat16"] = ElementType("bfloat16", 2, Code.BFLOAT, None)
_TYPES["float8_e4m3fn"] = ElementType("float8_e4m3fn", 1, Code.FLOAT8_E4M3FN, None)
_TYPES["float8_e5m2"] = ElementType("float8_e5m2", 1, Code.FLOAT8_E5M2, None)
_BY_CODE = {(int(kind.code), kind.bits): kind for kind in _TYPES.values()}


def element_type(dtype: object) -> ElementType:
    """The type meant by a name, a NumPy dtype, or a framework's own dtype object (by the name it prints).

    Raises
    ------
    InvalidRequestError
        It is none of those that can be exchanged.
    """
    name = dtype if isinstance(dtype, str) else _name_of(dtype)
    found = _TYPES.get(name)
    if found is None:
        raise InvalidRequestError(f"dtype: {dtype!r} cannot be exchanged; it is one of {', '.join(_TYPES)}")
    return found


def _name_of(dtype: object) -> str:
    printed = str(dtype)
    if printed.startswith("torch."):
        return printed.removeprefix("torch.")
    try:
        return np.dtype(dtype).name  # type: ignore[call-overload, no-any-return]  # anything that NumPy takes
    except TypeError:
        return printed


def type_from_dlpack(code: int, bits: int, lanes: int) -> ElementType:
    """The type that a DLPack tensor says it has.

    Raises
    ------
    UnsupportedError
        It has another.
    """
    found = _BY_CODE.get((code, bits)) if lanes == 1 else None
    if found is None:
        raise UnsupportedError(f"DLPack: type code {code} with {bits} bits and {lanes} lanes is not supported")
    return found
