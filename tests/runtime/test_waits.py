"""A test of the tester: every wait of an iteration is needed, and leaving one out is always noticed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .forgetting import redundant_waits
from .harness import Job
from .models import Decoder, checkpointed, next_token_loss, plainly

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


BY_THE_CPU = {
    "plain": (plainly, 5, 1, False, 0.4),
    "accumulate-async": (plainly, 3, 2, True, 0.5),
    "checkpoint-async": (checkpointed(False), 4, 1, True, 0.4),
    "reentrant-accumulate": (checkpointed(True), 3, 2, False, 0.8),
}
BY_THE_DEVICE = [
    pytest.param(plainly, 1, 1, False, 1.2, 1.0, marks=pytest.mark.slow, id="streamed"),
    pytest.param(plainly, 2, 2, True, 1.2, 0.5, marks=pytest.mark.slow, id="half-streamed-async"),
    pytest.param(plainly, 2, 1, True, 8.0, "auto", id="resident-async"),
    pytest.param(plainly, 2, 2, False, 3.0, 1.0, marks=pytest.mark.slow, id="some-resident"),
    pytest.param(plainly, 1, 1, True, 1.6, 1.0, id="streamed-into-copies"),
    pytest.param(plainly, 2, 2, False, 1.6, 0.5, marks=pytest.mark.slow, id="half-streamed-into-copies"),
]


@pytest.mark.parametrize(
    ("run", "layers", "accumulate", "async_step", "share", "split"),
    [*(pytest.param(*case, "cpu", id=name) for name, case in BY_THE_CPU.items()), *BY_THE_DEVICE],
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
    """Each place of the program where something waits, the first and the last time."""
    copies = share == 1.6  # all weights on the device, and masters beside them
    job = Job(
        lambda: Decoder(run, layers=layers),
        next_token_loss,
        accumulate=accumulate,
        steps=3,
        dtype=torch.bfloat16 if copies else torch.float32,
        lr=1e-3,
    )
    redundant, last = redundant_waits(
        job, monkeypatch, some=True, async_step=async_step, share=share, optimizer_split=split
    )
    assert redundant.keys() <= (REDUNDANT if split != "cpu" else set()), redundant
    assert not copies or CLAIM_INTO in last
    for claim in (CLAIM, CLAIM_INTO):
        if claim in last:
            assert last[claim] not in redundant.get(claim, []), "the last time, within a step"


@pytest.mark.parametrize(
    ("run", "layers", "accumulate", "async_step", "share"),
    [
        pytest.param(plainly, 2, 1, False, 0.6, id="few"),
        *(pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in BY_THE_CPU.items()),
    ],
)
def test_every_wait_counts_every_time(
    run: Any, layers: int, accumulate: int, async_step: bool, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(lambda: Decoder(run, layers=layers), next_token_loss, accumulate=accumulate, steps=3, lr=1e-3)
    redundant, _ = redundant_waits(job, monkeypatch, async_step=async_step, share=share, optimizer_split="cpu")
    assert not redundant


@pytest.mark.parametrize(
    "share", [pytest.param(0.8, marks=pytest.mark.slow), 6.0], ids=["some-at-home", "on-the-device"]
)
def test_every_wait_of_declared_micro_steps_counts(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(lambda: Decoder(layers=1), next_token_loss, accumulate=2, steps=3)
    redundant, _ = redundant_waits(job, monkeypatch, share=share, optimizer_split="cpu", accumulate=2)
    assert not redundant
