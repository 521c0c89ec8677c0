"""Models that are planned without torch are the ones that torch makes: layers, names, sizes, and memory."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memferry_rt.adapters.torch.cut import cut_layers
from memferry_rt.plan import Batch, Workload, transformer
from memferry_rt.plan.choice import FRAGMENTATION, WORKSPACES, Choice, LayerChoice, torch_live_nbytes
from memferry_tools.plan.configs import read_config
from memferry_tools.plan.target import dimensions
from memferry_tools.train.activations import torch_memory
from memferry_tools.train.model import Decoder
from memferry_tools.train.presets import PRESETS, ModelShape
from memferry_tools.train.recipe import Recipe


def sizes(workload: Workload) -> dict[str, list[int]]:
    """Of the parameters of every layer that has some."""
    return {layer.name: sorted(map(math.prod, layer.shapes)) for layer in workload.layers if layer.parameters}


def cut_sizes(model: nn.Module) -> dict[str, list[int]]:
    return {cut.name: sorted(parameter.numel() for _, parameter in cut.parameters) for cut in cut_layers(model)}


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("tied", [False, True])
def test_presets_are_cut_as_the_runtime_cuts_them(name: str, tied: bool) -> None:
    shape = ModelShape(**{**vars(PRESETS[name].shape), "tied": tied})
    with torch.device("meta"):
        model = Decoder(shape).bfloat16()
    assert sizes(transformer(name, dimensions(shape), Batch(1, 16))) == cut_sizes(model)


CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
    },
    "MistralForCausalLM": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "vocab_size": 500,
    },
    "GPT2LMHeadModel": {"n_layer": 3},
    "BertForMaskedLM": {"num_hidden_layers": 3},
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_configs_are_cut_as_the_runtime_cuts_their_models(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model_class = getattr(transformers, kind)
    config = model_class.config_class(**CONFIGS[kind])
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = model_class(config).bfloat16()
    size, names = read_config(tmp_path)
    assert sizes(transformer(kind, size, Batch(1, 16), names)) == cut_sizes(model)


def test_reading_a_config_imports_no_transformers(tmp_path: Path) -> None:
    import subprocess
    import sys

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    code = (
        "import sys, pathlib; from memferry_tools.plan.configs import read_config; import memferry_rt.plan;"
        f"read_config(pathlib.Path({str(tmp_path)!r}));"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'a framework was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("preset", "checkpointing", "micro_batch"),
    [
        ("llama-1b", True, 8),
        ("llama-1b", False, 8),
        ("llama-1b", True, 1),
        ("llama-7b", True, 8),
        ("large-vocabulary", True, 1),
    ],
)
def test_what_torch_needs_is_foreseen(preset: str, checkpointing: bool, micro_batch: int) -> None:
    """Against a step on tensors without data: never less by more than a little, nor much more."""
    shape = PRESETS[preset].shape
    recipe = Recipe(
        shape=shape,
        checkpointing=checkpointing,
        dtype="bfloat16",
        micro_batch=micro_batch,
        seq=1024,
        accumulate=1,
        steps=1,
        lr=1e-4,
        weight_decay=0.0,
        max_grad_norm=1.0,
        seed=0,
    )
    workload = transformer(preset, dimensions(shape), Batch(micro_batch, 1024, recompute=checkpointing))
    choice = Choice(tuple(LayerChoice(recompute=bool(layer.recompute)) for layer in workload.layers))
    foreseen = FRAGMENTATION * torch_live_nbytes(workload, choice) + WORKSPACES
    assert foreseen == pytest.approx(torch_memory(recipe), rel=0.08)
