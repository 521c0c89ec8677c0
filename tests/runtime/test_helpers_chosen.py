"""Which devices help: those that are named, or idle ones; what cannot be is refused before anything changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memferry_rt
from memferry_allocator import EmulatedDriver, InvalidRequestError
from memferry_allocator.driver import Route, Wiring
from memferry_rt import UnsupportedError
from memferry_rt.helpers import share_out

from .helped import FAST, LINK, machine, offloaded, put_in, small_slices, step
from .models import Decoder, next_token_loss

__all__ = ["small_slices"]


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


ASKED: dict[str, Any] = {
    "text": "all",
    "bytes": b"auto",
    "a number": 1,
    "a bool": [True],
    "below 0": [-1],
    "twice": [1, 1],
}


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
