"""A test of the tester: every wait of an iteration is needed, and leaving one out is always noticed."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from memferry_allocator import DriverError, EmulatedDriver, EmulatedOptions, Event, RaceError, Stream

from .harness import Job, Result, assert_same, offloaded, plain
from .models import Decoder, checkpointed, next_token_loss, plainly

offload_module = importlib.import_module("memferry_rt.adapters.torch.offload")

CLAIM = "_claim < _run < run < _stream_home"
CLAIM_INTO = "_claim < _run < run < _stream_into"

# Waits that another order makes redundant in these models, by where they are.
REDUNDANT = {
    # A slot's last use in the step before: backward has waited for whatever went through the ring, unless a layer
    # was not used in it.  Within a step it counts.
    CLAIM,
    CLAIM_INTO,
    # The host has waited for the whole device when the pool grew; marks made before do not know.
    "before < _take < _allocate_slowly < allocate",
    # Taking turns at a copy engine is a matter of time alone.
    "_let_others_in < _run < run < _stream_home",
    "_let_others_in < _run < run < _stream_into",
    # The ring itself keeps the order of two steps for a layer that is streamed in both; it counts for one that the
    # CPU updates in the second (test_streamed_weights.py).
    "settle < submit < step < step",
    "settle < _finish_updates < step < step",
    # The host has waited for new weights of a layer that is read in place, and `Hazards` of the device copy do not
    # know what the host knows.
    "before < _bring_home < _acquire_host < acquire",
    "before < _acquire_device < acquire < open_for_update",
    "before < _acquire_device < acquire < use",
    # The host has waited for backward, and hence for whoever read the old weights.
    "before < _acquire_device < acquire < _stream_into",
}


class Forgetful(EmulatedDriver):
    """Leaves out one wait: the n-th of those that come after `arm`."""

    def __init__(self, forget: int | None) -> None:
        super().__init__(EmulatedOptions(seed=3))
        self.forget = forget
        self.waits = 0
        self.forgotten = ""
        self.sites: list[str] = []
        self.armed = False

    def _skip(self) -> bool:
        if not self.armed:
            return False
        self.waits += 1
        if self.forget is None:
            self.sites.append(_site())
        if self.waits - 1 != self.forget:
            return False
        self.forgotten = _site()
        return True

    def stream_wait(self, stream: Stream, event: Event) -> None:
        if not self._skip():
            super().stream_wait(stream, event)

    def event_synchronize(self, event: Event) -> None:
        if not self._skip():
            super().event_synchronize(event)

    def stream_synchronize(self, stream: Stream) -> None:
        if not self._skip():
            super().stream_synchronize(stream)


def _site() -> str:
    """Where in the program a wait is."""
    frames = [f for f in traceback.extract_stack() if "memferry" in f.filename and "driver" not in f.filename]
    return " < ".join(frame.name for frame in reversed(frames[-4:]))


def _run(
    job: Job, monkeypatch: pytest.MonkeyPatch, forget: int | None, **options: Any
) -> tuple[Result, Forgetful]:
    """Train three steps; the second is the one in which a wait may be forgotten."""
    driver = Forgetful(forget)
    monkeypatch.setattr(offload_module, "open_device", lambda *_, **__: (driver, 0))

    def between(model: Any, number: int) -> None:
        driver.armed = number == 0

    counted = Job(**{**job.__dict__, "between": between, "steps": 3})
    return offloaded(counted, **options), driver


@pytest.mark.parametrize(
    ("run", "layers", "accumulate", "async_step", "share", "split"),
    [
        (plainly, 5, 1, False, 0.4, "cpu"),
        (plainly, 3, 2, True, 0.5, "cpu"),
        (checkpointed(False), 4, 1, True, 0.4, "cpu"),
        (checkpointed(True), 3, 2, False, 0.8, "cpu"),
        pytest.param(plainly, 1, 1, False, 1.2, 1.0, marks=pytest.mark.slow),
        pytest.param(plainly, 2, 2, True, 1.2, 0.5, marks=pytest.mark.slow),
        (plainly, 2, 1, True, 8.0, "auto"),
        pytest.param(plainly, 2, 2, False, 3.0, 1.0, marks=pytest.mark.slow),
        (plainly, 1, 1, True, 1.6, 1.0),
        pytest.param(plainly, 2, 2, False, 1.6, 0.5, marks=pytest.mark.slow),
    ],
    ids=[
        "plain",
        "accumulate-async",
        "checkpoint-async",
        "reentrant-accumulate",
        "streamed",
        "half-streamed-async",
        "resident-async",
        "some-resident",
        "streamed-into-copies",
        "half-streamed-into-copies",
    ],
)
def test_every_wait_counts(
    run: Any,
    layers: int,
    accumulate: int,
    async_step: bool,
    share: float,
    split: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dtype = torch.bfloat16 if share == 1.6 else torch.float32  # all weights on the device, and masters beside them
    job = Job(
        lambda: Decoder(run, layers=layers), next_token_loss, accumulate=accumulate, steps=3, dtype=dtype, lr=1e-3
    )
    redundant, last = _redundant(
        job, monkeypatch, some=split != "cpu", async_step=async_step, share=share, optimizer_split=split
    )
    assert redundant.keys() <= (REDUNDANT if split != "cpu" else set()), redundant
    for claim in (CLAIM, CLAIM_INTO):
        if claim in last:
            assert last[claim] not in redundant.get(claim, []), "the last time, within a step"


@pytest.mark.parametrize(
    "share", [pytest.param(0.8, marks=pytest.mark.slow), 6.0], ids=["some-at-home", "on-the-device"]
)
def test_every_wait_of_declared_micro_steps_counts(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(lambda: Decoder(layers=1), next_token_loss, accumulate=2, steps=3)
    redundant, _ = _redundant(job, monkeypatch, share=share, optimizer_split="cpu", accumulate=2)
    assert not redundant


def _redundant(
    job: Job, monkeypatch: pytest.MonkeyPatch, *, some: bool = False, **options: Any
) -> tuple[dict[str, list[int]], dict[str, int]]:
    """The waits of a step that may be left out, by place, and the last of each place."""
    expected = plain(job)
    complete, driver = _run(job, monkeypatch, None, **options)
    assert_same(expected, complete)
    assert driver.waits > 3
    numbers: Iterable[int] = range(driver.waits)
    last = {site: number for number, site in enumerate(driver.sites)}
    if some:  # a ring takes the same few ways again and again: the first and the last time of each
        first = {site: number for number, site in reversed(list(enumerate(driver.sites)))}
        numbers = sorted({*first.values(), *last.values()})
    redundant: dict[str, list[int]] = {}
    for number in numbers:
        try:
            result, driver = _run(job, monkeypatch, number, **options)
            assert_same(expected, result)
        except (RaceError, DriverError, AssertionError):
            continue
        redundant.setdefault(driver.forgotten, []).append(number)
    return redundant, last
