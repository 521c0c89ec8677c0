"""`save` and `load`: training state to a folder, and back under any budget and driver, or in plain PyTorch."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...checkpoint import CheckpointReader, TensorFile, TensorSpec, write_checkpoint
from ...checkpoint.manifest import check_json, runtime_version
from ...checkpoint.tensorfile import in_file_order
from ...errors import CheckpointError
from .fitting import check_fits, saved_state
from .offload import is_offloaded, runtime_of
from .pieces import DTYPE_NAMES, DTYPES, Source, as_bytes, is_rounding
from .state import (
    Forms,
    ParameterState,
    check_holdable,
    is_adam,
    persistent_buffers,
    plain_state,
)

MODEL, OPTIMIZER = "model", "optimizer"
MASTER = "master"  # as `ParameterState.whole` names it
ROUNDED = "weight"  # prefix of weights that are not their masters, rounded
# Settings of a group that say how an update is computed, not what it is, and its members.
HOW = frozenset({"params", "param_names", "fused", "foreach", "capturable", "differentiable"})


def save(path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer, *, extra: Any = None) -> None:
    """Save all training state: weights and fp32 masters, buffers, the optimizer's state, its settings.

    Tensors are streamed from where they lie: it takes no device memory, and no host memory beyond some MiB.
    Updates under way are waited for.  The folder holds a whole checkpoint at every moment: until the new one is
    complete and durable it is the last one, whatever ends the process.  The disk must have room for both.

    Of several ranks that share a model the first writes, and another returns at once: call it on all, or, where
    they are on one host, on the first alone.  State that other hosts have comes to it one tensor at a time.

    Gradients, and the states of random generators, schedulers and scalers are not part of it; what resuming needs
    of them goes into `extra`.

    Parameters
    ----------
    path : str or path
        A folder; made if it is not there.
    model, optimizer
        Offloaded or not.
    extra : optional
        Numbers, text, None, and lists and dicts of them; `load` gives it back, with tuples as lists.

    Raises
    ------
    CheckpointError
        It cannot be written, or something cannot be held by a checkpoint; what was saved before is untouched.
    """
    check_json(extra, "extra")
    check_holdable(model, optimizer)
    buffers = persistent_buffers(model)
    if is_offloaded(model) and not runtime_of(model).saves:
        runtime_of(model).help_save()
        return
    with _state(model, optimizer, save=True) as states:
        begun = [state for state in states if state.begun]
        tensors: dict[str, dict[str, Saved]] = {
            MODEL: {**_values(states), **{name: Saved(buffer) for name, buffer in buffers.items()}},
            OPTIMIZER: {**dict(_rounded(states)), **dict(_tensors(begun))},
        }
        content = {
            "memferry": runtime_version(),
            "torch": torch.__version__,
            "optimizer": {
                "type": type(optimizer).__name__,
                "groups": _groups(optimizer, states),
                **_optimizer_values(optimizer, begun),
            },
            "extra": extra,
        }
        files = [_file(kind, named) for kind, named in tensors.items()]
        write_checkpoint(Path(path), files, content)


def load(path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer) -> Any:
    """Load what `save` has saved, in place, and give back its ``extra``.

    The model may be offloaded under another budget, pool, driver or compute dtype than the one that was saved, or
    not offloaded at all.  Settings of the parameter groups are loaded too, but not how an update is computed
    (``fused``, ``foreach``, …).  Gradients stay what they are.

    Of several ranks that share a model every one must call it, with the same checkpoint, on each host.

    Everything is read and compared with its checksums before anything is changed.

    Parameters
    ----------
    path : str or path
    model, optimizer
        Of the same parameters, by name and shape, in the same groups.

    Returns
    -------
    extra

    Raises
    ------
    CheckpointError
        There is no checkpoint, it is damaged, or it is of another model or optimizer.  Nothing was changed.
    OffloadError
        A tensor still aliases a weight's device memory.  Nothing was changed.
    RankError
        Another rank has refused.  Nothing was changed.
    """
    check_holdable(model, optimizer)
    buffers = persistent_buffers(model)
    with contextlib.ExitStack() as stack:
        with runtime_of(model).checked("load()") if is_offloaded(model) else contextlib.nullcontext():
            reader = stack.enter_context(CheckpointReader(Path(path)))
            with _state(model, optimizer) as states:
                check_fits(reader, states, buffers, optimizer)
                reader.verify()
        with _state(model, optimizer, write=True) as states, _half_done():
            _load_model(reader, states, buffers)
            _load_optimizer(reader, states)
        _load_groups(optimizer, reader.content["optimizer"]["groups"])
        return reader.content["extra"]


def _state(
    model: nn.Module, optimizer: Optimizer, *, write: bool = False, save: bool = False
) -> contextlib.AbstractContextManager[list[ParameterState]]:
    if is_offloaded(model):
        runtime = runtime_of(model)
        if runtime.patch.optimizer is not optimizer:
            raise CheckpointError("optimizer: it is not the one that the model was offloaded with")
        return runtime.state_at_home(write=write, save=save)
    return plain_state(model, optimizer)


# -- saving ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Saved:
    """A tensor as it is written.

    Attributes
    ----------
    live : Tensor
        Of its form.
    name : str
        As for `ParameterState.whole`.
    state : ParameterState, optional
        Whose it is.
    """

    live: torch.Tensor
    name: str = ""
    state: ParameterState | None = None

    def data(self) -> Iterator[memoryview]:
        return as_bytes(self.live if self.state is None else self.state.whole(self.name, self.live))


def _values(states: list[ParameterState]) -> dict[str, Saved]:
    return {
        state.name: Saved(state.weight) if state.master is None else Saved(state.master, MASTER, state)
        for state in states
    }


def _rounded(states: list[ParameterState]) -> Iterator[tuple[str, Saved]]:
    """The few weights that do not follow from their masters."""
    for state in states:
        if state.master is not None and not is_rounding(state.weight, state.whole(MASTER, state.master)):
            yield f"{ROUNDED}.{state.name}", Saved(state.weight)


def _tensors(begun: list[ParameterState]) -> Iterator[tuple[str, Saved]]:
    for state in begun:
        if state.optimizer is not None:
            for key, tensor in state.optimizer.tensors().items():
                yield f"{key}.{state.name}", Saved(tensor, key, state)


def _optimizer_values(optimizer: Optimizer, begun: list[ParameterState]) -> dict[str, Any]:
    """The state that is no tensor; of other optimizers than Adam also which tensors there are."""
    held = {state.name: state.optimizer for state in begun if state.optimizer is not None}
    if is_adam(optimizer):
        return {"steps": {name: mine.values()["step"] for name, mine in held.items()}}
    return {"state": {name: [list(mine.tensors()), mine.values()] for name, mine in held.items()}}


def _file(kind: str, named: dict[str, Saved]) -> TensorFile:
    tensors = {name: saved.live for name, saved in named.items()}
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES or tensor.layout is not torch.strided or tensor.is_meta:
            raise CheckpointError(
                f"{name}: a checkpoint cannot hold a tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device}"
            )
    specs = in_file_order(
        [TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()]
    )

    def data() -> Iterator[memoryview]:
        for spec in specs:
            yield from named[spec.name].data()

    return TensorFile(kind, specs, data)


def _groups(optimizer: Optimizer, states: list[ParameterState]) -> list[dict[str, Any]]:
    names = {state.parameter: state.name for state in states}
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        settings = {key: _plain(value) for key, value in group.items() if key not in HOW}
        check_json(settings, f"optimizer.param_groups[{number}]")
        groups.append({"settings": settings, "parameters": [names[parameter] for parameter in group["params"]]})
    return groups


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


# -- loading --------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def _half_done() -> Iterator[None]:
    """Say of a file that can suddenly not be read any more that it is too late for changing nothing."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; part of the state is replaced already, so load a whole one now"
        ) from error


def _source(reader: CheckpointReader, kind: str, name: str) -> Source:
    spec = reader.tensors(kind)[name]
    return Source(functools.partial(reader.read_into, kind, name), DTYPES[spec.dtype])


@torch.no_grad()
def _load_model(reader: CheckpointReader, states: list[ParameterState], buffers: dict[str, torch.Tensor]) -> None:
    kept = reader.tensors(OPTIMIZER)
    for state in states:
        value = state.fill(MASTER, state.value, _source(reader, MODEL, state.name).fill)
        rounded = kept.get(f"{ROUNDED}.{state.name}")
        if rounded is not None and DTYPES[rounded.dtype] is state.weight.dtype:
            _source(reader, OPTIMIZER, rounded.name).fill(state.weight)
        elif state.master is not None:
            state.weight.copy_(value)
    for name, buffer in buffers.items():
        _source(reader, MODEL, name).fill(buffer)


@torch.no_grad()
def _load_optimizer(reader: CheckpointReader, states: list[ParameterState]) -> None:
    saved, tensors = saved_state(reader.content["optimizer"]), reader.tensors(OPTIMIZER)
    for state in states:
        if state.optimizer is None:
            continue
        if state.name not in saved:
            state.optimizer.clear()
            continue
        keys, values = saved[state.name]
        specs = {key: tensors[f"{key}.{state.name}"] for key in keys}
        forms: Forms = {key: (DTYPES[spec.dtype], spec.shape) for key, spec in specs.items()}
        live = state.optimizer.begin(forms, values)
        for key, spec in specs.items():
            state.fill(key, live[key], _source(reader, OPTIMIZER, spec.name).fill)


def _load_groups(optimizer: Optimizer, saved: list[dict[str, Any]]) -> None:
    for group, entry in zip(optimizer.param_groups, saved, strict=True):
        for key, value in entry["settings"].items():
            present = group.get(key)
            if isinstance(present, torch.Tensor):
                present.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) and not isinstance(present, list) else value
