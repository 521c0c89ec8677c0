"""``plan="auto"``: made of what the first step shows, the same bits, and a reason where there is none."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memferry_rt
from memferry_allocator import EmulatedOptions
from memferry_rt import BudgetError
from memferry_rt.adapters.torch import autopilot as autopilot_module
from memferry_rt.adapters.torch.profiling import profile_model
from memferry_rt.adapters.torch.weight_panels import WeightPanels
from memferry_rt.plan import Batch, Dimensions, make_plan, transformer
from memferry_rt.plan.recognise import recognise
from memferry_tools.train.model import Decoder as Llama
from memferry_tools.train.presets import ModelShape

from .faults import Fault
from .harness import Job, Result, assert_same, offloaded, plain
from .models import Decoder, next_token_loss

SHAPE = ModelShape(hidden=64, layers=4, ffn=128, heads=2, vocabulary=512)
STEPS = 6


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has been profiled yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def _tokens(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(SHAPE.vocabulary, (2, 17), generator=torch.Generator().manual_seed(number))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _loss(model: nn.Module, number: int) -> torch.Tensor:
    loss: torch.Tensor = model(*_tokens(number))
    return loss


def _llama(checkpointing: bool = False, tied: bool = False) -> Llama:
    return Llama(ModelShape(64, 4, 128, 2, 512, tied=tied), checkpointing=checkpointing)


def _job(**more: Any) -> Job:
    return Job(_llama, _loss, steps=STEPS, lr=1e-3, **more)


@cache
def _expected() -> Result:
    return plain(_job())


def _wait(model: nn.Module, number: int) -> None:
    """Planning is over before the next step."""
    autopilot = memferry_rt.runtime_of(model).autopilot
    assert autopilot is not None
    autopilot.wait()


@pytest.mark.parametrize("share", [0.4, 1.0, 6.0])
def test_auto_has_the_bits(share: float) -> None:
    seen = []

    def between(model: nn.Module, number: int) -> None:
        _wait(model, number)
        seen.append((memferry_rt.plan_of(model), memferry_rt.runtime_of(model).report()))

    assert_same(_expected(), offloaded(_job(between=between), share=share, plan="auto", async_step=True))
    plan, report = seen[-1]
    assert plan is not None
    used = report.plan_source == "auto, from formulas"
    assert used or report.plan_notes
    if used:
        assert [each.weight_mode for each in report.per_layer] == [each.weight.value for each in plan.layers]


def _train(model: nn.Module, loss: Any, steps: int = 3, **options: Any) -> memferry_rt.Report:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    options = {"device_memory": "4MiB", "plan": "auto", **options}
    memferry_rt.offload(model, optimizer, device="emulated", emulated=EmulatedOptions(), **options)
    try:
        for number in range(steps):
            loss(model, number).backward()
            optimizer.step()
            optimizer.zero_grad()
            _wait(model, number)
        return memferry_rt.runtime_of(model).report()
    finally:
        memferry_rt.restore(model)


def test_a_profile_of_before_is_used() -> None:
    told: list[str] = []
    arguments: dict[str, Any] = {"micro_batch": 2, "sequence": 16, "device": "emulated"}
    profile_model(_llama(), _tokens(0), told=told.append, **arguments)
    assert told
    model = _llama()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    memferry_rt.offload(
        model, optimizer, device="emulated", emulated=EmulatedOptions(), device_memory="4MiB", plan="auto"
    )
    _loss(model, 0).backward()
    optimizer.step()
    autopilot = memferry_rt.runtime_of(model).autopilot
    assert autopilot is not None
    assert autopilot.source == "a profile"
    memferry_rt.restore(model)


def test_what_is_not_known_trains_by_default() -> None:
    report = _train(Decoder(layers=2), next_token_loss)
    assert report.plan_source == "default"
    assert "formulas do not know this kind of model" in report.plan_notes[0]


def test_sums_train_by_default() -> None:
    report = _train(_llama(), _loss, accumulate=2)
    assert "several backwards" in report.plan_notes[0]


def test_a_plan_that_cannot_be_made_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> Any:
        raise BudgetError("device_memory", 1, 2, "too little for a plan")

    monkeypatch.setattr(autopilot_module, "make_plan", fail)
    report = _train(_llama(), _loss)
    assert report.plan_source == "default"
    assert "too little for a plan" in report.plan_notes[0]


def test_set_plan_ends_it() -> None:
    model = _llama()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    memferry_rt.offload(
        model, optimizer, device="emulated", emulated=EmulatedOptions(), device_memory="4MiB", plan="auto"
    )
    memferry_rt.set_plan(model, {"head": "resident"})
    for number in range(3):
        _loss(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    report = memferry_rt.runtime_of(model).report()
    assert report.plan_source == "by hand"
    assert report.plan_notes == ("set_plan() has said otherwise",)
    memferry_rt.restore(model)
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_first_step_shows_what_is_planned_for(checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def note(workload: Any, options: Any, *more: Any) -> Any:
        asked.append((workload, options))
        return make_plan(workload, options, *more)

    monkeypatch.setattr(autopilot_module, "make_plan", note)
    _train(_llama(checkpointing), _loss)
    ((workload, options),) = asked
    assert (workload.micro_batch, workload.sequence) == (2, 16)
    assert {layer.recompute for layer in workload.layers if layer.name.startswith("blocks")} == {checkpointing}
    assert options.spares == 0


class _Clock:
    """Iterations by the default take so long, those by a plan so long."""

    def __init__(self, model: nn.Module, plan: float) -> None:
        self._runtime = memferry_rt.runtime_of(model)
        self._plan = plan

    @property
    def last(self) -> Any:
        planned = self._runtime.plan is not None
        return type("Times", (), {"total": self._plan if planned else 1.0})


@pytest.mark.parametrize(("seconds", "kept"), [(0.5, True), (2.0, False)])
def test_a_plan_is_tried_against_the_default(seconds: float, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a real device, whose times mean something."""
    used = []

    def between(model: nn.Module, number: int) -> None:
        runtime = memferry_rt.runtime_of(model)
        pilot = runtime.autopilot
        assert pilot is not None
        if number == 0:
            pilot.measured = True
            pilot.times = _Clock(model, seconds)
        _wait(model, number)
        used.append(runtime.plan is not None)

    job = Job(_llama, _loss, steps=24, lr=1e-3, between=between)
    got = offloaded(job, share=3.0, plan="auto")
    assert_same(plain(Job(_llama, _loss, steps=24, lr=1e-3)), got)
    assert {True, False} == set(used[1:19])
    assert set(used[20:]) == {kept}


@pytest.mark.parametrize(("times", "source"), [(1, "default"), (2, "default, after a plan has failed")])
@pytest.mark.parametrize("after", [0, 1])
def test_a_change_that_fails_is_told_and_training_goes_on(
    times: int, source: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that it comes after is made already: it does not raise."""
    fault = Fault(lambda: torch.OutOfMemoryError("CUDA out of memory"))
    fault.hit(monkeypatch, WeightPanels, "open")
    reports = []

    def between(model: nn.Module, number: int) -> None:
        runtime = memferry_rt.runtime_of(model)
        assert runtime.autopilot is not None
        runtime.autopilot.measured = True
        _wait(model, number)
        if number == 0:
            fault.arm(after, times)
        reports.append(runtime.report())

    got = offloaded(Job(_llama, _loss, steps=8, lr=1e-3, between=between), share=3.0, plan="auto")
    assert_same(plain(Job(_llama, _loss, steps=8, lr=1e-3)), got)
    assert fault.disarm()
    assert reports[-1].plan_notes[0] == _note(times)
    back = after == 1 and times == 1  # it was the way back to the default that has failed
    assert reports[-1].plan_source == ("auto, from formulas" if back else source)


def _note(times: int) -> str:
    no_room = "OutOfMemoryError: CUDA out of memory"
    if times == 1:
        return f"plans are exchanged no more: {no_room}"
    return (
        f"plans are exchanged no more: OffloadError: a change of plans failed ({no_room}), and so did going back "
        f"({no_room}); every layer is streamed now, and training can go on"
    )


@pytest.mark.parametrize(
    "size",
    [
        Dimensions(64, 4, 128, 2, 512),
        Dimensions(64, 4, 128, 2, 512, fused=True, tied=True),
        Dimensions(64, 4, 128, 2, 512, kv_width=16),
        Dimensions(64, 12, 256, 2, 512, positions=768, gated=False, fused=True, biases=True, tied=True),
    ],
)
def test_families_are_recognised(size: Dimensions) -> None:
    known = transformer("known", size, Batch(2, 16, "float32"))
    shapes = {layer.name: layer.shapes for layer in known.layers if layer.parameters}
    found = recognise(shapes, Batch(2, 16, "float32"))
    assert found is not None
    assert [layer.flops for layer in found.layers] == [layer.flops for layer in known.layers]
    assert found.fingerprint == known.fingerprint
    shapes["blocks.1"] = (*shapes["blocks.1"], (7,))
    assert recognise(shapes, Batch(2, 16, "float32")) is None


@pytest.mark.gpu
def test_auto_is_tried_on_a_device() -> None:
    torch.manual_seed(0)
    model = _llama().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    memferry_rt.offload(model, optimizer, device="cuda", device_memory="1GiB", plan="auto", async_step=True)
    runtime = memferry_rt.runtime_of(model)
    assert runtime.autopilot is not None
    sources = set()
    for number in range(30):
        tokens, targets = _tokens(number)
        model(tokens.cuda(), targets.cuda()).backward()
        optimizer.step()
        optimizer.zero_grad()
        runtime.autopilot.wait()
        sources.add(runtime.report().plan_source)
        assert runtime.report().device_peak <= 1 << 30
    plan, acceptance = memferry_rt.plan_of(model), runtime.autopilot.acceptance
    assert plan is not None, runtime.autopilot.reason
    assert acceptance is not None, runtime.autopilot.reason
    assert acceptance.settled or acceptance.trials > 1
    assert sources == {"default", "auto, from formulas"}
    memferry_rt.restore(model)
