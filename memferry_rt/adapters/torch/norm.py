"""The norm of a gradient, piece by piece, so that a gradient that is never in one place whole has one too.

A gradient is cut into pieces of whole rows, at most `PIECE` elements each, in the order of its memory.  A piece
has its 2-norm in fp64; the norm of everything is the root of the sum of their squares, in the order of the
parameters and of the pieces.  Where the pieces are is a matter of the parameter's form alone, never of how it is
trained.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

PIECE = 4 << 20  # elements
ROWS = 256  # where so many fit, a piece has a multiple of them: what kernels' tiles fit in


def piece_rows(rows: int, width: int) -> int:
    """How many of `rows` rows, of `width` elements each, make a piece."""
    fitting = max(1, PIECE // max(1, width))
    if fitting > ROWS:
        fitting -= fitting % ROWS
    return max(1, min(rows, fitting))


def piece_elements(shape: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements a piece of a dense tensor has; the last one has what is left."""
    width = stride[0] if len(shape) > 1 and stride[0] == max(stride) else 1
    rows = -(-_numel(shape) // max(1, width))
    return piece_rows(rows, max(1, width)) * max(1, width)


def norm_of(gradient: torch.Tensor) -> torch.Tensor:
    """The fp64 2-norms of the pieces, shape (pieces,), without a copy of the gradient in fp64."""
    step = piece_elements(gradient.shape, gradient.stride())
    if gradient.numel() <= step:
        return torch.stack(norms_of([gradient]))
    flat = gradient.as_strided((gradient.numel(),), (1,))
    return torch.stack(norms_of([flat[start : start + step] for start in range(0, flat.numel(), step)]))


def norms_of(pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The fp64 2-norm of each piece: a scalar that does not depend on the others."""
    return list(torch._foreach_norm(list(pieces), 2, dtype=torch.float64))


def norm_of_rows(
    rows: torch.Tensor, values: torch.Tensor, shape: tuple[int, int], *, device: torch.device
) -> torch.Tensor:
    """`norm_of` of a table that is zero but for some rows.

    Parameters
    ----------
    rows : Tensor of int64
        Ascending.
    values : Tensor, shape (len(rows), width)
    shape : (int, int)
        Of the table.
    """
    count, width = shape
    step = piece_rows(count, width)
    starts = torch.arange(0, count, step, device=device)
    places = [*torch.searchsorted(rows, starts).tolist(), rows.shape[0]]
    nothing = torch.zeros((), dtype=torch.float64, device=device)
    norms = []
    for start, first, last in zip(range(0, count, step), places, places[1:], strict=False):
        if first == last:
            norms.append(nothing)
            continue
        piece = values.new_zeros(min(step, count - start), width)
        piece.index_copy_(0, rows[first:last] - start, values[first:last])
        norms.append(norms_of([piece])[0])
    return torch.stack(norms)


def _numel(shape: Sequence[int]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel
