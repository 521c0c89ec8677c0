"""Save and resume on a real device: the same bits, without device memory, and to the emulated device and back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import memferry_rt

from ..runtime.models import Decoder
from .test_training import loss_of

pytestmark = pytest.mark.gpu
Pair = tuple[nn.Module, torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def offloaded(seed: int, device: str, dtype: torch.dtype, memory: str = "256MiB", **options: bool) -> Pair:
    torch.manual_seed(seed)
    model = Decoder().to(dtype)
    model.register_buffer("mean", torch.full((3,), float(seed)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return memferry_rt.offload(model, optimizer, device=device, device_memory=memory, max_grad_norm=1.0, **options)


def train(pair: Pair, steps: range) -> list[float]:
    model, optimizer = pair
    losses = []
    for number in steps:
        loss = loss_of(model, number)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("async_step", [False, True])
def test_resuming_is_the_uninterrupted_run(dtype: torch.dtype, async_step: bool, tmp_path: Path) -> None:
    first = offloaded(0, "cuda", dtype, async_step=async_step)
    train(first, range(3))
    torch.cuda.synchronize()
    used = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    memferry_rt.save(tmp_path / "cuda", *first)
    assert torch.cuda.max_memory_allocated() == used
    expected = train(first, range(3, 6))
    masters = {k: v.clone() for k, v in memferry_rt.runtime_of(first[0]).master_parameters().items()}
    memferry_rt.restore(first[0])

    there = offloaded(1, "emulated", dtype, "1MiB")
    memferry_rt.load(tmp_path / "cuda", *there)
    memferry_rt.save(tmp_path / "emulated", *there)
    memferry_rt.restore(there[0])

    second = offloaded(2, "cuda", dtype, "320MiB")
    memferry_rt.load(tmp_path / "emulated", *second)
    assert torch.equal(second[0].mean.cpu(), torch.zeros(3))
    assert train(second, range(3, 6)) == expected
    for name, value in memferry_rt.runtime_of(second[0]).master_parameters().items():
        assert torch.equal(value, masters[name]), name
    memferry_rt.restore(second[0])


def test_a_plain_model_on_the_device(tmp_path: Path) -> None:
    pair = offloaded(0, "cuda", torch.float32)
    train(pair, range(2))
    memferry_rt.save(tmp_path, *pair)
    masters = {k: v.clone() for k, v in memferry_rt.runtime_of(pair[0]).master_parameters().items()}
    memferry_rt.restore(pair[0])
    model = Decoder().cuda()
    model.register_buffer("mean", torch.ones(3, device="cuda"))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    memferry_rt.load(tmp_path, model, optimizer)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.cpu(), masters[name])
        assert optimizer.state[parameter]["exp_avg"].is_cuda
        assert optimizer.state[parameter]["step"].is_cuda
    train((model, optimizer), range(2, 3))
