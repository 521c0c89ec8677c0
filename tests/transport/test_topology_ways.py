"""Which ways a machine offers and who helps whom, machine by machine and to the byte."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memferry_allocator import Direction
from memferry_transport import InvalidTransferError
from memferry_transport.cost import LinearCost, finish_time, relay_cost
from memferry_transport.paths import Path
from memferry_transport.topology import (
    HostLink,
    PeerKind,
    PeerLink,
    Topology,
    Uplink,
    UplinkKind,
    assign,
    candidates,
    link_costs,
    machine,
    machine_names,
    predicted_over_published,
    prior_calibration,
)

IN, OUT = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST
MIB, GIB = 1 << 20, 1 << 30
SLICE = 4 * MIB

# By machine and device: the helpers of its ways, in order.
HELPERS = {
    ("h200-x1", 0): (),
    ("h200-x2", 0): (1,),
    ("h200-x2", 1): (0,),
    ("hgx-h200-x8", 0): (1, 2, 3, 4, 5, 6),
    ("hgx-h200-x8", 5): (4, 6, 7, 0, 1, 2),  # its own socket's first, and six at most
    ("h20-x8", 0): (1, 2, 3, 4, 5),  # the memory of a node gives no more than that
    ("h20-x8", 7): (4, 5, 6, 0, 1),
    ("a100-x8", 0): (2, 4, 6),  # not 1, behind its own switch; and one behind each of the others
    ("a100-x8", 1): (2, 4, 6),
    ("a100-x8", 5): (6, 0, 2),
    ("consumer-x2", 0): (),
    ("cloudmatrix384-node", 3): (0, 1, 2, 4, 5, 6),
}


def slices(*counts: int) -> tuple[int, ...]:
    return tuple(count * SLICE for count in counts)


# One device that loads 1 GiB by itself: its quotas in slices, and how long it takes.
ALONE = {
    "h200-x1": ((256,), 0.019391621),
    "h200-x2": ((128, 128), 0.009721538),
    "hgx-h200-x8": ((37, 37, 37, 37, 36, 36, 36), 0.002831977),
    "h20-x8": ((46, 45, 45, 45, 45, 30), 0.003650339),
    "a100-x8": ((64, 64, 64, 64), 0.009717525),
    "consumer-x2": ((256,), 0.077461636),
    "cloudmatrix384-node": ((45, 36, 35, 35, 35, 35, 35), 0.003180188),
}

# All devices that load 1 GiB each at once: nobody helps, and everybody takes so long.
TOGETHER = {
    "h200-x1": 0.019391621,
    "h200-x2": 0.019391621,
    "hgx-h200-x8": 0.019391621,
    "h20-x8": 0.020269280,
    "a100-x8": 0.077461636,  # two behind each switch: twice as long as one alone
    "consumer-x2": 0.077461636,
    "cloudmatrix384-node": 0.017672228,
}


def via(device: int, *helpers: int) -> tuple[Path, ...]:
    return (Path(device), *(Path(device, helper) for helper in helpers))


# -- candidates -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(("where", "helpers"), HELPERS.items(), ids=str)
@pytest.mark.parametrize("direction", Direction)
def test_the_ways_of_every_machine(where: tuple[str, int], helpers: tuple[int, ...], direction: Direction) -> None:
    name, device = where
    assert candidates(machine(name), device, direction) == via(device, *helpers)


def test_every_machine_is_tried() -> None:
    assert {name for name, _ in HELPERS} == set(ALONE) == set(TOGETHER) == set(machine_names())


def test_busy_devices_do_not_help() -> None:
    assert candidates(machine("hgx-h200-x8"), 0, busy=(1, 2, 3, 4)) == via(0, 5, 6, 7)
    assert candidates(machine("a100-x8"), 0, busy=(2, 4)) == via(0, 3, 5, 6)


def pair(**link: object) -> Topology:
    """Two H200 with another link between them."""
    topology = machine("h200-x2")
    return replace(topology, peer_links=(PeerLink((0, 1), **link),))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [kind for kind in PeerKind if not kind.own])
def test_peer_access_over_pcie_is_no_way_round_pcie(kind: PeerKind) -> None:
    assert candidates(pair(kind=kind), 0) == via(0)


def test_a_link_of_unknown_make_is_a_way() -> None:
    assert candidates(pair(kind=PeerKind.PEER), 0) == via(0, 1)


def test_helpers_behind_the_same_switch_are_left_out_however_wide_it_is() -> None:
    topology = machine("a100-x8")
    wide = tuple(replace(uplink, bytes_per_second=1e12) for uplink in topology.uplinks)
    assert candidates(replace(topology, uplinks=wide), 0) == via(0, 2, 3, 4, 5, 6, 7)


@pytest.mark.parametrize(("share", "taken"), [(0.26, True), (0.24, False)])
def test_a_relay_slower_than_a_quarter_of_the_best_is_left_out(share: float, taken: bool) -> None:
    slow = pair(kind=PeerKind.NVLINK, links=1, bytes_per_second=share * 55.4e9)
    assert candidates(slow, 0) == (via(0, 1) if taken else via(0))


def test_devices_that_are_not_connected_do_not_help() -> None:
    assert candidates(replace(machine("h200-x2"), peer_links=(), published=()), 0) == via(0)


def test_the_direct_way_stays_however_slow_it_is() -> None:
    topology = machine("h200-x2")
    slow = replace(topology, host_links=(HostLink(0, to_device=1e9, from_device=1e9), topology.host_links[1]))
    assert candidates(slow, 0) == via(0, 1)
    assert candidates(slow, 1) == via(1)


def test_a_full_socket_link_keeps_helpers_of_the_other_socket_out() -> None:
    topology = machine("hgx-h200-x8")
    narrow = Uplink("sockets", UplinkKind.SOCKET, 80e9, None, (0, 1))
    assert candidates(replace(topology, uplinks=(narrow,)), 0) == via(0, 1, 2, 3, 4, 5)  # 55.4 and 24.6 of 80
    narrow = replace(narrow, bytes_per_second=10e9)
    assert candidates(replace(topology, uplinks=(narrow,)), 0) == via(0, 1, 2, 3)


@pytest.mark.parametrize("device", [-1, 2])
def test_devices_that_are_not_there(device: int) -> None:
    with pytest.raises(InvalidTransferError, match=f"no device {device}"):
        candidates(machine("h200-x2"), device)
    with pytest.raises(InvalidTransferError, match=f"no device {device}"):
        assign(machine("h200-x2"), {device: 1})


# -- assignments ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", machine_names())
def test_one_device_alone(name: str) -> None:
    counts, seconds = ALONE[name]
    (only,) = assign(machine(name), {0: GIB}).values()
    assert only.paths == candidates(machine(name), 0)
    assert only.quotas == slices(*counts)
    assert sum(only.quotas) == GIB
    assert only.seconds == pytest.approx(seconds, rel=1e-6)


@pytest.mark.parametrize("name", machine_names())
def test_symmetrical_loads_take_no_relay(name: str) -> None:
    topology = machine(name)
    assigned = assign(topology, {device.ordinal: GIB for device in topology.devices})
    assert list(assigned) == [device.ordinal for device in topology.devices]
    for device, assignment in assigned.items():
        assert assignment.paths == via(device)
        assert assignment.quotas == (GIB,)
        assert assignment.seconds == pytest.approx(TOGETHER[name], rel=1e-6)


def test_four_that_train_and_four_that_help() -> None:
    """One helper each: the arrangement of the published system on such a node."""
    assigned = assign(machine("cloudmatrix384-node"), dict.fromkeys(range(4), 16 * MIB), slice_bytes=MIB)
    for device in range(4):
        assert assigned[device].paths == via(device, device + 4)
        assert assigned[device].quotas == (9 * MIB, 7 * MIB)
        assert assigned[device].seconds == pytest.approx(41e-6 + 9 * MIB / 60.9e9)


def test_the_helpers_of_one_socket_are_divided() -> None:
    assigned = assign(machine("hgx-h200-x8"), {0: GIB, 1: GIB // 2})
    assert assigned[0].paths == via(0, 2, 4, 6)
    assert assigned[1].paths == via(1, 3, 5, 7)


def test_a_helper_s_busy_neighbour_has_taken_their_switch() -> None:
    """Devices 2 and 3 share a switch: while 3 loads, 2 has nothing to give."""
    assigned = assign(machine("a100-x8"), {0: GIB, 3: GIB})
    assert assigned[0].paths == via(0, 4)
    assert assigned[3].paths == via(3, 6)


def test_two_behind_one_switch_have_half_each_and_helpers_elsewhere() -> None:
    assigned = assign(machine("a100-x8"), {0: GIB, 1: GIB})
    assert assigned[0].paths == via(0, 2, 6)
    assert assigned[1].paths == via(1, 4)
    assert assigned[0].costs[0].bytes_per_second == pytest.approx(assigned[0].costs[1].bytes_per_second / 2)


def test_little_goes_the_direct_way_alone() -> None:
    assert assign(machine("h200-x2"), {0: 100_000})[0].paths == via(0)
    assert assign(machine("h200-x2"), {0: 0, 1: 5})[1].quotas == (5,)
    assert assign(machine("h200-x2"), {0: 0}) == {}
    with pytest.raises(InvalidTransferError, match="-1 bytes"):
        assign(machine("h200-x2"), {0: -1})


@given(
    st.sampled_from(machine_names()),
    st.dictionaries(st.integers(0, 7), st.integers(0, 3 * GIB), max_size=8),
    st.sampled_from(list(Direction)),
    st.sampled_from([MIB, SLICE, 5_000_000]),
)
def test_every_assignment_moves_everything_and_helps_only_the_needy(
    name: str, loads: dict[int, int], direction: Direction, slice_bytes: int
) -> None:
    topology = machine(name)
    loads = {device: nbytes for device, nbytes in loads.items() if device < len(topology.devices)}
    assigned = assign(topology, loads, direction, slice_bytes=slice_bytes)
    assert {device: sum(each.quotas) for device, each in assigned.items()} == {
        device: nbytes for device, nbytes in loads.items() if nbytes
    }
    helpers = [path.helper for each in assigned.values() for path in each.paths if path.helper is not None]
    assert len(helpers) == len(set(helpers))
    assert not any(loads.get(helper) for helper in helpers)
    for device, each in assigned.items():
        assert all(path.device == device for path in each.paths)
        assert sum(quota % slice_bytes != 0 for quota in each.quotas) <= 1
        ideal = finish_time(loads[device], each.costs)
        assert ideal <= each.seconds * (1 + 1e-9)
        assert each.seconds <= ideal + max(slice_bytes / cost.bytes_per_second for cost in each.costs) * 1.01


# -- costs ----------------------------------------------------------------------------------------------
def test_costs_of_links() -> None:
    costs = link_costs(machine("h200-x2"))
    assert set(costs) == {(path, each) for path in (*via(0, 1), *via(1, 0)) for each in Direction}
    assert costs[Path(0), IN] == LinearCost(10e-6, 55.4e9)
    assert costs[Path(0), OUT] == LinearCost(10e-6, 55.2e9)
    assert costs[Path(0, 1), IN] == relay_cost(LinearCost(10e-6, 55.4e9), LinearCost(10e-6, 391e9), SLICE)


def test_costs_that_nobody_measured_follow_from_the_make() -> None:
    costs = link_costs(machine("a100-x8"))
    assert costs[Path(0), IN].bytes_per_second == pytest.approx(0.88 * 31.5e9, rel=1e-3)
    plain = Topology(machine("h200-x1").devices, (HostLink(0),), numa_nodes=(0,))
    assert link_costs(plain)[Path(0), IN].bytes_per_second == pytest.approx(0.88 * 15.75e9, rel=1e-3)


def test_a_calibration_before_any_measurement() -> None:
    topology = machine("h200-x2")
    prior = prior_calibration(topology)
    assert (prior.machine, prior.source, prior.slice_bytes) == (topology.machine, "published", SLICE)
    assert {key: measured.cost for key, measured in prior.ways.items()} == link_costs(topology)
    assert prior.duplex == {0: pytest.approx(50.2 / 55.3, rel=1e-3), 1: pytest.approx(50.2 / 55.3, rel=1e-3)}
    even = prior.break_even_bytes[0, IN]
    ways = [prior.ways[path, IN].cost for path in via(0, 1)]
    level = finish_time(even, ways)
    assert ways[1].bytes_within(level) == pytest.approx(SLICE)  # the relay carries one slice
    assert prior_calibration(machine("a100-x8")).source == "topology"
    assert prior_calibration(machine("consumer-x2")).break_even_bytes == {}


# -- published figures ----------------------------------------------------------------------------------
def test_the_link_model_against_published_figures() -> None:
    """Ratios as they are: a change of the model or of a machine must show here."""
    ratios = [(each.machine, len(each.figure.paths), each.ratio) for each in predicted_over_published()]
    assert ratios == [
        ("cloudmatrix384-node", 1, pytest.approx(1.0, abs=0.01)),  # fitted to these three
        ("cloudmatrix384-node", 1, pytest.approx(1.0, abs=0.01)),
        ("cloudmatrix384-node", 2, pytest.approx(1.0, abs=0.01)),
        ("h20-x8", 1, pytest.approx(1.0, abs=0.01)),
        ("h20-x8", 8, pytest.approx(1.215, abs=0.005)),
        ("h200-x1", 1, pytest.approx(1.0, abs=0.01)),
        ("h200-x2", 1, pytest.approx(1.0, abs=0.01)),
        ("h200-x2", 2, pytest.approx(1.179, abs=0.005)),
        ("h200-x2", 2, pytest.approx(1.042, abs=0.005)),
        ("h200-x2", 2, pytest.approx(1.032, abs=0.005)),
    ]


def test_a_comparison_can_be_read() -> None:
    last = str(predicted_over_published([machine("cloudmatrix384-node")])[-1])
    assert "16777216 bytes h2d over direct+1: 86.1 GB/s predicted, 86.0 published" in last
