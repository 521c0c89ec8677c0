"""``__cuda_array_interface__`` version 3: a dictionary by which CUDA libraries for Python share memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..driver import Stream
from ..shadow import ElementType
from .dtypes import typestr

VERSION = 3
LEGACY_DEFAULT = 1  # how the protocol names the legacy default stream; 0 is not allowed


def cuda_array_interface(
    ptr: int,
    shape: Sequence[int],
    strides: Sequence[int] | None,
    kind: ElementType,
    *,
    stream: Stream,
    read_only: bool,
) -> dict[str, Any]:
    """The dictionary for memory that is valid in `stream`'s order.

    Parameters
    ----------
    ptr : int
        Ignored where there are no elements: the protocol wants 0 then.
    strides : sequence of int or None
        In elements; None for C order.
    """
    return {
        "version": VERSION,
        "shape": tuple(shape),
        "typestr": typestr(kind),
        "data": (0 if 0 in shape else ptr, read_only),
        "strides": None if strides is None else tuple(step * kind.itemsize for step in strides),
        "stream": int(stream.handle) or LEGACY_DEFAULT,
    }
