"""The estimate of what torch needs for a step beside the weights."""

from __future__ import annotations

from dataclasses import replace

from memferry_tools.train.activations import WORKSPACES, torch_memory
from memferry_tools.train.recipe import Recipe


def test_weights_do_not_count(recipe: Recipe) -> None:
    deep = replace(recipe, shape=replace(recipe.shape, hidden=256, ffn=1024, layers=24), micro_batch=1, seq=4)
    assert torch_memory(deep) - WORKSPACES < deep.weight_nbytes / 4


def test_activations_count_and_checkpointing_saves_them(recipe: Recipe) -> None:
    long = replace(recipe, micro_batch=16, seq=256)
    kept = torch_memory(long) - WORKSPACES
    shape = long.shape
    at_least = 4 * long.micro_batch * long.seq * shape.layers * (6 * shape.hidden + 3 * shape.ffn)
    assert at_least < kept < 4 * at_least
    assert torch_memory(replace(long, checkpointing=True)) - WORKSPACES < 0.7 * kept
