"""The same training in plain PyTorch.  Nothing of the runtime is imported, so that it can be its judge.

Forward and backward run by plain autograd where the runtime has them run too.  The update is
``torch.optim.AdamW(fused=True)`` on the CPU over fp32 masters, and the weights are the masters, rounded.
"""

from __future__ import annotations

import math

import torch

from .data import Batches
from .initial import model_on_cpu
from .loop import StepResult, run_micro_batches
from .recipe import Recipe


class PlainTraining:
    """A model trained by PyTorch alone, with all of it where the weights are used.

    Parameters
    ----------
    recipe : Recipe
    batches : Batches
    device : torch.device
        Where to compute.
    """

    def __init__(self, recipe: Recipe, batches: Batches, device: torch.device) -> None:
        self._recipe = recipe
        self._batches = batches
        self._device = device
        self._model = model_on_cpu(recipe)
        self._weights = {name: weight for name, weight in self._model.named_parameters() if weight.requires_grad}
        self._masters = self._weights
        dtype: torch.dtype = getattr(torch, recipe.dtype)
        if device.type != "cpu" or dtype != torch.float32:
            self._masters = {name: torch.nn.Parameter(weight.detach()) for name, weight in self._weights.items()}
            self._model.to(device=device, dtype=dtype)
        self._optimizer = torch.optim.AdamW(
            self._masters.values(), lr=recipe.lr, weight_decay=recipe.weight_decay, fused=True
        )
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        if recipe.accumulate_dtype is not None:
            for weight in self._weights.values():
                weight.register_post_accumulate_grad_hook(self._sum)

    def step(self, number: int) -> StepResult:
        """See `Training`."""
        losses = run_micro_batches(self._model, self._batches, self._recipe, number, self._device, lambda: None)
        norm = self._gradient_norm()
        if math.isfinite(norm):
            self._update(self._scale(norm))
        for weight in self._weights.values():
            weight.grad = None
        self._sums.clear()
        return StepResult(losses.tolist(), norm, None)

    def finish(self) -> None:
        """See `Training`: a step leaves nothing."""

    def parameters(self) -> dict[str, torch.Tensor]:
        """See `Training`.  Not copies: the training is over."""
        return {name: master.detach() for name, master in self._masters.items()}

    def _sum(self, weight: torch.Tensor) -> None:
        """Add a micro-batch's gradient, widened, to those before."""
        assert weight.grad is not None
        wide = weight.grad.to(getattr(torch, str(self._recipe.accumulate_dtype)))
        self._sums[weight] = self._sums[weight] + wide if weight in self._sums else wide
        weight.grad = None

    def _gradient(self, weight: torch.Tensor) -> torch.Tensor | None:
        return self._sums.get(weight, weight.grad)

    def _gradient_norm(self) -> float:
        """fp64 2-norms of the gradients' pieces, their squares added in the order of parameters and pieces."""
        total = 0.0
        for weight in self._weights.values():
            gradient = self._gradient(weight)
            if gradient is not None:
                for norm in torch._foreach_norm(pieces(gradient), 2, dtype=torch.float64):
                    total += float(norm) * float(norm)
        return math.sqrt(total)

    def _scale(self, norm: float) -> float:
        if self._recipe.max_grad_norm is None:
            return 1.0
        return min(1.0, self._recipe.max_grad_norm / (norm + 1e-6))

    @torch.no_grad()
    def _update(self, scale: float) -> None:
        for name, weight in self._weights.items():
            master, gradient = self._masters[name], self._gradient(weight)
            if gradient is None:
                master.grad = None
                continue
            master.grad = gradient.to(device="cpu", dtype=torch.float32)
            if scale != 1.0:
                master.grad.mul_(scale)
        self._optimizer.step()
        if self._masters is not self._weights:
            for name, weight in self._weights.items():
                weight.copy_(self._masters[name])


def pieces(gradient: torch.Tensor) -> list[torch.Tensor]:
    """Whole rows, at most 4 Mi elements, and a multiple of 256 of them where so many fit."""
    limit = 4 << 20
    rows, width = (gradient.shape[0], gradient[0].numel()) if gradient.dim() > 1 else (gradient.numel(), 1)
    fitting = max(1, limit // width)
    if fitting > 256:
        fitting -= fitting % 256
    return list(gradient.reshape(rows, width).split(fitting))
