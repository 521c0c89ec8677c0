"""A driver that leaves out one wait, and the search for waits that nobody would miss."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Iterable
from typing import Any

import pytest

from memferry_allocator import DriverError, EmulatedDriver, EmulatedOptions, Event, RaceError, Stream

from .harness import Job, Result, assert_same, offloaded, plain

offload_module = importlib.import_module("memferry_rt.adapters.torch.offload")


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


def run_forgetting(
    job: Job, monkeypatch: pytest.MonkeyPatch, forget: int | None, **options: Any
) -> tuple[Result, Forgetful]:
    """Train three steps; the second is the one in which a wait may be forgotten."""
    driver = Forgetful(forget)
    monkeypatch.setattr(offload_module, "open_device", lambda *_, **__: (driver, 0))

    def between(model: Any, number: int) -> None:
        driver.armed = number == 0

    counted = Job(**{**job.__dict__, "between": between, "steps": 3})
    return offloaded(counted, **options), driver


def redundant_waits(
    job: Job, monkeypatch: pytest.MonkeyPatch, *, some: bool = False, **options: Any
) -> tuple[dict[str, list[int]], dict[str, int]]:
    """The waits of a step that may be left out, by place, and the last of each place."""
    expected = plain(job)
    complete, driver = run_forgetting(job, monkeypatch, None, **options)
    assert_same(expected, complete)
    assert driver.waits > 0
    numbers: Iterable[int] = range(driver.waits)
    last = {site: number for number, site in enumerate(driver.sites)}
    if some:  # the same few ways are taken again and again: the first and the last time of each
        first = {site: number for number, site in reversed(list(enumerate(driver.sites)))}
        numbers = sorted({*first.values(), *last.values()})
    redundant: dict[str, list[int]] = {}
    for number in numbers:
        try:
            result, driver = run_forgetting(job, monkeypatch, number, **options)
            assert_same(expected, result)
        except (RaceError, DriverError, AssertionError):
            continue
        redundant.setdefault(driver.forgotten, []).append(number)
    return redundant, last
