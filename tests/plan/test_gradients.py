"""Gradient offload: the programs equal all combinations, and leave no more on the device than allowed."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memferry_rt.plan.gradients import Gradient, Offload, device_limit, offload_gradients, offload_in_time

MIB = 1 << 20
seconds = st.integers(0, 20).map(float)
gradients = st.lists(
    st.builds(Gradient, st.integers(0, 9), seconds, st.none() | seconds, seconds), min_size=1, max_size=7
)


def cheapest(gradients: list[Gradient], limit: int, unit: int) -> float | None:
    """By trying all: what is freed in whole units must be what is needed in whole units."""
    need = max(0, -(-(sum(each.nbytes for each in gradients) - limit) // unit))
    found = []
    for chosen in itertools.product((False, True), repeat=len(gradients)):
        costs = [each.cost() for each, out in zip(gradients, chosen, strict=True) if out]
        freed = sum(each.nbytes // unit for each, out in zip(gradients, chosen, strict=True) if out)
        if None not in costs and freed >= need:
            found.append(sum(cost for cost in costs if cost is not None))
    return min(found, default=None)


@settings(max_examples=5 * settings.default.max_examples)
@given(gradients, st.integers(0, 70), st.integers(1, 3))
def test_the_program_is_as_cheap_as_the_cheapest_of_all(gradients: list[Gradient], limit: int, unit: int) -> None:
    found = offload_gradients(gradients, limit, unit=unit)
    assert (None if found is None else found.seconds) == cheapest(gradients, limit, unit)
    if found is not None:
        assert found.device_nbytes == sum(
            each.nbytes for each, out in zip(gradients, found.inplace, strict=True) if not out
        )
        assert found.device_nbytes <= limit


@given(gradients, st.floats(0, 1), st.floats(0, 1))
def test_a_smaller_reserve_leaves_less_on_the_device_and_costs_no_less(
    gradients: list[Gradient], first: float, second: float
) -> None:
    more, less = max(first, second), min(first, second)
    loose = offload_gradients(gradients, device_limit(gradients, more), unit=1)
    tight = offload_gradients(gradients, device_limit(gradients, less), unit=1)
    if tight is not None:
        assert loose is not None
        assert tight.device_nbytes <= device_limit(gradients, less)
        assert loose.seconds <= tight.seconds


def test_device_bytes_follow_the_reserve() -> None:
    gradients = [Gradient(100 * MIB, 1.0, 1.0 + 0.1 * number) for number in range(10)]
    kept = []
    for reserve in (1, 0.75, 0.5, 0.25, 0):
        found = offload_gradients(gradients, device_limit(gradients, reserve))
        assert found is not None
        kept.append(found.device_nbytes // MIB)
    assert kept == [1000, 700, 500, 200, 0]


def test_a_copy_that_would_be_exposed_makes_writing_in_place_cheaper() -> None:
    gradients = [Gradient(4, 1.0, 2.0), Gradient(4, 1.0, 2.5)]
    assert offload_gradients(gradients, 4, unit=1) == Offload((True, False), 1.0, 4)
    assert offload_gradients(gradients, 4, exposed=[0.0, 1.5], unit=1) == Offload((False, True), 0.0, 4)


def test_what_may_not_be_written_there_stays_or_there_is_no_answer() -> None:
    gradients = [Gradient(4, 1.0, None), Gradient(4, 1.0, 2.0)]
    assert offload_gradients(gradients, 4, unit=1) == Offload((False, True), 1.0, 4)
    assert offload_gradients(gradients, 3, unit=1) is None
    assert offload_in_time(gradients, 3) is None


@pytest.mark.parametrize("reserve", [-0.1, 1.1, float("nan")])
def test_a_reserve_is_a_share(reserve: float) -> None:
    with pytest.raises(ValueError, match="not a share"):
        device_limit([], reserve)


def run(gradients: list[Gradient], chosen: tuple[bool, ...], limit: int) -> float | None:
    """When all is over, by playing it moment by moment: whole seconds, one at a time."""
    now = copied = 0.0
    leaving: list[tuple[float, int]] = []
    for gradient, out in zip(gradients, chosen, strict=True):
        if out:
            if gradient.inplace is None:
                return None
            now += gradient.inplace
            continue
        if gradient.nbytes > limit:
            return None
        while sum(nbytes for end, nbytes in leaving if end > now) + gradient.nbytes > limit:
            now += 1
        now += gradient.kept
        copied = max(copied, now) + gradient.copy
        leaving.append((copied, gradient.nbytes))
    return max(now, copied)


@settings(max_examples=5 * settings.default.max_examples)
@given(gradients, st.integers(0, 25))
def test_the_version_with_time_ends_as_early_as_any(gradients: list[Gradient], limit: int) -> None:
    every = [run(gradients, chosen, limit) for chosen in itertools.product((False, True), repeat=len(gradients))]
    found = offload_in_time(gradients, limit)
    assert (None if found is None else found.seconds) == min((e for e in every if e is not None), default=None)
    if found is not None:
        assert run(gradients, found.inplace, limit) == found.seconds
        assert found.device_nbytes <= limit


def test_on_a_slow_link_writing_all_in_place_loses_to_two_slabs() -> None:
    """Kernels that write in place take as long as the copy; slabs that leave meanwhile hide it behind the next."""
    gradients = [Gradient(4, kept=3.0, inplace=5.0, copy=4.0) for _ in range(8)]
    slabs = offload_in_time(gradients, 8)
    nothing = offload_in_time(gradients, 0)
    assert slabs is not None
    assert nothing is not None
    assert nothing.seconds == 40
    assert slabs.seconds < nothing.seconds
