"""The Pareto program over loads and kernels: nothing that all combinations have is lost."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memferry_rt.plan.panels import cut_panels, ring_ends
from memferry_rt.plan.ways import Step, Way, best_ways, ends_at, with_loads

seconds = st.integers(0, 20).map(float)  # whole numbers: sums are exact, however they are made


@st.composite
def a_step(draw: st.DrawFn) -> Step:
    load, direct = draw(st.none() | seconds), draw(st.none() | seconds)
    here = draw(st.booleans()) or (load is None and direct is None)
    return Step(draw(seconds), load, direct, draw(seconds), here, draw(seconds), draw(seconds))


steps = st.lists(a_step(), min_size=1, max_size=6)


@settings(max_examples=5 * settings.default.max_examples)
@given(steps)
def test_the_best_is_that_of_all_combinations(steps: list[Step]) -> None:
    best = best_ways(steps)[0]
    every = (ends_at(steps, ways) for ways in itertools.product(Way, repeat=len(steps)))
    assert best.seconds == min(every)
    assert ends_at(steps, best.ways) == best.seconds


@settings(max_examples=3 * settings.default.max_examples)
@given(steps)
def test_the_others_are_worse_in_turn_and_what_they_say(steps: list[Step]) -> None:
    found = best_ways(steps, count=5)
    assert [each.seconds for each in found] == sorted(each.seconds for each in found)
    for each in found:
        assert ends_at(steps, each.ways) == each.seconds


@settings(max_examples=3 * settings.default.max_examples)
@given(steps)
def test_host_memory_is_read_only_where_that_makes_something_earlier(steps: list[Step]) -> None:
    best = best_ways(steps)[0]
    sparing = with_loads(steps, best)
    assert ends_at(steps, sparing.ways) <= best.seconds == sparing.seconds
    for number, way in enumerate(sparing.ways):
        assert way is best.ways[number] or (best.ways[number] is Way.DIRECT and way is Way.LOAD)
        if way is Way.DIRECT:
            instead = (*sparing.ways[:number], Way.LOAD, *sparing.ways[number + 1 :])
            assert ends_at(steps, instead) > best.seconds


@given(steps, st.integers(0, 6))
def test_a_reload_and_keeping_host_access_is_the_same_program(steps: list[Step], busy: int) -> None:
    """Backward's loads may begin while the forward still runs: the link is free before the kernels are."""
    now = best_ways(steps, ended=10.0, loaded=float(busy))[0].seconds
    later = best_ways(steps, ended=10.0, loaded=10.0)[0].seconds
    assert now <= later


def test_host_access_hides_a_long_load_once() -> None:
    embedding = Step(seconds=1, load=20, direct=2)
    block = Step(seconds=10, load=5, direct=60)
    best = best_ways([embedding, block, block])[0]
    assert best.ways == (Way.DIRECT, Way.LOAD, Way.LOAD)
    assert best.seconds == 25


def test_what_a_kernel_takes_from_the_link_makes_later_loads_later() -> None:
    embedding = Step(seconds=1, load=20, direct=2, occupies=2)
    block = Step(seconds=10, load=5, direct=60)
    assert best_ways([embedding, block])[0].seconds == 17
    assert best_ways([embedding, replace(block, direct=11, occupies=90), block])[0].ways[1] is Way.LOAD


def test_a_greedy_choice_would_lose() -> None:
    """Reading the first directly is better by itself, and worse for all."""
    first, second = Step(seconds=1, load=4, direct=3), Step(seconds=10, load=9, direct=12)
    assert best_ways([first, second])[0].ways == (Way.DIRECT, Way.DIRECT)
    assert best_ways([first, Step(seconds=10, load=1, direct=13)])[0].ways == (Way.DIRECT, Way.LOAD)


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=8),
    st.integers(1, 4),
    st.integers(1, 10),
    st.integers(0, 50),
    st.integers(0, 3),
)
def test_a_ring_is_a_schedule_that_could_not_be_earlier(
    panels: list[int], slots: int, rate: int, computing: int, latency: int
) -> None:
    loaded, ended = ring_ends(panels, slots, rate, computing, latency=latency)
    copying = sum(panels) / rate + latency * len(panels)
    assert loaded >= copying - 1e-9
    assert ended >= max(copying, computing, latency + panels[0] / rate + computing) - 1e-9
    assert ended <= copying + computing + 1e-9
    assert ring_ends(panels, slots + 1, rate, computing, latency=latency)[1] <= ended + 1e-9
    assert ring_ends(panels, slots, rate + 1, computing, latency=latency)[1] <= ended + 1e-9


def test_one_slot_hides_nothing_and_enough_hide_all_but_the_first() -> None:
    panels = cut_panels(10, 3)
    assert panels == [3, 3, 3, 1]
    assert ring_ends(panels, 1, 1.0, 10.0)[1] == pytest.approx(20)
    assert ring_ends(panels, 4, 1.0, 10.0)[1] == pytest.approx(13)
    with pytest.raises(ValueError, match="at least one slot"):
        ring_ends(panels, 0, 1.0, 10.0)
