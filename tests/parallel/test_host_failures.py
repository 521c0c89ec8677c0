"""A rank that fails or goes another way ends the ranks of all hosts, with a message, and soon."""

from __future__ import annotations

import os
import re
import time
from typing import Any

import pytest
import torch.distributed as dist

import memferry_rt
from tests.runtime.models import next_token_loss

from . import world
from .programs import offloaded
from .test_failures import (
    CASES,
    JOB,
    Spoil,
    _close_after_half_a_backward,
    _go_on_after_half_a_backward,
    _kill,
    _train,
)
from .world import Failure


def _as_in_a_notebook(group: Any, spoil: Spoil) -> str:
    """The process lives on after its error, with its connections."""
    try:
        return str(_train(group, spoil))
    except Exception as error:
        time.sleep(1.5)  # longer than the other looks for
        return f"{type(error).__name__}: {error}"


def test_a_rank_that_raises_ends_the_other_host() -> None:
    first, second = world.run(2, _as_in_a_notebook, _go_on_after_half_a_backward, hosts=2)
    assert second.startswith("OffloadError: a backward has ended by an exception")
    assert first.startswith("RankError: rank 1 has failed: OffloadError: a backward has ended"), first


def test_closing_after_half_a_backward_keeps_the_process() -> None:
    """It meets nobody then: others are in the midst of an exchange, which gloo would end the process for."""
    first, second = world.run(2, _as_in_a_notebook, _close_after_half_a_backward, hosts=2)
    assert second.startswith("OffloadError: a backward has ended by an exception"), second
    assert first.startswith("RankError: rank 1 has failed: OffloadError: a backward has ended"), first


def _save_alone(group: Any) -> str:
    """What one host is enough for, several are needed for."""
    model, optimizer = offloaded(group, JOB)
    try:
        if dist.get_rank(group) == 0:
            memferry_rt.save("/nowhere", model, optimizer)
        next_token_loss(model, 0).backward()
        optimizer.step()
    except memferry_rt.RankError as error:
        return str(error)
    return "nothing was noticed"


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_go_different_ways_end(size: int) -> None:
    for message in world.succeed(size, _save_alone, hosts=2):
        assert "ranks go different ways: rank " in message
        assert "at save()" in message


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("spoil", [*[case[0] for case in CASES], _kill], ids=lambda spoil: spoil.__name__)
def test_a_failing_rank_ends_all_hosts(spoil: Spoil, size: int) -> None:
    before, begin = os.listdir("/dev/shm"), time.monotonic()
    *others, last = world.run(size, _train, spoil, hosts=2)
    assert time.monotonic() - begin < world.TIMEOUT, "they have waited for the time-out"
    if spoil is _kill:
        assert last is None
        assert os.listdir("/dev/shm") == before
    else:
        own = {case[0]: case[1] for case in CASES}[spoil]
        assert own.replace("rank 1", f"rank {size - 1}") in last.message
    for other in others:
        assert isinstance(other, Failure)
        assert other.kind == "RankError"
        assert re.search(
            "rank . .*has ended|rank . has failed|ranks (differ|go different)|the process group has failed",
            other.message,
            re.S,
        )
