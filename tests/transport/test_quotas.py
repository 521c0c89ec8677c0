"""How bytes are shared out: exact, whole, and no worse than any one slice moved."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memferry_transport import LinearCost
from memferry_transport.adaptive import next_shift
from memferry_transport.quotas import shift, slice_quotas, worthwhile

EVEN = LinearCost(0.0, 100.0)


def test_alike_ways_share_alike() -> None:
    assert slice_quotas(4000, [EVEN] * 4, 100) == [1000] * 4


def test_the_first_takes_what_is_no_whole_slice() -> None:
    assert slice_quotas(1030, [EVEN] * 2, 100) == [530, 500]


def test_shares_follow_rates() -> None:
    assert slice_quotas(6000, [LinearCost(0, 300), LinearCost(0, 200), LinearCost(0, 100)], 100) == [
        3000,
        2000,
        1000,
    ]


def test_a_way_that_starts_late_carries_less() -> None:
    assert slice_quotas(3000, [EVEN, LinearCost(10.0, 100)], 100) == [2000, 1000]


@pytest.mark.parametrize("nbytes", [0, 1, 99, 100, 1000])
def test_below_its_start_a_way_carries_nothing(nbytes: int) -> None:
    assert slice_quotas(nbytes, [EVEN, LinearCost(10.0, 100)], 100) == [nbytes, 0]


def test_a_slice_goes_over_where_that_ends_earlier() -> None:
    """Rounded down the first would have 260, 2.6 s; a slice more on the second ends at 2.4 s."""
    assert slice_quotas(400, [EVEN, LinearCost(0, 83.4)], 100) == [200, 200]


costs = st.lists(
    st.builds(LinearCost, st.floats(0, 10), st.floats(1, 1000)),
    min_size=1,
    max_size=5,
)


@given(nbytes=st.integers(0, 10000), costs=costs, slice_bytes=st.integers(1, 700))
def test_quotas_are_whole_and_no_slice_moved_from_the_first_helps(
    nbytes: int, costs: list[LinearCost], slice_bytes: int
) -> None:
    quotas = slice_quotas(nbytes, costs, slice_bytes)
    assert sum(quotas) == nbytes
    assert all(quota >= 0 for quota in quotas)
    assert all(quota % slice_bytes == 0 for quota in quotas[1:])
    for other in range(1, len(costs)):
        if quotas[0] >= slice_bytes:
            assert costs[other].seconds(quotas[other] + slice_bytes) >= costs[0].seconds(quotas[0])


def test_small_problems_are_solved_to_the_slice() -> None:
    """Against every way of sharing seven slices out."""
    for rates in itertools.product((100, 150, 400), repeat=2):
        ways = [LinearCost(0.5, rates[0]), LinearCost(0.1, rates[1])]
        best = min(max(ways[0].seconds(700 - 100 * n), ways[1].seconds(100 * n)) for n in range(8))
        found = slice_quotas(700, ways, 100)
        assert max(way.seconds(quota) for way, quota in zip(ways, found, strict=True)) == pytest.approx(best)


def test_a_way_slower_than_a_quarter_is_not_worth_it() -> None:
    assert worthwhile([LinearCost(0, 400), LinearCost(9, 100), LinearCost(0, 99)]) == [True, True, False]
    assert worthwhile([]) == []


# -- shifts ------------------------------------------------------------------------------------------------
@given(st.data())
def test_a_shift_keeps_the_whole(data: st.DataObject) -> None:
    quotas = data.draw(st.lists(st.integers(0, 2000), min_size=2, max_size=4))
    slices = data.draw(st.lists(st.integers(-5, 5), min_size=len(quotas) - 1, max_size=len(quotas) - 1))
    slices.append(-sum(slices))
    moved = shift(quotas, slices, 100)
    assert sum(moved) == sum(quotas)
    assert all(quota >= 0 for quota in moved)
    if all(quota >= 100 * 20 for quota in quotas):
        assert moved == [quota + 100 * change for quota, change in zip(quotas, slices, strict=True)]


def test_what_a_way_has_not_got_is_not_moved() -> None:
    assert shift([500, 100, 400], [1, -3, 2], 100) == [600, 0, 400]


def test_the_last_gives_a_slice_to_the_first() -> None:
    assert next_shift([0, 0, 0], [10, 10, 10], [1.0, 2.0, 1.5]) == [1, -1, 0]


@pytest.mark.parametrize("seconds", [[1.0, 1.04], [1.0, 1.0], [0.0, 0.0]])
def test_within_tolerance_nothing_moves(seconds: list[float]) -> None:
    assert next_shift([0, 0], [20, 20], seconds) == [0, 0]


def test_nothing_moves_if_that_would_end_later() -> None:
    """Three slices in 0.9 s would be four in 1.2 s: no better than the 1.1 s of the other."""
    assert next_shift([0, 0], [3, 3], [0.9, 1.1]) == [0, 0]


def test_a_way_that_carried_nothing_is_given_nothing() -> None:
    assert next_shift([0, 0, 0], [9, 0, 8], [1.0, 0.0, 0.5]) == [-1, 0, 1]


def test_no_more_than_a_quarter_is_moved() -> None:
    shifts = [0, 0]
    for _ in range(50):
        shifts = next_shift(shifts, [10, 10], [1.0, 9.0])
    assert shifts == [5, -5]
