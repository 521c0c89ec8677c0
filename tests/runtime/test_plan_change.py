"""Something fails in the middle of a change of plans: one plan is wholly in force, and training keeps its bits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import memferry_rt
from memferry_allocator import DevicePool, DriverError, EmulatedDriver, OutOfMemory
from memferry_rt import OffloadError
from memferry_rt.adapters.torch.gradient_homes import GradientHomes
from memferry_rt.adapters.torch.tensors import TensorFactory
from memferry_rt.adapters.torch.weight_panels import WeightPanels

from .faults import Fault, FaultError
from .helped import machine, small_slices
from .models import next_token_loss
from .test_plan_in_runtime import ALL, _changed, _plan
from .twins import Twins

__all__ = ["small_slices"]


def told(twins: Twins) -> tuple[Any, ...]:
    """What is said to be in force, and where layers really are."""
    report = twins.runtime.report()
    modes = [(each.weight_mode, each.gradient_mode, each.state_mode) for each in report.per_layer]
    residents = [layer.name for layer in twins.runtime.memory.residents.layers]
    return memferry_rt.plan_of(twins.model), report.plan_source, modes, residents, report.pool_nbytes


@pytest.fixture
def twins() -> Iterator[Twins]:
    made = Twins()
    yield made
    made.runtime.close()
    assert made.runtime.driver.registered == 0


@functools.cache
def _planned() -> Any:
    return _changed(_plan(4 << 20, half=False), ALL)


CALLS: list[tuple[type, str, Callable[[], Exception]]] = [
    *((EmulatedDriver, call, FaultError) for call in ("copy", "event_record", "stream_wait", "launch", "malloc")),
    *((EmulatedDriver, call, FaultError) for call in ("create_stream", "stream_synchronize", "event_synchronize")),
    (DevicePool, "allocate", lambda: OutOfMemory("the pool has no room", size=1, used=1, limit=1, budget="pool")),
    (GradientHomes, "_let_go", lambda: torch.OutOfMemoryError("CUDA out of memory")),
    (TensorFactory, "device", lambda: torch.OutOfMemoryError("CUDA out of memory")),
]


@pytest.mark.parametrize(("owner", "call", "make"), CALLS, ids=[call for _, call, _ in CALLS])
@pytest.mark.parametrize("back", [False, True])
def test_a_failing_call_leaves_the_plan_before(
    monkeypatch: pytest.MonkeyPatch, twins: Twins, owner: type, call: str, make: Any, back: bool
) -> None:
    first, second = (_planned(), {}) if back else ({}, _planned())
    memferry_rt.set_plan(twins.model, first)
    twins.step()
    fault = Fault(make)
    fault.hit(monkeypatch, owner, call)
    before, failed = told(twins), 0
    for after in [*range(12), *range(12, 600, 7)]:
        fault.arm(after)
        try:
            memferry_rt.set_plan(twins.model, second)
        except (FaultError, OutOfMemory, torch.OutOfMemoryError):
            failed += 1
            assert fault.disarm()
            assert told(twins) == before, after
            twins.assert_same(after)
        else:
            assert told(twins) != before
            if not fault.disarm():
                break
            memferry_rt.set_plan(twins.model, first)  # what failed was to be had in vain
        twins.step()
        twins.assert_same(after)
    assert failed
    twins.step()
    twins.assert_same("after all")


@pytest.fixture
def opening(monkeypatch: pytest.MonkeyPatch) -> Fault:
    """Lets a plan fail when it takes its parts of the pool, which every plan does once."""
    fault = Fault(lambda: OutOfMemory("the pool has no room", size=1, used=1, limit=1, budget="pool"))
    fault.hit(monkeypatch, WeightPanels, "open")
    return fault


def test_if_the_plan_before_fails_too_everything_is_streamed(twins: Twins, opening: Fault) -> None:
    memferry_rt.set_plan(twins.model, _planned())
    twins.step()
    pool = told(twins)[-1]
    opening.arm(0, times=2)
    with pytest.raises(OffloadError, match="every layer is streamed now, and training can go on") as caught:
        memferry_rt.set_plan(twins.model, "*=resident")
    assert isinstance(caught.value.__cause__, OutOfMemory)
    plan, source, modes, residents, nbytes = told(twins)
    assert (plan, source, residents) == (None, "default, after a plan has failed", [])
    assert set(modes) == {("stream", "buffer", "")}
    assert nbytes < pool
    for _ in range(2):
        twins.assert_same("streamed")
        twins.step()
    memferry_rt.set_plan(twins.model, _planned())
    twins.step()
    assert told(twins)[0] is _planned()
    assert told(twins)[-1] == pool
    twins.assert_same("planned again")


def test_a_pool_that_cannot_grow_stays_and_one_that_is_lost_is_told_of(twins: Twins, opening: Fault) -> None:
    memferry_rt.set_plan(twins.model, _planned())
    twins.step()
    plans, before = twins.runtime.plans, told(twins)
    opening.arm(0)
    plans.grow(plans.in_force.budget)
    assert opening.disarm()
    assert told(twins) == before
    opening.arm(0, times=2)
    with pytest.warns(RuntimeWarning, match="every layer is streamed now, and training can go on"):
        plans.grow(plans.in_force.budget)
    assert told(twins)[1] == "default, after a plan has failed"
    twins.step()
    twins.assert_same("after all")


def test_if_nothing_works_the_model_can_be_restored(twins: Twins, opening: Fault) -> None:
    memferry_rt.set_plan(twins.model, _planned())
    twins.step()
    opening.arm(0, times=3)
    with pytest.raises(OffloadError, match=r"training cannot go on: call memferry_rt\.restore"):
        memferry_rt.set_plan(twins.model, {})
    with pytest.raises(OffloadError, match=r"streaming everything .* call memferry_rt\.restore"):
        next_token_loss(twins.model, 1)
    with pytest.raises(OffloadError, match=r"streaming everything .* call memferry_rt\.restore"):
        memferry_rt.set_plan(twins.model, {})
    memferry_rt.restore(twins.model)
    twins.step()
    for one, other in zip(twins.plain.parameters(), twins.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_what_helpers_still_copy_is_waited_for(monkeypatch: pytest.MonkeyPatch, small_slices: None) -> None:
    """No event tells of it, if none can be recorded: neither behind a transfer nor behind what is left of it."""
    fault = Fault(lambda: DriverError("CUDA_ERROR_UNKNOWN", "event", "a fault"))
    plan = {"embedding": "resident", "blocks.0": "dha_then_load", "blocks.2": "ring", "head": "dha"}
    fault.hit(monkeypatch, EmulatedDriver, "event_record")
    for after in range(3, 8):
        twins = Twins(helpers=[1], device_memory=118_400, emulated=machine())
        fault.arm(after, times=3)
        with pytest.raises((DriverError, OffloadError)) as caught:
            memferry_rt.set_plan(twins.model, plan)
        assert fault.disarm()
        assert "RaceError" not in str(caught.value)
        memferry_rt.restore(twins.model)
        twins.step()
        for one, other in zip(twins.plain.parameters(), twins.model.parameters(), strict=True):
            assert torch.equal(one, other)
