"""The command that trains the largest model, and what may be said of it before it is found."""

from __future__ import annotations

import shlex
from pathlib import Path

from memferry_rt.plan import Largest, LayerKind

from ..errors import ToolError
from ..train.presets import ModelShape
from ..train.shapes import changed, shape_text

VOCABULARY = 32000
STEPS = 3
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def vocabulary_of(shape: str) -> int:
    """The vocabulary that ``--shape`` asks for: the one size that ``--largest`` does not find.

    Raises
    ------
    ToolError
        It asks for another size.
    """
    nothing = ModelShape(0, 0, 0, 0, VOCABULARY)
    asked = changed(nothing, shape)
    if asked != ModelShape(0, 0, 0, 0, asked.vocabulary) or asked.vocabulary < 1:
        raise ToolError(
            "--shape: --largest finds the sizes; name the vocabulary alone, at least 1, or leave it out"
        )
    return asked.vocabulary


def train_command(largest: Largest, device_memory: int, host_memory: int, config: Path | None) -> str:
    """What trains it within both budgets, for some steps, on as many devices as were planned for."""
    plan = largest.planned.plan
    command = ["memferry"]
    if plan.ranks > 1:
        command = ["torchrun", "--nproc-per-node", str(plan.ranks), "-m", "memferry_tools"]
    sizes = ["--shape", shape_text(largest.size)] if config is None else ["--config", str(config)]
    recomputed = any(layer.recompute for layer in plan.layers if layer.kind is LayerKind.BLOCK)
    words = [*command, "train", *sizes]
    words += ["--dtype", "fp32" if plan.dtype == "float32" else "bf16"]
    words += ["--micro-batch", str(plan.micro_batch), "--seq", str(plan.sequence)]
    words += ["--checkpointing" if recomputed else "--no-checkpointing"]
    words += ["--device-memory", _exact(device_memory), "--host-memory", _exact(host_memory)]
    return shlex.join([*words, "--steps", str(STEPS)])


def _exact(nbytes: int) -> str:
    """A size as options take it, to the byte."""
    for unit, size in _UNITS:
        if nbytes % size == 0:
            return f"{nbytes // size}{unit}"
    return str(nbytes)
