"""`nn.Embedding` on a table in host memory: only the rows that tokens name cross the link, either way."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from memferry_allocator import Stream

from ....device_kernels import DeviceMoves
from ....device_kernels.moves import UNIT


def embedding_forward(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The rows of `table`, shape (rows, width), that `ids` name, read where they are."""
    return F.embedding(ids, table)


def unique_rows(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that `ids` name, in ascending order, and for every id the place of its row among them.

    The host waits for the device: how many there are decides what is allocated.  It needs no gradients, so that it
    can be done in forward.
    """
    rows, places = torch.unique(ids, sorted=True, return_inverse=True)
    return rows, places


def gradient_of_rows(
    rows: torch.Tensor,
    places: torch.Tensor,
    dy: torch.Tensor,
    *,
    padding_idx: int | None = None,
    scale_grad_by_freq: bool = False,
) -> torch.Tensor:
    """The gradients of `unique_rows`, with the bits that PyTorch's dense gradient has in these rows.

    Its own kernel makes them: it takes indices in the order in which they are given, or stably sorted, and both
    are the same of the places as of the ids.

    Parameters
    ----------
    dy : Tensor, shape (*ids.shape, width)
    padding_idx : int, optional
        Its row gets zeros.
    scale_grad_by_freq : bool
        Divide by how often an id is there.
    """
    padding = -1
    if padding_idx is not None:
        found = (rows == padding_idx).nonzero()
        padding = int(found) if found.numel() else -1
    made: torch.Tensor = torch.ops.aten.embedding_dense_backward(
        dy, places, rows.shape[0], padding, scale_grad_by_freq
    )
    return made


def embedding_gradient_rows(
    ids: torch.Tensor,
    dy: torch.Tensor,
    num_rows: int,
    padding_idx: int | None = None,
    *,
    scale_grad_by_freq: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """An embedding's gradient as its rows that are not zero throughout.

    Parameters
    ----------
    ids : Tensor of int32 or int64
    dy : Tensor, shape (*ids.shape, width)
    num_rows : int
        Of the table.
    padding_idx : int, optional
        Its gradient is zero; may count from the end.

    Returns
    -------
    rows : Tensor of int64, shape (n,)
        Ascending.  The padding's row is one of them if an id names it.
    values : Tensor, shape (n, width)
    """
    padding = None if padding_idx is None else padding_idx % num_rows
    rows, places = unique_rows(ids)
    values = gradient_of_rows(rows, places, dy, padding_idx=padding, scale_grad_by_freq=scale_grad_by_freq)
    return rows.long(), values


def write_rows(
    home: torch.Tensor,
    rows: torch.Tensor,
    values: torch.Tensor,
    previous_rows: torch.Tensor | None = None,
    *,
    moves: DeviceMoves | None = None,
    stream: Stream | None = None,
) -> None:
    """Write rows of a table, each by one writer: those of `previous_rows` that are not written become zero.

    Parameters
    ----------
    home : Tensor, shape (rows, width)
        Contiguous; all other rows are zero already.
    rows : Tensor of int64
        Ascending, none of them twice.
    values : Tensor, shape (n, width)
    previous_rows : Tensor of int64, optional
        The rows that may be other than zero now, none of them twice.
    moves : DeviceMoves, optional
        The kernel that writes whole lines with few blocks.  Without it, on the CPU, and where rows are no multiple
        of 16 bytes, torch's kernels write.
    stream : Stream, optional
        Torch's current stream, for `moves`.
    """
    if previous_rows is not None:
        clear_rows(home, rows, previous_rows, moves=moves, stream=stream)
    if not rows.numel():
        return
    kernel = _kernel_for(home, moves)
    if kernel is None or stream is None:
        home.index_copy_(0, rows, values)
        return
    values, width = values.contiguous(), home.shape[1] * home.element_size()
    kernel.scatter_rows(
        home.data_ptr(), rows.data_ptr(), values.data_ptr(), 0, width, rows.shape[0], stream=stream
    )


def clear_rows(
    home: torch.Tensor,
    rows: torch.Tensor,
    previous_rows: torch.Tensor,
    *,
    moves: DeviceMoves | None = None,
    stream: Stream | None = None,
) -> None:
    """Zero those of `previous_rows` that are not among `rows`: the part of `write_rows` that needs no values.

    It touches none of `rows`, so that it may run beside what computes and writes them.  Parameters as there.
    """
    if not previous_rows.numel():
        return
    kept = _among(previous_rows, rows)
    kernel = _kernel_for(home, moves)
    if kernel is None or stream is None:
        home.index_fill_(0, previous_rows[~kept], 0)
        return
    width, count = home.shape[1] * home.element_size(), previous_rows.shape[0]
    kernel.scatter_rows(home.data_ptr(), previous_rows.data_ptr(), 0, kept.data_ptr(), width, count, stream=stream)


def _kernel_for(home: torch.Tensor, moves: DeviceMoves | None) -> DeviceMoves | None:
    """The kernel, where it can write rows of `home`."""
    aligned = home.shape[1] * home.element_size() % UNIT == 0 and home.data_ptr() % UNIT == 0
    return moves if home.is_cuda and aligned else None


def accumulate_rows(
    home: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, present_rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the gradient that is at home and a new one: rows and values for `write_rows`.

    Dense gradients are added everywhere, and a zero that is added turns -0 into 0: so all rows are that either
    has.

    Parameters
    ----------
    home : Tensor, shape (rows, width)
        Read, not written.
    rows, values
        The new gradient.
    present_rows : Tensor of int64
        The rows of the home that may be other than zero.
    """
    every = torch.unique(torch.cat((rows, present_rows)), sorted=True)
    added = values.new_zeros(every.shape[0], values.shape[1])
    added.index_copy_(0, torch.searchsorted(every, rows), values)
    return every, home.index_select(0, every).add_(added)


def _among(some: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """For each of `some`, whether it is one of the ascending `rows`."""
    if not rows.numel():
        return torch.zeros_like(some, dtype=torch.bool)
    places = torch.searchsorted(rows, some).clamp_(max=rows.shape[0] - 1)
    return rows[places] == some
