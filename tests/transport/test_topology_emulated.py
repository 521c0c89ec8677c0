"""Emulated devices with a topology's links: their clock agrees with what is published, and with assignments."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from memferry_allocator import Direction, EmulatedDriver, Event, InvalidRequestError, Span, Stream
from memferry_transport import TransferEngine
from memferry_transport.paths import Path
from memferry_transport.topology import (
    PeerKind,
    PeerLink,
    Topology,
    Uplink,
    UplinkKind,
    assign,
    emulated_options,
    machine,
    machine_names,
    prior_calibration,
)
from memferry_transport.topology.rates import uplink_rate

from ..allocator.machine import Machine, address, pattern

IN, OUT = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST
KIB, MIB = 1 << 10, 1 << 20
N, SLICES = MIB, 16


class Bench:
    """A machine with the links of a topology, latencies left out unless asked for."""

    def __init__(self, topology: Topology, *, host_node: int | None = None, latency: bool = False) -> None:
        if not latency:
            topology = replace(
                topology,
                fitted=None,
                host_links=tuple(replace(link, latency_s=0.0) for link in topology.host_links),
                peer_links=tuple(replace(link, latency_s=0.0) for link in topology.peer_links),
            )
        self.topology = topology
        self.driver = EmulatedDriver(emulated_options(topology, host_node=host_node, device_memory=64 * MIB))
        self.machine = Machine(self.driver)

    def host(self, device: int, direction: Direction) -> list[Callable[[], None]]:
        """Slices of a copy between host and device, on a stream of its own."""
        home, ptr = address(self.machine.pinned(N)), self.machine.device(N, device)
        return self._slices(*((ptr, home) if direction is IN else (home, ptr)), self.machine.stream(device))

    def peer(self, source: int, target: int) -> list[Callable[[], None]]:
        to, of = self.machine.device(N, target), self.machine.device(N, source)
        return self._slices(to, of, self.machine.stream(source))

    def _slices(self, dst: int, src: int, stream: Stream) -> list[Callable[[], None]]:
        size = N // SLICES
        return [partial(self.driver.copy, dst + at, src + at, size, stream=stream) for at in range(0, N, size)]

    def seconds(self, *copies: list[Callable[[], None]]) -> float:
        """Of copies side by side: a slice of each in turn."""
        for turn in itertools.zip_longest(*copies):
            for enqueue in turn:
                if enqueue is not None:
                    enqueue()
        began = self.driver.now
        self.driver.synchronize_all()
        return self.driver.now - began

    def rate(self, *copies: list[Callable[[], None]]) -> float:
        """Of each of some copies of N bytes side by side."""
        return N / self.seconds(*copies)


def near(rate: float) -> object:
    return pytest.approx(rate, rel=0.01)


# -- single links, as they were measured ----------------------------------------------------------------
def test_the_links_of_two_h200() -> None:
    bench = Bench(machine("h200-x2"))
    assert bench.rate(bench.host(0, IN)) == near(55.4e9)
    assert bench.rate(bench.host(0, OUT)) == near(55.2e9)
    assert bench.rate(bench.host(0, IN), bench.host(1, IN)) == near(55.4e9)
    assert bench.rate(bench.host(0, IN), bench.host(0, OUT)) == near(50.2e9)
    assert bench.rate(bench.peer(1, 0)) == near(391e9)
    assert bench.rate(bench.peer(1, 0), bench.peer(0, 1)) == near(196e9)


def test_latency_counts() -> None:
    bench = Bench(machine("h200-x1"), latency=True)
    assert bench.rate(bench.host(0, IN)) == near(N / (SLICES * 10e-6 + N / 55.4e9))


def test_two_behind_one_switch_share_it() -> None:
    bench = Bench(machine("a100-x8"))
    switch = uplink_rate(bench.topology.uplinks[0])
    assert switch is not None
    assert bench.rate(bench.host(0, IN), bench.host(1, IN), bench.host(2, IN)) == near(switch / 2)
    assert bench.rate(bench.host(0, IN), bench.host(1, OUT)) == near(switch)


def test_host_memory_on_one_node_is_shared_by_all() -> None:
    bench = Bench(machine("h20-x8"), host_node=0)
    assert bench.rate(*(bench.host(device, IN) for device in range(8))) == near(300e9 / 8)
    bench = Bench(machine("h20-x8"))
    assert bench.rate(*(bench.host(device, IN) for device in range(8))) == near(53e9)


def test_the_other_node_s_memory_is_reached_over_the_socket_link() -> None:
    topology = machine("h20-x8")
    narrow = (*topology.uplinks[:2], Uplink("sockets", UplinkKind.SOCKET, 100e9, None, (0, 1)))
    bench = Bench(replace(topology, uplinks=narrow), host_node=0)
    assert bench.rate(*(bench.host(device, IN) for device in range(4, 8))) == near(25e9)
    assert bench.rate(*(bench.host(device, IN) for device in range(4))) == near(53e9)


def test_peer_copies_over_pcie_take_both_devices_links_to_the_host() -> None:
    bench = Bench(replace(machine("consumer-x2"), peer_links=(PeerLink((0, 1), PeerKind.PHB),)))
    alone = bench.rate(bench.peer(0, 1))
    assert bench.rate(bench.peer(0, 1), bench.host(1, IN)) == near(alone / 2)
    assert bench.rate(bench.peer(0, 1), bench.host(0, OUT)) == near(alone / 2)
    assert bench.rate(bench.peer(0, 1), bench.host(0, IN)) == near(alone)


def test_devices_without_peer_access_have_none() -> None:
    bench = Bench(machine("consumer-x2"))
    assert not bench.driver.can_access_peer(0, 1)
    assert bench.rate(bench.peer(0, 1)) == near(bench.rate(bench.host(0, OUT)) / 2)


# -- a whole assignment ---------------------------------------------------------------------------------
def carried_out(bench: Bench, loads: dict[int, int], slice_bytes: int) -> tuple[float, float]:
    """Seconds that an assignment takes and that it predicts; relays through two staging buffers each."""
    assigned = assign(bench.topology, loads, slice_bytes=slice_bytes)
    ways = []
    for device, each in assigned.items():
        home, ptr = address(bench.machine.pinned(loads[device])), bench.machine.device(loads[device], device)
        for path, quota in zip(each.paths, each.quotas, strict=True):
            sizes = [min(slice_bytes, quota - at) for at in range(0, quota, slice_bytes)]
            ways.append(_way(bench, path, home, ptr, sizes))
            home, ptr = home + quota, ptr + quota
    return bench.seconds(*ways), max(each.seconds for each in assigned.values())


def _way(bench: Bench, path: Path, home: int, ptr: int, sizes: list[int]) -> list[Callable[[], None]]:
    copy, places = bench.driver.copy, list(itertools.accumulate(sizes, initial=0))
    if path.helper is None:
        stream = bench.machine.stream(path.device)
        return [
            partial(copy, ptr + at, home + at, size, stream=stream)
            for at, size in zip(places, sizes, strict=False)
        ]
    first, second = (bench.machine.stream(path.helper) for _ in range(2))
    staging = [bench.machine.device(max(sizes), path.helper) for _ in range(2)]
    free: dict[int, Event] = {}

    def relay(index: int) -> None:
        slot, at = index % 2, places[index]
        if slot in free:
            first.wait(free[slot])
        copy(staging[slot], home + at, sizes[index], stream=first)
        second.wait(first.record())
        copy(ptr + at, staging[slot], sizes[index], stream=second)
        free[slot] = second.record()

    return [partial(relay, index) for index in range(len(sizes))]


@pytest.mark.parametrize("name", machine_names())
@pytest.mark.parametrize("everybody", [False, True])
def test_the_clock_agrees_with_what_was_predicted(name: str, everybody: bool) -> None:
    """Within what a slice takes: the prediction knows of no order between slices."""
    bench = Bench(machine(name))
    loads = dict.fromkeys(range(len(bench.topology.devices) if everybody else 1), 8 * MIB)
    taken, predicted = carried_out(bench, loads, 64 * KIB)
    assert taken == pytest.approx(predicted, rel=0.02)


@pytest.mark.parametrize("name", machine_names())
@pytest.mark.parametrize("direction", Direction)
def test_the_engine_reaches_what_was_predicted_from_costs_nobody_measured(name: str, direction: Direction) -> None:
    bench, nbytes = Bench(machine(name)), 8 * MIB
    data, ptr = bench.machine.pinned(nbytes), bench.machine.device(nbytes)
    data[:] = pattern(nbytes)
    home = Span(address(data), nbytes)
    engine = TransferEngine(bench.driver, 0, calibration=prior_calibration(bench.topology, 64 * KIB))
    stream = bench.machine.stream()
    if direction is OUT:
        bench.driver.copy(ptr, home.ptr, nbytes, stream=stream)
        stream.synchronize()
        data[:] = 0
    there = Span(ptr, nbytes)
    ends = (there, home) if direction is IN else (home, there)
    engine.copy(*ends, direction, stream=stream).synchronize()  # the first one verifies its ways
    began = bench.driver.now
    engine.copy(*ends, direction, stream=stream).synchronize()
    (predicted,) = assign(bench.topology, {0: nbytes}, direction, slice_bytes=64 * KIB).values()
    assert bench.driver.now - began == pytest.approx(predicted.seconds, rel=0.1)
    assert (bench.machine.read(ptr, nbytes) == pattern(nbytes)).all()
    assert (data == pattern(nbytes)).all()
    engine.close()


# -- options --------------------------------------------------------------------------------------------
def test_options_of_a_machine() -> None:
    options = emulated_options(machine("hgx-h200-x8"), seed=7)
    assert (options.device_count, options.seed) == (8, 7)
    assert options.device_memory == machine("h200-x1").devices[0].capacity
    assert emulated_options(machine("h200-x1"), device_memory=MIB).device_memory == MIB
    with pytest.raises(InvalidRequestError, match="device_count"):
        emulated_options(Topology((), ()))
