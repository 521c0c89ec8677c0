"""Where an iteration's time goes: the parts are the whole, and nothing but computing is counted as that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import memferry_rt
from memferry_allocator import EmulatedDriver, EmulatedOptions
from memferry_allocator.driver import LinkModel
from memferry_rt.stalls import IterationTimes, StallMeter

from .models import Decoder, next_token_loss

SECOND = LinkModel(0.0, 1.0)  # a byte takes one second: the emulated clock's times are whole numbers


@settings(max_examples=30, deadline=None)
@given(
    parts=st.lists(
        st.tuples(st.sampled_from(["compute", "update", "copy", "half"]), st.integers(1, 9)), max_size=12
    ),
    inside=st.integers(0, 5),
)
def test_every_second_is_counted_once(parts: list[tuple[str, int]], inside: int) -> None:
    options = EmulatedOptions(host_to_device=SECOND, device_to_host=SECOND, on_device=SECOND, seed=1)
    driver = EmulatedDriver(options)
    compute, other = driver.create_stream(0), driver.create_stream(0)
    one, two = driver.malloc(0, 16), driver.malloc(0, 16)
    meter = StallMeter(driver, 0)
    expected = dict.fromkeys(("compute", "update", "copy"), 0.0)
    meter.iteration(compute)
    if inside:
        driver.copy(one, two, inside, stream=compute)
    meter.submitted(compute)
    for kind, seconds in parts:
        if kind == "compute":
            driver.copy(one, two, seconds, stream=compute)
            expected["compute"] += seconds
            continue
        other.wait(compute.record())
        begin = meter.mark(compute)
        driver.copy(one, two, seconds, stream=other)
        compute.wait(other.record())
        updating = {"update": float("inf"), "copy": 0.0, "half": seconds / 2}[kind]
        meter.stalled(begin, compute, updating)
        expected["update"] += min(seconds, updating)
        expected["copy"] += max(0.0, seconds - updating)
    meter.iteration(compute)
    times = meter.last
    assert times.step == inside
    assert times.busy == pytest.approx(expected["compute"])
    assert times.update == pytest.approx(expected["update"])
    assert times.copy == pytest.approx(expected["copy"])
    assert times.busy + times.exposed == pytest.approx(times.total)
    assert times.total == pytest.approx(inside + sum(expected.values()))
    compute.synchronize(), other.synchronize()
    driver.free(0, one), driver.free(0, two)


@pytest.fixture(params=[0.5, 1.3])
def times(request: pytest.FixtureRequest) -> IterationTimes:
    """Of a small model after some steps."""
    torch.manual_seed(0)
    model = Decoder(layers=3)
    optimizer = torch.optim.AdamW(model.parameters())
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    options: dict[str, Any] = {"optimizer_split": "cpu", "emulated": EmulatedOptions(seed=2)}
    memferry_rt.offload(model, optimizer, device="emulated", device_memory=int(weights * request.param), **options)
    for number in range(4):
        next_token_loss(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    report = memferry_rt.runtime_of(model).report()
    memferry_rt.restore(model)
    return report.times


def test_all_that_copies_cost_is_called_so(times: IterationTimes) -> None:
    """Kernels take no time on the emulated clock: what the compute stream spends there is waiting for copies."""
    assert times.total > 0
    assert times.busy == pytest.approx(0.0, abs=1e-9)
    assert times.copy > 0
    assert times.busy + times.exposed == pytest.approx(times.total)
