"""Lion, which PyTorch has not: an ordinary optimizer, with and without offloading."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class Lion(Optimizer):
    """Steps of the sign of an interpolation between mean and gradient, with decoupled weight decay.

    ``update = sign(beta1 * mean + (1 - beta1) * gradient)``,
    ``parameter -= lr * (update + weight_decay * parameter)``, ``mean = beta2 * mean + (1 - beta2) * gradient``:
    Chen et al., Symbolic Discovery of Optimization Algorithms, 2023.

    Parameters
    ----------
    params : iterable
        Parameters, named parameters or groups, as of any optimizer.
    lr : float
        About a third to a tenth of what suits AdamW, with a `weight_decay` as much larger.
    betas : (float, float)
    weight_decay : float
    maximize : bool

    Raises
    ------
    ValueError
        A setting makes no sense.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        if lr < 0 or weight_decay < 0 or not all(0 <= beta <= 1 for beta in betas):
            raise ValueError(
                f"lr={lr}, betas={betas}, weight_decay={weight_decay}: lr and weight_decay must not be negative, "
                "and betas must be from 0 to 1"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make one step; `closure` computes the loss anew, if it is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            raise RuntimeError("Lion does not support sparse gradients; build the embedding with sparse=False")
        if group["maximize"]:
            gradient = -gradient
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        mean = state["exp_avg"]
        update = mean.mul(beta1).add_(gradient, alpha=1 - beta1).sign_()
        if group["weight_decay"] != 0:
            update.add_(parameter, alpha=group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"])
        mean.mul_(beta2).add_(gradient, alpha=1 - beta2)
