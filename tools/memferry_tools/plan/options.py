"""What ``memferry plan`` and ``memferry simulate`` can be told, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memferry_allocator import InvalidRequestError, parse_size

from ..errors import ToolError
from ..train.presets import find_preset

DEFAULT = "llama-1b"
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class Model:
    """Which model, and with what micro-batch; None takes the preset's.  With neither preset nor config it is that
    of the profile, or the default preset without one.

    Attributes
    ----------
    preset : str or None
    config : Path or None
        A Hugging Face ``config.json``, in place of a preset.
    shape : str or None
        Sizes in place of the model's own.
    checkpointing : str
        on, off or auto: whether blocks recompute, or the planner may choose for each.
    """

    preset: str | None
    config: Path | None
    shape: str | None
    micro_batch: int | None
    sequence: int | None
    dtype: str
    checkpointing: str
    tied: bool


@dataclass(frozen=True)
class Host:
    """Which machine.

    Attributes
    ----------
    profile, topology : Path or None
    fixture : str or None
        A machine that comes with MemFerry.
    device, ranks : int
    helpers : bool
    """

    profile: Path | None
    topology: Path | None
    fixture: str | None
    device: int
    ranks: int
    helpers: bool


def build_model(
    *,
    preset: str | None,
    config: str | None,
    micro_batch: int | None,
    sequence: int | None,
    dtype: str,
    checkpointing: str | None,
    tied: bool,
    shape: str | None = None,
    **_: Any,
) -> Model:
    """A model from what a user writes.

    Raises
    ------
    ToolError
        Something that makes no sense; the message begins with the option's name.
    """
    if preset is not None and config is not None:
        raise ToolError("--preset: give it, or --config, but not both")
    if config is None:
        find_preset(preset or DEFAULT)
    if dtype not in DTYPES:
        raise ToolError(f"--dtype: {dtype!r} is not one of {', '.join(DTYPES)}")
    for name, value in (("--micro-batch", micro_batch), ("--seq", sequence)):
        if value is not None and value < 1:
            raise ToolError(f"{name}: {value} is not 1 or more")
    if checkpointing not in (None, "on", "off", "auto"):
        raise ToolError(f"--checkpointing: {checkpointing!r} is not on, off or auto")
    if checkpointing is None:
        checkpointing = "on"
        if config is None and not find_preset(preset or DEFAULT).checkpointing:
            checkpointing = "off"
    return Model(
        preset, path(config, "--config"), shape, micro_batch, sequence, DTYPES[dtype], checkpointing, tied
    )


def build_host(
    *,
    profile: str | None,
    topology: str | None,
    fixture: str | None,
    device: int,
    ranks: int,
    helpers: bool,
    **_: Any,
) -> Host:
    """A machine from what a user writes; errors as for `build_model`."""
    if topology is not None and fixture is not None:
        raise ToolError("--topology: give it, or --fixture, but not both")
    if device < 0:
        raise ToolError(f"--device: {device} is not an ordinal")
    if device and topology is None and fixture is None:
        raise ToolError("--device: name the machine that it is a device of: --topology or --fixture")
    if ranks < 1:
        raise ToolError(f"--ranks: {ranks} is not 1 or more")
    if helpers and topology is None and fixture is None:
        raise ToolError("--helpers: name the machine whose devices help: --topology or --fixture")
    return Host(path(profile, "--profile"), path(topology, "--topology"), fixture, device, ranks, helpers)


def path(text: str | None, name: str) -> Path | None:
    """A path that is one."""
    if text == "":
        raise ToolError(f"{name}: the name is empty; leave the option out, or name a file")
    return None if text is None else Path(text)


def size(text: str | None, name: str) -> int | None:
    """Bytes that a text means."""
    if text is None:
        return None
    try:
        return parse_size(text, name=name)
    except InvalidRequestError as error:
        raise ToolError(str(error)) from None
