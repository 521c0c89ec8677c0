"""A linear layer's weight gradient, written to its home in host memory as it is made.

Up to about a thousand tokens the product's own stores keep the link busy: one kernel writes the home.  With more
the product takes longer than the transfer, or as long, and they are to overlap: it is made panel by panel in
device memory, and each panel leaves while the next is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .outbox import DirectOutbox, Outbox

DIRECT_TOKENS = 1024  # up to so many one kernel that writes the home is as fast as the link

Visit = Callable[[int, int, torch.Tensor], None]


def weight_gradient(
    dy: torch.Tensor,
    x: torch.Tensor,
    out: torch.Tensor,
    *,
    partial: bool = False,
    borders: Sequence[tuple[int, int]] | None = None,
    outbox: Outbox | None = None,
    visit: Visit | None = None,
) -> None:
    """Write ``dy.T @ x`` to its home, or add it to the sum that is there.

    Parameters
    ----------
    dy : Tensor, shape (..., out)
    x : Tensor, shape (..., in)
    out : Tensor, shape (out, in)
        The home, contiguous, in any memory of the device's reach.
    partial : bool
        The home holds the sum so far, of earlier backward passes, and `out`'s stream has waited for it.  It is
        read, added to as autograd does, the product rounded first, and written; no kernel reads and writes one
        address.
    borders : sequence of (start, stop), optional
        Rows of each panel, all of them in order.  By default the whole is made in one piece, straight to the home
        where nothing else is to be done with it.
    outbox : Outbox, optional
        Where panels are made, and who takes them home; by default memory of torch's and the current stream's
        kernels.
    visit : callable, optional
        Is given each panel (start, stop, Tensor) while it is in device memory, complete: to sum up its squares.
    """
    left, right = dy.reshape(-1, dy.shape[-1]).t(), x.reshape(-1, x.shape[-1])
    if not (partial or visit or borders or outbox):
        torch.mm(left, right, out=out)
        return
    box = outbox or DirectOutbox(out)
    pitch = out.shape[1] * out.element_size()
    for start, stop in borders or [(0, out.shape[0])]:
        home = out[start:stop]
        with box.panel(start * pitch, home) as panel:
            torch.mm(left[start:stop], right, out=panel)
            if partial:
                panel.add_(home)
            if visit is not None:
                visit(start, stop, panel)
