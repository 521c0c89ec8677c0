"""Save and resume: three steps, a checkpoint and three more are the same bits as six steps."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memferry_rt
from memferry_allocator import EmulatedOptions
from memferry_rt import CheckpointError, OffloadError

from .models import Decoder, next_token_loss, tokens
from .trained import Trained

Pair = tuple[nn.Module, torch.optim.Optimizer]


def plain(build: Callable[[], nn.Module] = Decoder, seed: int = 0, **settings: Any) -> Pair:
    """A model and AdamW over two groups, not offloaded."""
    torch.manual_seed(seed)
    model = build()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "lr": 3e-3, "betas": (0.8, 0.95)},
    ]
    return model, torch.optim.AdamW(groups, **{"lr": 1e-2, "fused": True, **settings})


def offloaded(build: Callable[[], nn.Module] = Decoder, seed: int = 0, share: float = 0.6, **options: Any) -> Pair:
    model, optimizer = plain(build, seed)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    options.setdefault("device_memory", int(weights * share))
    return memferry_rt.offload(model, optimizer, device="emulated", max_grad_norm=1.0, **options)


def train(pair: Pair, steps: range) -> list[float]:
    model, optimizer = pair
    losses = []
    for number in steps:
        loss = next_token_loss(model, number)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def state(pair: Pair) -> dict[str, torch.Tensor]:
    """Copies of everything that a checkpoint holds, by name."""
    model, optimizer = pair
    found = {f"model.{name}": value.clone() for name, value in model.state_dict().items()}
    if "_memferry_runtime" in model.__dict__:
        masters = memferry_rt.runtime_of(model).master_parameters()
        found |= {f"master.{name}": value.clone() for name, value in masters.items()}
    for key, entry in optimizer.state_dict()["state"].items():
        if float(entry["step"]):
            found |= {f"{key}.{name}": value.clone() for name, value in entry.items()}
    return found


def assert_same_state(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype, name
        assert torch.equal(value, other[name]), name


def with_buffers() -> nn.Module:
    """Frozen parameters, buffers that change, one that is not saved, tied weights, and odd strides."""
    model = Decoder(tied=True)
    model.blocks[1].requires_grad_(False)
    model.blocks[2].up.weight.requires_grad_(False)
    model.register_buffer("count", torch.zeros((), dtype=torch.int64))
    model.register_buffer("mean", torch.zeros(2, 3).t())
    model.register_buffer("scratch", torch.zeros(2), persistent=False)
    model.blocks[3].up.weight = nn.Parameter(torch.randn(32, 128).mul_(0.1).t())

    def count(model: nn.Module, *_: Any) -> None:
        if model.training:
            model.count += 1
            model.mean += 0.5

    model.register_forward_pre_hook(count)
    return model


def half() -> nn.Module:
    return Decoder(layers=2).bfloat16()


@pytest.mark.parametrize(
    "settings",
    [
        {"share": 0.35},
        {"share": 1.6, "async_step": True},
        {"device_memory": 90_000, "pool_memory": 80_000},
        {"emulated": EmulatedOptions(seed=11)},
        {"layers": ["blocks.0", "blocks.1"], "share": 2.0},
    ],
    ids=str,
)
def test_resuming_is_the_uninterrupted_run(settings: dict[str, Any], tmp_path: Path) -> None:
    first = offloaded(async_step="async_step" in settings)
    train(first, range(3))
    memferry_rt.save(tmp_path / "saved", *first, extra={"step": 3})
    expected = train(first, range(3, 6))
    second = offloaded(seed=1, **settings)
    assert memferry_rt.load(tmp_path / "saved", *second) == {"step": 3}
    assert train(second, range(3, 6)) == expected
    assert_same_state(state(first), state(second))
    for pair in (first, second):
        memferry_rt.restore(pair[0])


@pytest.mark.parametrize("build", [with_buffers, half], ids=lambda build: build.__name__)
def test_everything_is_saved(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    first, second = offloaded(build, share=0.9), offloaded(build, seed=1, share=1.2)
    train(first, range(3))
    memferry_rt.save(tmp_path, *first)
    memferry_rt.load(tmp_path, *second)
    assert_same_state(state(first), state(second))
    assert train(first, range(3, 6)) == train(second, range(3, 6))
    assert_same_state(state(first), state(second))
    for pair in (first, second):
        memferry_rt.restore(pair[0])


@pytest.mark.parametrize("restored", [False, True])
def test_moments_whose_step_number_was_set_back_are_kept(restored: bool, tmp_path: Path) -> None:
    both = Trained()
    both.steps(2)
    for optimizer in (both.plain_optimizer, both.optimizer):
        for entry in optimizer.state.values():
            entry["step"].zero_()
    if restored:
        memferry_rt.restore(both.model)
        both.optimizer.param_groups[0]["fused"] = True
    memferry_rt.save(tmp_path / "ck", both.model, both.optimizer)
    memferry_rt.load(tmp_path / "ck", both.model, both.optimizer)
    both.steps(2, first=2)
    assert both.same()


def test_a_saved_run_is_not_disturbed(tmp_path: Path) -> None:
    """Saves at any time, while layers are resident and updates under way, change nothing."""
    watched, alone = offloaded(async_step=True), offloaded()
    for number in range(4):
        memferry_rt.save(tmp_path, *watched)
        assert train(watched, range(number, number + 1)) == train(alone, range(number, number + 1))
        loss = next_token_loss(watched[0], number)  # weights that an unfinished graph holds
        memferry_rt.save(tmp_path, *watched)
        loss.backward()
        memferry_rt.save(tmp_path, *watched)
        watched[1].zero_grad()
    assert_same_state(state(watched), state(alone))
    for pair in (watched, alone):
        memferry_rt.restore(pair[0])


def test_loading_before_the_first_step_after_some_and_again(tmp_path: Path) -> None:
    pair = offloaded(async_step=True)
    memferry_rt.save(tmp_path / "first", *pair)
    untouched = state(pair)
    losses = train(pair, range(3))
    memferry_rt.save(tmp_path / "third", *pair)
    later = train(pair, range(3, 6))  # with updates under way
    for _ in range(2):
        memferry_rt.load(tmp_path / "third", *pair)
        assert train(pair, range(3, 6)) == later
    memferry_rt.load(tmp_path / "first", *pair)
    assert_same_state(state(pair), untouched)
    assert train(pair, range(3)) == losses
    memferry_rt.restore(pair[0])


def test_loading_right_after_a_step_whose_update_is_under_way(tmp_path: Path) -> None:
    pair = offloaded(async_step=True)
    train(pair, range(2))
    memferry_rt.save(tmp_path, *pair)
    saved = state(pair)
    next_token_loss(*pair[:1], 2).backward()
    pair[1].step()
    memferry_rt.load(tmp_path, *pair)
    assert_same_state(state(pair), saved)
    memferry_rt.restore(pair[0])


def test_a_backward_over_a_load_fails_as_in_plain_pytorch(tmp_path: Path) -> None:
    for pair in (plain(), offloaded()):
        memferry_rt.save(tmp_path, *pair)
        loss = next_token_loss(pair[0], 0)
        memferry_rt.load(tmp_path, *pair)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_weights_in_device_memory_are_loaded_too(tmp_path: Path) -> None:
    first, second = offloaded(share=1.6), offloaded(seed=1, share=1.6)
    train(first, range(1))
    memferry_rt.save(tmp_path, *first)
    with torch.no_grad():
        second[0](tokens(0)[:, :-1])  # every layer is in device memory now
    memferry_rt.load(tmp_path, *second)
    with torch.no_grad():
        assert torch.equal(first[0](tokens(0)[:, :-1]), second[0](tokens(0)[:, :-1]))
    for pair in (first, second):
        memferry_rt.restore(pair[0])


def test_fp32_goes_to_plain_pytorch_and_back_without_losing_a_bit(tmp_path: Path) -> None:
    mine = plain(with_buffers)
    memferry_rt.offload(*mine, device="emulated", device_memory="200KiB")
    train(mine, range(3))
    memferry_rt.save(tmp_path / "mine", *mine, extra="three")
    theirs = plain(with_buffers, seed=1)
    assert memferry_rt.load(tmp_path / "mine", *theirs) == "three"
    assert all(group["fused"] for group in theirs[1].param_groups)
    assert train(theirs, range(3, 6)) == train(mine, range(3, 6))
    memferry_rt.save(tmp_path / "theirs", *theirs)
    back = plain(with_buffers, seed=2)
    memferry_rt.offload(*back, device="emulated", device_memory="300KiB")
    memferry_rt.load(tmp_path / "theirs", *back)
    expected = train(theirs, range(6, 8))
    assert train(back, range(6, 8)) == train(mine, range(6, 8)) == expected
    for pair in (mine, back):
        memferry_rt.restore(pair[0])


def test_bf16_goes_to_plain_fp32_exactly_and_to_plain_bf16_rounded(tmp_path: Path) -> None:
    model, optimizer = offloaded(half)
    train((model, optimizer), range(2))
    memferry_rt.save(tmp_path, model, optimizer)
    masters = {k: v.clone() for k, v in memferry_rt.runtime_of(model).master_parameters().items()}
    wide = plain(lambda: Decoder(layers=2), seed=1)
    memferry_rt.load(tmp_path, *wide)
    narrow = plain(half, seed=1)
    memferry_rt.load(tmp_path, *narrow)
    moments = {key: entry["exp_avg"] for key, entry in optimizer.state_dict()["state"].items()}
    for (name, one), (_, other) in zip(wide[0].named_parameters(), narrow[0].named_parameters(), strict=True):
        assert torch.equal(one, masters[name])
        assert torch.equal(other, masters[name].bfloat16())
    for key, moment in moments.items():
        assert torch.equal(wide[1].state_dict()["state"][key]["exp_avg"], moment)
        assert torch.equal(narrow[1].state_dict()["state"][key]["exp_avg"], moment.bfloat16())
    train(narrow, range(2, 3))
    memferry_rt.save(tmp_path, *narrow)
    memferry_rt.load(tmp_path, model, optimizer)
    for name, master in memferry_rt.runtime_of(model).master_parameters().items():
        assert torch.equal(master, dict(narrow[0].named_parameters())[name].float())
    train((model, optimizer), range(3, 4))
    memferry_rt.restore(model)


def test_another_compute_dtype_continues_from_the_masters(tmp_path: Path) -> None:
    narrow = offloaded(half)
    train(narrow, range(2))
    memferry_rt.save(tmp_path, *narrow)
    wide = offloaded(lambda: Decoder(layers=2), seed=1)
    memferry_rt.load(tmp_path, *wide)
    masters = memferry_rt.runtime_of(narrow[0]).master_parameters()
    assert all(torch.equal(p, masters[name]) for name, p in wide[0].named_parameters())
    for pair in (narrow, wide):
        memferry_rt.restore(pair[0])


def test_a_weight_that_is_not_its_master_rounded_is_saved_beside_it(tmp_path: Path) -> None:
    first, second = offloaded(half), offloaded(half, seed=1)
    first[0].head.weight.data[0] = 3.0  # what no version counts: the master keeps its value
    memferry_rt.save(tmp_path, *first)
    memferry_rt.load(tmp_path, *second)
    assert_same_state(state(first), state(second))
    assert second[0].head.weight[0, 0] == 3.0
    for pair in (first, second):
        memferry_rt.restore(pair[0])


def test_names_of_compiled_blocks_are_those_of_the_blocks(tmp_path: Path) -> None:
    first, second = plain(), plain(seed=1)
    second[0].blocks[0] = torch.compile(second[0].blocks[0], backend="eager")
    memferry_rt.save(tmp_path, *first)
    memferry_rt.load(tmp_path, *second)
    assert torch.equal(first[0].blocks[0].up.weight, second[0].blocks[0]._orig_mod.up.weight)


def test_settings_schedules_and_random_state_go_on(tmp_path: Path) -> None:
    def build(seed: int) -> tuple[Pair, torch.optim.lr_scheduler.LRScheduler]:
        pair = plain(lambda: Decoder(dropout=0.2), seed=seed)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(pair[1], max_lr=[0.02, 0.01], total_steps=9)
        memferry_rt.offload(*pair, device="emulated", device_memory="200KiB")
        return pair, scheduler

    def steps(pair: Pair, scheduler: Any, numbers: range) -> list[float]:
        losses = []
        for number in numbers:
            losses += train(pair, range(number, number + 1))
            scheduler.step()
        return losses

    first, scheduler = build(0)
    steps(first, scheduler, range(3))
    first[1].param_groups[1]["eps"] = 1e-5
    extra = {
        "scheduler": scheduler.state_dict(),
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "best": float("inf"),
    }
    memferry_rt.save(tmp_path, *first, extra=extra)
    expected = steps(first, scheduler, range(3, 6))
    second, scheduler = build(1)
    loaded = memferry_rt.load(tmp_path, *second)
    scheduler.load_state_dict(loaded["scheduler"])
    torch.set_rng_state(torch.tensor(loaded["torch"], dtype=torch.uint8))
    version, words, gauss = loaded["python"]
    random.setstate((version, tuple(words), gauss))
    assert loaded["best"] == float("inf")
    assert second[1].param_groups[1]["eps"] == 1e-5
    assert isinstance(second[1].param_groups[0]["betas"], tuple)
    assert steps(second, scheduler, range(3, 6)) == expected
    for one, other in zip(first[1].param_groups, second[1].param_groups, strict=True):
        assert {k: v for k, v in one.items() if k != "params"} == {k: v for k, v in other.items() if k != "params"}
    for pair in (first, second):
        memferry_rt.restore(pair[0])


def test_a_learning_rate_that_is_a_tensor_stays_the_same_tensor(tmp_path: Path) -> None:
    first, second = plain(), plain(seed=1, fused=False, foreach=False)
    rate = second[1].param_groups[0]["lr"] = torch.tensor(0.5)
    memferry_rt.save(tmp_path, *first)
    memferry_rt.load(tmp_path, *second)
    assert second[1].param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(1e-2)
    memferry_rt.save(tmp_path, *second)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda: plain(lambda: Decoder(width=16)), r"shape \(12, 32\) in it and \(12, 16\) in the model"),
        (lambda: plain(lambda: Decoder(layers=7)), "it has no blocks.6"),
        (lambda: plain(lambda: Decoder(layers=5)), "it has blocks.5.*which the model has not"),
        (lambda: one_group(torch.optim.AdamW), "2 parameter groups and the optimizer 1"),
        (lambda: one_group(torch.optim.Adam), "its optimizer is AdamW and this one Adam"),
        (lambda: moved_groups(), "is in parameter group 0 of only one"),
        (lambda: frozen_head(), "head.weight is in parameter group 0 of only one"),
        (lambda: integer_buffer(), "buffer.*int32"),
    ],
)
@pytest.mark.parametrize("offload", [False, True])
def test_a_checkpoint_of_something_else_changes_nothing(
    change: Callable[[], Pair], words: str, offload: bool, tmp_path: Path
) -> None:
    def with_buffer() -> nn.Module:
        model = Decoder()
        model.register_buffer("buffer", torch.ones(3))
        return model

    saved = plain(with_buffer if "buffer" in words else Decoder)
    train(saved, range(1))
    memferry_rt.save(tmp_path, *saved)
    pair = change()
    if offload:
        memferry_rt.offload(*pair, device="emulated", device_memory="1MiB")
    train(pair, range(1))
    before, settings = state(pair), copy.copy(pair[1].param_groups[0])
    with pytest.raises(CheckpointError, match=rf"(?s)not of this model.*{words}.*nothing was changed"):
        memferry_rt.load(tmp_path, *pair)
    assert_same_state(state(pair), before)
    assert pair[1].param_groups[0] == settings
    if offload:
        memferry_rt.restore(pair[0])


def one_group(kind: type[torch.optim.Optimizer]) -> Pair:
    model = Decoder()
    return model, kind(model.parameters())


def moved_groups() -> Pair:
    model = Decoder()
    parameters = list(model.parameters())
    return model, torch.optim.AdamW([{"params": parameters[:4]}, {"params": parameters[4:]}])


def frozen_head() -> Pair:
    def build() -> nn.Module:
        model = Decoder()
        model.head.requires_grad_(False)
        return model

    return plain(build)


def integer_buffer() -> Pair:
    def build() -> nn.Module:
        model = Decoder()
        model.register_buffer("buffer", torch.ones(3, dtype=torch.int32))
        return model

    return plain(build)


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> object:
        return object()


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: _stepped(nn.Linear(2, 2), torch.optim.LBFGS), "state of LBFGS.*is a Tensor"),
        (lambda: _with(nn.Linear(2, 2), torch.optim.AdamW, amsgrad=True), "amsgrad"),
        (lambda: _with(WithExtraState(2, 2), torch.optim.AdamW), "WithExtraState.*get_extra_state"),
        (lambda: _with(nn.Linear(2, 2, device="meta"), torch.optim.AdamW), "meta"),
        (lambda: _with(nn.Linear(2, 2, dtype=torch.complex64), torch.optim.AdamW), "complex64"),
        (lambda: (nn.Linear(2, 2), _with(nn.Linear(2, 2), torch.optim.AdamW)[1]), "belong to the model"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_anything_is_written(
    build: Callable[[], Pair], words: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=words):
        memferry_rt.save(tmp_path / "saved", *build())
    assert not (tmp_path / "saved").exists()


def _stepped(model: nn.Module, kind: type[torch.optim.Optimizer]) -> Pair:
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]

    def closure() -> float:
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss.item()

    optimizer.step(closure)
    return model, optimizer


def _with(model: nn.Module, kind: type[torch.optim.Optimizer], **settings: Any) -> Pair:
    return model, kind(model.parameters(), lr=0.1, **settings)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"loss": torch.ones(2)}, r"extra\['loss'\] is a Tensor"),
        ([1, {"a": {2: "x"}}], r"extra\[1\]\['a'\]: the key 2"),
        (b"bytes", "extra is a bytes"),
    ],
)
def test_extra_that_json_would_not_give_back_is_refused(extra: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        memferry_rt.save(tmp_path / "saved", *plain(), extra=extra)
    assert not (tmp_path / "saved").exists()


def test_a_setting_that_json_would_not_give_back_is_refused(tmp_path: Path) -> None:
    pair = plain()
    pair[1].param_groups[1]["mine"] = object()
    with pytest.raises(CheckpointError, match=r"param_groups\[1\]\['mine'\] is a object"):
        memferry_rt.save(tmp_path / "saved", *pair)


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    pair = offloaded()
    memferry_rt.save(tmp_path, *pair)
    twin = torch.optim.AdamW(pair[0].parameters())
    for call in (memferry_rt.save, memferry_rt.load):
        with pytest.raises(CheckpointError, match="not the one that the model was offloaded with"):
            call(tmp_path, pair[0], twin)
    memferry_rt.restore(pair[0])


def test_a_kept_alias_of_a_weight_refuses_the_load_and_changes_nothing(tmp_path: Path) -> None:
    pair = offloaded(share=1.6)
    train(pair, range(1))
    memferry_rt.save(tmp_path, *pair)
    train(pair, range(1, 2))
    kept = []
    handle = pair[0].blocks[2].up.register_forward_pre_hook(lambda module, _: kept.append(module.weight.detach()))
    with torch.no_grad():
        pair[0](tokens(0)[:, :-1])
    handle.remove()
    before = state(pair)
    with pytest.raises(OffloadError, match=r"aliases.*blocks\.2"):
        memferry_rt.load(tmp_path, *pair)
    assert_same_state(state(pair), before)
    kept.clear()
    gc.collect()
    memferry_rt.load(tmp_path, *pair)
    memferry_rt.restore(pair[0])


def test_a_restored_model_is_saved_and_loaded_as_a_plain_one(tmp_path: Path) -> None:
    pair, other = offloaded(), offloaded(seed=1)
    train(pair, range(2))
    memferry_rt.restore(pair[0])
    memferry_rt.save(tmp_path, *pair)
    memferry_rt.load(tmp_path, *other)
    memferry_rt.restore(other[0])
    assert_same_state(state(pair), state(other))
