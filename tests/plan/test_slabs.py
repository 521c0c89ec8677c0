"""Loads by Belady's rule: never more than there is room for, never a use without its weights, as few as can be."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from memferry_rt.plan.slabs import Loads, Use, plan_loads

layers = st.lists(st.integers(0, 4), min_size=1, max_size=12)


def alike(order: list[int], *, last: bool = False) -> list[Use]:
    """Uses of layers of one size."""
    return [Use(layer, 1, last) for layer in order]


@st.composite
def of_any_size(draw: st.DrawFn) -> tuple[list[Use], int]:
    sizes = draw(st.lists(st.integers(1, 9), min_size=5, max_size=5))
    uses = [Use(layer, sizes[layer], draw(st.booleans())) for layer in draw(layers)]
    return uses, draw(st.integers(max(sizes), 30))


@settings(max_examples=500, deadline=None)
@given(of_any_size())
def test_what_is_there_at_any_moment_fits(found: tuple[list[Use], int]) -> None:
    """Played back: a load takes its bytes before its use, and only after the use that it waits for."""
    uses, capacity = found
    result = plan_loads(uses, capacity)
    here: dict[int, int] = {}
    for position, use in enumerate(uses):
        assert (use.layer not in here) == (position in result.loads)
        here[use.layer] = use.nbytes
        assert sum(here.values()) <= capacity
        if position in result.released:
            del here[use.layer]
            continue
        gone = [other for other in here if not _is_used_before_release(other, position, uses, result)]
        for other in gone:
            del here[other]


def _is_used_before_release(layer: int, position: int, uses: list[Use], result: Loads) -> bool:
    """Whether a layer that is there now has not been given up by then."""
    last = max(place for place in range(position + 1) if uses[place].layer == layer)
    return last not in result.released


@settings(max_examples=500, deadline=None)
@given(of_any_size())
def test_a_load_waits_for_enough_to_be_released(found: tuple[list[Use], int]) -> None:
    """Loads are made in turn, so one has waited for what those before it waited for, too."""
    uses, capacity = found
    result = plan_loads(uses, capacity)
    waited = -1
    for use, after in result.loads.items():
        assert after < use
        waited = max(waited, after)
        free = capacity
        free += sum(uses[place].nbytes for place in result.released if place <= waited)
        free -= sum(uses[place].nbytes for place in result.loads if place < use)
        assert free >= uses[use].nbytes


@settings(max_examples=300, deadline=None)
@given(layers, st.integers(1, 4))
def test_of_layers_alike_no_order_of_displacing_needs_fewer_loads(order: list[int], capacity: int) -> None:
    assert len(plan_loads(alike(order), capacity).loads) == fewest(order, capacity)


def fewest(order: list[int], capacity: int) -> int:
    """The fewest loads, by trying every victim at every turn."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for layer in order:
        following: dict[frozenset[int], int] = {}
        for here, loads in states.items():
            if layer in here:
                options = [(here, loads)]
            else:
                kept = itertools.combinations(here, min(len(here), capacity - 1))
                options = [(frozenset({*some, layer}), loads + 1) for some in kept]
            for state, count in options:
                following[state] = min(count, following.get(state, count))
        states = following
    return min(states.values())


def test_at_the_turn_from_forward_to_backward_the_last_layers_stay() -> None:
    order = [0, 1, 2, 3, 3, 2, 1, 0]
    result = plan_loads(alike(order), 2)
    assert sorted(result.loads) == [0, 1, 2, 3, 6, 7]


def test_a_copy_that_is_worth_nothing_makes_room_at_once() -> None:
    result = plan_loads(alike([0, 1, 0], last=True), 2)
    assert result.loads == {0: -1, 1: -1, 2: 0}
    assert result.released == {0, 1, 2}
