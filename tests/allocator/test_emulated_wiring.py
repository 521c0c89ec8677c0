"""The virtual clock with links given device by device: shared ones, slower ones both ways, and none at all."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memferry_allocator import EmulatedDriver, EmulatedOptions, InvalidRequestError
from memferry_allocator.driver import LinkModel, Route, Wiring
from memferry_allocator.driver.emulated.clock import Link, Shared

from .machine import Machine, address, refused

N = 1 << 16
SECOND = LinkModel(0.0, N)  # N bytes take a second


class Wired:
    """Two devices, each with memory and a stream of its own for each direction."""

    def __init__(self, **wiring: Any) -> None:
        plain = (Route(SECOND), Route(SECOND))
        options = {"host_to_device": plain, "device_to_host": plain, **wiring}
        self.driver = EmulatedDriver(EmulatedOptions(device_count=2, wiring=Wiring(**options)))
        self.machine = Machine(self.driver)
        self.home = [[address(self.machine.pinned(2 * N)) for _ in range(2)] for _ in range(2)]
        self.ptr = [[self.machine.device(2 * N, device) for _ in range(2)] for device in range(2)]
        self.streams = [[self.machine.stream(device) for _ in range(2)] for device in range(2)]

    def into(self, device: int, nbytes: int = N) -> None:
        self.driver.copy(self.ptr[device][0], self.home[device][0], nbytes, stream=self.streams[device][0])

    def out(self, device: int, nbytes: int = N) -> None:
        self.driver.copy(self.home[device][1], self.ptr[device][1], nbytes, stream=self.streams[device][1])

    def across(self, source: int, nbytes: int = N) -> None:
        other = 1 - source
        self.driver.copy(self.ptr[other][0], self.ptr[source][1], nbytes, stream=self.streams[source][0])

    def end(self) -> float:
        self.driver.synchronize_all()
        return self.driver.now


def test_each_device_has_links_of_its_own() -> None:
    wired = Wired(
        host_to_device=(Route(SECOND), Route(LinkModel(0.5, 2 * N))), device_to_host=(Route(SECOND),) * 2
    )
    wired.into(1)
    assert wired.end() == 1
    wired.into(0, 2 * N)
    assert wired.end() == 3


def test_what_two_links_share_carries_no_more_than_it_can() -> None:
    behind = (Route(SECOND, ("switch",)),) * 2
    wired = Wired(host_to_device=behind, shared={"switch": N})
    wired.into(0)
    wired.out(1)
    assert wired.end() == 1
    wired.into(0)
    wired.into(1)
    assert wired.end() == 3


def test_what_is_wide_enough_for_both_slows_nobody() -> None:
    behind = (Route(SECOND, ("switch",)),) * 2
    wired = Wired(host_to_device=behind, shared={"switch": 2 * N})
    wired.into(0)
    wired.into(1)
    assert wired.end() == 1


def test_alone_a_copy_goes_at_the_rate_of_the_slowest_on_its_way() -> None:
    route = Route(LinkModel(0.25, N), ("wide", "narrow"))
    wired = Wired(host_to_device=(route, Route(SECOND)), shared={"wide": 4 * N, "narrow": N / 2})
    wired.into(0)
    assert wired.end() == 2.25


def test_both_ways_at_once_are_slower_than_each_alone() -> None:
    both = (Route(SECOND, ("both ways",)), Route(SECOND))
    wired = Wired(host_to_device=both, device_to_host=both, shared={"both ways": 1.6 * N})
    wired.into(0)
    assert wired.end() == 1
    wired.into(0, 2 * N)
    wired.out(0, 2 * N)
    assert wired.end() == 1 + 2.5  # 4 N over 1.6 N a second


def test_devices_without_a_link_copy_by_way_of_the_host() -> None:
    wired = Wired()
    assert not wired.driver.can_access_peer(0, 1)
    with refused("INVALID_CONTEXT"):
        wired.driver.enable_peer_access(0, 1)
    wired.across(0)
    assert wired.end() == 2


def test_devices_with_a_link_use_it() -> None:
    quick = Route(LinkModel(0.0, 4 * N))
    wired = Wired(peer={(0, 1): quick, (1, 0): Route(SECOND)})
    assert wired.driver.can_access_peer(0, 1)
    wired.across(0)
    assert wired.end() == 0.25
    wired.across(1)
    assert wired.end() == 1.25


def test_the_simple_form_is_a_wiring_too() -> None:
    options = EmulatedOptions(device_count=2)
    wiring = options.wired()
    assert [route.link for route in wiring.host_to_device] == [options.host_to_device] * 2
    assert [route.link for route in wiring.device_to_host] == [options.device_to_host] * 2
    assert {pair: route.link for pair, route in wiring.peer.items()} == dict.fromkeys(
        [(0, 1), (1, 0)], options.peer
    )
    assert EmulatedOptions(device_count=2, wiring=wiring).wired() is wiring


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=30))
def test_what_is_shared_idles_only_while_nobody_waits(requests: list[tuple[int, int]]) -> None:
    """In whole time steps: each transfer takes the first steps from its start on that are free."""
    shared, free = Shared(1.0), dict.fromkeys(range(2000), True)
    for ready, nbytes in requests:
        steps = [step for step in range(ready, 2000) if free[step]][:nbytes]
        free.update(dict.fromkeys(steps, False))
        assert shared.reserve(float(ready), nbytes) == steps[-1] + 1


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 30), st.integers(1, 20)), max_size=25))
def test_nothing_is_overbooked_and_nothing_beats_its_own_link(requests: list[tuple[int, int, int]]) -> None:
    """Whatever is asked in whatever order: no one ends sooner than alone, nor all sooner than what they share."""
    shared = Shared(1.5)
    links = [Link(LinkModel(0.0, 1.0), [shared]) for _ in range(2)]
    ends = []
    for which, ready, nbytes in requests:
        end = links[which].reserve(float(ready), nbytes)
        assert end >= ready + nbytes
        ends.append((ready, nbytes, end))
    for begin, _, _ in ends:
        later = [(nbytes, end) for ready, nbytes, end in ends if ready >= begin]
        assert max(end for _, end in later) >= begin + sum(nbytes for nbytes, _ in later) / 1.5 - 1e-9


@pytest.mark.parametrize(("in_turn", "first", "last"), [(True, 1.25, 1.25), (False, 1.0, 1.390625)])
def test_what_is_enqueued_first_has_the_first_claim(in_turn: bool, first: float, last: float) -> None:
    """Slices in turn share evenly; else the earlier direction is as fast as alone, the later gets the rest."""
    both = (Route(SECOND, ("both ways",)), Route(SECOND))
    wired = Wired(host_to_device=both, device_to_host=both, shared={"both ways": 1.6 * N})
    for direction in [wired.into, wired.out] * 8 if in_turn else [wired.into] * 8 + [wired.out] * 8:
        direction(0, N // 8)
    wired.streams[0][0].synchronize()
    assert wired.driver.now == pytest.approx(first, rel=0.07)
    assert wired.end() == pytest.approx(last)


ROUTES = (Route(SECOND),)


@pytest.mark.parametrize(
    ("wiring", "match"),
    [
        (lambda: Wiring(ROUTES, ROUTES, shared={"x": 0.0}), "'x'"),
        (lambda: Wiring(ROUTES, ROUTES, shared={"x": "fast"}), "'x'"),  # type: ignore[dict-item]
        (lambda: Wiring((Route(SECOND, ("x",)),), ROUTES), "'x' is not in shared"),
        (lambda: Wiring((SECOND,), ROUTES), "not a Route"),  # type: ignore[arg-type]
        (lambda: Wiring((), ROUTES), "0 and 1 routes"),
        (lambda: Wiring(ROUTES, ROUTES, {(0, 0): ROUTES[0]}), "no peers 0 and 0"),
        (lambda: Wiring(ROUTES, ROUTES, {(0, 1): ROUTES[0]}), "no peers 0 and 1"),
        (lambda: 5, "a Wiring"),
    ],
)
def test_wirings_that_cannot_be(wiring: Any, match: str) -> None:
    with pytest.raises(InvalidRequestError, match=match):
        EmulatedOptions(wiring=wiring())


def test_a_link_one_way_only_is_refused() -> None:
    routes = ROUTES * 2
    with pytest.raises(InvalidRequestError, match="one way only"):
        EmulatedOptions(device_count=2, wiring=Wiring(routes, routes, {(0, 1): ROUTES[0]}))
