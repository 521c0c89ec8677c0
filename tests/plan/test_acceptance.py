"""Trials of a plan against the plain one, with a played clock."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memferry_rt.plan.acceptance import ROUNDS, STEPS, Acceptance

WHOLE = 2 * ROUNDS * STEPS


def _play(acceptance: Acceptance, seconds: Callable[[bool, int], float], iterations: int) -> list[bool]:
    """What each iteration is by; `seconds` says what one takes that is by the plan or not."""
    used = []
    for number in range(iterations):
        used.append(acceptance.planned)
        acceptance.learn(seconds(acceptance.planned, number))
    return used


@pytest.mark.parametrize("faster", [True, False])
def test_the_faster_is_kept(faster: bool) -> None:
    acceptance = Acceptance()
    used = _play(acceptance, lambda planned, _: 1.0 if planned is faster else 1.2, WHOLE + 10)
    assert used[:WHOLE] == [number // STEPS % 2 == 0 for number in range(WHOLE)]
    assert set(used[WHOLE:]) == {faster}
    assert acceptance.settled
    assert acceptance.trials == 1


@given(st.floats(1.5, 50.0))
def test_what_exchanging_costs_does_not_count(cost: float) -> None:
    acceptance = Acceptance(steps=2)
    _play(acceptance, lambda planned, n: cost if planned and n % 2 == 0 else 1.0 if planned else 1.2, 4 * ROUNDS)
    assert acceptance.settled
    assert acceptance.planned


def test_one_slow_iteration_decides_nothing() -> None:
    acceptance = Acceptance()
    _play(acceptance, lambda planned, n: 9.0 if n == 1 else 1.0 if planned else 1.2, WHOLE)
    assert acceptance.planned


def test_drift_begins_a_new_trial() -> None:
    acceptance = Acceptance()
    _play(acceptance, lambda planned, _: 1.0 if planned else 1.2, WHOLE + 20)
    assert acceptance.settled
    _play(acceptance, lambda planned, _: 1.05, 20)
    assert acceptance.trials == 1
    _play(acceptance, lambda planned, _: 1.3 if planned else 1.2, 3 + WHOLE)
    assert acceptance.trials == 2
    assert acceptance.settled
    assert not acceptance.planned
