"""Models of the transformers library, unmodified: they train bit for bit, and generate."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import memferry_rt

from .harness import Job, assert_same, offloaded, plain

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        **SMALL, intermediate_size=64, num_key_value_heads=2, max_position_embeddings=32
    )
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=4, n_head=4, n_positions=32)
    )


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(**SMALL, intermediate_size=64, max_position_embeddings=32)
    )


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        **SMALL,
        intermediate_size=48,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=32,
    )
    return transformers.MixtralForCausalLM(config)


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
    )


def loss(model: nn.Module, number: int) -> torch.Tensor:
    ids = torch.randint(0, 64, (2, 10), generator=torch.Generator().manual_seed(number))
    return model(input_ids=ids, labels=ids).loss


@pytest.mark.parametrize("build", [llama, gpt2, bert, mixtral, t5])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_training(build: Callable[[], nn.Module], checkpointing: bool) -> None:
    def prepared() -> nn.Module:
        model = build().train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    job = Job(prepared, loss, steps=4, lr=1e-3)
    assert_same(plain(job), offloaded(job, share=0.45, async_step=checkpointing))


def test_generation() -> None:
    torch.manual_seed(0)
    expected = llama().eval()
    model = copy.deepcopy(expected)
    memferry_rt.offload(model, torch.optim.AdamW(model.parameters()), device="emulated", device_memory="64KiB")
    ids = torch.tensor([[1, 5, 9]])
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(expected.generate(ids, **settings), model.generate(ids, **settings))
    memferry_rt.restore(model)
