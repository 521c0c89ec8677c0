"""Devices that do not train carry a share of the copies: nothing else changes, and nothing is left of it."""

from __future__ import annotations

from typing import Any

import pytest

import memferry_rt
from memferry_allocator import EmulatedDriver
from memferry_rt.helpers import costs

from .harness import Job, assert_same, plain
from .harness import offloaded as run_offloaded
from .helped import machine, offload_module, offloaded, small_slices, some_slow, step
from .models import Decoder, next_token_loss

__all__ = ["small_slices"]


PLANS: dict[str, dict[str, Any]] = {
    "streamed": {},
    "cpu, asynchronous": {"optimizer_split": "cpu", "async_step": True},
    "early": {"spare_slabs": 3},
    "state is streamed": {"optimizer_split": 1.0, "share": 2.0},
    "everything resident": {"optimizer_split": 1.0, "share": 8.0},
    "panels": {"plan": {"blocks.*": "ring+inplace", "embedding": "dha"}, "share": 1.0},
    "micro-steps": {"accumulate": 2},
}


@pytest.mark.parametrize("options", some_slow(PLANS, "cpu, asynchronous", "micro-steps", "state is streamed"))
def test_parameters_have_the_bits_of_plain_pytorch(
    options: dict[str, Any], small_slices: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(lambda: Decoder(layers=3), next_token_loss, steps=4, accumulate=options.get("accumulate", 1))
    drivers: list[EmulatedDriver] = []

    def opened(text: str, emulated: Any) -> tuple[EmulatedDriver, int]:
        drivers.append(EmulatedDriver(emulated))
        return drivers[-1], 0

    monkeypatch.setattr(offload_module, "open_device", opened)
    expected = plain(job)
    for helpers in ([1], "auto"):
        assert_same(expected, run_offloaded(job, helpers=helpers, emulated=machine(3), **options))
        free = [drivers[-1].memory_info(device).free for device in range(3)]
        assert len(set(free)) == 1, "memory of a device is not given back"


def _seconds(**options: Any) -> tuple[float, int]:
    """Emulated seconds of three iterations, and what helpers have carried."""
    model, optimizer, runtime = offloaded(share=0.4, **options)
    assert isinstance(runtime.driver, EmulatedDriver)
    step(model, optimizer, 0)
    began = runtime.driver.now
    for number in range(1, 4):
        step(model, optimizer, number)
    seconds, carried = runtime.driver.now - began, runtime.report().helper_nbytes
    memferry_rt.restore(model)
    return seconds, carried


@pytest.mark.parametrize("helpers", [[1], "auto"])
def test_an_iteration_that_waits_for_weights_takes_half_the_time_with_a_helper(
    helpers: Any, small_slices: None
) -> None:
    """Of a frozen model, in which only biases train, on the emulated clock."""
    frozen = {"freeze": lambda name: not name.endswith("bias"), "emulated": machine()}
    alone, nothing = _seconds(**frozen)
    helped, carried = _seconds(helpers=helpers, **frozen)
    assert carried > nothing == 0
    assert alone / helped > 1.5


def test_full_training_is_no_slower_with_a_helper(small_slices: None) -> None:
    alone, _ = _seconds(emulated=machine())
    helped, carried = _seconds(helpers=[1], emulated=machine())
    assert carried > 0
    assert alone / helped > 0.99


def test_a_report_counts_what_helpers_carry_and_hold(small_slices: None) -> None:
    model, optimizer, runtime = offloaded(helpers=[2, 1], emulated=machine(3))
    for number in range(2):
        step(model, optimizer, number)
    report = runtime.report()
    assert [helper.device for helper in report.helpers] == [2, 1]
    for helper in report.helpers:
        assert 0 < helper.carried_in < report.host_to_device_nbytes
        assert 0 < helper.carried_out < report.device_to_host_nbytes
        assert helper.device_nbytes == 2 * 2 * costs.EMULATED_SLICE  # two buffers a direction
        assert runtime.driver.memory_info(helper.device).free <= (64 << 30) - helper.device_nbytes
        assert "well" in helper.health
    assert report.helpers_note.startswith("named: device 2, 1; costs as the emulated links")
    memferry_rt.restore(model)
