"""Any assignment of modes to layers, changed between any two steps: bit-identical parameters."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import memferry_rt
from memferry_rt import cuts

from .harness import Job, Result, assert_same, offloaded, plain
from .models import Decoder, checkpointed, next_token_loss, plainly, skipping, twice

RUNS = {
    "plainly": plainly,
    "twice": twice,
    "skipping": skipping,
    "reentrant": checkpointed(True),
    "checkpointed": checkpointed(False),
}
EMBEDDING = ["resident", "stream", "dha"]
BLOCK = [*EMBEDDING, "dha_then_load", "ring"]
GRADIENT = ["buffer", "inplace"]


def _job(run: str, accumulate: int, half: bool, tied: bool, **more: Any) -> Job:
    return Job(
        lambda: Decoder(RUNS[run], layers=2, tied=tied),
        next_token_loss,
        steps=3,
        accumulate=accumulate,
        dtype=torch.bfloat16 if half else torch.float32,
        max_grad_norm=4.0,  # bites in some of the steps
        lr=1e-3,
        **more,
    )


@cache
def _expected(run: str, accumulate: int, half: bool, tied: bool) -> Result:
    return plain(_job(run, accumulate, half, tied))


@st.composite
def modes(draw: Any) -> dict[str, str]:
    weights = {"embedding": EMBEDDING, "blocks.0": BLOCK, "blocks.1": BLOCK}
    return {
        name: f"{draw(st.sampled_from(known))}+{draw(st.sampled_from(GRADIENT))}"
        for name, known in weights.items()
    }


@st.composite
def options(draw: Any) -> dict[str, Any]:
    return {
        "share": draw(st.sampled_from([2.0, 3.0, 7.0, 20.0])),
        "seed": draw(st.integers(0, 1000)),
        "async_step": draw(st.booleans()),
        "optimizer_split": draw(st.sampled_from(["auto", "cpu", 0.0, 0.3, 1.0])),
        "spare_slabs": draw(st.sampled_from([0, 1, 5])),
        "accumulate": draw(st.sampled_from([1, 2])),
    }


@settings(max_examples=12, deadline=None)
@given(
    run=st.sampled_from(sorted(RUNS)),
    accumulate=st.sampled_from([1, 2]),
    half=st.booleans(),
    tied=st.booleans(),
    plan=modes(),
    panel=st.sampled_from([1 << 10, 1 << 20]),
    settings=options(),
)
def test_any_modes(
    run: str, accumulate: int, half: bool, tied: bool, plan: dict[str, str], panel: int, settings: dict[str, Any]
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cuts, "PANEL", panel)
        got = offloaded(_job(run, accumulate, half, tied), plan=plan, **settings)
    assert_same(_expected(run, accumulate, half, tied), got)


@settings(max_examples=15, deadline=None)
@given(
    run=st.sampled_from(sorted(RUNS)),
    half=st.booleans(),
    tied=st.booleans(),
    plans=st.lists(modes(), min_size=3, max_size=3),
    settings=options(),
)
def test_modes_changed_between_steps(
    run: str, half: bool, tied: bool, plans: list[dict[str, str]], settings: dict[str, Any]
) -> None:
    def between(model: nn.Module, number: int) -> None:
        memferry_rt.set_plan(model, plans[number])

    got = offloaded(_job(run, 1, half, tied, between=between), **settings)
    assert_same(_expected(run, 1, half, tied), got)


@pytest.mark.parametrize("when", ["before_step", "between"])
def test_random_modes_for_many_steps(when: str) -> None:
    """Also with gradients there and not yet used."""
    dice = random.Random(5)
    known = {"embedding": EMBEDDING, "blocks.0": BLOCK, "blocks.1": BLOCK, "blocks.2": BLOCK}

    def change(model: nn.Module, number: int) -> None:
        if hasattr(model, "_memferry_runtime"):
            plan = {name: f"{dice.choice(own)}+{dice.choice(GRADIENT)}" for name, own in known.items()}
            memferry_rt.set_plan(model, plan)

    hooks: dict[str, Any] = {when: change}
    job = Job(lambda: Decoder(layers=3), next_token_loss, steps=30, lr=1e-3, **hooks)
    assert_same(plain(job), offloaded(job, share=3.0, spare_slabs=2))
