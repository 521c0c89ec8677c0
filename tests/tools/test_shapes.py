"""Models that no preset is: sizes from a ``config.json``, sizes of one's own, and the largest of two memories."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from memferry_tools.errors import ToolError
from memferry_tools.plan.target import dimensions
from memferry_tools.train.model import Decoder
from memferry_tools.train.presets import PRESETS, ModelShape
from memferry_tools.train.shapes import find_model, shape_text

from .conftest import Command

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    folder = tmp_path / "small-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


def test_a_config_is_a_shape(config: Path) -> None:
    name, found = find_model("tiny", config / "config.json")
    assert name == "small-llama"
    assert found.shape == ModelShape(32, 2, 64, 4, 300, kv_heads=2)
    with torch.device("meta"):
        made = sum(parameter.numel() for parameter in Decoder(found.shape).parameters())
    assert found.shape.parameters == dimensions(found.shape).parameters == made


def test_sizes_go_over_those_of_a_preset_or_a_config(config: Path) -> None:
    _, found = find_model("llama-1b", None, "layers=3, vocabulary=512")
    assert found.shape == ModelShape(2048, 3, 5632, 16, 512)
    assert found.seq == PRESETS["llama-1b"].seq
    _, found = find_model("tiny", config, "kv_heads=1")
    assert found.shape == ModelShape(32, 2, 64, 4, 300, kv_heads=1)
    _, again = find_model("tiny", None, shape_text(dimensions(PRESETS["llama-7b"].shape)))
    assert again.shape == PRESETS["llama-7b"].shape


@pytest.mark.parametrize(
    ("shape", "part"),
    [
        ("layers", "'layers' is no size"),
        ("layers=many", "'layers=many' is no size"),
        ("depth=3", "there are hidden, layers, ffn, heads, vocabulary, kv_heads"),
        ("layers=0", "layers: 0 is less than 1"),
        ("layers=99999999999", "layers: 99999999999 is more than 4096"),
        ("ffn=99999999999", "ffn: 99999999999 is more than 16777216"),
        ("heads=7", "heads: 7 do not cut"),
        ("hidden=6,heads=6", "even width"),
        ("kv_heads=4", "kv_heads: 4 do not divide 6"),
    ],
)
def test_sizes_that_make_no_model_are_refused(shape: str, part: str) -> None:
    with pytest.raises(ToolError, match="--shape: ") as refused:
        find_model("tiny", None, shape)
    assert part in str(refused.value)


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"model_type": "gpt2"}, "not like Llama"),
        ({"model_type": "bert"}, "not like Llama"),
        ({"num_key_value_heads": 3}, "kv_heads: 3 do not divide 4"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_hidden_layers": 10**12}, "layers: 1000000000000 is more than 4096"),
    ],
)
def test_a_config_of_another_kind_is_refused(config: Path, changed: dict[str, Any], part: str) -> None:
    (config / "config.json").write_text(json.dumps({**LLAMA, **changed}))
    with pytest.raises(ToolError, match="--config: ") as refused:
        find_model("tiny", config)
    assert part in str(refused.value)


def test_shared_keys_are_those_of_their_heads() -> None:
    """As a model whose heads each have keys and values of their own, which are the same in a group."""
    torch.manual_seed(0)
    shared = Decoder(ModelShape(32, 1, 16, 4, 20, kv_heads=2))
    own = Decoder(ModelShape(32, 1, 16, 4, 20))
    own.load_state_dict({name: value for name, value in shared.state_dict().items() if "qkv" not in name}, False)
    q, k, v = shared.blocks[0].attention.qkv.weight.split([32, 16, 16])  # type: ignore[union-attr]
    parts = [q, *(each.view(2, 1, 8, 32).expand(2, 2, 8, 32).reshape(32, 32) for each in (k, v))]
    own.blocks[0].attention.qkv.weight = torch.nn.Parameter(torch.cat(parts))  # type: ignore[union-attr]
    tokens = torch.randint(20, (2, 9))
    torch.testing.assert_close(shared(tokens, tokens), own(tokens, tokens))


def test_a_config_is_trained_to_the_bit(memferry: Command, config: Path, text_file: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    options = ("--config", str(config), "--micro-batch", "2", "--sequence", "16", "--device", "emulated")
    more = ("--steps", "2", "--verify", "--json", str(results), "--data", str(text_file))
    done = memferry("train", *options, *more)
    assert done.status == 0, done.err
    settings = json.loads(results.read_text())["settings"]
    assert settings["preset"] == "small-llama"
    assert settings["shape"]["kv_heads"] == 2
    both = memferry("train", "--preset", "tiny", *options)
    assert "--preset: give it, or --config" in both.err


def test_plans_and_profiles_take_sizes_too(memferry: Command, config: Path) -> None:
    shape = ("--preset", "tiny", "--shape", "layers=2,hidden=384,heads=4")
    for command in ("plan", "simulate"):
        outcome = memferry(command, *shape, "--device-memory", "1GiB")
        assert outcome.status == 0, outcome.err
        assert "tiny with layers=2,hidden=384,heads=4" in outcome.out
    sizes = ("--micro-batch", "1", "--seq", "8", "--device", "emulated", "--anew")
    outcome = memferry("profile", "--config", str(config), *sizes)
    assert outcome.status == 0, outcome.err
    assert "small-llama, 1 x 8 tokens" in outcome.out


# -- the largest model ------------------------------------------------------------------------------------
BUDGETS = ("--device-memory", "80MiB", "--host-memory", "40MiB")  # 71 MiB of device memory are torch's
BATCH = ("--micro-batch", "1", "--seq", "32", "--dtype", "fp32")


def largest(memferry: Command, *arguments: str) -> list[str]:
    """The command that is shown."""
    outcome = memferry("plan", "--largest", "--shape", "vocabulary=256", *BUDGETS, *BATCH, *arguments)
    assert outcome.status == 0, outcome.err
    (line,) = [line for line in outcome.out.splitlines() if line.startswith("  train ")]
    return shlex.split(line)[2:]


def test_the_largest_model_trains_in_both_budgets_and_one_layer_more_does_not(
    memferry: Command, text_file: Path, tmp_path: Path
) -> None:
    files = {name: tmp_path / f"{name}.json" for name in ("config", "plan", "results")}
    command = largest(memferry, "--save-config", str(files["config"]), "--save", str(files["plan"]))
    assert command[:3] == ["train", "--config", str(files["config"])]
    assert command[-2:] == ["--steps", "3"]
    here = ("--device", "emulated", "--pool-memory", "6MiB", "--data", str(text_file))
    done = memferry(*command, *here, "--json", str(files["results"]))
    assert done.status == 0, done.err
    report = json.loads(files["results"].read_text())["report"]
    assert report["steps"] == 3
    assert report["device_peak"] <= 6 << 20
    assert 24 << 20 < report["host_nbytes"] <= 40 << 20
    by_plan = memferry(*command, *here, "--plan", str(files["plan"]))
    assert by_plan.status == 0, by_plan.err

    content = json.loads(files["config"].read_text())
    content["num_hidden_layers"] += 1
    files["config"].write_text(json.dumps(content))
    refused = memferry(*command, *here)
    assert refused.status == 2
    assert "host_memory: 40.00 MiB is too small" in refused.err


@pytest.mark.gpu
def test_the_largest_model_trains_on_a_device(memferry: Command, text_file: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    budgets = ("--device-memory", "512MiB", "--host-memory", "512MiB")
    batch = ("--micro-batch", "1", "--seq", "64", "--shape", "vocabulary=256")
    outcome = memferry("plan", "--largest", *budgets, *batch)
    assert outcome.status == 0, outcome.err
    (line,) = [line for line in outcome.out.splitlines() if line.startswith("  train ")]
    here = ("--device", "cuda:0", "--data", str(text_file), "--json", str(results))
    done = memferry(*shlex.split(line)[2:], *here)
    assert done.status == 0, done.err
    report = json.loads(results.read_text())["report"]
    assert report["device_peak"] <= 512 << 20
    assert 256 << 20 < report["host_nbytes"] <= 512 << 20


@pytest.mark.gpu
def test_a_config_is_trained_to_the_bit_on_a_device(memferry: Command, config: Path, text_file: Path) -> None:
    options = ("--config", str(config), "--micro-batch", "2", "--seq", "16", "--data", str(text_file))
    done = memferry(
        "train", *options, "--device", "cuda:0", "--device-memory", "256MiB", "--steps", "3", "--verify"
    )
    assert done.status == 0, done.out + done.err


def test_for_ranks_the_command_starts_them(memferry: Command) -> None:
    budgets = ("--device-memory", "100MiB", "--host-memory", "40MiB")
    outcome = memferry("plan", "--largest", "--shape", "vocabulary=256", *budgets, *BATCH, "--ranks", "2")
    assert outcome.status == 0, outcome.err
    assert "  train      torchrun --nproc-per-node 2 -m memferry_tools train --shape " in outcome.out


def test_the_command_needs_no_file(memferry: Command) -> None:
    command = largest(memferry)
    assert command[:2] == ["train", "--shape"]
    _, found = find_model("tiny", None, command[2])
    assert found.shape.vocabulary == 256


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--largest", "--shape", "layers=3"), "name the vocabulary alone"),
        (("--largest", "--shape", "vocabulary=0"), "name the vocabulary alone"),
        (("--save-config", "x.json"), "--save-config: it keeps the sizes that --largest finds"),
        (("--largest", "--save-config", "/nowhere/x.json"), "no folder /nowhere"),
    ],
)
def test_what_the_largest_cannot_be_told(memferry: Command, arguments: tuple[str, ...], part: str) -> None:
    outcome = memferry("plan", *BUDGETS, *arguments)
    assert outcome.status == 2
    assert part in outcome.err
