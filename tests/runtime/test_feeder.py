"""Device work enqueued, and early updates started, by a thread of their own, as on a real device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memferry_allocator import EmulatedOptions
from memferry_rt.updates import UpdateQueue

from .harness import Job, assert_same, offloaded, plain
from .models import Decoder, next_token_loss


@pytest.fixture(autouse=True)
def feeder(monkeypatch: pytest.MonkeyPatch) -> None:
    def queue(**options: Any) -> UpdateQueue:
        return UpdateQueue(2, **{**options, "feeder": True})

    monkeypatch.setattr("memferry_rt.adapters.torch.set_up.UpdateQueue", queue)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("split", "spare_slabs"), [(1.0, 0), (0.5, 3), ("cpu", 9)])
def test_a_feeder_changes_no_bit(split: Any, spare_slabs: int, seed: int) -> None:
    job = Job(lambda: Decoder(layers=3), next_token_loss, max_grad_norm=None, steps=5, accumulate=1 + seed % 2)
    result = offloaded(
        job, share=0.8, optimizer_split=split, spare_slabs=spare_slabs, async_step=seed % 2 == 0,
        emulated=EmulatedOptions(seed=seed),
    )  # fmt: skip
    assert_same(plain(job), result)


@pytest.mark.parametrize("share", [0.9, 1.6])
def test_a_feeder_that_writes_weights_into_their_copies_changes_no_bit(share: float) -> None:
    job = Job(lambda: Decoder(layers=3), next_token_loss, steps=5, dtype=torch.bfloat16, lr=1e-3)
    assert_same(plain(job), offloaded(job, share=share, optimizer_split=0.7, async_step=True))


def test_a_device_kernel_that_fails_is_told_and_leaves_the_runtime_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from memferry_rt.streaming import StateStream

    def fail(*_: Any) -> None:
        raise ArithmeticError("in the feeder")

    run = StateStream.run

    def between(model: Any, number: int) -> None:
        monkeypatch.setattr(StateStream, "run", fail if number == 1 else run)

    job = Job(lambda: Decoder(layers=3), next_token_loss, steps=4, between=between)
    with pytest.raises(ArithmeticError, match="in the feeder"):
        offloaded(job, share=0.8, optimizer_split=1.0)
