"""Which model is meant: a preset, the sizes of a ``config.json``, or either with some sizes of one's own."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from memferry_rt.plan import Dimensions
from memferry_rt.plan.shapes import most

from ..errors import ToolError
from ..plan.configs import read_config
from .presets import ModelShape, Preset, find_preset

NAMES = tuple(field.name for field in fields(ModelShape) if field.name != "tied")
_ONE = re.compile(r"(\w+)=(\d+)")


def find_model(preset: str, config: Path | None = None, shape: str | None = None) -> tuple[str, Preset]:
    """A model's name, and its sizes with the settings that suit it.

    Parameters
    ----------
    preset : str
        Where no `config` is given.
    config : Path, optional
        A Hugging Face ``config.json`` of a Llama-like model, or its folder.
    shape : str, optional
        Sizes in place of its own, as ``"layers=4,vocabulary=512"``.

    Raises
    ------
    ToolError
        There is no such model, or the sizes make none.
    """
    if config is None:
        name, found = preset, find_preset(preset)
    else:
        name, found = name_of(config), Preset(_decoder(config), 8, 1024, 1e-4, checkpointing=True)
    if shape is not None:
        name, found = f"{name} with {shape}", replace(found, shape=changed(found.shape, shape))
    check_shape(found.shape, "--config" if shape is None and config is not None else "--shape")
    return name, found


def name_of(config: Path) -> str:
    """What a model is called whose sizes are in this file."""
    return (config.parent.name if config.name == "config.json" else config.stem) or "model"


def changed(shape: ModelShape, text: str) -> ModelShape:
    """A shape with the sizes that a text names.

    Raises
    ------
    ToolError
        The text is no list of sizes.
    """
    sizes: dict[str, Any] = {}
    for part in text.split(","):
        found = _ONE.fullmatch(part.strip())
        if found is None or found[1] not in NAMES:
            raise ToolError(
                f"--shape: {part.strip()!r} is no size; write for example layers=4,vocabulary=512; there are "
                + ", ".join(NAMES)
            )
        sizes[found[1]] = int(found[2])
    return replace(shape, **sizes)


def shape_text(size: Dimensions) -> str:
    """The sizes as ``--shape`` takes them."""
    text = f"hidden={size.hidden},layers={size.layers},ffn={size.ffn},heads={size.heads}"
    return f"{text},vocabulary={size.vocabulary}"


def check_shape(shape: ModelShape, option: str) -> None:
    """Refuse sizes of which no decoder can be made.

    Raises
    ------
    ToolError
        The message begins with `option`.
    """
    for name in NAMES:
        value = getattr(shape, name)
        if value is not None and value < 1:
            raise ToolError(f"{option}: {name}: {value} is less than 1")
        if value is not None and value > most(name):
            raise ToolError(f"{option}: {name}: {value} is more than {most(name)}, and no model's")
    if shape.hidden % (2 * shape.heads):
        raise ToolError(
            f"{option}: heads: {shape.heads} do not cut a hidden size of {shape.hidden} into even widths"
        )
    if shape.heads % (shape.kv_heads or shape.heads):
        raise ToolError(f"{option}: kv_heads: {shape.kv_heads} do not divide {shape.heads} heads")


def _decoder(config: Path) -> ModelShape:
    """The sizes in a file, if a decoder of ``memferry train`` can have them."""
    size, _ = read_config(config)
    if not size.gated or size.positions or size.types:
        raise ToolError(
            f"--config: {config} is of a model that is not like Llama, and memferry train makes no others; a file "
            "of model_type llama or mistral would work"
        )
    kv_heads = (size.kv_width or size.hidden) * size.heads // size.hidden
    alike = kv_heads == size.heads
    return ModelShape(
        size.hidden,
        size.layers,
        size.ffn,
        size.heads,
        size.vocabulary,
        size.tied,
        kv_heads=None if alike else kv_heads,
    )
