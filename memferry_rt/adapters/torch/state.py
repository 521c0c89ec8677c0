"""Training state by name, wherever it lives: what a checkpoint saves and loads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from ...checkpoint.manifest import check_json
from ...errors import CheckpointError
from ...layout import MOMENTS

Tensors = dict[str, torch.Tensor]
Forms = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
Read = Callable[[str, torch.Tensor], torch.Tensor]  # the whole of a live tensor of this name


class OptimizerState(Protocol):
    """A parameter's part of the optimizer's state."""

    @property
    def shaped(self) -> tuple[str, ...]:
        """Its tensors that have the parameter's shape, whenever they are there, as far as that is known."""

    def begun(self, read: Read) -> bool:
        """Whether it is another than before the first step, whatever the step number."""

    def tensors(self) -> Tensors:
        """The live tensors, by name; maybe none before the first step."""

    def values(self) -> dict[str, Any]:
        """What else there is: JSON."""

    def begin(self, forms: Forms, values: dict[str, Any]) -> Tensors:
        """Make it one of these values and tensors of these forms, and give the tensors to be filled."""

    def clear(self) -> None:
        """As before the first step."""


class PartialState(Protocol):
    """State of which this host has a part, and other hosts the rest: the tensors with these names."""

    @property
    def names(self) -> frozenset[str]:
        """ "master", or as in ``optimizer.state``."""

    def whole(self, name: str) -> torch.Tensor:
        """A copy of all of a tensor, in the parameter's shape."""

    def put(self, name: str, value: torch.Tensor) -> None:
        """Take over what this host has of it."""


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
    partial : PartialState or None
        What of this is not all here; it is read by `whole` and written by `fill`.
    """

    name: str
    parameter: nn.Parameter
    weight: torch.Tensor
    master: torch.Tensor | None
    optimizer: OptimizerState | None
    partial: PartialState | None = None

    @property
    def value(self) -> torch.Tensor:
        """The most exact form of the weight."""
        return self.weight if self.master is None else self.master

    @property
    def begun(self) -> bool:
        """Whether it has optimizer state that is another than before the first step."""
        return self.optimizer is not None and self.optimizer.begun(self.whole)

    def whole(self, name: str, live: torch.Tensor) -> torch.Tensor:
        """All values of a live tensor; its name is "master", or as in ``optimizer.state``."""
        return live if self.partial is None or name not in self.partial.names else self.partial.whole(name)

    def fill(self, name: str, live: torch.Tensor, source: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """Let a source fill a live tensor, named as for `whole`, and give all of what it has filled."""
        if self.partial is None or name not in self.partial.names:
            source(live)
            return live
        whole = torch.empty_like(live)
        source(whole)
        self.partial.put(name, whole)
        return whole


class PlainMoments:
    """See `OptimizerState`; what a plain Adam keeps."""

    shaped = MOMENTS

    def __init__(self, optimizer: Optimizer, group: dict[str, Any], parameter: nn.Parameter) -> None:
        self._optimizer = optimizer
        self._group = group
        self._parameter = parameter

    def begun(self, read: Read) -> bool:
        return self._step() != 0 or any(bool(read(key, moment).any()) for key, moment in self.tensors().items())

    def _step(self) -> float:
        return float(self._optimizer.state.get(self._parameter, {}).get("step", 0.0))

    def tensors(self) -> Tensors:
        state = self._optimizer.state.get(self._parameter)
        return {key: state[key] for key in MOMENTS} if state else {}

    def values(self) -> dict[str, Any]:
        return {"step": self._step()}

    def begin(self, forms: Forms, values: dict[str, Any]) -> Tensors:
        parameter, state = self._parameter, self._optimizer.state[self._parameter]
        device = step_device(self._group, parameter)
        state["step"] = torch.tensor(values["step"], dtype=torch.float32, device=device)
        for key in MOMENTS:
            if key not in state:
                state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return self.tensors()

    def clear(self) -> None:
        self._optimizer.state.pop(self._parameter, None)


class Entry:
    """See `OptimizerState`; the entry that an optimizer of any class has in its ``state``.

    Parameters
    ----------
    make : callable of (key, dtype, shape), optional
        Gives the tensor for new state; by default one where `Optimizer.load_state_dict` would put it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        group: dict[str, Any],
        parameter: nn.Parameter,
        *,
        shaped: tuple[str, ...] = (),
        make: Callable[[str, torch.dtype, tuple[int, ...]], torch.Tensor] | None = None,
    ) -> None:
        self.shaped = shaped
        self._optimizer = optimizer
        self._group = group
        self._parameter = parameter
        self._make = make or self._like_pytorch

    @property
    def _entry(self) -> dict[str, Any]:
        entry: dict[str, Any] = self._optimizer.state.get(self._parameter, {})
        return entry

    def begun(self, read: Read) -> bool:
        return bool(self._entry)

    def tensors(self) -> Tensors:
        return {key: value for key, value in self._entry.items() if isinstance(value, torch.Tensor)}

    def values(self) -> dict[str, Any]:
        rest = {key: value for key, value in self._entry.items() if not isinstance(value, torch.Tensor)}
        check_json(rest, f"optimizer.state of {type(self._optimizer).__name__}")
        return rest

    def begin(self, forms: Forms, values: dict[str, Any]) -> Tensors:
        tensors = {key: self._make(key, dtype, shape) for key, (dtype, shape) in forms.items()}
        self._optimizer.state[self._parameter] = {**tensors, **values}
        return tensors

    def clear(self) -> None:
        self._optimizer.state.pop(self._parameter, None)

    def _like_pytorch(self, key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        parameter = self._parameter
        if key == "step":
            return torch.empty(shape, dtype=dtype, device=step_device(self._group, parameter))
        if shape == tuple(parameter.shape):
            return torch.empty_like(parameter, memory_format=torch.preserve_format, requires_grad=False)
        return torch.empty(shape, dtype=parameter.dtype, device=parameter.device)


def step_device(group: dict[str, Any], parameter: nn.Parameter) -> torch.device:
    """Where PyTorch keeps a parameter's step number."""
    return parameter.device if group.get("capturable") or group.get("fused") else torch.device("cpu")


@contextlib.contextmanager
def plain_state(model: nn.Module, optimizer: Optimizer) -> Iterator[list[ParameterState]]:
    """The state of a model and an optimizer that are not offloaded."""
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    states = []
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise CheckpointError(f"{name} is on the meta device; give it memory first, for example to_empty()")
        group = groups.get(parameter)
        kind = PlainMoments if is_adam(optimizer) else Entry
        mine = None if group is None else kind(optimizer, group, parameter)
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


def check_holdable(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse optimizers whose state a checkpoint does not hold whole.

    Raises
    ------
    CheckpointError
    """
    known = set(model.parameters())
    for number, group in enumerate(optimizer.param_groups):
        if is_adam(optimizer) and group.get("amsgrad"):
            raise CheckpointError("optimizer: amsgrad=True is not supported by checkpoints")
        if not known.issuperset(group["params"]):
            raise CheckpointError(f"optimizer: a parameter of group {number} does not belong to the model")
    if not known.issuperset(optimizer.state):
        raise CheckpointError(
            f"optimizer: {type(optimizer).__name__} has state that is no parameter's; a checkpoint cannot hold it"
        )


def is_adam(optimizer: Optimizer) -> bool:
    """Whether it is one of PyTorch's own two; a subclass may keep and do anything."""
    return type(optimizer) in (Adam, AdamW)
