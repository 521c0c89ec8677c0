"""Machines for discovery to look at: a driver's answers, a sysfs tree and NVML, all of them made up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memferry_allocator import Driver
from memferry_allocator.driver import DeviceInfo


class FakeDriver:
    """As much of a driver as discovery asks."""

    def __init__(
        self,
        addresses: list[str | None],
        *,
        name: str = "NVIDIA H200",
        numa: list[int | None] | None = None,
        access: bool | Mapping[tuple[int, int], bool] = True,
        capability: tuple[int, int] = (9, 0),
    ) -> None:
        self.device_count = len(addresses)
        self._addresses, self._name, self._capability = addresses, name, capability
        self._numa = numa or [None] * len(addresses)
        self._access = access

    def device_info(self, device: int) -> DeviceInfo:
        address, node = self._addresses[device], self._numa[device]
        return DeviceInfo(device, self._name, f"GPU-{device}", 1 << 30, address, node, self._capability)

    def can_access_peer(self, device: int, peer: int) -> bool:
        return self._access if isinstance(self._access, bool) else self._access[device, peer]


def driver(*arguments: Any, **options: Any) -> Driver:
    return FakeDriver(*arguments, **options)  # type: ignore[return-value]


# -- Linux ----------------------------------------------------------------------------------------------
def sysfs(root: Path, *chains: str, nodes: str = "0") -> Path:
    """A tree with these devices: each given as ``pci0000:00/0000:00:01.0/0000:01:00.0``."""
    devices = root / "bus" / "pci" / "devices"
    devices.mkdir(parents=True)
    (root / "devices" / "system" / "node").mkdir(parents=True)
    (root / "devices" / "system" / "node" / "online").write_text(f"{nodes}\n")
    for chain in chains:
        at = root / "devices"
        for part in chain.split("/"):
            at = at / part
            at.mkdir(exist_ok=True)
            if ":" in part and not part.startswith("pci") and not (devices / part).exists():
                (devices / part).symlink_to(at)
    return root


def link(root: Path, address: str, speed: str, width: object, *, most: str = "", node: object = "") -> None:
    """What Linux says of a PCI device: its link now, its best speed, its NUMA node."""
    entry = root / "bus" / "pci" / "devices" / address
    (entry / "current_link_speed").write_text(f"{speed}\n")
    (entry / "current_link_width").write_text(f"{width}\n")
    (entry / "max_link_speed").write_text(f"{most or speed}\n")
    (entry / "max_link_width").write_text(f"{width}\n")
    if node != "":
        (entry / "numa_node").write_text(f"{node}\n")


# -- NVML -----------------------------------------------------------------------------------------------
@dataclass
class FakeNvml:
    """NVML for devices at some addresses; by name, calls that it refuses."""

    addresses: list[str]
    links: Mapping[str, list[str]] = field(default_factory=dict)  # by address: where its NVLinks end
    version: int = 6
    ancestors: Mapping[tuple[str, str], int] = field(default_factory=dict)
    pcie: tuple[int, int, int, int] = (5, 16, 5, 16)
    refused: tuple[str, ...] = ()
    calls: list[str] = field(default_factory=list)

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):  # noqa: N801
        pass

    class NVMLError_InvalidArgument(NVMLError):  # noqa: N801
        pass

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml"):
            self.calls.append(name)
            if name in self.refused:

                def refuse(*_: object) -> None:
                    raise self.NVMLError("Unknown Error")

                return refuse
        return object.__getattribute__(self, name)

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlShutdown(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetHandleByPciBusId(self, address: bytes) -> str:  # noqa: N802
        if address.decode() not in self.addresses:
            raise self.NVMLError("Not Found")
        return address.decode()

    def nvmlDeviceGetCurrPcieLinkGeneration(self, _: str) -> int:  # noqa: N802
        return self.pcie[0]

    def nvmlDeviceGetCurrPcieLinkWidth(self, _: str) -> int:  # noqa: N802
        return self.pcie[1]

    def nvmlDeviceGetMaxPcieLinkGeneration(self, _: str) -> int:  # noqa: N802
        return self.pcie[2]

    def nvmlDeviceGetMaxPcieLinkWidth(self, _: str) -> int:  # noqa: N802
        return self.pcie[3]

    def nvmlDeviceGetTopologyCommonAncestor(self, first: str, second: str) -> int:  # noqa: N802
        return self.ancestors[min(first, second), max(first, second)]

    def nvmlDeviceGetNvLinkState(self, handle: str, index: int) -> int:  # noqa: N802
        if handle not in self.links:
            raise self.NVMLError_NotSupported("Not Supported")
        if index >= len(self.links[handle]):
            raise self.NVMLError_InvalidArgument("Invalid Argument")
        return int(self.links[handle][index] != "down")

    def nvmlDeviceGetNvLinkVersion(self, _: str, __: int) -> int:  # noqa: N802
        return self.version

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: str, index: int) -> int:  # noqa: N802
        return 2 if self.links[handle][index] == "switch" else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: str, index: int) -> Any:  # noqa: N802
        @dataclass
        class Info:
            busId: bytes  # noqa: N815

        return Info(f"0000{self.links[handle][index].upper()}".encode())
