"""The user's own optimizer object, with the update moved into the runtime.

It stays what it was: schedulers built on it keep working, and its state is the runtime's, as tensors.
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from ...errors import UnsupportedError
from ...native import AdamSettings
from .groups import GroupMembers, why_no_group
from .layer import LayerState

MOMENTS = ("exp_avg", "exp_avg_sq")
STATE_KEYS = frozenset({"step", "exp_avg", "exp_avg_sq"})


def check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Refuse what the update cannot honour.

    Raises
    ------
    UnsupportedError
        Not a plain ``Adam`` or ``AdamW``, a setting without a counterpart, or parameters of another model.
    """
    if type(optimizer) not in (Adam, AdamW):
        raise UnsupportedError(
            f"optimizer: {type(optimizer).__name__} is not supported; use torch.optim.AdamW or torch.optim.Adam"
        )
    known = set(model.parameters())
    for number, group in enumerate(optimizer.param_groups):
        _settings(group, isinstance(optimizer, AdamW))
        for parameter in group["params"]:
            if parameter not in known:
                raise UnsupportedError(f"optimizer: a parameter of group {number} does not belong to the model")
    for state in optimizer.state.values():
        if not STATE_KEYS.issuperset(state):
            raise UnsupportedError(
                f"optimizer: unknown state {sorted(set(state) - STATE_KEYS)}; it cannot be moved"
            )


def _settings(group: dict[str, Any], decoupled: bool) -> AdamSettings:
    for flag in ("amsgrad", "differentiable", "capturable"):
        if group.get(flag):
            raise UnsupportedError(f"optimizer: {flag}=True is not supported; build the optimizer without it")
    beta1, beta2 = group["betas"]
    return AdamSettings(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        decoupled=bool(group.get("decoupled_weight_decay", decoupled)),
        maximize=bool(group.get("maximize", False)),
    )


@dataclass(frozen=True)
class AmpScaling:
    """What `torch.amp.GradScaler` tells an optimizer that can take scaled gradients.

    Attributes
    ----------
    inverse : float or None
        What to multiply the gradients by; None if the scaler has done so in place, which no version counts.
    finite : bool
        Whether it found no infinity and no NaN.
    """

    inverse: float | None
    finite: bool


class OptimizerPatch:
    """Replaces, on one optimizer object, what must go through the runtime; `restore` undoes it.

    Parameters
    ----------
    optimizer : Adam or AdamW
    home : mapping of Parameter to (LayerState, index)
    step : callable
        The runtime's step.
    settle : callable
        Blocks until all updates under way are done.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        home: dict[nn.Parameter, tuple[LayerState, int]],
        *,
        step: Callable[[], None],
        settle: Callable[[], None],
    ) -> None:
        self.optimizer = optimizer
        self._home = home
        self._step = step
        self._settle = settle
        self._before = {
            name: optimizer.__dict__.get(name)
            for name in (
                "step",
                "zero_grad",
                "load_state_dict",
                "add_param_group",
                "_step_supports_amp_scaling",
            )
        }
        self._own: dict[nn.Parameter, dict[str, torch.Tensor]] = {}
        self._members = GroupMembers(optimizer)
        self._adopt_state()
        self._replace()
        self.tell(grad_norm=None, skipped_steps=0)

    # -- what the runtime needs -----------------------------------------------------------------------
    def settings(self) -> list[AdamSettings]:
        """Every group's settings as they are now.

        Raises
        ------
        UnsupportedError
            A setting without a counterpart, or parameters that have changed groups.
        """
        self._members.check()
        decoupled = isinstance(self.optimizer, AdamW)
        return [_settings(group, decoupled) for group in self.optimizer.param_groups]

    def amp_scaling(self) -> AmpScaling | None:
        """What a `torch.amp.GradScaler` that is calling `step` says of the gradients; None without one."""
        found = getattr(self.optimizer, "found_inf", None)
        if found is None:
            return None
        scale = getattr(self.optimizer, "grad_scale", None)
        return AmpScaling(inverse=None if scale is None else 1.0 / float(scale), finite=float(found) == 0.0)

    @property
    def scaler_tells(self) -> bool:
        """Whether a `torch.amp.GradScaler` says what it does; else it may have scaled gradients unseen."""
        return bool(getattr(self.optimizer, "_step_supports_amp_scaling", False))

    def group_of(self) -> dict[nn.Parameter, int]:
        return {
            parameter: number
            for number, group in enumerate(self.optimizer.param_groups)
            for parameter in group["params"]
        }

    def count(self, parameter: nn.Parameter) -> torch.Tensor:
        """Advance a parameter's step number and give it, as a scalar of its own."""
        step = self.step_of(parameter)
        step += 1
        return step.clone()

    def step_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """A parameter's live step number."""
        return self._own[parameter]["step"]

    def next_count(self, parameter: nn.Parameter) -> torch.Tensor:
        """The step number that `count` will give, without advancing it."""
        return self.step_of(parameter) + 1

    def moment(self, parameter: nn.Parameter, key: str) -> torch.Tensor:
        """A parameter's live moment, which `optimizer.state` shows unless the user has replaced it."""
        return self._own[parameter][key]

    def repoint(self, layer: LayerState) -> None:
        """A layer's state has moved: the tensors in ``optimizer.state`` stay, and show its new home."""
        for index, parameter in enumerate(layer.parameters):
            if parameter in self._own:
                for key in MOMENTS:
                    self.moment(parameter, key).data = layer.in_shape(index, layer.state(index, key))

    def shows_own(self, layer: LayerState) -> bool:
        """Whether ``optimizer.state`` has the runtime's own tensors for all of a layer."""
        return not any(parameter in self._own and self._replaced(parameter) for parameter in layer.parameters)

    def adopt_replaced(self) -> None:
        """Take over what the user has put into ``optimizer.state`` in place of the runtime's own tensors.

        An entry that is missing or empty is the state before the first step.
        """
        replaced = [parameter for parameter in self._own if self._replaced(parameter)]
        if not replaced:
            return
        self._settle()
        state = self.optimizer.state
        entries = [(parameter, state.get(parameter, {})) for parameter in replaced]
        for parameter, entry in entries:
            self._check_shapes(parameter, entry, "optimizer.state")
        self._adopt_all([(parameter, entry, entry) for parameter, entry in entries])

    def _replaced(self, parameter: nn.Parameter) -> bool:
        entry = self.optimizer.state.get(parameter, {})
        return any(entry.get(key) is not tensor for key, tensor in self._own[parameter].items())

    def tell(self, *, grad_norm: float | None, skipped_steps: int) -> None:
        """Let the user read what the last step found, on the optimizer itself."""
        self.optimizer.grad_norm = grad_norm  # type: ignore[attr-defined]
        self.optimizer.skipped_steps = skipped_steps  # type: ignore[attr-defined]

    def restore(self) -> None:
        """Give the optimizer its own methods back; its state stays where it is, in the parameter's dtype."""
        for name, value in self._before.items():
            if value is None:
                self.optimizer.__dict__.pop(name, None)
            else:
                setattr(self.optimizer, name, value)
        for parameter, own in self._own.items():
            state = self.optimizer.state[parameter]
            if float(own["step"]) == 0 and not any(bool(own[key].any()) for key in MOMENTS):
                del self.optimizer.state[parameter]
                continue
            for key in MOMENTS:
                state[key] = state[key].to(parameter.dtype)
        self._hook.remove()

    # -- state ------------------------------------------------------------------------------------------
    def _adopt_state(self) -> None:
        """Move what state there is into the slabs, and make the slabs the state."""
        self._adopt_all(
            [
                (parameter, self.optimizer.state.get(parameter, {}), {})
                for group in self.optimizer.param_groups
                for parameter in group["params"]
                if parameter in self._home and parameter.requires_grad
            ]
        )

    @torch.no_grad()
    def _adopt_all(self, states: list[tuple[nn.Parameter, dict[str, Any], dict[str, Any]]]) -> None:
        """Make states live: of each the parameter, the values, and the dict that is to be its entry."""
        slabs = {tensor.untyped_storage().data_ptr() for own in self._own.values() for tensor in own.values()}
        values = []
        for parameter, state, _ in states:
            own = self._own.get(parameter, {})
            values.append(  # what lies in the slabs may be overwritten before it is read
                {
                    key: value.clone()
                    if isinstance(value, torch.Tensor)
                    and value is not own.get(key)
                    and value.untyped_storage().data_ptr() in slabs
                    else value
                    for key, value in state.items()
                    if key in STATE_KEYS
                }
            )
        for (parameter, _, entry), value in zip(states, values, strict=True):
            self._adopt(parameter, value, entry)

    def _adopt(self, parameter: nn.Parameter, state: dict[str, Any], entry: dict[str, Any]) -> None:
        layer, index = self._home[parameter]
        own = self._own.setdefault(parameter, {})
        self.optimizer.state[parameter] = entry
        step = state.get("step", 0.0)
        if step is not own.get("step"):
            own["step"] = torch.tensor(float(step), dtype=torch.float32, device="cpu")
        entry["step"] = own["step"]
        for key in MOMENTS:
            value = state.get(key)
            if value is None or value is not own.get(key):
                view = layer.in_shape(index, layer.state(index, key))
                entry[key] = view
                _give_own_memory(own, key)
                own[key] = view
                view.zero_() if value is None else view.copy_(value)
            entry[key] = own[key]

    def _load_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """As `Optimizer.load_state_dict`, with the moments kept in fp32 and copied into the slabs."""
        self._settle()
        state_dict = state_dict.copy()
        for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(optimizer, state_dict) or state_dict
        groups, saved = optimizer.param_groups, copy.deepcopy(state_dict["param_groups"])
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in saved]:
            raise ValueError("loaded state dict has other parameter groups than this optimizer")
        pairs = []
        for group, other in zip(groups, saved, strict=True):
            _settings({**group, **other}, isinstance(optimizer, AdamW))
            for parameter, key in zip(group["params"], other["params"], strict=True):
                state = state_dict["state"].get(key, {})
                self._check_loaded(parameter, state)
                pairs.append((parameter, state))
        self._adopt_all([(parameter, state, {}) for parameter, state in pairs if parameter in self._own])
        for group, other in zip(groups, saved, strict=True):
            group.update({key: value for key, value in other.items() if key != "params"})
        for after in optimizer._optimizer_load_state_dict_post_hooks.values():
            after(optimizer)

    @staticmethod
    def _check_loaded(parameter: nn.Parameter, state: dict[str, Any]) -> None:
        unknown = sorted(set(state) - STATE_KEYS)
        if unknown:
            raise UnsupportedError(f"loaded state dict has unknown state {unknown}; nothing was changed")
        OptimizerPatch._check_shapes(parameter, state, "loaded state dict")

    @staticmethod
    def _check_shapes(parameter: nn.Parameter, state: dict[str, Any], what: str) -> None:
        for key in MOMENTS:
            if key in state and state[key].shape != parameter.shape:
                raise ValueError(
                    f"{what}: {key} has shape {tuple(state[key].shape)} where the parameter has "
                    f"{tuple(parameter.shape)}; nothing was changed"
                )

    # -- methods ----------------------------------------------------------------------------------------
    def _replace(self) -> None:
        optimizer = self.optimizer

        def step(optimizer: Optimizer, closure: Callable[[], float] | None = None) -> float | None:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._step()
            return loss

        def zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
            if not set_to_none:
                self._settle()
            type(optimizer).zero_grad(optimizer, set_to_none)

        def add_param_group(optimizer: Optimizer, group: dict[str, Any]) -> None:
            raise UnsupportedError(why_no_group(group, self._home))

        hooked = Optimizer.profile_hook_step(step)  # so that step hooks and profiling go on working
        wrapped = getattr(self._before["step"] or optimizer.step, "_wrapped_by_lr_sched", False)
        bound = types.MethodType(_mark_called(hooked) if wrapped else hooked, optimizer)
        optimizer.step = bound  # type: ignore[method-assign]
        optimizer.zero_grad = types.MethodType(zero_grad, optimizer)  # type: ignore[method-assign]
        optimizer.load_state_dict = types.MethodType(  # type: ignore[method-assign]
            lambda optimizer, state_dict: self._load_state_dict(optimizer, state_dict), optimizer
        )
        optimizer.add_param_group = types.MethodType(add_param_group, optimizer)  # type: ignore[method-assign]
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # see `amp_scaling`
        self._hook = optimizer.register_state_dict_pre_hook(lambda _: self._settle())


def _give_own_memory(own: dict[str, torch.Tensor], key: str) -> None:
    """Let go of a tensor over a slab that is to be rewritten; whoever keeps it keeps its values, as in PyTorch."""
    if key in own:
        known = weakref.ref(own.pop(key))
        kept = known()
        if kept is not None:
            kept.data = kept.to("cpu", copy=True)


def _mark_called(step: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the mark by which an LR scheduler sees that the optimizer has stepped."""

    @functools.wraps(step)
    def marked(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return step(optimizer, *args, **kwargs)

    marked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return marked
