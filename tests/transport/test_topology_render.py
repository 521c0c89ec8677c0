"""A topology as text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memferry_transport.topology import Pcie, PeerKind, PeerLink, describe, machine, machine_names, render_matrix


def test_the_matrix_of_two_h200() -> None:
    assert render_matrix(machine("h200-x2")).splitlines() == [
        "      GPU0  GPU1  NUMA Affinity",
        "GPU0  X     NV18  0",
        "GPU1  NV18  X     0",
        "",
        "X    = the device itself",
        "NV#  = so many NVLinks",
    ]


def test_no_peer_access_is_marked() -> None:
    text = render_matrix(machine("consumer-x2"))
    assert "GPU0  X     PHB*  0" in text
    assert "*    = no peer access" in text
    assert "NV#" not in text


def test_what_is_not_known_is_a_question_mark() -> None:
    assert "GPU0  X     ?     0" in render_matrix(replace(machine("consumer-x2"), peer_links=()))


def test_every_kind_has_its_line_in_the_legend() -> None:
    for kind in PeerKind:
        link = PeerLink((0, 1), kind)
        text = render_matrix(replace(machine("consumer-x2"), peer_links=(link,)))
        assert f"{'NV#' if kind is PeerKind.NVLINK else kind.value:4} = " in text


@pytest.mark.parametrize("name", machine_names())
def test_every_machine_can_be_described(name: str) -> None:
    topology = machine(name)
    text = describe(topology)
    assert text.startswith(topology.machine)
    assert render_matrix(topology) in text
    assert all(f"note: {note}" in text for note in topology.notes)
    assert all(uplink.name in text for uplink in topology.uplinks)


def test_given_and_expected_rates_differ_at_sight() -> None:
    assert "0: PCIe 5 x16, 55.4, 55.2 GB/s, 0.91" in describe(machine("h200-x2"))
    assert "0: PCIe 4 x16, ~27.7, ~27.7 GB/s, ~0.91, behind switch 0" in describe(machine("a100-x8"))
    assert "each two: NV12, ~261.0 GB/s, ~0.50" in describe(machine("a100-x8"))


def test_a_link_that_is_trained_down_is_told() -> None:
    topology = machine("h200-x1")
    slow = replace(topology, host_links=(replace(topology.host_links[0], pcie=Pcie(5, 8, 5, 16)),))
    assert "0: PCIe 5 x8 (of 5 x16)" in describe(slow)
    assert "0: PCIe 4 x8 (of 4 x16)" in describe(machine("consumer-x2"))
