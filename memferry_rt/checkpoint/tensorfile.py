"""The safetensors file format: a JSON header, then the tensors' bytes.

Written here and not by the ``safetensors`` package, because a checkpoint is streamed from memory in pieces, with
its checksum taken on the way, and tensors of any stride.  Whatever reads safetensors reads these files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ITEMSIZES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}
PREFIX = 8  # bytes before the header: its length
LONGEST_HEADER = 100_000_000  # the format's own limit
METADATA = {"format": "pt"}  # what some readers ask for


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of a file: its name, its dtype as the format calls it, and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZES[self.dtype]


def in_file_order(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """The order in which every tensor is aligned to its own element: large elements first."""
    return sorted(specs, key=lambda spec: -ITEMSIZES[spec.dtype])


def encode_header(specs: Sequence[TensorSpec]) -> bytes:
    """What precedes the bytes of these tensors, which follow one another in this order."""
    header: dict[str, Any] = {"__metadata__": METADATA}
    offset = 0
    for spec in specs:
        end = offset + spec.nbytes
        header[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % PREFIX)
    return len(text).to_bytes(PREFIX, "little") + text


def decode_header(text: bytes, data_nbytes: int) -> dict[str, tuple[TensorSpec, int]]:
    """The tensors of a file, by name, each with where its bytes begin behind the header.

    Parameters
    ----------
    text : bytes
        The header without the length before it.
    data_nbytes : int
        Bytes of the file behind the header.

    Raises
    ------
    ValueError
        It is not a header, or not that of a file of this size.
    """
    found: dict[str, tuple[TensorSpec, int]] = {}
    offset = 0
    header: Mapping[str, Any] = json.loads(text)
    try:
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            spec = TensorSpec(name, entry["dtype"], tuple(int(size) for size in entry["shape"]))
            if list(entry["data_offsets"]) != [offset, offset + spec.nbytes]:
                raise ValueError(f"the bytes of {name} are not where its shape puts them")
            found[name] = (spec, offset)
            offset += spec.nbytes
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"an entry is odd: {error!r}") from None
    if offset != data_nbytes:
        raise ValueError(f"the tensors have {offset} bytes, and the file {data_nbytes} for them")
    return found
