"""Every wait of an iteration with layers that are read and written in place is needed: see `test_waits.py`."""

from __future__ import annotations

from typing import Any

import pytest

from memferry_rt import cuts

from .forgetting import redundant_waits
from .harness import Job
from .models import Decoder, checkpointed, next_token_loss, plainly
from .test_waits import REDUNDANT

WRITTEN = {"_is_written < _send < _arrive < after", "_is_written < _arrives_at_home < before"}
CLAIM = "claim < fill < panels < pieces"

# Waits that another order makes redundant in these models, by where they are; the others as in `test_waits.py`.
HERE = {
    # A panel's slot was read last in the step before, and the host has waited for backward since.
    CLAIM,
    # As it has for gradients that kernels have written home; an update that begins before needs to wait (below).
    *WRITTEN,
    # As was a layer's memory that another one takes.
    "before < _take < _allocate_slowly < allocate",
}


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("plan", "run", "accumulate", "async_step", "split", "share"),
    [
        ("*=dha+inplace", plainly, 1, True, "cpu", 1.0),
        ("blocks.*=dha_then_load, embedding=dha+inplace", plainly, 1, True, "cpu", 2.0),
        pytest.param("blocks.*=dha_then_load+inplace", checkpointed(False), 2, False, "cpu", 2.0, marks=slow),
        ("blocks.*=ring+inplace", plainly, 1, True, "cpu", 2.0),
        pytest.param("blocks.*=ring", checkpointed(True), 1, False, "cpu", 2.0, marks=slow),
        ("blocks.*=resident", plainly, 1, True, "cpu", 2.0),
        pytest.param("*=dha+inplace", plainly, 1, True, 1.0, 1.5, marks=slow),
        pytest.param("blocks.*=ring+inplace", plainly, 1, True, 1.0, 3.0, marks=slow),
    ],
)
def test_every_wait_counts(
    plan: str,
    run: Any,
    accumulate: int,
    async_step: bool,
    split: Any,
    share: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuts, "PANEL", 4096)
    job = Job(lambda: Decoder(run, layers=1), next_token_loss, accumulate=accumulate, steps=3, lr=1e-3)
    redundant, last = redundant_waits(
        job, monkeypatch, some=True, async_step=async_step, share=share, optimizer_split=split, plan=plan
    )
    assert redundant.keys() <= (HERE | REDUNDANT if split != "cpu" else HERE), redundant
    if CLAIM in last:
        assert last[CLAIM] not in redundant.get(CLAIM, []), "the last time, within a step"


def test_updates_during_backward_wait_for_gradients_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(lambda: Decoder(layers=2), next_token_loss, steps=3, lr=1e-3, max_grad_norm=None)
    plan = {"embedding": "dha+inplace", "blocks.*": "dha+inplace"}
    redundant, last = redundant_waits(
        job, monkeypatch, some=True, share=3.0, optimizer_split="cpu", spare_slabs=9, plan=plan
    )
    for site in WRITTEN:
        assert last[site] not in redundant.get(site, []), site
