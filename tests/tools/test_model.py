"""The decoder, and the weights it begins with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from memferry_tools.train import model as model_module
from memferry_tools.train.data import Batches
from memferry_tools.train.initial import STD, FirstWeights, model_on_cpu
from memferry_tools.train.model import Decoder
from memferry_tools.train.presets import ModelShape
from memferry_tools.train.recipe import Recipe


def loss_of(model: Decoder, batches: Batches) -> torch.Tensor:
    tokens = torch.from_numpy(batches.micro_batch(0, 0))
    loss: torch.Tensor = model(tokens[:, :-1], tokens[:, 1:])
    return loss


def loss_and_gradients(recipe: Recipe, batches: Batches) -> list[torch.Tensor]:
    model = model_on_cpu(recipe)
    loss = loss_of(model, batches)
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [loss.detach(), *(gradient for gradient in gradients if gradient is not None)]


def test_checkpointing_changes_no_bit(recipe: Recipe, batches: Batches) -> None:
    kept = loss_and_gradients(recipe, batches)
    recomputed = loss_and_gradients(replace(recipe, checkpointing=True), batches)
    assert len(kept) == len(recomputed) == 1 + len(list(Decoder(recipe.shape).parameters()))
    assert all(torch.equal(one, other) for one, other in zip(kept, recomputed, strict=True))


def test_a_loss_in_pieces_is_the_same_loss(
    recipe: Recipe, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = loss_and_gradients(recipe, batches)
    monkeypatch.setattr(model_module, "LOGITS_AT_ONCE", 5 * recipe.shape.vocabulary)  # 32 tokens: 5, 5, …, 2
    for one, other in zip(whole, loss_and_gradients(recipe, batches), strict=True):
        torch.testing.assert_close(one, other)


def test_the_loss_is_the_mean_cross_entropy(recipe: Recipe, batches: Batches) -> None:
    model = model_on_cpu(recipe)
    torch.nn.init.zeros_(model.head.weight)
    expected = torch.log(torch.tensor(float(recipe.shape.vocabulary)))
    torch.testing.assert_close(loss_of(model, batches).detach(), expected)


def test_no_token_sees_what_comes_after_it(recipe: Recipe) -> None:
    model = model_on_cpu(recipe)
    seen: list[torch.Tensor] = []
    model.norm.register_forward_hook(lambda module, args, output: seen.append(output))
    tokens = torch.arange(16).view(1, 16)
    changed = tokens.clone()
    changed[0, 10] = 99
    for ids in (tokens, changed):
        model(ids, tokens)
    same = (seen[0] == seen[1]).all(dim=1)
    assert same[:10].all()
    assert not same[10:].any()


def test_position_matters(recipe: Recipe) -> None:
    """Without rotation, attention to a set of earlier tokens would not see their order."""
    model = model_on_cpu(recipe)
    seen: list[torch.Tensor] = []
    model.norm.register_forward_hook(lambda module, args, output: seen.append(output))
    tokens = torch.tensor([[1, 2, 3, 4]])
    for ids in (tokens, tokens[:, [1, 0, 2, 3]]):
        model(ids, tokens)
    assert not torch.allclose(seen[0][3], seen[1][3], rtol=1e-6, atol=1e-7)


def test_bf16_weights_give_an_fp32_loss(recipe: Recipe, batches: Batches) -> None:
    model = model_on_cpu(recipe).to(torch.bfloat16)
    assert loss_of(model, batches).dtype == torch.float32


def test_tying_shares_one_parameter(recipe: Recipe) -> None:
    model = model_on_cpu(replace(recipe, shape=replace(recipe.shape, tied=True)))
    assert model.head.weight is model.embedding.weight
    assert not model.head.weight.is_meta


def test_first_weights_do_not_depend_on_the_order_in_which_they_are_made(recipe: Recipe) -> None:
    model, other = model_on_cpu(recipe), Decoder(recipe.shape)
    first = FirstWeights(other, recipe.seed)
    for module in reversed(list(other.modules())):
        first(module)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_first_weights_depend_on_seed_and_name(recipe: Recipe) -> None:
    model, other = model_on_cpu(recipe), model_on_cpu(replace(recipe, seed=1))
    assert not torch.equal(model.embedding.weight, other.embedding.weight)
    assert not torch.equal(model.embedding.weight, model.head.weight)
    blocks = [block.ffn.up.weight for block in model.blocks]  # type: ignore[union-attr]
    assert not torch.equal(blocks[0], blocks[1])  # type: ignore[arg-type]


def test_first_weights_are_spread_as_they_should_be(monkeypatch: pytest.MonkeyPatch, recipe: Recipe) -> None:
    monkeypatch.setattr("memferry_tools.train.initial.PIECE", 10_000)  # more than one generator
    shape = ModelShape(hidden=256, layers=8, ffn=512, heads=4, vocabulary=256)
    model = model_on_cpu(replace(recipe, shape=shape))
    assert model.head.weight.std().item() == pytest.approx(STD, rel=0.05)
    down = model.get_parameter("blocks.0.ffn.down.weight")
    assert down.std().item() == pytest.approx(STD / 4, rel=0.05)  # by the root of twice the blocks
    assert len(model.head.weight.unique()) > 60_000  # no piece repeats another
    assert (model.norm.weight == 1).all()
