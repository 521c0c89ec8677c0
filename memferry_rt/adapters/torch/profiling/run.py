"""A layer's forward and backward, as often as they are measured."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from .rehearsal import Call, Subject


class Run:
    """A layer's forward and backward, over all calls of its modules."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.inputs: list[torch.Tensor] = []

    def forward(self) -> list[torch.Tensor]:
        """Without gradients."""
        with torch.no_grad():
            return [y for unit, calls in self._subject.units for call in calls for y in _outputs(unit, call)]

    def record(self) -> list[torch.Tensor]:
        """Forward with gradients, for `backward`; gives what autograd keeps, and forgets gradients so far."""
        self._pending, self.inputs = [], []
        for parameter in self._subject.parameters:
            parameter.grad = None
        kept: list[torch.Tensor] = []

        def keep(x: torch.Tensor) -> torch.Tensor:
            kept.append(x)
            return x

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            for unit, calls in self._subject.units:
                for call in calls:
                    self._pending += [(y, _like(y)) for y in _outputs(unit, self._leaves(call)) if y.requires_grad]
        return kept

    @property
    def has_backward(self) -> bool:
        """Whether anything recorded needs a gradient."""
        return bool(self._pending)

    def backward(self) -> None:
        """Once for each `record`."""
        results = [y for y, _ in self._pending]
        torch.autograd.backward(results, [dy for _, dy in self._pending])

    def _leaves(self, call: Call) -> Call:
        """The call with inputs of its own, of which those get gradients that do in training."""

        def leaf(x: torch.Tensor) -> torch.Tensor:
            if not x.requires_grad:
                return x
            self.inputs.append(x.detach().requires_grad_())
            return self.inputs[-1]

        return Call(*pytree.tree_map_only(torch.Tensor, leaf, (call.args, call.kwargs)))


def _outputs(unit: Any, call: Call) -> list[torch.Tensor]:
    made = unit(*call.args, **call.kwargs)
    return [x for x in pytree.tree_leaves(made) if isinstance(x, torch.Tensor)]


def _like(y: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator(y.device).manual_seed(y.numel())
    return torch.empty_like(y).normal_(0.0, 1e-3, generator=generator)
