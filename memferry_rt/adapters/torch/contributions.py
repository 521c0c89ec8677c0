"""What a module adds to a gradient: kept as what it is made of, until it is known where it goes.

A contribution is made by a module's backward and used a moment later, when autograd has everything that adds to
the gradient: computed straight into the gradient's home if it is all of it, and otherwise as autograd would have.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from memferry_allocator import Stream

from ...device_kernels import DeviceMoves
from .norm import norm_of_rows, norms_of, piece_rows
from .operators import Outbox, accumulate_rows, embedding_gradient_rows, weight_gradient, write_rows


@dataclass(frozen=True)
class Written:
    """What was done to a gradient's home.

    Attributes
    ----------
    norm : Tensor or None
        As `norm_of` the home.
    rows : Tensor or None
        The only rows that may be other than zero now, if that is known.
    nbytes, nbytes_read : int
        Written and read there.
    """

    norm: torch.Tensor | None
    rows: torch.Tensor | None
    nbytes: int
    nbytes_read: int


class Contribution(abc.ABC):
    """One module's addition to a gradient.

    Attributes
    ----------
    task : int
        The backward that it belongs to.
    """

    def __init__(self) -> None:
        self.task = torch._C._current_graph_task_id()

    @abc.abstractmethod
    def dense(self) -> torch.Tensor:
        """The addition as autograd makes it."""

    def joined(self, other: Contribution) -> Contribution | None:
        """The sum of this and a later one; None where it cannot be made at home."""
        return None

    def panel_nbytes(self, home: torch.Tensor) -> int:
        """Bytes of each panel that an outbox is given; 0 for a contribution that needs none."""
        return 0

    @abc.abstractmethod
    def write(
        self,
        home: torch.Tensor,
        *,
        partial: bool,
        rows: torch.Tensor | None,
        complete: bool,
        outbox: Outbox | None = None,
        scatter: tuple[DeviceMoves, Stream] | None = None,
    ) -> Written:
        """Write it to the gradient's home, or add it to the sum that is there.

        Parameters
        ----------
        home : Tensor
            Contiguous, of the parameter's shape and dtype.
        partial : bool
            Whether the home holds a sum to be added to.
        rows : Tensor of int64, optional
            The only rows of the home that may be other than zero now; None where that is not known.
        complete : bool
            Whether the sum's norm is wanted.
        outbox : Outbox, optional
            Where panels are made, and who takes them home.
        scatter : (DeviceMoves, Stream), optional
            A kernel that writes rows with few blocks, and torch's current stream.

        """


class LinearWeight(Contribution):
    """``dy.T @ x``, or the sum of several.

    Parameters
    ----------
    parts : (Tensor, Tensor)
        The gradient of a linear layer's output, and its input: of each call, in the order of the sum.
    """

    def __init__(self, *parts: tuple[torch.Tensor, torch.Tensor]) -> None:
        super().__init__()
        self._parts = parts

    def dense(self) -> torch.Tensor:
        total: torch.Tensor | None = None
        for dy, x in self._parts:
            made = _by_rows(dy).t() @ _by_rows(x)
            total = made if total is None else total + made
        assert total is not None
        return total

    def joined(self, other: Contribution) -> Contribution | None:
        return LinearWeight(*self._parts, *other._parts) if isinstance(other, LinearWeight) else None

    def panel_nbytes(self, home: torch.Tensor) -> int:
        count, width = home.shape
        return piece_rows(count, width) * width * home.element_size()

    def write(
        self,
        home: torch.Tensor,
        *,
        partial: bool,
        rows: torch.Tensor | None,
        complete: bool,
        outbox: Outbox | None = None,
        scatter: tuple[DeviceMoves, Stream] | None = None,
    ) -> Written:
        count, width = home.shape
        step = piece_rows(count, width)
        borders = [(start, min(count, start + step)) for start in range(0, count, step)]
        norms: list[torch.Tensor] = []
        (dy, x), *more = self._parts

        def visit(start: int, stop: int, panel: torch.Tensor) -> None:
            for other_dy, other_x in more:
                panel.add_(_by_rows(other_dy).t()[start:stop] @ _by_rows(other_x))
            if complete:
                norms.append(norms_of([panel])[0])

        assert not (partial and more), "a sum is added to what is there once it is complete"
        weight_gradient(
            dy, x, home, partial=partial, borders=borders, outbox=outbox, visit=visit if complete or more else None
        )
        nbytes = home.numel() * home.element_size()
        return Written(torch.stack(norms) if complete else None, None, nbytes, nbytes if partial else 0)


def _by_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


class EmbeddingRows(Contribution):
    """The rows that tokens name.

    Parameters
    ----------
    ids, dy : Tensor
        An embedding's input, and the gradient of its output.
    num_rows : int
    padding_idx : int or None
        From the front.
    scale_grad_by_freq : bool
    """

    def __init__(
        self, ids: torch.Tensor, dy: torch.Tensor, num_rows: int, padding_idx: int | None, scale_grad_by_freq: bool
    ) -> None:
        super().__init__()
        self._ids, self._dy = ids, dy
        self._num_rows = num_rows
        self._padding = padding_idx
        self._scale = scale_grad_by_freq

    def dense(self) -> torch.Tensor:
        padding = -1 if self._padding is None else self._padding
        made: torch.Tensor = torch.ops.aten.embedding_dense_backward(
            self._dy, self._ids, self._num_rows, padding, self._scale
        )
        return made

    def write(
        self,
        home: torch.Tensor,
        *,
        partial: bool,
        rows: torch.Tensor | None,
        complete: bool,
        outbox: Outbox | None = None,
        scatter: tuple[DeviceMoves, Stream] | None = None,
    ) -> Written:
        named, values = embedding_gradient_rows(
            self._ids, self._dy, self._num_rows, self._padding, scale_grad_by_freq=self._scale
        )
        present = torch.arange(self._num_rows, device=home.device) if rows is None else rows
        if partial:
            named, values = accumulate_rows(home, named, values, present)
        moves, stream = scatter or (None, None)
        write_rows(home, named, values, present, moves=moves, stream=stream)
        norm = None
        if complete:
            norm = norm_of_rows(named, values, (home.shape[0], home.shape[1]), device=home.device)
        row = home.shape[1] * home.element_size()
        emptied = 0 if partial else present.numel() - int(torch.isin(present, named).sum())
        return Written(norm, named, (named.numel() + emptied) * row, named.numel() * row if partial else 0)


def summed(pending: Sequence[Contribution], given: torch.Tensor | None) -> torch.Tensor | None:
    """All that adds to a gradient, as autograd adds it up.

    What it was given in the place of the pending ones is zeros of the sign that changes nothing.
    """
    with torch.no_grad():
        total = pending[0].dense()
        for contribution in pending[1:]:
            total = total + contribution.dense()
        return total if given is None else total + given


def joined(pending: Sequence[Contribution]) -> Contribution | None:
    """All that adds to a gradient, as one contribution; None where they are not of one kind."""
    whole: Contribution | None = pending[0]
    for contribution in pending[1:]:
        whole = None if whole is None else whole.joined(contribution)
    return whole
