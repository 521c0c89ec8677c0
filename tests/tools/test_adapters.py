"""``memferry train --adapters``: a frozen model, and thin matrices beside it that alone train."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from memferry_rt.adapters.torch.convert import plan_layouts
from memferry_rt.adapters.torch.cut import cut_layers
from memferry_rt.adapters.torch.early import host_nbytes
from memferry_tools.train.adapters import AdaptedLinear, add_adapters
from memferry_tools.train.initial import model_on_cpu
from memferry_tools.train.model import Decoder
from memferry_tools.train.presets import PRESETS
from memferry_tools.train.recipe import Recipe

from .conftest import SMALL, Command

RANK = 4


def test_it_is_the_base_at_first_and_its_adapters_add_to_it(recipe: Recipe) -> None:
    base, adapted = model_on_cpu(recipe), model_on_cpu(replace(recipe, adapters=RANK))
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    assert torch.equal(base(tokens, tokens), adapted(tokens, tokens))
    layer = adapted.blocks[0].attention.qkv
    assert isinstance(layer, AdaptedLinear)
    torch.nn.init.normal_(layer.adapter.up.weight)
    assert not torch.equal(base(tokens, tokens), adapted(tokens, tokens))
    x = torch.randn(3, SMALL.hidden)
    both = layer.base.weight + layer.adapter.up.weight @ layer.adapter.down.weight
    torch.testing.assert_close(layer(x), x @ both.T)


def test_adapters_alone_train_and_are_counted(recipe: Recipe) -> None:
    adapted = replace(recipe, adapters=RANK)
    model = model_on_cpu(adapted)
    trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    assert all(".adapter." in name for name in trained)
    assert len(trained) == 4 * SMALL.layers
    assert sum(trained.values()) == adapted.trained_parameters
    assert sum(p.numel() for p in model.parameters()) == adapted.parameters
    assert recipe.trained_parameters == recipe.parameters == SMALL.parameters


def test_the_frozen_weights_of_a_large_model_take_two_bytes_each() -> None:
    shape = PRESETS["llama-7b"].shape
    with torch.device("meta"):
        model = Decoder(shape)
        add_adapters(model, 16)
    trained = {p: ("exp_avg", "exp_avg_sq") for p in model.parameters() if p.requires_grad}
    assert shape.adapter_parameters(16) == sum(p.numel() for p in trained)
    layouts, _ = plan_layouts(cut_layers(model, None), trained, torch.bfloat16)
    at_home = host_nbytes(layouts, 0)
    assert 2 * shape.parameters <= at_home <= 2.1 * shape.parameters
    assert at_home == pytest.approx(2 * shape.parameters + 16 * shape.adapter_parameters(16), rel=1e-4)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--mode", "blocks.*=ring+inplace"],
        pytest.param([], marks=pytest.mark.slow),
        pytest.param(["--checkpointing", "--dtype", "bf16"], marks=pytest.mark.slow),
        pytest.param(["--tied"], marks=pytest.mark.slow),
    ],
)
def test_a_run_has_the_bits_of_plain_pytorch(train: Command, arguments: list[str]) -> None:
    outcome = train("--steps", "3", "--verify", "--adapters", str(RANK), "--lr", "0.1", *arguments)
    assert (outcome.status, outcome.err) == (0, "")
    assert "identical to the bit with plain PyTorch" in outcome.out
    assert f"{4 * SMALL.layers} parameters of {SMALL.adapter_parameters(RANK):,} values" in outcome.out


def test_host_memory_is_that_of_the_weights(train: Command, tmp_path: Path) -> None:
    """Sixteen bytes for each parameter that trains, in bf16 two for the others; slabs are cut at 256."""
    results = tmp_path / "results.json"
    arguments = ["--adapters", "1", "--dtype", "bf16", "--steps", "2", "--json", str(results)]
    assert train(*arguments).status == 0
    content = json.loads(results.read_text())
    trained, total = SMALL.adapter_parameters(1), SMALL.parameters
    assert content["settings"]["trained_parameters"] == trained
    assert content["report"]["parameters"] == total + trained
    tensors = 4 * SMALL.layers
    most = 2 * (total + trained) + 14 * trained + 256 * (5 * tensors + 7 * SMALL.layers + 3)
    assert content["report"]["host_nbytes"] <= -(-most // 4096) * 4096


def test_a_run_goes_on_from_its_checkpoint_and_not_from_another(train: Command, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    assert train("--adapters", "2", "--steps", "2", "--save", folder).status == 0
    assert train("--adapters", "2", "--steps", "4", "--resume", folder, "--verify").status == 0
    other = train("--adapters", "3", "--steps", "4", "--resume", folder)
    assert other.status == 2
    assert "has adapters 2, and this one 3" in other.err


@pytest.mark.parametrize(("rank", "part"), [("0", "0 is less than 1"), (f"{10**20}", "the model's hidden size")])
def test_a_rank_that_makes_no_sense_is_refused(train: Command, rank: str, part: str) -> None:
    outcome = train("--adapters", rank)
    assert outcome.status == 2
    assert outcome.err.startswith("memferry: error: --adapters: ")
    assert part in outcome.err
