"""Training state by name, wherever it lives: what a checkpoint saves and loads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from ...errors import CheckpointError

MOMENTS = ("exp_avg", "exp_avg_sq")
Moments = dict[str, torch.Tensor]


class OptimizerState(Protocol):
    """A parameter's part of the optimizer's state."""

    def step(self) -> float:
        """How often the parameter has been updated."""

    def moments(self) -> Moments:
        """The live ``exp_avg`` and ``exp_avg_sq``, in the parameter's shape; maybe none before its first step."""

    def begin(self, step: float) -> Moments:
        """Set the step number, and give the moments to be filled."""

    def clear(self) -> None:
        """As before the first step."""


@dataclass(frozen=True)
class ParameterState:
    """A parameter's live state: tensors in its shape, of any stride.

    Attributes
    ----------
    name : str
    parameter : Parameter
    weight : Tensor
        What the model computes with.
    master : Tensor or None
        Its fp32 master, if it has one beside it.
    optimizer : OptimizerState or None
        None if the optimizer does not update it.
    """

    name: str
    parameter: nn.Parameter
    weight: torch.Tensor
    master: torch.Tensor | None
    optimizer: OptimizerState | None

    @property
    def value(self) -> torch.Tensor:
        """The most exact form of the weight."""
        return self.weight if self.master is None else self.master

    @property
    def steps(self) -> float:
        """How often it has been updated."""
        return 0.0 if self.optimizer is None else self.optimizer.step()

    @property
    def begun(self) -> bool:
        """Whether its optimizer state is another than before the first step, whatever the step number."""
        if self.optimizer is None:
            return False
        return self.steps != 0 or any(bool(moment.any()) for moment in self.optimizer.moments().values())


class PlainState:
    """See `OptimizerState`; the state is what a plain optimizer keeps."""

    def __init__(self, optimizer: Optimizer, group: dict[str, Any], parameter: nn.Parameter) -> None:
        self._optimizer = optimizer
        self._group = group
        self._parameter = parameter

    def step(self) -> float:
        return float(self._optimizer.state.get(self._parameter, {}).get("step", 0.0))

    def moments(self) -> Moments:
        state = self._optimizer.state.get(self._parameter)
        return {key: state[key] for key in MOMENTS} if state else {}

    def begin(self, step: float) -> Moments:
        parameter, state = self._parameter, self._optimizer.state[self._parameter]
        on_device = self._group.get("capturable") or self._group.get("fused")
        device = parameter.device if on_device else torch.device("cpu")
        state["step"] = torch.tensor(step, dtype=torch.float32, device=device)
        for key in MOMENTS:
            if key not in state:
                state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return self.moments()

    def clear(self) -> None:
        self._optimizer.state.pop(self._parameter, None)


@contextlib.contextmanager
def plain_state(model: nn.Module, optimizer: Optimizer) -> Iterator[list[ParameterState]]:
    """The state of a model and an optimizer that are not offloaded."""
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    states = []
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise CheckpointError(f"{name} is on the meta device; give it memory first, for example to_empty()")
        group = groups.get(parameter)
        mine = None if group is None else PlainState(optimizer, group, parameter)
        states.append(ParameterState(plain_name(name), parameter, parameter.detach(), None, mine))
    yield states


def plain_name(name: str) -> str:
    """A parameter's or buffer's name as it is where nothing is wrapped by `torch.compile`."""
    return name.replace("_orig_mod.", "")


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that a state dict would have, each once, by name.

    Raises
    ------
    CheckpointError
        A module keeps state that is not tensors.
    """
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise CheckpointError(
                f"{path or 'the model'} ({type(module).__name__}) keeps state that is not tensors "
                "(get_extra_state), which a checkpoint cannot hold; save it in extra, without that method"
            )
        for key, buffer in module._buffers.items():
            if buffer is None or key in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            found[plain_name(f"{path}.{key}" if path else key)] = buffer
    return found


def check_adam(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse optimizers whose state a checkpoint does not hold whole.

    Raises
    ------
    CheckpointError
    """
    if not isinstance(optimizer, Adam):
        raise CheckpointError(
            f"optimizer: the state of {type(optimizer).__name__} is not known to checkpoints; they hold that of "
            "torch.optim.AdamW and Adam"
        )
    known = set(model.parameters())
    for number, group in enumerate(optimizer.param_groups):
        if group.get("amsgrad"):
            raise CheckpointError("optimizer: amsgrad=True is not supported by checkpoints")
        if not known.issuperset(group["params"]):
            raise CheckpointError(f"optimizer: a parameter of group {number} does not belong to the model")


def optimizer_type(optimizer: Optimizer) -> str:
    return "AdamW" if isinstance(optimizer, AdamW) else "Adam"
