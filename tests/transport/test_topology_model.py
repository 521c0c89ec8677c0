"""A topology in itself: what counts as the same machine, and what no machine can be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from memferry_allocator import Direction, EmulatedDriver, EmulatedOptions
from memferry_allocator.driver import LinkModel
from memferry_transport import TopologyError
from memferry_transport.paths import Path
from memferry_transport.topology import (
    HostLink,
    Pcie,
    PeerKind,
    PeerLink,
    Published,
    Topology,
    Uplink,
    UplinkKind,
    discover,
    emulated_options,
    machine,
    machine_names,
)

A100 = machine("a100-x8")


def changed(topology: Topology, what: str, index: int, **fields: Any) -> Topology:
    """The same with some fields of one part changed."""
    parts = list(getattr(topology, what))
    parts[index] = replace(parts[index], **fields)
    return replace(topology, **{what: tuple(parts)})


# -- the make of a machine ------------------------------------------------------------------------------
def test_every_machine_of_the_package_is_another() -> None:
    assert len({machine(name).fingerprint() for name in machine_names()}) == len(machine_names()) == 7


@pytest.mark.parametrize(
    "same",
    [
        lambda t: replace(t, name="another", date="2030-01-01", source="elsewhere", notes=("seen",)),
        lambda t: changed(t, "devices", 0, uuid="GPU-1"),
        lambda t: changed(t, "devices", 0, capacity=1 << 30),
        lambda t: changed(t, "host_links", 0, to_device=1e9, latency_s=1.0),
        lambda t: changed(t, "host_links", 0, pcie=Pcie(1, 16, 4, 16)),  # it rests
        lambda t: changed(t, "peer_links", 0, bytes_per_second=1e9),
        lambda t: replace(t, peer_links=t.peer_links[::-1]),
    ],
)
def test_what_does_not_make_another_machine(same: Callable[[Topology], Topology]) -> None:
    assert same(A100).machine == A100.machine


@pytest.mark.parametrize(
    "other",
    [
        lambda t: changed(t, "devices", 0, name="NVIDIA A100-SXM4-40GB"),
        lambda t: changed(t, "devices", 0, numa_node=1),
        lambda t: changed(t, "devices", 0, pci_address="ffff:00:00.0"),  # the first is the last on the bus
        lambda t: changed(t, "host_links", 0, pcie=Pcie(4, 8, 4, 16)),  # trained down to eight lanes
        lambda t: changed(t, "host_links", 0, through=()),
        lambda t: changed(t, "peer_links", 0, links=4),
        lambda t: changed(t, "peer_links", 0, kind=PeerKind.SYS, links=None, version=None, peer_access=False),
        lambda t: changed(t, "uplinks", 0, pcie=Pcie(3, 16)),
        lambda t: replace(t, peer_links=t.peer_links[1:]),
    ],
)
def test_what_makes_another_machine(other: Callable[[Topology], Topology]) -> None:
    assert other(A100).machine != A100.machine


def test_the_address_itself_does_not_count_but_the_order_does() -> None:
    def addressed(first: str, second: str) -> str:
        topology = changed(machine("h200-x2"), "devices", 0, pci_address=first)
        return changed(topology, "devices", 1, pci_address=second).machine

    assert addressed("0000:18:00.0", "0000:28:00.0") == addressed("0000:05:00.0", "0000:06:00.0")
    assert addressed("0000:18:00.0", "0000:28:00.0") != addressed("0000:28:00.0", "0000:18:00.0")


def test_emulated_machines_with_other_links_are_others() -> None:
    links = [EmulatedOptions(device_count=2), EmulatedOptions(device_count=2, peer=LinkModel(0.0, 1e9))]
    links.append(emulated_options(machine("consumer-x2")))
    names = [discover(EmulatedDriver(options)).machine for options in links]
    assert len(set(names)) == 3
    assert names == [discover(EmulatedDriver(options)).machine for options in links]


def test_switches_of_known_and_unknown_make() -> None:
    uplinks = (replace(A100.uplinks[0], pcie=None), *A100.uplinks[1:])
    assert replace(A100, uplinks=uplinks).machine == replace(A100, uplinks=uplinks[::-1]).machine != A100.machine


def test_the_make_can_be_read() -> None:
    assert machine("h200-x2").machine.startswith("2 x NVIDIA H200, NV18 [")


# -- what cannot be -------------------------------------------------------------------------------------
FIGURE = Published((Path(0), Path(0, 1)), Direction.HOST_TO_DEVICE, 1, 1, 1.0, "", "")


@pytest.mark.parametrize(
    ("field", "broken"),
    [
        ("devices[1].ordinal", lambda t: changed(t, "devices", 1, ordinal=5)),
        ("devices[0].capacity", lambda t: changed(t, "devices", 0, capacity=-1)),
        ("devices[0].numa_node", lambda t: changed(t, "devices", 0, numa_node=7)),
        ("numa_nodes", lambda t: replace(t, numa_nodes=(0, 1, 1))),
        ("host_links", lambda t: replace(t, host_links=t.host_links[:-1])),
        ("host_links.device", lambda t: replace(t, host_links=(*t.host_links, HostLink(0)))),
        ("host_links[8].device", lambda t: replace(t, host_links=(*t.host_links, HostLink(8)))),
        ("host_links[0].to_device", lambda t: changed(t, "host_links", 0, to_device=-1.0)),
        ("host_links[0].from_device", lambda t: changed(t, "host_links", 0, from_device=float("nan"))),
        ("host_links[0].latency_s", lambda t: changed(t, "host_links", 0, latency_s=-1e-6)),
        ("host_links[0].duplex", lambda t: changed(t, "host_links", 0, duplex=0.4)),
        ("host_links[0].duplex", lambda t: changed(t, "host_links", 0, duplex=1.1)),
        ("host_links[0].pcie.width", lambda t: changed(t, "host_links", 0, pcie=Pcie(4, -16))),
        ("host_links[0].pcie.generation", lambda t: changed(t, "host_links", 0, pcie=Pcie(0, 16))),
        ("host_links[0].pcie.width", lambda t: changed(t, "host_links", 0, pcie=Pcie(4, 16, 4, 8))),
        ("host_links[0].through", lambda t: changed(t, "host_links", 0, through=("switch 9",))),
        ("host_links[0].through", lambda t: changed(t, "host_links", 0, through=("switch 0",) * 2)),
        ("uplinks.name", lambda t: replace(t, uplinks=t.uplinks + t.uplinks[:1])),
        ("uplinks[0].bytes_per_second", lambda t: changed(t, "uplinks", 0, bytes_per_second=0.0)),
        ("uplinks[0].numa_nodes", lambda t: changed(t, "uplinks", 0, numa_nodes=(0,))),
        ("uplinks[4].numa_nodes", lambda t: replace(t, uplinks=(*t.uplinks, Uplink("s", UplinkKind.SOCKET)))),
        (
            "uplinks[4].numa_nodes",
            lambda t: replace(t, uplinks=(*t.uplinks, Uplink("m", UplinkKind.MEMORY, numa_nodes=(5,)))),
        ),
        ("peer_links[0].between", lambda t: changed(t, "peer_links", 0, between=(0, 9))),
        ("peer_links[0].between", lambda t: changed(t, "peer_links", 0, between=(-1, 1))),
        ("peer_links[0].between", lambda t: changed(t, "peer_links", 0, between=(1, 1))),
        ("peer_links[0].between", lambda t: changed(t, "peer_links", 0, between=(1, 0))),
        ("peer_links[28].between", lambda t: replace(t, peer_links=(*t.peer_links, t.peer_links[3]))),
        (
            "peer_links[28].links",
            lambda t: replace(t, peer_links=(*t.peer_links, replace(t.peer_links[0], between=(1, 0), links=4))),
        ),
        (
            "peer_links[28].kind",
            lambda t: replace(t, peer_links=(*t.peer_links, PeerLink((0, 1), PeerKind.SYS))),
        ),
        ("peer_links[0].links", lambda t: changed(t, "peer_links", 0, links=-12)),
        ("peer_links[0].links", lambda t: changed(t, "peer_links", 0, kind=PeerKind.PIX)),
        ("peer_links[0].peer_access", lambda t: changed(t, "peer_links", 0, peer_access=False)),
        ("peer_links[0].bytes_per_second", lambda t: changed(t, "peer_links", 0, bytes_per_second=-1.0)),
        ("published[0].nbytes", lambda t: replace(t, published=(replace(FIGURE, nbytes=0),))),
        ("published[0].paths", lambda t: replace(t, published=(replace(FIGURE, paths=()),))),
        ("published[0].paths", lambda t: replace(t, published=(replace(FIGURE, paths=(Path(0), Path(1))),))),
        ("published[0].device", lambda t: replace(t, published=(replace(FIGURE, paths=(Path(9),)),))),
        ("published[0].helpers", lambda t: replace(t, published=(replace(FIGURE, paths=(Path(0, 9),)),))),
        (
            "published[0].helpers",
            lambda t: replace(t, published=(FIGURE,), peer_links=t.peer_links[1:]),
        ),
    ],
)
def test_contradictions_are_named_by_their_field(field: str, broken: Callable[[Topology], Topology]) -> None:
    with pytest.raises(TopologyError) as caught:
        broken(A100)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


def test_a_link_that_is_trained_down_shows_it() -> None:
    assert str(Pcie(5, 16, 5, 16)) == "PCIe 5 x16"
    assert str(Pcie(5, 8, 5, 16)) == "PCIe 5 x8 (of 5 x16)"
    assert str(Pcie()) == "PCIe ? x?"
    assert Pcie(4, 16, 5, 16).trained_down
    assert not Pcie(4, 16).trained_down
