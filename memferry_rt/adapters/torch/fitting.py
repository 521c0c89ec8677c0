"""Whether a checkpoint belongs to a model and an optimizer, found out before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ...checkpoint import CheckpointReader, TensorSpec
from ...errors import CheckpointError
from ...layout import MOMENTS
from .pieces import DTYPES
from .state import ParameterState


def check_fits(
    reader: CheckpointReader,
    states: list[ParameterState],
    buffers: dict[str, torch.Tensor],
    optimizer: Optimizer,
) -> None:
    """Compare names, shapes, kinds of dtype, the optimizer's type and its groups.

    Raises
    ------
    CheckpointError
        It names what differs first, and how much does.
    """
    content = reader.content["optimizer"]
    differences = [
        *_model_differences(reader.tensors("model"), states, buffers),
        *_optimizer_differences(content, states, optimizer),
        *_state_differences(saved_state(content), reader.tensors("optimizer"), states),
    ]
    if differences:
        more = f" (and {len(differences) - 1} more differences)" if len(differences) > 1 else ""
        raise CheckpointError(
            f"the checkpoint in {reader.folder} is not of this model and optimizer: {differences[0]}{more}; "
            "nothing was changed"
        )


def _model_differences(
    saved: dict[str, TensorSpec], states: list[ParameterState], buffers: dict[str, torch.Tensor]
) -> Iterator[str]:
    mine = {**{state.name: state.value for state in states}, **buffers}
    for name in dict.fromkeys((*mine, *saved)):
        if name not in saved:
            yield f"it has no {name}"
        elif name not in mine:
            yield f"it has {name}, which the model has not"
        else:
            yield from _tensor_differences(name, saved[name], mine[name])


def _tensor_differences(name: str, saved: TensorSpec, mine: torch.Tensor) -> Iterator[str]:
    dtype = DTYPES[saved.dtype]
    if saved.shape != tuple(mine.shape):
        yield f"{name} has shape {saved.shape} in it and {tuple(mine.shape)} in the model"
    elif dtype is not mine.dtype and not (dtype.is_floating_point and mine.dtype.is_floating_point):
        yield f"{name} is {dtype} in it and {mine.dtype} in the model"


def _optimizer_differences(
    saved: dict[str, Any], states: list[ParameterState], optimizer: Optimizer
) -> Iterator[str]:
    if saved["type"] != type(optimizer).__name__:
        yield f"its optimizer is {saved['type']} and this one {type(optimizer).__name__}"
    if len(saved["groups"]) != len(optimizer.param_groups):
        yield f"it has {len(saved['groups'])} parameter groups and the optimizer {len(optimizer.param_groups)}"
        return
    names = {state.parameter: state.name for state in states}
    for number, (group, entry) in enumerate(zip(optimizer.param_groups, saved["groups"], strict=True)):
        differing = {names[parameter] for parameter in group["params"]} ^ set(entry["parameters"])
        if differing:
            yield f"{min(differing)} is in parameter group {number} of only one of the two"


def saved_state(content: dict[str, Any]) -> dict[str, tuple[Sequence[str], dict[str, Any]]]:
    """For each parameter that has optimizer state in a checkpoint: the names of its tensors, and its values.

    Parameters
    ----------
    content : dict
        What the manifest says of the optimizer.
    """
    if "steps" in content:  # Adam's
        return {name: (MOMENTS, {"step": step}) for name, step in content["steps"].items()}
    return {name: (keys, values) for name, (keys, values) in content["state"].items()}


def _state_differences(
    saved: dict[str, tuple[Sequence[str], dict[str, Any]]],
    tensors: dict[str, TensorSpec],
    states: list[ParameterState],
) -> Iterator[str]:
    mine = {state.name: state for state in states if state.optimizer is not None}
    for name, (keys, _) in saved.items():
        if name not in mine:
            yield f"{name} was trained in it and is not trained here"
            continue
        shape, optimizer = tuple(mine[name].value.shape), mine[name].optimizer
        for key in keys:
            tensor = tensors.get(f"{key}.{name}")
            if tensor is None:
                yield f"it has no {key} of {name}"
            elif optimizer is not None and key in optimizer.shaped and tensor.shape != shape:
                yield f"its {key} of {name} has not the shape {shape}"
