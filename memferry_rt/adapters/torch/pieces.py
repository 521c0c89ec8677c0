"""Tensors as bytes, in the order of their elements, without a copy of more than a piece."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

PIECE = 8 << 20  # bytes

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def pieces(tensor: torch.Tensor, numel: int) -> Iterator[torch.Tensor]:
    """Views of a tensor, of at most `numel` elements, that have all its elements in order."""
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(numel)
    elif tensor.numel() <= numel:
        yield tensor
    else:
        rows = numel // (tensor.numel() // tensor.shape[0])
        for part in tensor.split(max(rows, 1)):
            yield from pieces(part if rows else part[0], numel)


def as_bytes(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor's elements, in order; from memory itself if they lie so on the CPU."""
    for piece in pieces(tensor.detach(), PIECE // tensor.element_size()):
        yield _memory(piece.cpu().contiguous())


class Source:
    """Where a tensor's bytes come from.

    Parameters
    ----------
    read : callable of (offset, memoryview)
        Fills a buffer from a byte offset on.
    dtype : torch.dtype
        Of the elements that are read.
    """

    def __init__(self, read: Any, dtype: torch.dtype) -> None:
        self._read = read
        self._dtype = dtype

    @torch.no_grad()
    def fill(self, tensor: torch.Tensor) -> None:
        """Give a tensor of any dtype, stride and device these elements."""
        offset = 0
        for piece in pieces(tensor.detach(), PIECE // max(tensor.element_size(), self._dtype.itemsize)):
            if piece.dtype is self._dtype and piece.is_contiguous() and piece.device.type == "cpu":
                loaded = piece
            else:
                loaded = torch.empty(piece.shape, dtype=self._dtype, device="cpu")
            memory = _memory(loaded)
            self._read(offset, memory)
            offset += memory.nbytes
            if loaded is not piece:
                piece.copy_(loaded)
        torch.autograd.graph.increment_version(tensor)


def is_rounding(weight: torch.Tensor, master: torch.Tensor) -> bool:
    """Whether a weight is its fp32 master, rounded to the weight's dtype, in every bit."""
    numel = PIECE // master.element_size()
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    return all(
        torch.equal(mine.cpu().contiguous().view(bits), exact.cpu().to(weight.dtype).contiguous().view(bits))
        for mine, exact in zip(pieces(weight, numel), pieces(master, numel), strict=True)
    )


def _memory(contiguous: torch.Tensor) -> memoryview:
    flat = contiguous.as_strided((contiguous.numel(),), (1,))  # whatever the strides of dimensions of one element
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)
