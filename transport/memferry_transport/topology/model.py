"""A machine as plain data: devices, NUMA nodes, and the links between them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .checks import check
from .parts import Device, FittedCosts, HostLink, Pcie, PeerKind, PeerLink, Published, Uplink, UplinkKind


@dataclass(frozen=True)
class Topology:
    """A machine.

    Raises
    ------
    TopologyError
        It contradicts itself; the error names the field.
    """

    devices: tuple[Device, ...]
    host_links: tuple[HostLink, ...]
    peer_links: tuple[PeerLink, ...] = ()
    uplinks: tuple[Uplink, ...] = ()
    numa_nodes: tuple[int, ...] = ()
    name: str = ""
    source: str = ""
    date: str = ""
    fitted: FittedCosts | None = None
    published: tuple[Published, ...] = ()
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        check(self)

    @cached_property
    def _host(self) -> Mapping[int, HostLink]:
        return {link.device: link for link in self.host_links}

    @cached_property
    def _peers(self) -> Mapping[tuple[int, int], PeerLink]:
        return {link.between: link for link in self.peer_links}

    @cached_property
    def _uplinks(self) -> Mapping[str, Uplink]:
        return {uplink.name: uplink for uplink in self.uplinks}

    def device(self, ordinal: int) -> Device:
        return self.devices[ordinal]

    def host_link(self, device: int) -> HostLink:
        return self._host[device]

    def peer_link(self, first: int, second: int) -> PeerLink | None:
        """How two devices are connected; None if that is not known."""
        return self._peers.get((min(first, second), max(first, second)))

    def uplink(self, name: str) -> Uplink:
        return self._uplinks[name]

    # -- the make -------------------------------------------------------------------------------------
    def fingerprint(self) -> str:
        """Of the machine's make, in hexadecimal: device models in PCI order, NUMA nodes and links.

        Not of single pieces: neither UUIDs nor addresses.  A PCIe link counts with its width now and with its
        highest generation: idle devices lower the other.  A link whose make is not known, as those of
        emulated devices, counts with the rates that were given for it; of other links rates do not count.
        """
        return hashlib.sha256(json.dumps(self._make(), sort_keys=True).encode()).hexdigest()[:12]

    @property
    def machine(self) -> str:
        """The make in one line; what `Calibration.machine` holds."""
        counts: dict[str, int] = {}
        for device in self.devices:
            counts[device.name] = counts.get(device.name, 0) + 1
        models = " + ".join(f"{count} x {name}" for name, count in counts.items())
        links = "/".join(sorted({link.label for link in self.peer_links}))
        return f"{models}{', ' if links else ''}{links} [{self.fingerprint()}]"

    def _make(self) -> dict[str, Any]:
        order = sorted(self.devices, key=lambda each: (each.pci_address or "", each.ordinal))
        place = {each.ordinal: index for index, each in enumerate(order)}
        return {
            "devices": [
                [each.name, each.numa_node, place[each.ordinal], _host_make(self.host_link(each.ordinal))]
                for each in self.devices
            ],
            "peers": sorted(map(_peer_make, self.peer_links), key=str),
            "shared": sorted(
                (
                    [uplink.kind.value, _pcie_make(uplink.pcie), sorted(self.below(uplink))]
                    for uplink in self.uplinks
                ),
                key=str,
            ),
        }

    def below(self, uplink: Uplink) -> tuple[int, ...]:
        """The devices under a switch, or of the NUMA nodes of another kind of uplink."""
        if uplink.kind is UplinkKind.SWITCH:
            return tuple(link.device for link in self.host_links if uplink.name in link.through)
        return tuple(each.ordinal for each in self.devices if each.numa_node in uplink.numa_nodes)


def _host_make(link: HostLink) -> list[Any]:
    return [link.to_device, link.from_device] if link.pcie is None else _pcie_make(link.pcie)


def _pcie_make(link: Pcie | None) -> list[Any]:
    return [] if link is None else [link.max_generation or link.generation, link.width]


def _peer_make(link: PeerLink) -> list[Any]:
    rates = [link.bytes_per_second] if link.kind is PeerKind.PEER else []
    return [*link.between, link.label, link.peer_access, *rates]
