"""Discovery: from the driver, NVML and sysfs together, from each of them alone, and from none."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

from memferry_allocator import EmulatedDriver, EmulatedOptions
from memferry_transport.paths import Path as Way
from memferry_transport.topology import (
    Pcie,
    PeerKind,
    Uplink,
    UplinkKind,
    candidates,
    discover,
    dumps,
    emulated_options,
    loads,
    machine,
    machine_names,
)
from memferry_transport.topology.nvml import load_nvml, normal_address
from memferry_transport.topology.pci import read_pci

from .machines import FakeNvml, driver, link, sysfs

A, B, C, D = "0000:18:00.0", "0000:19:00.0", "0000:3b:00.0", "0000:3c:00.0"
FAST = "32.0 GT/s PCIe"


# -- everything answers ---------------------------------------------------------------------------------
def h200_pair(root: Path) -> Path:
    tree = sysfs(root, f"pci0000:17/0000:17:01.0/{A}", f"pci0000:3a/0000:3a:01.0/{C}", nodes="0-1")
    link(tree, A, FAST, 16, node=0)
    link(tree, C, FAST, 16, node=0)
    return tree


def test_two_h200(tmp_path: Path) -> None:
    """As the machine of the package that was measured; its rates are what is not discovered."""
    nvml = FakeNvml([A, C], {A: ["switch"] * 18, C: ["switch"] * 18}, version=7, ancestors={(A, C): 40})
    tree = h200_pair(tmp_path)
    (tree / "devices" / "system" / "node" / "online").write_text("0\n")
    found = discover(driver([A, C], numa=[0, 0]), nvml=nvml, root=tree)
    assert found.machine == machine("h200-x2").machine
    assert found.notes == ()
    peer = found.peer_link(0, 1)
    assert peer is not None
    assert (peer.label, peer.version) == ("NV18", 4)  # Hopper's version 5 is version 4
    assert candidates(found, 0) == (Way(0), Way(0, 1))
    assert loads(dumps(found)) == found
    assert nvml.calls[-1] == "nvmlShutdown"


def test_nvlinks_that_are_down_do_not_count(tmp_path: Path) -> None:
    nvml = FakeNvml([A, C], {A: ["switch"] * 18, C: ["switch"] * 12 + ["down"] * 6}, ancestors={(A, C): 40})
    peer = discover(driver([A, C]), nvml=nvml, root=h200_pair(tmp_path)).peer_link(0, 1)
    assert peer is not None
    assert peer.label == "NV12"


def test_nvlinks_from_device_to_device(tmp_path: Path) -> None:
    links = {A: [B, B, C], B: [A, A], C: [A]}
    ancestors = {(A, B): 10, (A, C): 50, (B, C): 50}
    nvml = FakeNvml([A, B, C], links, version=3, ancestors=ancestors)
    found = discover(driver([A, B, C], capability=(7, 0)), nvml=nvml, root=tmp_path)
    assert [peer.label for peer in found.peer_links] == ["NV2", "NV1", "SYS"]
    assert candidates(found, 1) == (Way(1), Way(1, 0))


def test_a_link_now_and_at_its_best(tmp_path: Path) -> None:
    nvml = FakeNvml([A], pcie=(1, 8, 5, 16))
    found = discover(driver([A]), nvml=nvml, root=tmp_path)
    assert found.host_link(0).pcie == Pcie(1, 8, 5, 16)
    assert found.host_link(0).pcie is not None
    assert str(found.host_link(0).pcie) == "PCIe 1 x8 (of 5 x16)"


@pytest.mark.parametrize(
    ("level", "kind"),
    [(0, "PIX"), (10, "PIX"), (20, "PXB"), (30, "PHB"), (40, "NODE"), (50, "SYS")],
)
def test_nvml_s_levels(level: int, kind: str, tmp_path: Path) -> None:
    nvml = FakeNvml([A, C], ancestors={(A, C): level})
    found = discover(driver([A, C]), nvml=nvml, root=tmp_path)
    assert [peer.label for peer in found.peer_links] == [kind]
    assert candidates(found, 0) == (Way(0),)  # over PCIe the bytes would come in by its own link


# -- NVML says little -----------------------------------------------------------------------------------
def test_without_nvml_peer_access_is_believed_and_its_make_left_open(tmp_path: Path) -> None:
    found = discover(driver([A, C]), nvml=None, root=h200_pair(tmp_path))
    assert [peer.kind for peer in found.peer_links] == [PeerKind.PEER]
    assert found.host_link(0).pcie == Pcie(5, 16, 5, 16)
    assert any("nvidia-ml-py" in note for note in found.notes)
    assert candidates(found, 0) == (Way(0), Way(0, 1))


def test_nvml_that_does_not_start(tmp_path: Path) -> None:
    nvml = FakeNvml([A, C], refused=("nvmlInit",))
    found = discover(driver([A, C]), nvml=nvml, root=h200_pair(tmp_path))
    assert [peer.kind for peer in found.peer_links] == [PeerKind.PEER]
    assert any("Unknown Error" in note for note in found.notes)
    assert "nvmlShutdown" not in nvml.calls


@pytest.mark.parametrize(
    "refused", [name for name in dir(FakeNvml) if name.startswith("nvmlDevice")], ids=lambda name: name[10:]
)
def test_each_refusal_is_noted_once_and_fails_nothing(refused: str, tmp_path: Path) -> None:
    ends = {A: ["switch"] * 18, C: ["switch"] * 18}
    nvml = FakeNvml([A, C], ends, ancestors={(A, C): 40}, refused=(refused,))
    found = discover(driver([A, C]), nvml=nvml, root=h200_pair(tmp_path))
    if refused != "nvmlDeviceGetNvLinkRemotePciInfo":  # which is only asked of links between two devices
        assert sum(refused in note for note in found.notes) == 1
    kept = refused not in ("nvmlDeviceGetNvLinkState", "nvmlDeviceGetHandleByPciBusId")
    expected = PeerKind.PEER
    if kept:
        expected = PeerKind.NVLINK if refused != "nvmlDeviceGetNvLinkRemoteDeviceType" else PeerKind.NODE
    assert [peer.kind for peer in found.peer_links] == [expected]


def test_hidden_ends_of_nvlinks_are_taken_for_a_switch(tmp_path: Path) -> None:
    refused = ("nvmlDeviceGetNvLinkRemotePciInfo", "nvmlDeviceGetNvLinkRemoteDeviceType")
    nvml = FakeNvml([A, C], {A: ["?"] * 4, C: ["?"] * 6}, ancestors={(A, C): 40}, refused=refused)
    found = discover(driver([A, C]), nvml=nvml, root=h200_pair(tmp_path))
    assert [peer.label for peer in found.peer_links] == ["NV4"]
    assert any("hidden" in note for note in found.notes)


def test_an_old_nvml(tmp_path: Path) -> None:
    class Old(FakeNvml):
        nvmlDeviceGetTopologyCommonAncestor = None  # type: ignore[assignment]  # noqa: N815

    found = discover(driver([A, C]), nvml=Old([A, C]), root=h200_pair(tmp_path))
    assert [peer.kind for peer in found.peer_links] == [PeerKind.NODE]  # from sysfs
    assert any("no such call" in note for note in found.notes)


# -- sysfs ----------------------------------------------------------------------------------------------
def switched(root: Path, upstream: str = "16.0 GT/s PCIe", width: object = 16) -> Path:
    """Two devices behind one switch, and a third at another root port."""
    below = "pci0000:17/0000:17:01.0/0000:18:00.0/"
    tree = sysfs(
        root,
        f"{below}0000:19:00.0/0000:1a:00.0",
        f"{below}0000:19:01.0/0000:1b:00.0",
        "pci0000:17/0000:17:02.0/0000:1c:00.0",
    )
    for address in ("0000:1a:00.0", "0000:1b:00.0", "0000:1c:00.0"):
        link(tree, address, "16.0 GT/s PCIe", 16, node=0)
    link(tree, "0000:17:01.0", upstream, width)
    link(tree, "0000:18:00.0", upstream, width)
    return tree


SWITCHED: list[str | None] = ["0000:1a:00.0", "0000:1b:00.0", "0000:1c:00.0"]


def test_a_shared_switch(tmp_path: Path) -> None:
    found = discover(driver(SWITCHED, access=False), nvml=None, root=switched(tmp_path))
    assert found.uplinks == (Uplink("0000:17:01.0", UplinkKind.SWITCH, pcie=Pcie(4, 16, 4, 16)),)
    assert [link.through for link in found.host_links] == [("0000:17:01.0",), ("0000:17:01.0",), ()]
    assert [peer.label for peer in found.peer_links] == ["PIX", "PHB", "PHB"]
    assert [device.numa_node for device in found.devices] == [0, 0, 0]


def test_helpers_behind_the_same_switch_are_left_out(tmp_path: Path) -> None:
    found = discover(driver(SWITCHED), nvml=None, root=switched(tmp_path))
    assert candidates(found, 0) == (Way(0), Way(0, 2))
    assert candidates(found, 2) == (Way(2), Way(2, 0))  # the second behind that switch would add nothing


@pytest.mark.parametrize(
    ("speed", "width"), [("Unknown", 0), ("Unknown speed", 255), ("2.5 GT/s PCIe", 1), ("2.5 GT/s PCIe", 16)]
)
def test_a_bridge_that_a_virtual_machine_made_up_is_not_shared(speed: str, width: object, tmp_path: Path) -> None:
    found = discover(driver(SWITCHED), nvml=None, root=switched(tmp_path, speed, width))
    assert found.uplinks == ()
    assert any("0000:17:01.0" in note for note in found.notes)
    assert candidates(found, 0) == (Way(0), Way(0, 1), Way(0, 2))


def test_switches_behind_switches(tmp_path: Path) -> None:
    outer = "pci0000:17/0000:17:01.0/0000:18:00.0"
    inner = [f"{outer}/0000:19:0{index}.0/0000:{2 + index}a:00.0" for index in range(2)]
    devices = [f"0000:{2 + index}b:0{port}.0" for index in range(2) for port in range(2)]
    chains = [
        f"{inner[index]}/0000:{2 + index}a:0{1 + port}.0/0000:{2 + index}b:0{port}.0"
        for index in range(2)
        for port in range(2)
    ]
    tree = sysfs(tmp_path, *chains)
    for entry in (tree / "bus" / "pci" / "devices").iterdir():
        link(tree, entry.name, "16.0 GT/s PCIe", 16)
    found = discover(driver(list(devices), access=False), nvml=None, root=tree)
    assert [uplink.name for uplink in found.uplinks] == ["0000:17:01.0", "0000:19:00.0", "0000:19:01.0"]
    assert [found.below(uplink) for uplink in found.uplinks] == [(0, 1, 2, 3), (0, 1), (2, 3)]
    assert [peer.label for peer in found.peer_links] == ["PIX", "PXB", "PXB", "PXB", "PXB", "PIX"]


def test_one_device_behind_one_switch_and_one_behind_two(tmp_path: Path) -> None:
    outer = "pci0000:17/0000:17:01.0/0000:18:00.0"
    inner = "0000:19:01.0/0000:1a:00.0/0000:1b:00.0"
    tree = sysfs(tmp_path, f"{outer}/0000:19:00.0/0000:2a:00.0", f"{outer}/{inner}/0000:2b:00.0")
    for first, second in itertools.permutations(("0000:2a:00.0", "0000:2b:00.0")):
        found = discover(driver([first, second], access=False), nvml=None, root=tree)
        assert [peer.label for peer in found.peer_links] == ["PXB"]


def test_sockets(tmp_path: Path) -> None:
    tree = sysfs(
        tmp_path,
        f"pci0000:17/0000:17:01.0/{A}",
        f"pci0000:20/0000:20:01.0/{C}",
        f"pci0000:80/0000:80:01.0/{D}",
        nodes="0-1",
    )
    for address, node in ((A, 0), (C, 0), (D, 1)):
        link(tree, address, FAST, 16, node=node)
    found = discover(driver([A, C, D], access=False), nvml=None, root=tree)
    assert [peer.label for peer in found.peer_links] == ["NODE", "SYS", "SYS"]
    assert found.numa_nodes == (0, 1)


@pytest.mark.parametrize(("text", "generation"), [("2.5 GT/s PCIe", 1), ("8 GT/s", 3), ("64.0 GT/s PCIe", 6)])
def test_speeds(text: str, generation: int, tmp_path: Path) -> None:
    tree = sysfs(tmp_path, f"pci0000:00/{A}")
    link(tree, A, text, 16, node=-1)
    device = read_pci(A.upper(), tree)
    assert device is not None
    assert device.link.generation == generation
    assert device.numa_node is None  # -1


def test_a_maximum_below_what_is_now(tmp_path: Path) -> None:
    tree = sysfs(tmp_path, f"pci0000:00/{A}")
    link(tree, A, FAST, 16, most="2.5 GT/s PCIe")
    assert discover(driver([A]), nvml=None, root=tree).host_link(0).pcie == Pcie(5, 16, 5, 16)


# -- nothing answers ------------------------------------------------------------------------------------
def test_the_driver_alone(tmp_path: Path) -> None:
    found = discover(driver([None, None], access=False), nvml=None, root=tmp_path / "none")
    assert [link.pcie for link in found.host_links] == [None, None]
    assert [peer.label for peer in found.peer_links] == ["SYS"]
    assert any("sysfs" in note for note in found.notes)
    assert candidates(found, 0) == (Way(0),)
    assert loads(dumps(found)) == found


def test_sysfs_full_of_nonsense(tmp_path: Path) -> None:
    tree = sysfs(tmp_path, f"pci0000:00/{A}", nodes="")
    link(tree, A, "very fast", "wide", node="none")
    (tree / "bus" / "pci" / "devices" / A / "max_link_width").write_bytes(b"\xff\xfe")
    found = discover(driver([A]), nvml=None, root=tree)
    assert found.host_link(0).pcie is None
    assert found.numa_nodes == ()
    assert any("NUMA" in note for note in found.notes)


def test_nvml_that_does_not_stop(tmp_path: Path) -> None:
    found = discover(driver([A]), nvml=FakeNvml([A], refused=("nvmlShutdown",)), root=tmp_path)
    assert found.host_link(0).pcie == Pcie(5, 16, 5, 16)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("00000000:3B:00.0", C),
        ("0000:3b:00.0", C),
        ("00010000:3B:00.0", "10000:3b:00.0"),
        ("", ""),
        ("x:y", "x:y"),
    ],
)
def test_addresses_as_linux_writes_them(text: str, address: str) -> None:
    assert normal_address(text) == address


def test_a_machine_without_devices(tmp_path: Path) -> None:
    found = discover(driver([]), nvml=None, root=tmp_path)
    assert found.devices == ()
    assert loads(dumps(found)) == found


def test_peer_access_one_way_only_is_none(tmp_path: Path) -> None:
    found = discover(driver([A, C], access={(0, 1): True, (1, 0): False}), nvml=None, root=tmp_path)
    assert not found.peer_links[0].peer_access
    assert any("one direction only" in note for note in found.notes)


# -- emulated devices -----------------------------------------------------------------------------------
def test_an_emulated_machine_of_the_simple_form() -> None:
    found = discover(EmulatedDriver(EmulatedOptions(device_count=3)))
    options = EmulatedOptions()
    assert {link.to_device for link in found.host_links} == {options.host_to_device.bytes_per_second}
    assert {link.bytes_per_second for link in found.peer_links} == {options.peer.bytes_per_second}
    assert {link.duplex for link in (*found.host_links, *found.peer_links)} == {1.0}
    assert found.source == "emulated"
    assert candidates(found, 1) == (Way(1), Way(1, 0), Way(1, 2))


@pytest.mark.parametrize("name", machine_names())
def test_an_emulated_machine_offers_the_ways_of_its_topology(name: str) -> None:
    topology = machine(name)
    found = discover(EmulatedDriver(emulated_options(topology, device_memory=1 << 20)))
    assert loads(dumps(found)) == found
    for device in topology.devices:
        ways = len(candidates(topology, device.ordinal))
        # What the host memory of a NUMA node lets pass is not known of emulated devices.
        assert len(candidates(found, device.ordinal)) == (7 if name == "h20-x8" else ways)


def test_a_module_that_warns_of_its_age_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings are errors here, as they may be in a user's program."""
    (tmp_path / "pynvml.py").write_text('import warnings\nwarnings.warn("deprecated", FutureWarning)\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    assert load_nvml().__name__ == "pynvml"  # type: ignore[union-attr]
    sys.modules.pop("pynvml")


@pytest.mark.gpu
def test_this_machine() -> None:
    from memferry_allocator import open_driver

    found = discover(open_driver("cuda"))
    assert loads(dumps(found)) == found
    assert all(device.name and device.pci_address for device in found.devices)
    assert found.machine == discover(open_driver("cuda")).machine
