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
    stale = None if previous_rows is None or not previous_rows.numel() else ~_among(previous_rows, rows)
    width = home.shape[1] * home.element_size()
    if moves is None or stream is None or not home.is_cuda or width % UNIT or home.data_ptr() % UNIT:
        if stale is not None and previous_rows is not None:
            home.index_fill_(0, previous_rows[stale], 0)
        home.index_copy_(0, rows, values)
        return
    values = values.contiguous()
    target, count = home.data_ptr(), rows.shape[0]
    if stale is not None and previous_rows is not None:
        fresh = stale.logical_not()
        moves.scatter_rows(
            target, previous_rows.data_ptr(), 0, fresh.data_ptr(), width, previous_rows.shape[0], stream=stream
        )
    if count:
        moves.scatter_rows(target, rows.data_ptr(), values.data_ptr(), 0, width, count, stream=stream)


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
