"""The topology of this machine, from the driver, NVML and Linux: each of them may say nothing."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memferry_allocator import Driver, EmulatedDriver
from memferry_allocator.driver import DeviceInfo
from memferry_allocator.host.numa import online_nodes

from .emulated import topology_of_emulated
from .model import Topology
from .nvml import NvmlDevice, NvmlFacts, load_nvml, normal_address, read_nvml
from .parts import Device, HostLink, Pcie, PeerKind, PeerLink, Uplink, UplinkKind
from .pci import SYSFS, PciDevice, read_bridge, read_pci, relation, shared_bridges
from .rates import pcie_rate

_INSTALLED = object()
_HOPPER = 9  # NVML calls its NVLinks version 5; they have the rate of version 4


def discover(driver: Driver, *, nvml: Any | None = _INSTALLED, root: Path = SYSFS) -> Topology:
    """The topology of the machine whose driver this is.

    Parameters
    ----------
    driver : Driver
        Of an emulated device: what its links were set to.
    nvml : module, optional
        With the functions of ``pynvml``; the installed one by default, None for none.
    root : Path
        Of sysfs.

    Returns
    -------
    Topology
        What no source knows is None in it, and `Topology.notes` says which source did not answer.
    """
    if isinstance(driver, EmulatedDriver):
        return topology_of_emulated(driver)
    infos = [driver.device_info(device) for device in range(driver.device_count)]
    addresses = [normal_address(info.pci_address) for info in infos if info.pci_address]
    facts = read_nvml(load_nvml() if nvml is _INSTALLED else nvml, addresses)
    seen = [_see(info, facts, root) for info in infos]
    notes = list(facts.notes)
    hidden = [str(each.info.ordinal) for each in seen if each.pci is None]
    if hidden:
        notes.append(f"sysfs: does not show device {', '.join(hidden)}; shared switches are not known")
    uplinks = _switches(seen, root, notes)
    nodes = {each.numa_node for each in seen if each.numa_node is not None}
    return Topology(
        devices=tuple(each.device for each in seen),
        host_links=tuple(_host_link(each, uplinks) for each in seen),
        peer_links=tuple(_peer_link(driver, pair, facts, notes) for pair in itertools.combinations(seen, 2)),
        uplinks=uplinks,
        numa_nodes=tuple(sorted(nodes.union(_online(root, notes)))),
        source="discovered",
        date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        notes=tuple(notes),
    )


def _online(root: Path, notes: list[str]) -> tuple[int, ...]:
    try:
        return online_nodes(root / "devices" / "system" / "node")
    except ValueError:
        notes.append("sysfs: which NUMA nodes are online cannot be read; those of the devices are listed")
        return ()


@dataclass(frozen=True)
class _Seen:
    """A device, and what the sources say of it."""

    info: DeviceInfo
    address: str | None
    pci: PciDevice | None
    nvml: NvmlDevice | None

    @property
    def numa_node(self) -> int | None:
        known = self.info.numa_node
        return self.pci.numa_node if known is None and self.pci is not None else known

    @property
    def device(self) -> Device:
        info = self.info
        return Device(info.ordinal, info.name, self.address, self.numa_node, info.capacity, info.uuid)

    @property
    def link(self) -> Pcie:
        """Each entry from NVML, else from Linux."""
        first = self.nvml.link if self.nvml is not None else Pcie()
        second = self.pci.link if self.pci is not None else Pcie()
        return _sound(
            Pcie(
                first.generation or second.generation,
                first.width or second.width,
                first.max_generation or second.max_generation,
                first.max_width or second.max_width,
            )
        )


def _see(info: DeviceInfo, facts: NvmlFacts, root: Path) -> _Seen:
    if not info.pci_address:
        return _Seen(info, None, None, None)
    address = normal_address(info.pci_address)
    return _Seen(info, address, read_pci(address, root), facts.devices.get(address))


def _sound(link: Pcie) -> Pcie:
    """A virtual machine may report a maximum below what it reports for now."""

    def most(maximum: int | None, now: int | None) -> int | None:
        return maximum if maximum is None or now is None else max(maximum, now)

    return Pcie(
        link.generation,
        link.width,
        most(link.max_generation, link.generation),
        most(link.max_width, link.width),
    )


# -- links to the host ----------------------------------------------------------------------------------
def _switches(seen: Sequence[_Seen], root: Path, notes: list[str]) -> tuple[Uplink, ...]:
    links = {each.pci.address: each.link for each in seen if each.pci is not None}
    uplinks = []
    for bridge, below in shared_bridges([each.pci for each in seen if each.pci is not None]).items():
        pcie = _sound(read_bridge(bridge, root))
        rate, fastest = pcie_rate(pcie), max(pcie_rate(links[address]) or 0.0 for address in below)
        if rate is None or rate < fastest / 4:
            notes.append(
                f"sysfs: bridge {bridge} above {len(below)} devices is {pcie}: as virtual machines make them up; "
                "it is not counted as shared"
            )
        else:
            uplinks.append(Uplink(bridge, UplinkKind.SWITCH, pcie=pcie))
    return tuple(uplinks)


def _host_link(seen: _Seen, uplinks: Sequence[Uplink]) -> HostLink:
    above = () if seen.pci is None else seen.pci.bridges
    through = tuple(uplink.name for uplink in uplinks if uplink.name in above)
    return HostLink(seen.info.ordinal, seen.link if seen.link != Pcie() else None, through=through)


# -- links between devices ------------------------------------------------------------------------------
def _peer_link(driver: Driver, pair: tuple[_Seen, _Seen], facts: NvmlFacts, notes: list[str]) -> PeerLink:
    first, second = pair
    between = (first.info.ordinal, second.info.ordinal)
    there, back = driver.can_access_peer(*between), driver.can_access_peer(*between[::-1])
    if there != back:
        notes.append(f"devices {between[0]} and {between[1]}: peer access in one direction only; not used")
    access = there and back
    count, version = facts.nvlinks(first.address, second.address)
    if access and count:
        capability = first.info.compute_capability
        hopper = capability is not None and capability[0] == _HOPPER
        return PeerLink(between, PeerKind.NVLINK, True, count, 4 if hopper and version == 5 else version)
    return PeerLink(between, _apart(first, second, facts, access), access)


def _apart(first: _Seen, second: _Seen, facts: NvmlFacts, access: bool) -> PeerKind:
    """Over PCIe, unless there is peer access and NVML could not say whether there are NVLinks."""
    if access and not (facts.knows_nvlinks(first.address) and facts.knows_nvlinks(second.address)):
        return PeerKind.PEER
    level = facts.relation(first.address, second.address)
    if level is not None:
        return level
    if first.pci is not None and second.pci is not None:
        return relation(first.pci, second.pci)
    return PeerKind.SYS
