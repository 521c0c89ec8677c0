"""The models that are known by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from memferry_tools.train.model import Decoder
from memferry_tools.train.presets import PRESETS, ModelShape


def count(shape: ModelShape) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Decoder(shape).parameters())


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("tied", [False, True])
def test_the_parameter_formula_is_the_models(name: str, tied: bool) -> None:
    shape = replace(PRESETS[name].shape, tied=tied)
    assert shape.parameters == count(shape)


@pytest.mark.parametrize(("name", "billions"), [("llama-1b", 1.26), ("llama-3b", 3.43), ("llama-7b", 6.74)])
def test_the_llamas_have_their_published_sizes(name: str, billions: float) -> None:
    assert round(PRESETS[name].shape.parameters / 1e9, 2) == billions


def test_tiny_is_tiny() -> None:
    assert 10e6 <= PRESETS["tiny"].shape.parameters <= 25e6


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_heads_divide_the_hidden_size_evenly(preset: object) -> None:
    shape = preset.shape  # type: ignore[attr-defined]
    assert shape.hidden % shape.heads == 0
    assert shape.hidden // shape.heads % 2 == 0
