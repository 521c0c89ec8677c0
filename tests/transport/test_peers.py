"""From device to device: over their own link, or by way of the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memferry_allocator import EmulatedDriver, EmulatedOptions, RaceError, Span, Stream
from memferry_allocator.driver import LinkModel
from memferry_transport import (
    Edge,
    Fault,
    FaultKind,
    FaultyDriver,
    InvalidTransferError,
    TransferEngine,
    TransferOptions,
)

from ..allocator.machine import Bytes, Machine, address, pattern, refused
from .fleet import FAST, Clock, Crying

N = 1000


class Apart(EmulatedDriver):
    """Devices that do not reach each other."""

    def can_access_peer(self, device: int, peer: int) -> bool:
        return False


class Pair:
    """Memory on two devices of three, and an engine on the first."""

    def __init__(self, make: Callable[[EmulatedOptions], Any] = EmulatedDriver, **options: Any) -> None:
        link = LinkModel(0.0, 1000.0)
        settings: dict[str, Any] = {"device_count": 3, "eagerness": 0.0, "on_device": FAST, "peer": FAST}
        settings.update(host_to_device=link, device_to_host=link, **options)
        self.driver = make(EmulatedOptions(**settings))
        self.machine, self.clock = Machine(self.driver), Clock()
        self.engine = TransferEngine(self.driver, 0, options=TransferOptions(slice_bytes=100), clock=self.clock)
        self.ptrs = [self.machine.device(N, device) for device in range(3)]
        for device, ptr in enumerate(self.ptrs):
            self.machine.write(ptr, pattern(N, device), device=device)
        self.driver.synchronize_all()
        self.stream = self.machine.stream()

    def span(self, device: int, start: int = 0, nbytes: int = N) -> Span:
        return Span(self.ptrs[device] + start, nbytes)

    def holds(self, device: int) -> Bytes:
        return self.machine.read(self.ptrs[device], N, device=device)

    def close(self) -> None:
        self.engine.close()
        self.machine.close()


@pytest.mark.parametrize("pair", [(0, 1), (1, 0), (2, 0)])
@pytest.mark.parametrize(("make", "seconds"), [(EmulatedDriver, 0.0), (Apart, 1.1)])
def test_either_way(make: Any, seconds: float, pair: tuple[int, int]) -> None:
    """By way of the host the two hops overlap, but for a slice."""
    world = Pair(make)
    world.engine.copy(world.span(pair[1]), world.span(pair[0]), stream=world.stream).synchronize()
    assert np.array_equal(world.holds(pair[1]), pattern(N, pair[0]))
    before = world.driver.now
    transfer = world.engine.copy(world.span(pair[1]), world.span(pair[0]), stream=world.stream)
    with world.driver.launch(world.stream, reads=[world.span(0)]):
        pass
    transfer.synchronize()
    assert world.driver.now - before == pytest.approx(seconds)
    assert transfer.direction is None
    how = "peer path in 1 driver copies" if not seconds else "peer path by way of the host in 20 driver copies"
    assert transfer.explain() == f"1000 bytes d2d over the {how}"
    assert world.engine.bytes_between_devices == 2000
    world.close()


class Alone(Apart):
    """Nor does a device's stream carry what lies on another."""

    def copy(self, dst: int, src: int, nbytes: int, *, stream: Stream) -> None:
        assert {self.device_of(dst), self.device_of(src)} == {None, stream.device}
        super().copy(dst, src, nbytes, stream=stream)


@pytest.mark.parametrize("pair", [(0, 1), (1, 0)])
def test_each_device_carries_its_own_hop(pair: tuple[int, int]) -> None:
    world = Pair(Alone)
    world.engine.copy(world.span(pair[1]), world.span(pair[0]), stream=world.stream).synchronize()
    assert np.array_equal(world.holds(pair[1]), pattern(N, pair[0]))
    world.close()


@pytest.mark.parametrize("make", [EmulatedDriver, Apart])
def test_order(make: Any) -> None:
    world = Pair(make)
    world.driver.fill(world.ptrs[0], 7, N, stream=world.stream)
    world.engine.copy(world.span(1), world.span(0), stream=world.stream)
    world.driver.fill(world.ptrs[0], 8, N, stream=world.stream)
    other = world.machine.stream(1)
    with pytest.raises(RaceError):
        world.driver.fill(world.ptrs[1], 9, N, stream=other)
    world.stream.synchronize()
    assert set(world.holds(1)) == {7}
    world.close()


def test_within_a_device() -> None:
    world = Pair()
    world.engine.copy(world.span(0, 500, 500), world.span(0, 0, 500), stream=world.stream).synchronize()
    assert np.array_equal(world.holds(0)[500:], pattern(N)[:500])
    assert world.engine.health().verified == ()
    world.close()


@pytest.mark.parametrize("edge", [Edge(0, 1), Edge(1, 0)])
def test_a_link_that_changes_bytes_is_not_used(edge: Edge) -> None:
    world = Pair(lambda options: FaultyDriver(EmulatedDriver(options)))
    world.driver.arm(Fault(FaultKind.CORRUPT, edge=edge, count=None))
    for _ in range(2):
        world.engine.copy(world.span(edge.target or 0), world.span(edge.source or 0), stream=world.stream)
        world.stream.synchronize()
        assert np.array_equal(world.holds(edge.target or 0), pattern(N, edge.source or 0))
    assert f"changed over {edge}" in str(world.engine.health())
    world.close()


def test_a_link_that_fails_is_gone_round() -> None:
    world = Pair(lambda options: FaultyDriver(EmulatedDriver(options)))
    world.engine.copy(world.span(1), world.span(0), stream=world.stream)
    world.stream.synchronize()
    for errors in range(1, 5):
        world.driver.arm(Fault(FaultKind.FAIL, edge=Edge(2, 0)), Fault(FaultKind.FAIL, first=1, edge=Edge(0, 1)))
        regions = [(world.span(1, start, 300), world.span(0, start, 300)) for start in (0, 300, 600)]
        transfer = world.engine.copy_regions(regions, stream=world.stream)
        transfer.synchronize()
        assert transfer.nbytes == 900
        assert np.array_equal(world.holds(1)[:900], pattern(N)[:900])
        assert sum(path.errors for path in world.engine.health().paths) == min(errors, 3)
    assert "left alone for 30 s" in str(world.engine.health())
    world.close()


def test_a_link_said_to_be_lost_that_carries_on() -> None:
    world = Pair(Crying)
    world.engine.copy(world.span(1), world.span(0), stream=world.stream).synchronize()
    world.driver.cry(2, on=0)
    regions = [(world.span(1, start, 300), world.span(0, start + 300, 300)) for start in (0, 300)]
    transfer = world.engine.copy_regions(regions, stream=world.stream)
    transfer.synchronize()
    assert "by way of the host" in transfer.explain()
    assert np.array_equal(world.holds(1)[:600], pattern(N)[300:900])
    world.close()


def test_what_the_host_cannot_carry_either() -> None:
    world = Pair()
    with refused("INVALID_VALUE"):
        world.engine.copy(world.span(1, 10), world.span(0), stream=world.stream)
    assert all(path.errors == 0 for path in world.engine.health().paths)
    assert world.engine.bytes_between_devices == 0
    world.close()


REFUSALS: dict[str, tuple[Callable[[Pair], Any], str]] = {
    "overlap": (lambda w: [(w.span(0, 0, 500), w.span(0, 499, 500))], "overlap"),
    "overlap of two": (
        lambda w: [(w.span(0, 0, 10), w.span(1, 0, 10)), (w.span(1, 5, 10), w.span(0, 50, 10))],
        "overlap",
    ),
    "same destination": (
        lambda w: [(w.span(0, 0, 10), w.span(1, 0, 10)), (w.span(0, 9, 10), w.span(1, 50, 10))],
        "overlap",
    ),
    "sizes": (lambda w: [(w.span(0, 0, 9), w.span(1, 0, 10))], "source has 10 bytes and destination 9"),
    "others": (lambda w: [(w.span(1), w.span(2))], "neither is device 0"),
    "unknown": (lambda w: [(w.span(0), Span(12345, N))], "at 0x3039 are neither all registered"),
    "mixed": (
        lambda w: [(w.span(0), w.span(1)), (w.span(0), Span(address(w.machine.pinned(N)), N))],
        "not an allocation of a device",
    ),
    "nothing": (lambda w: [(Span(0, 0), Span(0, 0))], "no region has any bytes"),
    "host": (
        lambda w: [(Span(address(w.machine.pinned(N)), N), Span(address(w.machine.pinned(N)), N))],
        "both host memory",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_refused_is_not_begun(name: str) -> None:
    world = Pair()
    regions, match = REFUSALS[name]
    with pytest.raises(InvalidTransferError, match=match):
        world.engine.copy_regions(regions(world), stream=world.stream)
    assert [np.array_equal(world.holds(device), pattern(N, device)) for device in range(3)] == [True] * 3
    world.close()


@given(
    moves=st.lists(
        st.tuples(
            st.sampled_from([(0, 1), (1, 0), (0, 2), (2, 0), (0, 0)]), st.integers(0, 499), st.integers(0, 499)
        ),
        max_size=6,
    ),
    nbytes=st.integers(0, 500),
    seed=st.integers(0, 99),
    apart=st.booleans(),
)
def test_any_copies_arrive(
    moves: list[tuple[tuple[int, int], int, int]], nbytes: int, seed: int, apart: bool
) -> None:
    world = Pair(Apart if apart else EmulatedDriver, eagerness=0.3, seed=seed)
    model = [pattern(N, device) for device in range(3)]
    for (source, target), of, to in moves:
        if not nbytes or (source == target and abs(of - to) < nbytes):
            continue
        model[target][to : to + nbytes] = model[source][of : of + nbytes].copy()
        world.engine.copy(world.span(target, to, nbytes), world.span(source, of, nbytes), stream=world.stream)
    world.stream.synchronize()
    for device in range(3):
        assert np.array_equal(world.holds(device), model[device])
    world.close()
