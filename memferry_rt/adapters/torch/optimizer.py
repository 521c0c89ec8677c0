"""The user's own optimizer object, with the update moved into the runtime.

It stays what it was: schedulers built on it keep working, and its state is the runtime's, as tensors.
"""

from __future__ import annotations

import abc
import functools
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...errors import UnsupportedError
from .groups import GroupMembers, why_no_group
from .layer import LayerState
from .state import OptimizerState

Whole = Callable[[LayerState, int, str], torch.Tensor]


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


class OptimizerPatch(abc.ABC):
    """Replaces, on one optimizer object, what must go through the runtime; `restore` undoes it.

    What its state is like, and what a step captures, is a subclass's matter.

    Parameters
    ----------
    optimizer : Optimizer
    home : mapping of Parameter to (LayerState, index)
    step : callable
        The runtime's step.
    settle : callable
        Blocks until all updates under way are done.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        home: Mapping[nn.Parameter, tuple[LayerState, int]],
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
        self._own: dict[nn.Parameter, dict[str, torch.Tensor]] = {}  # the runtime's tensors, as the user sees them
        self._members = GroupMembers(optimizer)
        self._adopt_state()
        self._replace()
        self.tell(grad_norm=None, skipped_steps=0)

    # -- what a subclass knows ------------------------------------------------------------------------
    @abc.abstractmethod
    def count(self, parameter: nn.Parameter) -> Any:
        """Take a parameter's part in the step that is being made: what its update needs beside the settings."""

    @abc.abstractmethod
    def open_state(self, parameter: nn.Parameter) -> OptimizerState:
        """A parameter's live state, where it is at home."""

    @abc.abstractmethod
    def _capture(self, group: dict[str, Any]) -> Any:
        """A group's settings as they are now."""

    @abc.abstractmethod
    def _adopt_state(self) -> None:
        """Move what state there is into the slabs."""

    @abc.abstractmethod
    def _load_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """As `Optimizer.load_state_dict`, with state kept in fp32 and copied into the slabs."""

    @abc.abstractmethod
    def _hand_back(self, parameter: nn.Parameter, own: dict[str, torch.Tensor]) -> None:
        """Make a parameter's state that of a plain optimizer."""

    @abc.abstractmethod
    def _replaced(self, parameter: nn.Parameter) -> bool:
        """Whether ``optimizer.state`` has something else in place of the runtime's own tensors."""

    @abc.abstractmethod
    def _check_shapes(self, parameter: nn.Parameter, entry: dict[str, Any], what: str) -> None:
        """Refuse an entry that does not fit its parameter."""

    @abc.abstractmethod
    def _adopt_entries(self, entries: list[tuple[nn.Parameter, dict[str, Any]]]) -> None:
        """Make entries of ``optimizer.state`` live; what is missing in them is as before the first step."""

    # -- what the runtime needs -----------------------------------------------------------------------
    def adopt_replaced(self) -> None:
        """Take over what the user has put into ``optimizer.state`` in place of the runtime's own tensors."""
        replaced = [parameter for parameter in self._own if self._replaced(parameter)]
        if not replaced:
            return
        self._settle()
        entries = [(parameter, self.optimizer.state.get(parameter, {})) for parameter in replaced]
        for parameter, entry in entries:
            self._check_shapes(parameter, entry, "optimizer.state")
        self._adopt_entries(entries)

    def settings(self) -> list[Any]:
        """Every group's settings as they are now.

        Raises
        ------
        UnsupportedError
            A setting without a counterpart, or parameters that have changed groups.
        """
        self._members.check()
        return [self._capture(group) for group in self.optimizer.param_groups]

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

    def repoint(self, layer: LayerState) -> None:
        """A layer's state has moved: the tensors in ``optimizer.state`` stay, and show its new home."""
        for index, parameter in enumerate(layer.parameters):
            if parameter in self._own:
                for key in layer.layout.slots[index].state:
                    self._own[parameter][key].data = layer.in_shape(index, layer.state(index, key))

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
            self._hand_back(parameter, own)
        for hook in self._hooks:
            hook.remove()

    # -- state of which other hosts have a part ---------------------------------------------------------
    def show_whole(self, begin: Callable[[str], None], whole: Whole) -> None:
        """Let ``state_dict()`` have copies of the whole state; all ranks call it.

        Parameters
        ----------
        begin : callable
            Meets the other ranks, for what it says.
        whole : callable of (layer, index, key)
            A copy of all of a parameter's state.
        """

        def complete(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            begin("state_dict()")
            entries = dict(state_dict["state"])
            numbers = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            for number, parameter in enumerate(numbers):
                known = self._whole_of(parameter, whole) if parameter in self._own else {}
                if number in entries:
                    entries[number] = {
                        key: known[key] if key in known else _copy(value) for key, value in entries[number].items()
                    }
            return {**state_dict, "state": entries}

        self._hooks.append(self.optimizer.register_state_dict_post_hook(complete))

    def gather(self, whole: Whole) -> None:
        """Exchange the state for copies of the whole, which `restore` hands back; all ranks call it."""
        for parameter, own in self._own.items():
            entry = self.optimizer.state.get(parameter, {})
            for key, value in self._whole_of(parameter, whole).items():
                if entry.get(key) is own[key]:
                    entry[key] = value
                own[key] = value

    def _whole_of(self, parameter: nn.Parameter, whole: Whole) -> dict[str, torch.Tensor]:
        layer, index = self._home[parameter]
        return {key: whole(layer, index, key) for key in layer.layout.slots[index].state}

    # -- state ------------------------------------------------------------------------------------------
    def _updated(self) -> list[nn.Parameter]:
        """The parameters that the optimizer updates, in its order."""
        return [
            parameter
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            if parameter in self._home and parameter.requires_grad
        ]

    def _apart(self, states: list[tuple[nn.Parameter, dict[str, Any]]]) -> list[dict[str, Any]]:
        """The values of states, of which those that lie in other places of the slabs are copies.

        So what lies in the slabs may be overwritten before it is read.
        """
        slabs = {tensor.untyped_storage().data_ptr() for own in self._own.values() for tensor in own.values()}

        def apart(value: Any, own: torch.Tensor | None) -> Any:
            if isinstance(value, torch.Tensor) and value is not own and value.layout is torch.strided:
                return value.clone() if value.untyped_storage().data_ptr() in slabs else value
            return value

        return [
            {key: apart(value, self._own.get(parameter, {}).get(key)) for key, value in state.items()}
            for parameter, state in states
        ]

    def _renew(self, parameter: nn.Parameter, key: str) -> torch.Tensor:
        """A new tensor over a parameter's state, which is about to be rewritten.

        Whoever keeps the one before keeps its values, as in PyTorch.
        """
        layer, index = self._home[parameter]
        own = self._own[parameter]
        if key in own:
            known = weakref.ref(own.pop(key))
            kept = known()
            if kept is not None:
                kept.data = kept.to("cpu", copy=True)
        own[key] = layer.in_shape(index, layer.state(index, key))
        return own[key]

    def _put(self, parameter: nn.Parameter, key: str, value: torch.Tensor | None) -> None:
        """Write a parameter's state where it lies; zeros by default."""
        layer, index = self._home[parameter]
        layer.put_state(index, key, value)

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
        self._hooks = [optimizer.register_state_dict_pre_hook(lambda _: self._settle())]


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _mark_called(step: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the mark by which an LR scheduler sees that the optimizer has stepped."""

    @functools.wraps(step)
    def marked(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return step(optimizer, *args, **kwargs)

    marked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return marked
