"""Which ways of computing a linear layer give the plain way's bytes on this machine: tried, not known.

The library chooses its kernel by the shape of a product, and kernels differ in the order of their sums.  Ways
whose bytes differ are only for those who ask for relaxed numerics.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ....panels import PANEL, borders, panel_step
from .linear import WeightPanel, linear_forward, linear_input_gradient
from .weight import weight_gradient

SEEDS = (0, 1)


@dataclass(frozen=True)
class LinearShape:
    """A product, and what it is made of."""

    tokens: int
    in_features: int
    out_features: int
    dtype: torch.dtype
    bias: bool = False

    @property
    def row_step(self) -> int:
        """Rows of a panel of the usual size."""
        return panel_step(self.out_features, self.in_features * self.dtype.itemsize, PANEL)

    @property
    def column_step(self) -> int:
        """Columns of a panel of the usual size."""
        return panel_step(self.in_features, self.out_features * self.dtype.itemsize, PANEL)


@dataclass(frozen=True)
class ExactModes:
    """For each way, whether its results were the plain ones to the byte.

    Attributes
    ----------
    forward_host, input_gradient_host : bool
        Weights read in host memory.
    forward_ring, input_gradient_ring : bool
        Weights in panels: of rows, of columns.
    weight_gradient_host, weight_gradient_panels : bool
        Written to host memory by one kernel, and panel by panel.
    """

    forward_host: bool
    forward_ring: bool
    input_gradient_host: bool
    input_gradient_ring: bool
    weight_gradient_host: bool
    weight_gradient_panels: bool


def exact_modes(
    shape: LinearShape,
    *,
    device: torch.device,
    host: Callable[[torch.Tensor], torch.Tensor],
    row_step: int | None = None,
    column_step: int | None = None,
) -> ExactModes:
    """Try every way with random values, and compare with all on the device.

    Parameters
    ----------
    device : torch.device
    host : callable
        A copy of a tensor in mapped host memory, as a tensor of the device.  It lives until the next call.
    row_step, column_step : int, optional
        Rows or columns of a panel, where they are not the usual ones.
    """
    equal = [_try(shape, device, host, row_step or shape.row_step, column_step or shape.column_step, seed)
             for seed in SEEDS]  # fmt: skip
    return ExactModes(*(all(seen) for seen in zip(*equal, strict=True)))


@torch.no_grad()
def _try(
    shape: LinearShape,
    device: torch.device,
    host: Callable[[torch.Tensor], torch.Tensor],
    row_step: int,
    column_step: int,
    seed: int,
) -> tuple[bool, ...]:
    make = torch.Generator(device).manual_seed(seed)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=make, device=device).to(shape.dtype)

    x, dy = random(shape.tokens, shape.in_features), random(shape.tokens, shape.out_features)
    weight = random(shape.out_features, shape.in_features)
    bias = random(shape.out_features) if shape.bias else None
    rows, columns = borders(shape.out_features, row_step), borders(shape.in_features, column_step)
    y, dx, dw = linear_forward(x, weight, bias), linear_input_gradient(dy, weight), dy.t() @ x
    far = host(weight)
    found = [
        same_bytes(y, linear_forward(x, far, bias)),
        same_bytes(y, linear_forward(x, far, bias, _cut_rows(weight, rows))),
        same_bytes(dx, linear_input_gradient(dy, far)),
        same_bytes(dx, linear_input_gradient(dy, far, _cut_columns(weight, columns))),
    ]
    home = host(torch.full_like(dw, float("nan")))
    for cut in (None, rows):
        weight_gradient(dy, x, home.fill_(float("nan")), borders=cut)
        found.append(same_bytes(dw, home))
    return tuple(found)


def _cut_rows(weight: torch.Tensor, parts: list[tuple[int, int]]) -> list[WeightPanel]:
    return [(start, stop, weight[start:stop].clone()) for start, stop in parts]


def _cut_columns(weight: torch.Tensor, parts: list[tuple[int, int]]) -> list[WeightPanel]:
    return [(start, stop, weight[:, start:stop].contiguous()) for start, stop in parts]


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous tensors of one form have the same bits, NaNs and zeros included."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
