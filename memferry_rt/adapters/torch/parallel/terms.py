"""What ranks that train together can be told, and what they must have alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ....errors import UnsupportedError
from ....layout import LayerLayout
from ....options import OffloadOptions
from ..budget import Budget
from ..cut import Cut
from ..layer import Geometry
from .ranks import Ranks

OWN = frozenset({"device", "emulated", "helpers"})  # what every rank has for itself


def options_of_rank(options: OffloadOptions, ranks: Ranks) -> OffloadOptions:
    """Options as one rank uses them: on the device that its process has chosen, and no more than ranks can share.

    Raises
    ------
    UnsupportedError
        Something was asked for that ranks cannot share.
    """
    if options.spare_slabs:
        raise UnsupportedError(
            f"spare_slabs={options.spare_slabs} with process_group: updates are not made during backward where "
            "ranks share the host state; leave it out"
        )
    device = options.device
    if device in ("auto", "cuda") and torch.cuda.is_available():
        device = f"cuda:{torch.cuda.current_device()}"
    if device.startswith("cuda:"):
        ranks.device = torch.device(device)
    return dataclasses.replace(options, device=device, spare_slabs=0, accumulate=1)


def refuse_unshared(optimizer: Optimizer, *, in_parts: bool) -> None:
    """Refuse an optimizer whose update cannot be made in parts.

    Raises
    ------
    UnsupportedError
    """
    if not in_parts:
        raise UnsupportedError(
            f"process_group: {type(optimizer).__name__} updates whole parameters, and ranks share them in parts; "
            "use AdamW, Adam, SGD, Adagrad(fused=True) or memferry_rt.Lion"
        )


def facts(
    options: OffloadOptions,
    optimizer: Optimizer,
    cuts: Sequence[Cut],
    layouts: Sequence[LayerLayout],
    geometries: Sequence[Sequence[Geometry]],
    budget: Budget,
) -> dict[str, str]:
    """What must be alike on all ranks, by names that a user understands."""
    found = {"the version of torch": torch.__version__, "the optimizer": type(optimizer).__name__}
    for field in dataclasses.fields(options):
        if field.name not in OWN:
            found[field.name] = repr(getattr(options, field.name))
    found["the number of layers"] = str(len(layouts))
    for cut, layout, forms in zip(cuts, layouts, geometries, strict=True):
        for (name, _), slot, form in zip(cut.parameters, layout.slots, forms, strict=True):
            found[f"parameter {name}"] = f"{form} of layer {layout.name}, {_kind(slot.spec.trainable)}"
    names: dict[Any, str] = {parameter: name for cut in cuts for name, parameter in cut.parameters}
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            members = [names[parameter] for parameter in group["params"]]
            found[f"{key} of parameter group {number}"] = repr(members if key == "params" else _plain(value))
    found.update(_state_facts(optimizer, names))
    found["the plan of device memory"] = repr(dataclasses.replace(budget, device=None))
    return found


def _kind(trainable: bool) -> str:
    return "trained" if trainable else "frozen"


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _state_facts(optimizer: Optimizer, names: Mapping[Any, str]) -> dict[str, str]:
    """Of a state that is there already; of a tensor its sum, which differs where the rest does."""
    return {
        f"optimizer.state {key!r} of {names[parameter]}": repr(
            float(value.detach().sum(dtype=torch.float64)) if isinstance(value, torch.Tensor) else value
        )
        for parameter, state in optimizer.state.items()
        if parameter in names
        for key, value in state.items()
    }
