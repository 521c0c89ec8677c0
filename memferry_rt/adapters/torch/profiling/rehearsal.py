"""One forward of a copy of a model, to see what each of its layers is called with.

The copy has random weights, and layers that are alike share them: a model larger than the device is rehearsed in
the memory of its different layers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..cut import Cut, cut_layers

STD = 0.02  # of weights; with much larger ones nothing finite would be left after some layers


@dataclass(frozen=True)
class Call:
    """What a module was called with, on the device; tensors that get gradients in training require them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def form(self) -> tuple[Any, ...]:
        """Shapes and dtypes of all tensors."""
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return tuple((tuple(x.shape), x.dtype) for x in leaves if isinstance(x, torch.Tensor))


@dataclass(eq=False)
class Subject:
    """A layer that is measured.

    Attributes
    ----------
    cut : Cut
        With the copy's parameters.
    units : list of (Module, list of Call)
        The outermost modules that own its parameters, and their calls in one forward; empty where these hold
        other layers too, so that their time is not the layer's own.
    like : str
        The first layer that is the same.
    """

    cut: Cut
    units: list[tuple[nn.Module, list[Call]]]
    like: str = ""

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self.cut.parameters]

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(parameter.shape) for parameter in self.parameters)


def rehearse(
    model: nn.Module,
    inputs: Sequence[Any],
    device: torch.device,
    dtype: torch.dtype | None,
    layers: Sequence[str] | None = None,
) -> list[Subject]:
    """A model's layers, in order, with the calls of the first of each kind.

    Parameters
    ----------
    model : nn.Module
        On any device, or on ``meta``; its weights are not read.
    inputs : sequence
        Of its forward.
    dtype : torch.dtype, optional
        Of floating-point weights; by default what they have.
    layers : sequence of str, optional
        As `memferry_rt.offload` takes it.
    """
    twin = _twin(model)
    cuts = _give_weights(twin, cut_layers(twin, layers), device, dtype)
    subjects = [Subject(cut, []) for cut in cuts]
    first: dict[Any, Subject] = {}
    for subject in subjects:
        units = _units(twin, subject.cut)
        kind = (tuple(type(unit) for unit in units), _signature(subject.cut), bool(units))
        subject.units = [(unit, []) for unit in units]
        alike = first.setdefault(kind, subject)
        subject.like = alike.cut.name
    hooks = [hook for subject in subjects for hook in _listen(subject, keep=subject in first.values())]
    with torch.enable_grad():
        twin(*pytree.tree_map_only(torch.Tensor, lambda x: x.to(device), tuple(inputs)))
    for hook in hooks:
        hook.remove()
    return subjects


def _twin(model: nn.Module) -> nn.Module:
    """A copy without memory for its parameters."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
        )
        for parameter in model.parameters()
    }
    twin = copy.deepcopy(model, memo)
    config = vars(twin).get("config")
    if config is not None and hasattr(config, "use_cache"):  # transformers would fill it from call to call
        config.use_cache = False
    return twin


def _give_weights(
    twin: nn.Module, cuts: Sequence[Cut], device: torch.device, dtype: torch.dtype | None
) -> list[Cut]:
    """Random weights for every parameter, the same for layers of one form; the cuts with them."""
    made: dict[Any, torch.Tensor] = {}
    exchange: dict[nn.Parameter, nn.Parameter] = {}
    for cut in cuts:
        form = _signature(cut)
        for index, (_, parameter) in enumerate(cut.parameters):
            key = (form, index)
            if key not in made:
                kind = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
                made[key] = _weights(tuple(parameter.shape), kind, device, len(made))
            exchange[parameter] = nn.Parameter(made[key].detach(), requires_grad=parameter.requires_grad)
    for module in twin.modules():
        for name, old in module._parameters.items():
            if old is not None:
                module._parameters[name] = exchange[old]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                lost = buffer.is_meta
                module._buffers[name] = torch.zeros_like(buffer, device=device) if lost else buffer.to(device)
    return [Cut(cut.name, tuple((name, exchange[old]) for name, old in cut.parameters)) for cut in cuts]


def _weights(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    values = torch.empty(shape, device=device).normal_(0.0, STD, generator=generator)
    return (values + 1.0 if len(shape) == 1 else values).to(dtype)


def _signature(cut: Cut) -> tuple[Any, ...]:
    """What makes two layers the same: their parameters' names within them, shapes and dtypes."""
    prefix = f"{cut.name}."
    return tuple(
        (name.removeprefix(prefix) if name.startswith(prefix) else name, tuple(p.shape), p.dtype, p.requires_grad)
        for name, p in cut.parameters
    )


def _units(model: nn.Module, cut: Cut) -> list[nn.Module]:
    """The outermost modules that own the cut's parameters; none if other parameters are inside of them."""
    own = {parameter for _, parameter in cut.parameters}
    root = dict(model.named_modules()).get(cut.name)
    found = [] if root is None or cut.name == "" else [root]
    found += [owner for owner in _owners(model, own) if not any(owner in set(unit.modules()) for unit in found)]
    if any(parameter not in own for unit in found for parameter in unit.parameters()):
        return []
    return found


def _owners(model: nn.Module, own: set[nn.Parameter]) -> Iterator[nn.Module]:
    for module in model.modules():
        if any(parameter in own for parameter in module._parameters.values()):
            yield module


def _listen(subject: Subject, *, keep: bool) -> Iterator[Any]:
    """Keep the calls of a layer's modules, and cut autograd's graph behind them: nothing goes back through it."""
    for unit, calls in subject.units:

        def called(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], calls: list[Call] = calls
        ) -> None:
            kept = pytree.tree_map_only(torch.Tensor, _cut, (args, kwargs))
            calls.append(Call(*kept))

        def over(module: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
            return pytree.tree_map_only(torch.Tensor, lambda x: _cut(x).clone() if x.requires_grad else x, result)

        if keep:
            yield unit.register_forward_pre_hook(called, with_kwargs=True)
        yield unit.register_forward_hook(over)


def _cut(x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_(x.requires_grad)
