"""Every wait between ranks counts: whatever is late the bits are the same, and without a wait they are not."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from memferry_rt.adapters.torch import runtime as runtime_module
from memferry_rt.adapters.torch.memory import DeviceMemory
from memferry_rt.adapters.torch.parallel import RankGradients, Ranks, RankUpdates
from memferry_rt.adapters.torch.parallel.exchange import Flight, PieceExchange
from memferry_rt.adapters.torch.step import StepUpdates
from memferry_rt.cache import LayerCache
from memferry_rt.parallel import Board

from . import world
from .programs import MODELS, OPTIMIZERS, Job, Result, alone, closing, offloaded, train

JOB = Job(max_grad_norm=None, options={"async_step": True})

PLACES: list[tuple[type, str]] = [
    (Board, "gather"),
    (RankUpdates, "_tell"),
    (RankUpdates, "submit_native"),
    (PieceExchange, "send"),
    (Flight, "go_on"),
    (StepUpdates, "submit"),
    (LayerCache, "use"),
]


def _delay(owner: Any, name: str, seconds: Callable[[], float]) -> None:
    """In this process, which is one rank, a method begins late."""
    method = getattr(owner, name)

    def late(*arguments: Any, **options: Any) -> Any:
        time.sleep(seconds())
        return method(*arguments, **options)

    setattr(owner, name, late)


def _with_delays(group: Any, seed: int) -> Result:
    chance = random.Random(seed * 10 + dist.get_rank(group))
    for owner, name in PLACES:
        _delay(owner, name, lambda: chance.choice([0, 0, 0, 0.0005, 0.004]))
    return train(group, replace(JOB, seed=seed))


@pytest.mark.parametrize("seed", range(3))
def test_any_delays_give_the_same_bits(seed: int) -> None:
    expected = alone(JOB, 2)
    for result in world.succeed(2, _with_delays, seed):
        for name, value in result.parameters.items():
            assert torch.equal(value, expected.parameters[name]), name


def _slow_rank(group: Any, wait: str, kept: bool) -> Result:
    """One rank is late somewhere, and perhaps nobody waits for it there."""
    (late, method, rank), (owner, name, instead) = WAITS[wait]
    if not kept:
        setattr(owner, name, instead)
    if dist.get_rank(group) == rank:
        _delay(late, method, lambda: 0.1)
    return train(group, replace(JOB, steps=2))


def _nothing(*_: Any) -> None:
    return None


def _yes(*_: Any) -> bool:
    return True


WAITS: dict[str, tuple[Any, Any]] = {
    "for the others' parts of an update": ((StepUpdates, "submit", 1), (Board, "written", _yes)),
    "for the first to fill what all share": ((runtime_module, "move_in", 0), (Ranks, "fence", _nothing)),
}


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("kept", [True, False])
def test_a_wait_left_out_is_noticed(wait: str, kept: bool) -> None:
    expected = alone(replace(JOB, steps=2), 2)
    results = world.succeed(2, _slow_rank, wait, kept)
    same = all(
        torch.equal(value, expected.parameters[name])
        for result in results
        for name, value in result.parameters.items()
    )
    assert same is kept


def _late_filling(group: Any, job: Job) -> Result:
    begin = DeviceMemory.open

    def at_once(self: DeviceMemory) -> None:
        begin(self)
        self._driver.synchronize(self._device)  # the emulated device would take its time

    DeviceMemory.open = at_once  # type: ignore[method-assign]
    if dist.get_rank(group) == 0:
        _delay(runtime_module, "move_in", lambda: 0.3)
    return train(group, job)


def test_layers_that_are_loaded_in_advance_have_the_first_weights() -> None:
    job = replace(JOB, steps=1, share=3.0, options={"plan": {"*": "resident"}})
    expected = alone(job, 2)
    for result in world.succeed(2, _late_filling, job):
        for name, value in result.parameters.items():
            assert torch.equal(value, expected.parameters[name]), name


def _late_update(group: Any, job: Job) -> Result:
    if dist.get_rank(group) == 1:
        _delay(StepUpdates, "submit", lambda: 0.1)
    return train(group, job)


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_a_late_rank_leaves_alone_what_others_have_updated(optimizer: str) -> None:
    job = replace(JOB, optimizer=optimizer, steps=2)
    expected = alone(job, 2)
    for result in world.succeed(2, _late_update, job):
        for name, value in result.parameters.items():
            assert torch.equal(value, expected.parameters[name]), name


def _read_at_once(group: Any, kept: bool) -> dict[str, torch.Tensor]:
    if not kept:
        RankGradients._came_home = _nothing  # type: ignore[method-assign]
    if dist.get_rank(group) == 1:
        _delay(RankGradients, "_show", lambda: 0.3)
    model, _ = offloaded(group, JOB)
    with closing(model):
        MODELS[JOB.model][1](model, dist.get_rank(group)).backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kept", [True, False])
def test_gradients_are_at_home_when_backward_returns(kept: bool) -> None:
    first, second = world.succeed(2, _read_at_once, kept)
    assert all(torch.equal(value, second[name]) for name, value in first.items()) is kept
