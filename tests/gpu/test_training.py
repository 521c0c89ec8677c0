"""On a real device: bit for bit as plain PyTorch there, within the budget, and nothing left behind."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import memferry_rt
from memferry_allocator import open_driver

from ..runtime.models import (
    SEQUENCE,
    Decoder,
    checkpointed,
    checkpointed_in_groups,
    plainly,
    skipping,
    tokens,
    twice,
)

pytestmark = pytest.mark.gpu
MIB = 1 << 20
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # of other tests' streams; they count in this process's budget
    torch.cuda.empty_cache()


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    batch = tokens(number).cuda()
    return F.cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def plain(
    build: Callable[[], nn.Module],
    dtype: torch.dtype,
    steps: int,
    accumulate: int,
    clip: float,
    optimizer_of: Callable[[Any], torch.optim.Optimizer] = adamw,
    *,
    wide: bool = False,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = build().to(dtype)
    masters = {name: nn.Parameter(p.detach().float().clone()) for name, p in model.named_parameters()}
    model.cuda()
    optimizer = optimizer_of(masters.values())
    losses = []
    torch.manual_seed(7)
    for number in range(steps):
        sums: dict[str, torch.Tensor] = {}
        weights = dict(model.named_parameters())
        for micro in range(accumulate):
            loss = loss_of(model, number * accumulate + micro)
            (loss / accumulate).backward()
            losses.append(loss.item())
            for name, weight in weights.items() if wide else ():
                if weight.grad is not None:
                    sums[name] = weight.grad.float() + sums[name] if name in sums else weight.grad.float()
                    weight.grad = None
        if not wide:
            sums = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
        total = 0.0
        for name in weights:
            if name in sums:
                norm = float(torch._foreach_norm([sums[name]], 2, dtype=torch.float64)[0])
                total += norm * norm
        scale = min(1.0, clip / (math.sqrt(total) + 1e-6))
        for name, weight in weights.items():
            masters[name].grad = sums[name].float().cpu() if name in sums else None
            if name in sums and scale != 1.0:
                masters[name].grad.mul_(scale)
            weight.grad = None
        optimizer.step()
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(masters[name])
    return losses, {name: master.detach() for name, master in masters.items()}


def offloaded(
    build: Callable[[], nn.Module],
    dtype: torch.dtype,
    steps: int,
    accumulate: int,
    clip: float,
    optimizer_of: Callable[[Any], torch.optim.Optimizer] = adamw,
    *,
    share: float = 0.4,
    declare: bool = False,
    **options: Any,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = build().to(dtype)
    optimizer = optimizer_of(model.parameters())
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    memferry_rt.offload(
        model,
        optimizer,
        device="cuda:0",
        device_memory=256 * MIB,
        pool_memory=int(weights * share),
        max_grad_norm=clip,
        accumulate=accumulate if declare else 1,
        **options,
    )
    losses = []
    torch.manual_seed(7)
    for number in range(steps):
        for micro in range(accumulate):
            loss = loss_of(model, number * accumulate + micro)
            (loss / accumulate).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    runtime = memferry_rt.runtime_of(model)
    values = {name: value.clone() for name, value in runtime.master_parameters().items()}
    report = runtime.report()
    assert report.device_peak <= report.device_memory
    memferry_rt.restore(model)
    assert all(p.device.type == "cpu" for p in model.parameters())
    return losses, values


def assert_same(
    one: tuple[list[float], dict[str, torch.Tensor]], other: tuple[list[float], dict[str, torch.Tensor]]
) -> None:
    differing = {
        name: f"{int((value != other[1][name]).sum())} of {value.numel()}"
        for name, value in one[1].items()
        if not torch.equal(value, other[1][name])
    }
    steps = [step for step, pair in enumerate(zip(one[0], other[0], strict=True)) if pair[0] != pair[1]]
    assert not differing, (steps, differing)
    assert not steps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    "run",
    [plainly, checkpointed(False), checkpointed(True), checkpointed_in_groups(False), skipping, twice],
    ids=["plain", "checkpoint", "reentrant", "groups", "skipping", "twice"],
)
def test_bit_for_bit(run: Any, accumulate: int, dtype: torch.dtype) -> None:
    settings = (lambda: Decoder(run, width=64), dtype, 8, accumulate, 1.0)
    expected = plain(*settings)
    for async_step in (False, True):
        assert_same(expected, offloaded(*settings, async_step=async_step))


@pytest.mark.parametrize("wide", [False, True], ids=["own-dtype", "fp32"])
@pytest.mark.parametrize("declare", [False, True], ids=["undeclared", "declared"])
@pytest.mark.parametrize(
    ("share", "options"),
    [(0.6, {"optimizer_split": "cpu", "spare_slabs": 9}), (3.0, {"optimizer_split": 0.5}), (12.0, {})],
    ids=["cpu", "half", "device"],
)
def test_sums_of_micro_steps(share: float, options: dict[str, Any], declare: bool, wide: bool) -> None:
    settings = (lambda: Decoder(plainly, width=64), torch.bfloat16, 5, 4, 100.0)
    dtype = "float32" if wide else None
    got = offloaded(*settings, share=share, declare=declare, accumulate_dtype=dtype, async_step=True, **options)
    assert_same(plain(*settings, wide=wide), got)


@pytest.mark.filterwarnings("ignore:RMSprop has no native")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "optimizer_of",
    [
        lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda p: torch.optim.Adagrad(p, lr=1e-2, weight_decay=0.1, fused=True),
        lambda p: memferry_rt.Lion(p, lr=1e-3, weight_decay=0.1),
        lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    ],
    ids=["sgd", "adagrad", "lion", "rmsprop"],
)
def test_other_optimizers(optimizer_of: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype) -> None:
    settings = (lambda: Decoder(width=64), dtype, 6, 2, 1.0, optimizer_of)
    expected = plain(*settings)
    for async_step in (False, True):
        assert_same(expected, offloaded(*settings, async_step=async_step))


def test_tied_weights_and_dropout_on_larger_layers() -> None:
    settings = (
        lambda: Decoder(checkpointed(False), tied=True, dropout=0.1, width=512),
        torch.bfloat16,
        6,
        1,
        1.0,
    )
    assert_same(plain(*settings), offloaded(*settings, async_step=True))


def test_many_steps_without_waiting_for_any() -> None:
    """The host runs ahead of the device as far as it can; a missing wait shows as wrong bits."""
    settings = (lambda: Decoder(width=512, layers=10), torch.bfloat16, 60, 1, 1.0)
    assert_same(plain(*settings), offloaded(*settings, share=0.35, async_step=True))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("async_step", [True, False])
@pytest.mark.parametrize("split", [0.5, 1.0])
def test_weights_of_streamed_layers_stay_on_the_device(split: float, async_step: bool, accumulate: int) -> None:
    settings = (lambda: Decoder(width=512, layers=6), torch.bfloat16, 20, accumulate, 1.0)
    got = offloaded(*settings, share=1.6, optimizer_split=split, async_step=async_step)
    assert_same(plain(*settings), got)


def test_on_a_stream_of_the_user() -> None:
    settings = (lambda: Decoder(width=256), torch.bfloat16, 6, 2, 1.0)
    expected = plain(*settings)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert_same(expected, offloaded(*settings))


def test_gradients_and_clipping_by_the_user() -> None:
    torch.manual_seed(0)
    reference = Decoder(width=64).cuda()
    model = Decoder(width=64)
    model.load_state_dict(reference.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    memferry_rt.offload(model, optimizer, device="cuda:0", device_memory=256 * MIB, pool_memory=MIB)
    for one in (reference, model):
        loss_of(one, 0).backward()
    for one, other in zip(reference.parameters(), model.parameters(), strict=True):
        assert other.grad.is_cuda
        assert torch.equal(one.grad, other.grad)
    norms = [float(torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1)) for one in (reference, model)]
    assert norms[0] == norms[1]
    for one, other in zip(reference.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    optimizer.step()
    memferry_rt.restore(model)


def test_grad_scaler() -> None:
    model = Decoder(width=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    memferry_rt.offload(model, optimizer, device="cuda:0", device_memory=256 * MIB, pool_memory=MIB)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    before = {name: value.clone() for name, value in memferry_rt.runtime_of(model).master_parameters().items()}
    for number in range(3):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_of(model, number)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    runtime = memferry_rt.runtime_of(model)
    after = runtime.master_parameters()
    assert all(not torch.equal(value, after[name]) for name, value in before.items())
    assert 0 < runtime.grad_norm < 20  # of the unscaled gradients: 1024 times less
    memferry_rt.restore(model)


def test_state_dict_load_and_generate_between_steps() -> None:
    model = Decoder(width=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    memferry_rt.offload(model, optimizer, device="cuda:0", device_memory=256 * MIB, pool_memory=256 << 10)
    loss_of(model, 0).backward()
    optimizer.step()
    state = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    fresh = Decoder(width=64).cuda()
    fresh.load_state_dict(state)
    ids = tokens(3).cuda()[:, :SEQUENCE]
    with torch.inference_mode():
        assert torch.equal(fresh(ids), model(ids))
    torch.manual_seed(9)
    other = Decoder(width=64).state_dict()
    model.load_state_dict(other)
    fresh.load_state_dict(other)
    with torch.no_grad():
        assert torch.equal(fresh(ids), model(ids))
    memferry_rt.restore(model)


def test_torch_is_capped_and_the_pool_grows_into_what_is_left() -> None:
    model = Decoder(width=1024, layers=8).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    total = 400 * MIB
    memferry_rt.offload(model, optimizer, device="cuda:0", device_memory=total)
    runtime = memferry_rt.runtime_of(model)
    first = runtime.report().pool_nbytes
    for number in range(3):
        loss_of(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    report = runtime.report()
    assert report.pool_nbytes > first
    assert report.device_peak <= total
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total, dtype=torch.uint8, device="cuda")
    memferry_rt.restore(model)
    torch.empty(total, dtype=torch.uint8, device="cuda")


def test_a_model_that_was_on_the_device_does_not_count() -> None:
    model = Decoder(width=1024, layers=8).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    on_device = torch.cuda.memory_reserved()
    memferry_rt.offload(model, optimizer, device="cuda:0", device_memory=200 * MIB, pool_memory=64 * MIB)
    report = memferry_rt.runtime_of(model).report()
    assert report.device_peak <= report.device_memory < on_device
    memferry_rt.restore(model)


def test_everything_is_given_back() -> None:
    driver = open_driver("cuda")
    free = 0
    for number in range(4):
        if number == 1:  # the first one leaves cuBLAS's workspaces
            free = driver.memory_info(0).free
        model = Decoder(width=512)
        optimizer = torch.optim.AdamW(model.parameters())
        memferry_rt.offload(model, optimizer, device="cuda:0", device_memory=256 * MIB, pool_memory=64 * MIB)
        loss_of(model, 0).backward()
        optimizer.step()
        memferry_rt.restore(model)
        del model, optimizer
        gc.collect()
        torch.cuda.empty_cache()
    assert driver.memory_info(0).free >= free - 8 * MIB
