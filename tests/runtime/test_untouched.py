"""Parameters, masters and moments change in a step that is made, and at no other time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import memferry_rt

from .models import next_token_loss
from .trained import Trained

PLACES: dict[str, dict[str, Any]] = {
    "cpu": {"optimizer_split": "cpu"},
    "early": {"optimizer_split": "cpu", "spare_slabs": 9},
    "streamed": {"optimizer_split": 1.0},
    "resident": {"optimizer_split": 1.0, "share": 9.0},
    "fp32-sums": {"share": 1.5, "spare_slabs": 9, "accumulate": 2, "accumulate_dtype": "float32"},
    "device-sums": {"optimizer_split": "cpu", "share": 9.0, "spare_slabs": 9, "accumulate": 2},
}


@pytest.fixture(params=PLACES)
def trained(request: pytest.FixtureRequest) -> Iterator[Trained]:
    both = Trained(**PLACES[request.param])
    both.steps(2)
    yield both
    both.runtime.close()


def state_of(both: Trained) -> dict[str, torch.Tensor]:
    """Weights, masters, moments and step numbers, as they are now."""
    memferry_rt.synchronize(both.model)
    found = {name: value.clone() for name, value in both.model.state_dict().items()}
    found |= {f"master {name}": value.clone() for name, value in both.runtime.master_parameters().items()}
    for name, parameter in both.model.named_parameters():
        for key, value in both.optimizer.state[parameter].items():
            found[f"{key} {name}"] = value.clone()
    return found


class Expected(Exception):
    """What a test raises itself."""


@contextlib.contextmanager
def _raising(module: nn.Module, register: Callable[..., Any]) -> Iterator[None]:
    def fail(*_: Any) -> None:
        raise Expected

    handle = register(module)(fail)
    with pytest.raises(Expected):
        yield
    handle.remove()


def _backward(both: Trained, number: int = 9) -> None:
    next_token_loss(both.model, number).backward()


def before_a_step(both: Trained) -> None:
    _backward(both)
    _backward(both)


def a_step_that_is_skipped(both: Trained) -> None:
    for factor in (float("inf"), float("nan")):
        _backward(both)
        (next_token_loss(both.model, 9) * factor).backward()
        skipped = both.optimizer.skipped_steps
        both.optimizer.step()
        assert both.optimizer.skipped_steps == skipped + 1
        both.optimizer.zero_grad()


def an_exception_in_forward(both: Trained) -> None:
    _backward(both)
    with _raising(both.model.blocks[3].down, lambda m: m.register_forward_pre_hook):
        _backward(both)


def an_exception_in_backward(both: Trained) -> None:
    for number in (0, 4):
        with _raising(both.model.blocks[number].down.weight, lambda weight: weight.register_hook):
            _backward(both)


def an_exception_in_a_worker(both: Trained) -> None:
    def fail(*_: Any) -> None:
        raise Expected

    for _ in range(both.runtime.options.accumulate - 1):
        _backward(both)
    early = both.runtime.step_updates.early
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(both.runtime.updates, "run_early", fail)
        _backward(both)
    if early is not None:
        with pytest.raises(Expected):
            both.optimizer.step()


def settings_that_are_refused(both: Trained) -> None:
    _backward(both)
    both.optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(memferry_rt.UnsupportedError):
        both.optimizer.step()
    both.optimizer.param_groups[0]["amsgrad"] = False


EVENTS = [
    before_a_step, an_exception_in_forward, an_exception_in_backward, an_exception_in_a_worker,
    settings_that_are_refused, a_step_that_is_skipped,
]  # fmt: skip


def test_nothing_is_touched_and_training_goes_on(trained: Trained) -> None:
    for event in EVENTS:
        before = state_of(trained)
        event(trained)
        after = state_of(trained)
        assert before.keys() == after.keys()
        for name, value in before.items():
            assert torch.equal(value, after[name]), (event.__name__, name)
        trained.optimizer.zero_grad()
        trained.steps(1, first=20)
        assert trained.same(), event.__name__


def test_what_is_asserted_here_can_differ() -> None:
    both = Trained(**PLACES["early"])
    both.steps(2)
    before = state_of(both)
    both.steps(1, first=30)
    after = state_of(both)
    both.runtime.close()
    assert not any(torch.equal(value, after[name]) for name, value in before.items())
