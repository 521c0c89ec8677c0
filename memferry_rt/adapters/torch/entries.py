"""The state of an optimizer of any class: its own entries of ``optimizer.state``, with tensors in the slabs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...errors import UnsupportedError
from .generic import bare, capture
from .layer import LayerState
from .optimizer import OptimizerPatch
from .state import Entry


@dataclass(frozen=True)
class Held:
    """A parameter's state in a step.

    Attributes
    ----------
    states : mapping of Tensor to dict
        ``optimizer.state``.
    parameter : Tensor
    room : mapping of str to Tensor
        fp32, in the parameter's shape: where the state of these names lies, once there is some.
    """

    states: Mapping[torch.Tensor, dict[str, Any]]
    parameter: torch.Tensor
    room: Mapping[str, torch.Tensor]

    @property
    def entry(self) -> dict[str, Any]:
        """The live one, as the user sees it; made by looking, as in a class's own step."""
        return self.states[self.parameter]


class EntriesPatch(OptimizerPatch):
    """An optimizer of any class, whose entries are as the class makes them, in its first step or before.

    Parameters
    ----------
    adapt : callable
        A group's captured settings, as the update takes them.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        home: Mapping[nn.Parameter, tuple[LayerState, int]],
        *,
        step: Callable[[], None],
        settle: Callable[[], None],
        adapt: Callable[[dict[str, Any]], Any],
    ) -> None:
        self._adapt = adapt
        self._shown: set[nn.Parameter] = set()  # whose own tensors somebody may have
        super().__init__(optimizer, home, step=step, settle=settle)

    def count(self, parameter: nn.Parameter) -> Held:
        self._shown.add(parameter)
        return Held(self.optimizer.state, parameter, self._own[parameter])

    def _adopt_entries(self, entries: list[tuple[nn.Parameter, dict[str, Any]]]) -> None:
        self._adopt_all(entries)

    def _replaced(self, parameter: nn.Parameter) -> bool:
        entry, shown = self.optimizer.state.get(parameter, {}), parameter in self._shown
        return any(
            value is not own and (shown or value is not None)
            for key, own in self._own[parameter].items()
            for value in (entry.get(key),)
        )

    def open_state(self, parameter: nn.Parameter) -> Entry:
        own = self._own[parameter]

        def make(key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
            self._shown.add(parameter)
            wide = torch.float32 if dtype.is_floating_point and key != "step" else dtype
            return own[key] if key in own else torch.empty(shape, dtype=wide, device="cpu")

        group = next(g for g in self.optimizer.param_groups if any(p is parameter for p in g["params"]))
        return Entry(self.optimizer, group, parameter, shaped=tuple(own), make=make)

    def _capture(self, group: dict[str, Any]) -> Any:
        return self._adapt(capture(group))

    def _hand_back(self, parameter: nn.Parameter, own: dict[str, torch.Tensor]) -> None:
        entry = self.optimizer.state.get(parameter, {})
        for key, value in entry.items():
            if key != "step" and isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                entry[key] = value.to(parameter.dtype) if value.is_floating_point() else value

    # -- state ------------------------------------------------------------------------------------------
    def _adopt_state(self) -> None:
        states = []
        for parameter in self._updated():
            layer, index = self._home[parameter]
            self._own[parameter] = {}
            for key in layer.layout.slots[index].state:
                self._renew(parameter, key)
            entry = _without_meta(self.optimizer.state.get(parameter, {}))
            own = self._own[parameter]
            wide = {key: value if key in own else _on_cpu(key, value) for key, value in entry.items()}
            states.append((parameter, wide))
        self._adopt_all(states)

    @torch.no_grad()
    def _adopt_all(self, states: list[tuple[nn.Parameter, dict[str, Any]]]) -> None:
        """Make entries live, and move what has room in the slabs there."""
        for (parameter, entry), values in zip(states, self._apart(states), strict=True):
            if entry or parameter in self.optimizer.state:
                self.optimizer.state[parameter] = entry
            for key in tuple(self._own[parameter]):
                value = values.get(key)
                if value is self._own[parameter][key]:
                    continue
                if value is not None:
                    entry[key] = None  # so that it is not the entry that keeps the old one
                view = self._renew(parameter, key)
                if value is not None:
                    self._put(parameter, key, value)
                    entry[key] = view
            (self._shown.add if entry else self._shown.discard)(parameter)

    def _load_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        self._settle()
        state_dict = state_dict.copy()
        for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(optimizer, state_dict) or state_dict
        loaded, members = self._loaded(optimizer, state_dict)
        entries = []
        for stand_in, entry in loaded.state.items():
            parameter = members.get(stand_in)
            if parameter is None:
                raise UnsupportedError(
                    "loaded state dict has state that is no parameter's: it cannot be moved; nothing was changed"
                )
            self._check_shapes(parameter, entry, "loaded state dict")
            entries.append((parameter, {key: copy.deepcopy(value) for key, value in entry.items()}))
        for group, other in zip(optimizer.param_groups, loaded.param_groups, strict=True):
            self._adapt(capture({**group, **other}))
        for parameter in self._own:
            self.optimizer.state.pop(parameter, None)
        optimizer.state.update({p: entry for p, entry in entries if p not in self._own})
        self._adopt_all([(p, entry) for p, entry in entries if p in self._own])
        for group, other in zip(optimizer.param_groups, loaded.param_groups, strict=True):
            group.update({key: value for key, value in other.items() if key != "params"})
        for after in optimizer._optimizer_load_state_dict_post_hooks.values():
            after(optimizer)

    @staticmethod
    def _loaded(
        optimizer: Optimizer, state_dict: dict[str, Any]
    ) -> tuple[Optimizer, dict[torch.Tensor, nn.Parameter]]:
        """The class's own loading, for fp32 parameters on the CPU that stand for those of the model."""
        members: dict[torch.Tensor, nn.Parameter] = {}
        groups = []
        for group in optimizer.param_groups:
            stand_ins = [nn.Parameter(torch.empty(0, dtype=torch.float32, device="cpu")) for _ in group["params"]]
            members.update(zip(stand_ins, group["params"], strict=True))
            groups.append({**group, "params": stand_ins})
        loaded = bare(optimizer)
        loaded.param_groups = groups
        type(optimizer).load_state_dict(loaded, state_dict)
        return loaded, members

    def _check_shapes(self, parameter: nn.Parameter, entry: Mapping[str, Any], what: str) -> None:
        for key in self._own.get(parameter, ()):
            value = entry.get(key)
            if value is not None and (not isinstance(value, torch.Tensor) or value.shape != parameter.shape):
                found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                raise ValueError(
                    f"{what}: {key} has shape {found} where the parameter has {tuple(parameter.shape)}; "
                    "nothing was changed"
                )


def _without_meta(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry; none where it was made for a parameter without memory, so that the class makes it again."""
    return {} if any(isinstance(value, torch.Tensor) and value.is_meta for value in entry.values()) else entry


def _on_cpu(key: str, value: Any) -> Any:
    """State that has no room in a slab, as a parameter in fp32 on the CPU would have it."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.to("cpu", torch.float32 if value.is_floating_point() and key != "step" else value.dtype)
