"""Devices that do not train carry a share of the copies: nothing else changes, and nothing is left of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

import memferry_rt
from memferry_allocator import DriverError, EmulatedDriver, InvalidRequestError
from memferry_allocator.driver import Route, Stream, Wiring
from memferry_rt import UnsupportedError
from memferry_rt.helpers import costs, share_out
from memferry_transport import TransferFailedError

from .harness import Job, assert_same, plain
from .harness import offloaded as run_offloaded
from .helped import FAST, LINK, machine, offload_module, offloaded, put_in, small_slices, step
from .models import Decoder, next_token_loss

__all__ = ["small_slices"]


# -- which devices -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("devices", "ranks", "expected"),
    [
        (2, 1, [(1,)]),
        (8, 4, [(4,), (5,), (6,), (7,)]),
        (8, 2, [(2, 4, 6), (3, 5, 7)]),
        (8, 3, [(3,), (4,), (5,)]),
        (2, 2, [(), ()]),
        (3, 2, [(), ()]),
    ],
    ids=lambda value: str(value),
)
def test_idle_devices_are_shared_out_evenly(devices: int, ranks: int, expected: list[tuple[int, ...]]) -> None:
    assert share_out(range(devices), range(ranks)) == expected


def test_a_device_is_helped_by_those_that_it_reaches() -> None:
    near = {(0, 2), (0, 4), (1, 2), (1, 3), (1, 4)}
    assert share_out(range(5), [0, 1], lambda one, other: (one, other) in near) == [(2,), (3,)]
    assert share_out(range(3), [0], lambda one, other: False) == [()]
    assert share_out([0, 1], [0, 0]) == [(), ()]  # two that train on one device


ASKED: dict[str, Any] = {"text": "all", "a number": 1, "a bool": [True], "below 0": [-1], "twice": [1, 1]}


@pytest.mark.parametrize("helpers", ASKED.values(), ids=ASKED)
def test_what_is_no_list_of_devices_is_refused(helpers: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^helpers: "):
        offloaded(helpers=helpers)


def _island() -> Wiring:
    """Three devices of which the first two reach each other."""
    return Wiring((Route(LINK),) * 3, (Route(LINK),) * 3, {(0, 1): Route(FAST), (1, 0): Route(FAST)})


@pytest.mark.parametrize(
    ("helpers", "kind", "text"),
    [
        ([0], InvalidRequestError, "device 0 is the one that trains"),
        ([1, 7], InvalidRequestError, "there is no device 7; this process sees 3"),
        ([2], UnsupportedError, "devices 2 and 0 have no peer access"),
    ],
)
def test_helpers_that_cannot_be_are_refused_before_anything_changes(
    helpers: list[int], kind: type[Exception], text: str
) -> None:
    model = Decoder(layers=1)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(kind, match=f"^helpers: {text}"):
        memferry_rt.offload(
            model,
            optimizer,
            device="emulated",
            device_memory="1MiB",
            helpers=helpers,
            emulated=machine(3, wiring=_island()),
        )
    assert not list(model._forward_hooks)
    next_token_loss(model, 0).backward()
    optimizer.step()


def test_auto_takes_those_that_reach_or_none(small_slices: None) -> None:
    for wiring, expected in ((_island(), [1]), (Wiring((Route(LINK),) * 3, (Route(LINK),) * 3), [])):
        model, optimizer, runtime = offloaded(helpers="auto", emulated=machine(3, wiring=wiring))
        step(model, optimizer, 0)
        report = runtime.report()
        assert [helper.device for helper in report.helpers] == expected
        assert report.helpers_note.startswith("auto: ")
        assert bool(report.helper_nbytes) == bool(expected)
        memferry_rt.restore(model)


# -- two models of one process ---------------------------------------------------------------------------------
def test_a_device_that_trains_helps_nobody_and_the_other_way_round(
    monkeypatch: pytest.MonkeyPatch, small_slices: None
) -> None:
    put_in(monkeypatch, EmulatedDriver(machine(3)))
    first, _, _ = offloaded(device="emulated:0", helpers=[1])
    with pytest.raises(UnsupportedError, match="device 0 trains another model of this process"):
        offloaded(device="emulated:2", helpers=[0])
    with pytest.raises(UnsupportedError, match="device 1 helps device 0, which trains another model"):
        offloaded(device="emulated:1")
    second, _, runtime = offloaded(device="emulated:2", helpers="auto")
    assert [helper.device for helper in runtime.report().helpers] == [1]
    memferry_rt.restore(second)
    memferry_rt.restore(first)
    for device, helper in ((1, 0), (0, 1)):  # nobody trains any more
        model, _, _ = offloaded(device=f"emulated:{device}", helpers=[helper])
        memferry_rt.restore(model)


def test_auto_leaves_the_link_of_a_device_alone_that_has_begun_to_train(
    monkeypatch: pytest.MonkeyPatch, small_slices: None
) -> None:
    put_in(monkeypatch, EmulatedDriver(machine()))
    first, optimizer, helped = offloaded(device="emulated:0", helpers="auto")
    step(first, optimizer, 0)
    before = helped.report().helper_nbytes
    assert before > 0
    second, other, _ = offloaded(device="emulated:1")
    for number in range(1, 3):
        step(second, other, number)
        step(first, optimizer, number)
    assert helped.report().helper_nbytes == before
    memferry_rt.restore(second)
    memferry_rt.restore(first)


# -- what training gains, and what it does not change --------------------------------------------------------
def some_slow(cases: Mapping[str, Any], *slow: str) -> list[Any]:
    """Parameters by name, of which some are only tried where there is time."""
    assert set(slow) <= set(cases)
    return [pytest.param(case, id=name, marks=[pytest.mark.slow] * (name in slow)) for name, case in cases.items()]


PLANS: dict[str, dict[str, Any]] = {
    "streamed": {},
    "cpu, asynchronous": {"optimizer_split": "cpu", "async_step": True},
    "early": {"spare_slabs": 3},
    "state is streamed": {"optimizer_split": 1.0, "share": 2.0},
    "everything resident": {"optimizer_split": 1.0, "share": 8.0},
    "panels": {"plan": {"blocks.*": "ring+inplace", "embedding": "dha"}, "share": 1.0},
    "micro-steps": {"accumulate": 2},
}


@pytest.mark.parametrize(
    "options", some_slow(PLANS, "cpu, asynchronous", "micro-steps", "state streamed through the device")
)
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


# -- helpers that fail -----------------------------------------------------------------------------------------
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
