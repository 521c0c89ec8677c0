"""What happens to the others when a rank fails, differs or is killed: they end with a message, and soon."""

from __future__ import annotations

import atexit
import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import memferry_rt

from . import world
from .programs import Job, offloaded
from .world import Failure

JOB = Job(steps=3)
Spoil = Callable[[torch.nn.Module, torch.optim.Optimizer, int], None]


def _train(group: Any, spoil: Spoil, job: Job = JOB) -> list[float]:
    model, optimizer = offloaded(group, job)
    rank, norms = dist.get_rank(group), []
    for step in range(job.steps):
        if rank == dist.get_world_size(group) - 1:
            spoil(model, optimizer, step)
        loss = model(torch.randint(0, 61, (2, 12))).square().mean()
        loss.backward()
        optimizer.step()
        norms.append(memferry_rt.runtime_of(model).grad_norm)
        optimizer.zero_grad()
    return norms


def _raise_between_steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 1:
        raise ValueError("the data has ended")


def _raise_in_backward(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    def fail(parameter: torch.Tensor) -> None:
        raise ValueError("a hook has failed")

    if step == 1:
        model.blocks[0].up.weight.register_post_accumulate_grad_hook(fail)


def _go_on_after_half_a_backward(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 1:
        _raise_in_backward(model, optimizer, step)
        with pytest.raises(ValueError, match="a hook has failed"):
            model(torch.randint(0, 61, (2, 12))).square().mean().backward()


def _close_after_half_a_backward(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 1:
        _go_on_after_half_a_backward(model, optimizer, step)
        memferry_rt.restore(model)


def _load_alone(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 1:
        memferry_rt.load("/nowhere", model, optimizer)


def _write_to_a_gradient(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 1:
        model(torch.randint(0, 61, (2, 12))).square().mean().backward()
        model.head.weight.grad.mul_(2)


def _write_to_a_weight(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 1:
        with torch.no_grad():
            model.head.weight.mul_(2)


def _change_the_rate(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.param_groups[0]["lr"] = 1e-2 * (step + 1)


def _keep_a_gradient(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 1:
        model(torch.randint(0, 61, (2, 12))).square().mean().backward()
        optimizer.step()


def _kill(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def _end_slowly(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """The interpreter goes down, and something keeps the process."""
    if step == 1:
        atexit._run_exitfuncs()
        time.sleep(2)
        raise ValueError("it has ended at last")


def _close(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 1:
        memferry_rt.restore(model)


CASES: list[tuple[Spoil, str, str]] = [
    (_raise_between_steps, "the data has ended", "rank 1 .* has ended"),
    (_raise_in_backward, "a hook has failed", "rank 1 .*has ended|the process group has failed"),
    (_go_on_after_half_a_backward, "ended by an exception", "rank 1 has failed: OffloadError"),
    (_write_to_a_weight, "written to in place", "rank 1 has failed: UnsupportedError: head.weight"),
    (
        _write_to_a_gradient,
        "its grad was written to",
        "rank 1 has failed: Unsupported.*: its grad",
    ),
    (_keep_a_gradient, "which parameters have a gradient", "which parameters have a gradient before a backward"),
    (_load_alone, "rank 1 is at load(), which is checked", "rank 0 is at their next backward or step"),
    (_change_the_rate, "ranks differ in the optimizer's settings: rank 1", "ranks differ in the optimizer's set"),
]


@pytest.mark.parametrize(("spoil", "own", "others"), CASES, ids=[case[0].__name__ for case in CASES])
def test_a_failing_rank_ends_all(spoil: Spoil, own: str, others: str) -> None:
    begin = time.monotonic()
    results = world.run(2, _train, spoil)
    assert time.monotonic() - begin < world.TIMEOUT, "they have waited for the time-out"
    assert all(isinstance(result, Failure) for result in results), results
    assert own in results[1].message
    assert results[0].kind == "RankError"
    _match(others, results[0].message)


def _match(pattern: str, text: str) -> None:
    assert re.search(pattern, text, re.S), text


def test_a_killed_rank_ends_all_and_leaves_nothing() -> None:
    before = os.listdir("/dev/shm")
    first, second = world.run(2, _train, _kill)
    assert second is None
    assert first.kind == "RankError"
    _match("rank 1 .*has ended|the process group has failed", first.message)
    assert os.listdir("/dev/shm") == before


def test_what_is_under_way_is_over_before_its_memory_is_freed() -> None:
    """The emulated device notices where it is not."""
    first, second = world.run(2, _train, _close_after_half_a_backward)
    assert first.kind == "RankError"
    assert second.message == "a hook has failed", second  # in the plain model, which still has that hook


@pytest.mark.parametrize("spoil", [_close, _end_slowly])
def test_a_rank_that_goes_ends_all(spoil: Spoil) -> None:
    first, _ = world.run(2, _train, spoil)
    assert first.kind == "RankError"
    assert "rank 1 has closed its model or ended while rank 0 waits for" in first.message
