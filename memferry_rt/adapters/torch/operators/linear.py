"""`nn.Linear` over weights that lie in host memory, or come panel by panel.

With weights in place the very kernels of PyTorch run, only the pointer is another one, and so are its results.
Over panels every element of a result is still one sum over all that the plain product sums for it: panels of rows
cut the forward's columns, panels of columns the input gradient's.  The library may choose another kernel for a
smaller product, whose sums are in another order: `exact_modes` tries it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

WeightPanel = tuple[int, int, torch.Tensor]  # where it begins and ends, and its elements


def linear_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    panels: Iterable[WeightPanel] | None = None,
) -> torch.Tensor:
    """``F.linear(x, weight, bias)``.

    Parameters
    ----------
    x : Tensor, shape (..., in)
    weight : Tensor, shape (out, in)
        In any memory of the device's reach.  With panels only its shape is used.
    bias : Tensor, shape (out,), optional
    panels : iterable of (start, stop, Tensor of shape (stop - start, in)), optional
        All rows of the weight, in order; each is read before the next is taken.
    """
    if panels is None:
        return F.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    result = rows.new_empty(rows.shape[0], weight.shape[0])
    for start, stop, panel in panels:
        into = result[:, start:stop]
        if bias is None:
            torch.mm(rows, panel.t(), out=into)
        else:
            torch.addmm(bias[start:stop], rows, panel.t(), out=into)
    return result.view(*x.shape[:-1], weight.shape[0])


def linear_input_gradient(
    dy: torch.Tensor,
    weight: torch.Tensor,
    panels: Iterable[WeightPanel] | None = None,
    *,
    x: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gradient of a linear layer's input, ``dy @ weight``.

    Parameters
    ----------
    dy : Tensor, shape (..., out)
    weight : Tensor, shape (out, in)
        In any memory of the device's reach.  With panels only its shape is used.
    panels : iterable of (start, stop, Tensor of shape (out, stop - start)), optional
        All columns of the weight, in order; each is read before the next is taken.
    x : Tensor, shape (..., in), optional
        The input: of one that lies column by column autograd makes the gradient's transpose.
    """
    rows = dy.reshape(-1, dy.shape[-1])
    flipped = x is not None and _by_columns(x)
    if panels is None:
        result = torch.mm(weight.t(), rows.t()).t() if flipped else torch.mm(rows, weight)
    elif flipped:
        made = rows.new_empty(weight.shape[1], rows.shape[0])
        for start, stop, panel in panels:
            torch.mm(panel.t(), rows.t(), out=made[start:stop])
        result = made.t()
    else:
        result = rows.new_empty(rows.shape[0], weight.shape[1])
        for start, stop, panel in panels:
            torch.mm(rows, panel, out=result[:, start:stop])
    return result.reshape(*dy.shape[:-1], weight.shape[1])


def _by_columns(x: torch.Tensor) -> bool:
    """As autograd sees it: a vector's only element does, too."""
    rows = x.reshape(-1, x.shape[-1])
    return rows.stride() == (1, rows.shape[0])


def bias_gradient(dy: torch.Tensor, out: torch.Tensor, *, partial: bool = False) -> None:
    """Write the gradient of a linear layer's bias to its home, or add it to what is there.

    Parameters
    ----------
    dy : Tensor, shape (..., out)
    out : Tensor, shape (out,)
    partial : bool
        `out` holds the sum so far.
    """
    found = dy.reshape(-1, dy.shape[-1]).sum(0)
    out.copy_(out + found if partial else found)
