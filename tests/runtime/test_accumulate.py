"""Sums of micro-steps: in fp32 if asked, on the device where there is room, and complete before they are used."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import memferry_rt
from memferry_allocator import InvalidRequestError
from memferry_rt import BudgetError
from memferry_rt.adapters.torch.early import EarlyUpdates

from .harness import Job, Result, assert_same, offloaded, plain
from .models import Decoder, checkpointed, next_token_loss, plainly, skipping, twice

LAYERS = 2
FP32 = {"accumulate_dtype": "float32"}


def small(run: Any = None, **options: Any) -> Decoder:
    return Decoder(run, layers=LAYERS, **options)


def summed_in_fp32(job: Job) -> Result:
    """The definition: what autograd gives for one micro-step, widened, is added to the sum of those before."""
    torch.manual_seed(0)
    model = job.build().to(job.dtype)
    masters = {p: nn.Parameter(p.detach().float()) for p in model.parameters()}
    how = {"fused": True} if job.optimizer is torch.optim.AdamW else {}
    optimizer = job.optimizer(masters.values(), lr=job.lr, **how, **job.settings)  # type: ignore[call-arg]
    losses, norms = [], []
    torch.manual_seed(7)
    for step in range(job.steps):
        sums: dict[nn.Parameter, torch.Tensor] = {}
        for micro in range(job.accumulate):
            loss = job.loss(model, step * job.accumulate + micro)
            (loss / job.accumulate).backward()
            losses.append(loss.item())
            for parameter in model.parameters():
                if parameter.grad is not None:
                    wide = parameter.grad.float()
                    sums[parameter] = wide if parameter not in sums else sums[parameter] + wide
                parameter.grad = None
        ordered = [sums[parameter] for parameter in model.parameters() if parameter in sums]
        each = [float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) for gradient in ordered]
        norms.append(math.sqrt(sum(norm * norm for norm in each)))
        if not math.isfinite(norms[-1]):
            continue
        scale = 1.0 if job.max_grad_norm is None else min(1.0, job.max_grad_norm / (norms[-1] + 1e-6))
        for parameter, master in masters.items():
            master.grad = None
            if parameter in sums:
                master.grad = sums[parameter] * scale if scale != 1.0 else sums[parameter].clone()
        optimizer.step()
        with torch.no_grad():
            for parameter, master in masters.items():
                parameter.copy_(master)
    return Result(losses, norms, {name: masters[p].detach() for name, p in model.named_parameters()})


@pytest.mark.parametrize(
    ("dtype", "share", "run", "options"),
    [
        (torch.bfloat16, 0.9, plainly, {}),
        (torch.bfloat16, 0.9, skipping, {"accumulate": 3, "optimizer_split": "cpu", "async_step": True}),
        (torch.bfloat16, 8.0, skipping, {"accumulate": 3, "optimizer_split": "cpu", "spare_slabs": 4}),
        (torch.bfloat16, 2.0, plainly, {"accumulate": 3, "optimizer_split": 0.5}),
        (torch.bfloat16, 20.0, skipping, {"accumulate": 3}),
        (torch.bfloat16, 4.0, plainly, {"accumulate": 3, "optimizer_split": 0.3, "spare_slabs": 2}),
        (torch.float16, 1.2, plainly, {"accumulate": 2, "spare_slabs": 3, "optimizer_split": 1.0}),
        (torch.float16, 20.0, plainly, {"accumulate": 7, "async_step": True}),
        (torch.float32, 4.0, skipping, {"accumulate": 3, "optimizer_split": "cpu", "spare_slabs": 4}),
    ],
)
def test_sums_in_fp32(dtype: torch.dtype, share: float, run: Any, options: dict[str, Any]) -> None:
    clip = None if "spare_slabs" in options else 1.0
    job = Job(lambda: small(run), next_token_loss, dtype=dtype, accumulate=3, steps=3, lr=1e-3, max_grad_norm=clip)
    assert_same(summed_in_fp32(job), offloaded(job, share=share, **FP32, **options))


@pytest.mark.filterwarnings("ignore:RMSprop has no native")
@pytest.mark.parametrize(
    ("kind", "settings"),
    [(torch.optim.SGD, {"momentum": 0.9}), (memferry_rt.Lion, {}), (torch.optim.RMSprop, {"momentum": 0.5})],
)
def test_sums_in_fp32_for_other_optimizers(kind: Any, settings: dict[str, Any]) -> None:
    job = Job(
        small, next_token_loss, dtype=torch.bfloat16, accumulate=3, steps=3, lr=1e-3, optimizer=kind,
        settings=settings,
    )  # fmt: skip
    for share in (0.9, 8.0):
        assert_same(summed_in_fp32(job), offloaded(job, share=share, accumulate=3, **FP32))


def test_it_is_not_the_sum_in_the_parameter_s_dtype() -> None:
    """The comparison can fail: in bf16 the bits are others."""
    job = Job(small, next_token_loss, dtype=torch.bfloat16, accumulate=3, steps=2, lr=1e-3)
    assert_same(plain(job), offloaded(job, share=0.9))
    with pytest.raises(AssertionError):
        assert_same(summed_in_fp32(job), offloaded(job, share=0.9))


@pytest.mark.parametrize("share", [0.9, 8.0])
@pytest.mark.parametrize("run", [checkpointed(True), twice])
def test_checkpointing_and_blocks_used_twice(run: Any, share: float) -> None:
    job = Job(lambda: small(run, tied=True), next_token_loss, dtype=torch.bfloat16, accumulate=2, steps=3, lr=1e-3)
    assert_same(summed_in_fp32(job), offloaded(job, share=share, accumulate=2, **FP32))


class Promoted(nn.Module):
    """Half-precision parameters whose gradients are made in fp32: autograd rounds each before it adds them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(31))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        return (x.sin() * self.scale).sum() + (x.cos() @ self.scale.float())


def test_gradients_that_autograd_rounds() -> None:
    def loss(model: nn.Module, number: int) -> torch.Tensor:
        return model(torch.randn(31, generator=torch.Generator().manual_seed(number)))

    job = Job(Promoted, loss, dtype=torch.bfloat16, accumulate=3, steps=4)
    assert_same(summed_in_fp32(job), offloaded(job, device_memory=1 << 17, accumulate=3, **FP32))


@pytest.mark.parametrize(("declared", "split"), [(2, "cpu"), (3, 0.5), (5, "cpu"), (5, 0.5)])
def test_more_and_fewer_micro_steps_than_declared(declared: int, split: Any) -> None:
    job = Job(small, next_token_loss, accumulate=3, steps=3, max_grad_norm=None)
    expected = plain(job)
    for share in (0.6, 8.0):
        assert_same(
            expected, offloaded(job, share=share, accumulate=declared, optimizer_split=split, spare_slabs=2)
        )


def _trained(share: float, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(0)
    model = small().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    memferry_rt.offload(
        model, optimizer, device="emulated", device_memory=int(weights * share), optimizer_split="cpu", **options
    )
    return model, optimizer, memferry_rt.runtime_of(model)


@pytest.mark.parametrize(("share", "fits"), [(0.6, "some"), (8.0, "all")])
def test_sums_that_fit_leave_the_device_once_a_step(share: float, fits: str) -> None:
    """Those of the first layers come first: backward makes them at its end, when nothing hides their transfer."""
    model, optimizer, runtime = _trained(share, accumulate=4)
    summed = [layer.sums is not None for layer in runtime.layers]
    assert all(summed) == (fits == "all")
    assert summed[0]
    expected = 0
    for layer in runtime.layers:
        nbytes = sum(slot.spec.gradient_nbytes for slot in layer.layout.slots)
        expected += nbytes if layer.sums is not None else 4 * nbytes
    for micro in range(4):
        next_token_loss(model, micro).backward()
    optimizer.step()
    report = runtime.report()
    assert report.device_to_host_nbytes == expected
    assert report.summed_parameters == sum(
        p.numel() for layer in runtime.layers if layer.sums is not None for p in layer.parameters
    )
    runtime.close()


def test_only_the_last_backward_begins_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []
    begin = EarlyUpdates._begin
    monkeypatch.setattr(EarlyUpdates, "_begin", lambda *a: (begun.append(number), begin(*a))[1])
    for declared, share in ((1, 0.6), (3, 0.6), (3, 8.0)):
        model, optimizer, runtime = _trained(share, accumulate=declared, spare_slabs=9)
        early = runtime.step_updates.early
        begun.clear()
        for number in range(6):
            next_token_loss(model, number).backward()
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        assert early.published == 2 * len(runtime.layers)
        assert early.dropped == (0 if declared == 3 else 4 * len(runtime.layers))
        assert {number % 3 for number in begun} == ({2} if declared == 3 else {0, 1, 2})
        runtime.close()


@pytest.mark.parametrize("share", [0.9, 20.0])
def test_grad_is_the_fp32_sum_and_may_be_changed(share: float) -> None:
    torch.manual_seed(0)
    other = small().bfloat16()
    model, optimizer, runtime = _trained(share, torch.bfloat16, accumulate=2, **FP32)
    sums: dict[str, torch.Tensor] = {}
    for micro in range(2):
        next_token_loss(other, micro).backward()
        next_token_loss(model, micro).backward()
        for name, parameter in other.named_parameters():
            wide = parameter.grad.float()
            sums[name] = wide if micro == 0 else sums[name] + wide
            parameter.grad = None
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype is torch.float32
        assert torch.equal(parameter.grad, sums[name])
    kept = model.head.weight.grad
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="dtype"):
            model.norm.weight.grad = model.norm.weight.grad * 2
        model.norm.weight.grad = torch.full_like(model.norm.weight, 2.0)
        sums["norm.weight"] = torch.full((32,), 2.0)
        model.norm.bias.grad.mul_(3)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 3 if name == "norm.bias" else 1
        moment = optimizer.state[parameter]["exp_avg"]
        assert torch.allclose(moment, sums[name] * factor * 0.1, rtol=1e-5, atol=0)
    optimizer.zero_grad(set_to_none=False)
    assert not kept.any()
    optimizer.zero_grad()
    next_token_loss(model, 5).backward()
    assert not kept.any()
    memferry_rt.restore(model)
    assert all(p.grad is None or p.grad.dtype is torch.bfloat16 for p in model.parameters())
    model.head.weight.grad = torch.zeros_like(model.head.weight)
    assert runtime.driver.registered == 0


def test_sums_that_are_not_finite_are_skipped() -> None:
    def loss(model: nn.Module, number: int) -> torch.Tensor:
        return next_token_loss(model, number) * {3: float("inf"), 8: float("nan")}.get(number, 1.0)

    job = Job(small, loss, dtype=torch.bfloat16, accumulate=2, steps=6, lr=1e-3)
    expected, got = summed_in_fp32(job), offloaded(job, share=0.9, accumulate=2, spare_slabs=3, **FP32)
    assert sum(not math.isfinite(norm) for norm in got.norms) == 2
    for name, value in expected.parameters.items():
        assert torch.equal(value, got.parameters[name]), name


def test_bytes_a_parameter_count_the_larger_slabs() -> None:
    model = Decoder(layers=2, width=128).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    smallest = []
    for options in ({}, FP32):
        with pytest.raises(BudgetError) as caught:
            memferry_rt.offload(
                model, optimizer, device="emulated", device_memory="4MiB", host_memory=1 << 10, **options
            )
        smallest.append(caught.value.smallest)
    memferry_rt.offload(model, optimizer, device="emulated", device_memory="4MiB", host_memory=smallest[1], **FP32)
    report = memferry_rt.runtime_of(model).report()
    assert 18 <= report.host_nbytes_per_parameter < 18.3
    assert smallest[1] - smallest[0] == pytest.approx(2 * report.parameters, rel=0.01)
    memferry_rt.restore(model)


@pytest.mark.parametrize("options", [{"accumulate": 0}, {"accumulate": 1.5}, {"accumulate_dtype": "float64"}])
def test_what_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    model = small()
    with pytest.raises(InvalidRequestError, match="accumulate"):
        memferry_rt.offload(
            model, torch.optim.AdamW(model.parameters()), device="emulated", device_memory="1MiB", **options
        )
