"""Helpers that fail, are slow, or are lost in the middle of an iteration: no bit changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

import memferry_rt
from memferry_allocator import DriverError, EmulatedDriver
from memferry_allocator.driver import Stream
from memferry_transport import TransferFailedError

from .helped import machine, offloaded, put_in, small_slices, some_slow, step

__all__ = ["small_slices"]


class Troubled(EmulatedDriver):
    """Has trouble with copies on streams of device 1, its helper."""

    lost_after: int | None = None  # so many copies more, on whatever device, it is lost
    fails = range(0)  # which of the helper's copies are refused
    times = 1  # as often as one is carried out
    spoils = False  # whether what it passes on comes changed
    count = 0

    def copy(self, dst: int, src: int, nbytes: int, *, stream: Stream) -> None:
        if stream.device != 1:
            super().copy(dst, src, nbytes, stream=stream)
        else:
            self.count += 1
            if self.count in self.fails:
                raise DriverError("CUDA_ERROR_UNKNOWN", "copy", "a fault")
            for _ in range(self.times):
                super().copy(dst, src, nbytes, stream=stream)
            if self.spoils and self.device_of(dst) == 1:
                self.fill(dst, 7, min(nbytes, 16), stream=stream)
        if self.lost_after is not None:
            self.lost_after -= 1
            if self.lost_after < 0:
                self.lost_after = None
                self.lose(1)


def _trained(
    options: dict[str, Any], lost_after: int | None = None, *, steps: int = 4
) -> tuple[dict[str, torch.Tensor], int]:
    """Parameters after some steps, those repeated that say so; and how many were."""
    model, optimizer, runtime = offloaded(**options)
    said: list[str] = []
    number = 0
    while number < steps:
        if number == 2 and not said and isinstance(runtime.driver, Troubled):
            runtime.driver.lost_after = lost_after
        try:
            step(model, optimizer, number)
            number += 1
        except TransferFailedError as error:
            said.append(str(error))
            optimizer.zero_grad()
    assert all("device 1, a helper, was lost" in text and "Nothing was updated" in text for text in said)
    parameters = {name: value.clone() for name, value in runtime.master_parameters().items()}
    memferry_rt.restore(model)
    assert isinstance(runtime.driver, EmulatedDriver)
    assert runtime.driver.registered == 0
    return parameters, len(said)


def _same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


LOST: dict[str, dict[str, Any]] = {
    "weights stay": {"share": 2.0, "optimizer_split": "cpu"},
    "state on the device": {"share": 3.0, "optimizer_split": 1.0},
    "early": {"spare_slabs": 3},
}


@pytest.mark.parametrize("options", some_slow(LOST, "state on the device", "early"))
def test_a_helper_lost_in_the_middle_costs_an_iteration_and_no_bit(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, small_slices: None
) -> None:
    expected, _ = _trained({"emulated": machine(), **options})
    told = 0
    for after in (1, 77, 150):
        put_in(monkeypatch, Troubled(machine()))
        found, repeated = _trained({"helpers": [1], **options}, after)
        told += repeated
        assert _same(expected, found), after
    assert 0 < told <= 3


def test_what_the_device_has_made_comes_home_without_helpers(
    monkeypatch: pytest.MonkeyPatch, small_slices: None
) -> None:
    """Weights and state of layers that live there: should a helper be lost, there would be no other copy."""
    driver = Troubled(machine())
    put_in(monkeypatch, driver)
    model, optimizer, runtime = offloaded(helpers=[1], optimizer_split=1.0, share=8.0)
    step(model, optimizer, 0)
    report = runtime.report()
    assert report.resident_parameters == report.updated_parameters
    assert report.device_to_host_nbytes == report.weight_nbytes
    assert report.helpers[0].carried_out == 0 < report.helpers[0].carried_in
    before = driver.count
    memferry_rt.restore(model)
    assert driver.count == before


TROUBLE: dict[str, dict[str, Any]] = {
    "is refused for a while": {"fails": range(6, 20)},
    "is always refused": {"fails": range(3, 10000)},
    "is slow": {"times": 50},
    "spoils what it carries": {"spoils": True},
}


@pytest.mark.parametrize("trouble", some_slow(TROUBLE, "is refused for a while"))
def test_a_helper_in_trouble_changes_no_bit(
    trouble: dict[str, Any], monkeypatch: pytest.MonkeyPatch, small_slices: None
) -> None:
    expected, _ = _trained({"emulated": machine()})
    driver = Troubled(machine())
    for name, value in trouble.items():
        setattr(driver, name, value)
    put_in(monkeypatch, driver)
    found, repeated = _trained({"helpers": [1]})
    assert driver.count > 0
    assert repeated == 0
    assert _same(expected, found)


def test_a_helper_without_memory_is_left_alone(monkeypatch: pytest.MonkeyPatch, small_slices: None) -> None:
    expected, _ = _trained({"emulated": machine()})
    driver = EmulatedDriver(machine(device_memory=16 << 20))
    put_in(monkeypatch, driver)
    taken = driver.malloc(1, driver.memory_info(1).free)
    model, optimizer, runtime = offloaded(helpers=[1])
    for number in range(4):
        step(model, optimizer, number)
    (helper,) = runtime.report().helpers
    assert (helper.carried_in, helper.carried_out, helper.device_nbytes) == (0, 0, 0)
    assert "left alone" in helper.health
    assert _same(expected, runtime.master_parameters())
    memferry_rt.restore(model)
    driver.free(1, taken)
