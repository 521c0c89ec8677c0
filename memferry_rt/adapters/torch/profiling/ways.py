"""A layer computed in one way or another: weights on the device, at home or in panels, gradients here or there.

Only what differs from plain PyTorch is put in the modules' place, by the operators that training uses; nothing
here knows of a runtime.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ....panels import Cut, PanelRing, borders, panel_step
from ....plan.profile import GradientPlace, WeightPlace
from ..operators import (
    LaneOutbox,
    bias_gradient,
    embedding_forward,
    embedding_gradient_rows,
    linear_forward,
    linear_input_gradient,
    weight_gradient,
    write_rows,
)
from ..operators.linear import WeightPanel
from ..operators.weight import DIRECT_TOKENS
from .kit import Homes, Kit, Way
from .rehearsal import Subject
from .stand import Home


def possible(subject: Subject, way: Way, kit: Kit) -> bool:
    """Whether a layer can be computed so.

    Panels need a linear layer whose rows and columns fit a slot; gradients at home need parameters that one module
    alone uses.
    """
    if way.gradients is GradientPlace.HOST and _shared(subject):
        return False
    if way.weights is not WeightPlace.RING:
        return True
    matrices = [module.weight for module in _modules(subject) if type(module) is nn.Linear]
    fits = [max(weight.shape) * weight.element_size() <= kit.panel for weight in matrices]
    return bool(fits) and all(fits)


@contextlib.contextmanager
def computed(subject: Subject, way: Way, homes: Homes, kit: Kit) -> Iterator[None]:
    """The layer's modules compute in this way inside."""
    with contextlib.ExitStack() as undo:
        if way.weights is not WeightPlace.DEVICE:
            for parameter, home in homes.weights.items():
                undo.callback(setattr, parameter, "data", parameter.data)
                parameter.data = home.mapped
        for module in _modules(subject):
            if not way.plain and type(module) in _PARTS and getattr(module, "max_norm", None) is None:
                part = _PARTS[type(module)](module, way, homes, kit)
                undo.callback(module.__dict__.pop, "forward")
                module.__dict__["forward"] = part
            elif way.weights is not WeightPlace.DEVICE:
                counted = module.register_forward_pre_hook(_counts(kit))
                undo.callback(counted.remove)
        if way.gradients is GradientPlace.HOST:
            for parameter, home in homes.gradients.items():
                sent = parameter.register_post_accumulate_grad_hook(_sends(home, kit))
                undo.callback(sent.remove)
        yield


def _shared(subject: Subject) -> bool:
    """Whether several modules use one parameter: its gradients are added, and not written by each."""
    used = [p for module in _modules(subject) for p in module._parameters.values() if p is not None]
    return len(used) > len(set(used))


def _modules(subject: Subject) -> Iterator[nn.Module]:
    for unit, _ in subject.units:
        yield from unit.modules()


def _counts(kit: Kit) -> Any:
    def count(module: nn.Module, args: Any) -> None:
        kit.touch(*(parameter for parameter in module._parameters.values() if parameter is not None))

    return count


def _sends(home: Home, kit: Kit) -> Any:
    """Writes what autograd made in device memory home, by a kernel."""

    def send(parameter: torch.Tensor) -> None:
        if parameter.grad is None:  # an operator has written it
            return
        home.mapped.copy_(parameter.grad)
        parameter.grad = None
        kit.touch(home.mapped)

    return send


class _LinearPart:
    """In the place of `nn.Linear.forward`."""

    def __init__(self, module: nn.Linear, way: Way, homes: Homes, kit: Kit) -> None:
        self.weight, self.bias, self.way, self._kit = module.weight, module.bias, way, kit
        self._home = homes.weights[module.weight]
        self._weight_home = homes.gradients.get(module.weight)
        self._bias_home = None if module.bias is None else homes.gradients.get(module.bias)
        nbytes = module.in_features * module.weight.element_size()
        self._borders = borders(module.out_features, panel_step(module.out_features, nbytes, kit.panel))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Linear.apply(x, self.weight, self.bias, self)  # type: ignore[no-untyped-call]
        return result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is not None and self.way.weights is not WeightPlace.DEVICE:
            self._kit.touch(self.bias)
        return linear_forward(x, self.weight, self.bias, self._panels(by_columns=False))

    def input_gradient(self, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return linear_input_gradient(dy, self.weight, self._panels(by_columns=True), x=x)

    def gradients(self, dy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The weight's and the bias's, where they stay on the device."""
        flat, rows = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        if self.way.gradients is GradientPlace.DEVICE:
            bias = flat.sum(0) if self.bias is not None and self.bias.requires_grad else None
            return flat.t() @ rows if self.weight.requires_grad else None, bias
        if self._weight_home is not None:
            self._send(self._weight_home, dy, x, len(rows))
        if self._bias_home is not None:
            bias_gradient(dy, self._bias_home.mapped)
            self._kit.touch(self._bias_home.mapped)
        return None, None

    def _send(self, home: Home, dy: torch.Tensor, x: torch.Tensor, tokens: int) -> None:
        if tokens <= DIRECT_TOKENS:
            weight_gradient(dy, x, home.mapped)
            self._kit.touch(home.mapped)
            return
        stand = self._kit.stand
        self._kit.use(self._kit.slabs)
        box = LaneOutbox(
            stand.driver,
            stand.engine,
            self._kit.slabs,
            stand.factory.device,
            stream=stand.stream,
            home=home.span,
        )
        weight_gradient(dy, x, home.mapped, borders=self._borders, outbox=box)

    def _panels(self, *, by_columns: bool) -> Iterator[WeightPanel] | None:
        if self.way.weights is WeightPlace.RING:
            ring = self._kit.ring
            self._kit.use(ring)
            return self._passing(ring, ring.cut(self._home.matrix, by_columns=by_columns))
        if self.way.weights is WeightPlace.HOST:
            self._kit.touch(self._home.mapped)
        return None

    def _passing(self, ring: PanelRing, cut: Cut) -> Iterator[WeightPanel]:
        stand = self._kit.stand
        for panel in ring.panels(self._home.matrix, cut, stream=stand.stream):
            flat = stand.factory.device(panel.span).view(self.weight.dtype)
            yield panel.start, panel.stop, flat.view(panel.rows, panel.columns)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: Any, part: _LinearPart) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.part = part
        return part.forward(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        part: _LinearPart = ctx.part
        dx = part.input_gradient(dy, x) if ctx.needs_input_grad[0] else None
        return dx, *part.gradients(dy, x), None


class _EmbeddingPart:
    """In the place of `nn.Embedding.forward`."""

    def __init__(self, module: nn.Embedding, way: Way, homes: Homes, kit: Kit) -> None:
        self.module, self.way, self._kit = module, way, kit
        self._home = homes.gradients.get(module.weight)
        self._written: torch.Tensor | None = None

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Embedding.apply(ids, self.module.weight, self)  # type: ignore[no-untyped-call]
        return result

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        y = embedding_forward(ids, self.module.weight)
        if self.way.weights is not WeightPlace.DEVICE:
            self._kit.touch(y)
        return y

    def gradient(self, ids: torch.Tensor, dy: torch.Tensor) -> torch.Tensor | None:
        module, count = self.module, self.module.num_embeddings
        if self.way.gradients is GradientPlace.DEVICE or self._home is None:
            padding = -1 if module.padding_idx is None else module.padding_idx
            dense: torch.Tensor = torch.ops.aten.embedding_dense_backward(
                dy, ids, count, padding, module.scale_grad_by_freq
            )
            return dense
        rows, values = embedding_gradient_rows(
            ids, dy, count, module.padding_idx, scale_grad_by_freq=module.scale_grad_by_freq
        )
        stream = self._kit.stand.stream
        write_rows(self._home.mapped, rows, values, self._written, moves=self._kit.moves, stream=stream)
        self._written = rows
        self._kit.touch(values)
        return None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: Any, part: _EmbeddingPart) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.part = part
        return part.forward(ids)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        return None, ctx.part.gradient(ids, dy), None


_PARTS: dict[type[nn.Module], Any] = {nn.Linear: _LinearPart, nn.Embedding: _EmbeddingPart}
