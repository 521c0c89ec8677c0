"""Whatever is planned, and whoever works at what: bit-identical parameters."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memferry_rt.adapters.torch import native_adam, set_up
from memferry_rt.updates import UpdateQueue

from .harness import Job, Result, assert_same, offloaded, plain
from .models import Decoder, next_token_loss, plainly, shuffled, skipping, twice

RUNS = {run.__name__: run for run in (plainly, shuffled, skipping, twice)}


def _job(run: str, accumulate: int, half: bool) -> Job:
    return Job(
        lambda: Decoder(RUNS[run], layers=2),
        next_token_loss,
        steps=3,
        accumulate=accumulate,
        dtype=torch.bfloat16 if half else torch.float32,
        max_grad_norm=4.0,  # bites in some of the steps
        lr=1e-3,
    )


@cache
def _expected(run: str, accumulate: int, half: bool) -> Result:
    return plain(_job(run, accumulate, half))


@st.composite
def plans(draw: Any) -> dict[str, Any]:
    share = draw(st.sampled_from([0.9, 1.5, 3.0, 7.0, 20.0]))
    return {
        "share": share,
        "seed": draw(st.integers(0, 1000)),
        "async_step": draw(st.booleans()),
        "optimizer_split": draw(st.sampled_from(["auto", "cpu", 0.0, 0.3, 0.7, 1.0])),
        "spare_slabs": draw(st.sampled_from([0, 1, 5])),
        "accumulate": draw(st.sampled_from([1, 2, 3])),
        "layers": draw(st.sampled_from([None, ("blocks",)])) if share >= 3 else None,
    }


@settings(max_examples=25, deadline=None)
@given(
    run=st.sampled_from(sorted(RUNS)),
    accumulate=st.sampled_from([1, 2]),
    half=st.booleans(),
    workers=st.sampled_from([1, 2, 3, 8]),
    feeder=st.booleans(),
    plan=plans(),
)
def test_any_plan(run: str, accumulate: int, half: bool, workers: int, feeder: bool, plan: dict[str, Any]) -> None:
    def queue(**options: Any) -> UpdateQueue:
        return UpdateQueue(workers, **{**options, "feeder": feeder})

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(set_up, "UpdateQueue", queue)
        got = offloaded(_job(run, accumulate, half), **plan)
    assert_same(_expected(run, accumulate, half), got)


@pytest.mark.filterwarnings("ignore:memferry_rt was installed without its native")
@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("native", [True, False])
def test_any_number_of_workers(workers: int, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(set_up, "UpdateQueue", lambda **options: UpdateQueue(workers, **options))
    if not native:
        monkeypatch.setattr(native_adam, "load_adam", lambda: None)
    native_adam.trusted_kernel.cache_clear()
    try:
        assert_same(_expected("plainly", 1, False), offloaded(_job("plainly", 1, False), share=1.0))
    finally:
        native_adam.trusted_kernel.cache_clear()
