"""The state of Adam and AdamW in the slabs, and as ``optimizer.state`` shows it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from ...errors import UnsupportedError
from ...layout import MOMENTS
from ...native import AdamSettings
from .layer import LayerState
from .optimizer import OptimizerPatch
from .state import Forms, Read, Tensors

STATE_KEYS = frozenset({"step", *MOMENTS})


def check_adam(optimizer: Optimizer) -> None:
    """Refuse what the update cannot honour.

    Raises
    ------
    UnsupportedError
        A setting without a counterpart, or unknown state.
    """
    for group in optimizer.param_groups:
        adam_settings(optimizer, group)
    for state in optimizer.state.values():
        if not STATE_KEYS.issuperset(state):
            raise UnsupportedError(
                f"optimizer: unknown state {sorted(set(state) - STATE_KEYS)}; it cannot be moved"
            )


def adam_settings(optimizer: Optimizer, group: dict[str, Any]) -> AdamSettings:
    """A group's settings as they are now.

    Raises
    ------
    UnsupportedError
        One has no counterpart.
    """
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
        decoupled=bool(group.get("decoupled_weight_decay", isinstance(optimizer, AdamW))),
        maximize=bool(group.get("maximize", False)),
    )


class AdamPatch(OptimizerPatch):
    """Adam or AdamW: every parameter has its moments and its step number from the beginning."""

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

    def shows_own(self, layer: LayerState) -> bool:
        """Whether ``optimizer.state`` has the runtime's own tensors for all of a layer."""
        return not any(parameter in self._own and self._replaced(parameter) for parameter in layer.parameters)

    def _adopt_entries(self, entries: list[tuple[nn.Parameter, dict[str, Any]]]) -> None:
        self._adopt_all([(parameter, entry, entry) for parameter, entry in entries])

    def _replaced(self, parameter: nn.Parameter) -> bool:
        entry = self.optimizer.state.get(parameter, {})
        return any(entry.get(key) is not tensor for key, tensor in self._own[parameter].items())

    def open_state(self, parameter: nn.Parameter) -> MomentState:
        layer, index = self._home[parameter]
        moments = {key: layer.in_shape(index, layer.state(index, key)) for key in MOMENTS}
        return MomentState(self.step_of(parameter), moments)

    def _capture(self, group: dict[str, Any]) -> AdamSettings:
        return adam_settings(self.optimizer, group)

    def _hand_back(self, parameter: nn.Parameter, own: dict[str, torch.Tensor]) -> None:
        state = self.optimizer.state[parameter]
        if float(own["step"]) == 0 and not any(bool(own[key].any()) for key in MOMENTS):
            del self.optimizer.state[parameter]
            return
        for key in MOMENTS:
            state[key] = state[key].to(parameter.dtype)

    # -- state ------------------------------------------------------------------------------------------
    def _adopt_state(self) -> None:
        self._adopt_all([(p, self.optimizer.state.get(p, {}), {}) for p in self._updated()])

    @torch.no_grad()
    def _adopt_all(self, states: list[tuple[nn.Parameter, dict[str, Any], dict[str, Any]]]) -> None:
        """Make states live: of each the parameter, the values, and the dict that is to be its entry."""
        known = [
            (parameter, {key: value for key, value in state.items() if key in STATE_KEYS})
            for parameter, state, _ in states
        ]
        for (parameter, _, entry), value in zip(states, self._apart(known), strict=True):
            self._adopt(parameter, value, entry)

    def _adopt(self, parameter: nn.Parameter, state: dict[str, Any], entry: dict[str, Any]) -> None:
        own = self._own.setdefault(parameter, {})
        self.optimizer.state[parameter] = entry
        step = state.get("step", 0.0)
        if step is not own.get("step"):
            own["step"] = torch.tensor(float(step), dtype=torch.float32, device="cpu")
        entry["step"] = own["step"]
        for key in MOMENTS:
            value = state.get(key)
            if value is None or value is not own.get(key):
                entry[key] = None  # so that it is not the entry that keeps the old one
                self._renew(parameter, key)
                self._put(parameter, key, value)
            entry[key] = own[key]

    def _load_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        self._settle()
        state_dict = state_dict.copy()
        for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(optimizer, state_dict) or state_dict
        groups, saved = optimizer.param_groups, copy.deepcopy(state_dict["param_groups"])
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in saved]:
            raise ValueError("loaded state dict has other parameter groups than this optimizer")
        pairs = []
        for group, other in zip(groups, saved, strict=True):
            adam_settings(optimizer, {**group, **other})
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
        AdamPatch._check_shapes(parameter, state, "loaded state dict")

    @staticmethod
    def _check_shapes(parameter: nn.Parameter, state: dict[str, Any], what: str) -> None:
        for key in MOMENTS:
            if key in state and state[key].shape != parameter.shape:
                raise ValueError(
                    f"{what}: {key} has shape {tuple(state[key].shape)} where the parameter has "
                    f"{tuple(parameter.shape)}; nothing was changed"
                )


class MomentState:
    """See `OptimizerState`.

    Parameters
    ----------
    step : Tensor
        The live step number.
    moments : dict of str to Tensor
        Views of the slabs.
    """

    shaped = MOMENTS

    def __init__(self, step: torch.Tensor, moments: Tensors) -> None:
        self._step = step
        self._moments = moments

    def begun(self, read: Read) -> bool:
        return float(self._step) != 0 or any(
            bool(read(key, moment).any()) for key, moment in self._moments.items()
        )

    def tensors(self) -> Tensors:
        return self._moments

    def values(self) -> dict[str, Any]:
        return {"step": float(self._step)}

    def begin(self, forms: Forms, values: dict[str, Any]) -> Tensors:
        self._step.fill_(values["step"])
        return self._moments

    def clear(self) -> None:
        self._step.fill_(0.0)
        for moment in self._moments.values():
            moment.zero_()
