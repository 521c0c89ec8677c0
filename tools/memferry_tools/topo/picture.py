"""A topology as a picture: devices above the host they hang on, peer links as arcs above them."""

from __future__ import annotations

import io
from typing import Any

from memferry_transport.topology import PeerLink, Topology

from ..optional import require

INSTALL = "'memferry-rt[tools]'"
_HOST, _SWITCH, _DEVICE = 0.0, 1.0, 2.0  # heights
_MOST_LABELS = 3


def check_drawable() -> None:
    """Find out whether a picture can be drawn, before it is begun."""
    require("matplotlib", what="--picture", install=INSTALL)


def draw(topology: Topology, *, emulated: bool) -> bytes:
    """A PNG.

    Raises
    ------
    ToolError
        matplotlib is missing.
    """
    check_drawable()
    from matplotlib.figure import Figure

    count = len(topology.devices)
    figure = Figure(figsize=(max(5.0, 1.8 * count), 5.5), layout="constrained")
    axes = figure.subplots()
    axes.set_title(f"{topology.machine}{' (EMULATED)' if emulated else ''}")
    axes.set_axis_off()
    axes.set_xlim(-0.8, count - 0.2)
    axes.set_ylim(-0.4, _DEVICE + 0.6 + 0.35 * count)
    places = _hosts(axes, topology)
    _switches(axes, topology, places)
    for device in topology.devices:
        _box(axes, device.ordinal, _DEVICE, f"GPU{device.ordinal}\n{device.name}", "#cfe8cf")
    _peers(axes, topology)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)
    return png.getvalue()


def _hosts(axes: Any, topology: Topology) -> dict[int | None, float]:
    """A box for each NUMA node that devices are on; where it is."""
    groups: dict[int | None, list[int]] = {}
    for device in topology.devices:
        groups.setdefault(device.numa_node, []).append(device.ordinal)
    places = {node: sum(members) / len(members) for node, members in groups.items()}
    for node, place in places.items():
        _box(axes, place, _HOST, "host memory" if node is None else f"host memory\nNUMA node {node}", "#f3e3c3")
    return places


def _switches(axes: Any, topology: Topology, hosts: dict[int | None, float]) -> None:
    """Each device's line to its host, through the switch nearest to it if there is one."""
    below = {uplink.name: topology.below(uplink) for uplink in topology.uplinks}
    shown: set[str] = set()
    for device in topology.devices:
        link = topology.host_link(device.ordinal)
        host = (hosts[device.numa_node], _HOST)
        label = "" if link.pcie is None else str(link.pcie)
        if not link.through:
            _line(axes, (device.ordinal, _DEVICE), host, label)
            continue
        name = link.through[0]
        place = sum(below[name]) / len(below[name])
        _line(axes, (device.ordinal, _DEVICE), (place, _SWITCH), label)
        if name not in shown:
            shown.add(name)
            _line(axes, (place, _SWITCH), host, "")
            _box(axes, place, _SWITCH, name, "#dddddd")


def _peers(axes: Any, topology: Topology) -> None:
    reached = [link for link in topology.peer_links if link.peer_access]
    for link in reached:
        _arc(axes, link, link.label if len(reached) <= _MOST_LABELS else "")
    if len(reached) > _MOST_LABELS:
        kinds = ", ".join(sorted({link.label for link in reached}))
        top = axes.get_ylim()[1]
        axes.text(
            (len(topology.devices) - 1) / 2, top - 0.1, f"{len(reached)} pairs: {kinds}", ha="center", va="top"
        )


def _arc(axes: Any, link: PeerLink, label: str) -> None:
    first, second = link.between
    height = 0.25 + 0.35 * (second - first)
    steps = [number / 24 for number in range(25)]
    across = [first + (second - first) * step for step in steps]
    up = [_DEVICE + 0.22 + 4 * height * step * (1 - step) for step in steps]
    axes.plot(across, up, color="#3a7d3a", linewidth=1.5, zorder=1)
    if label:
        axes.text((first + second) / 2, _DEVICE + 0.27 + height, label, ha="center", va="bottom", fontsize=9)


def _line(axes: Any, start: tuple[float, float], end: tuple[float, float], label: str) -> None:
    axes.plot([start[0], end[0]], [start[1], end[1]], color="#666666", linewidth=1.2, zorder=1)
    if label:
        middle = (start[0] + 0.35 * (end[0] - start[0]), start[1] + 0.35 * (end[1] - start[1]))
        axes.text(*middle, label, ha="center", va="center", fontsize=7, backgroundcolor="white", zorder=2)


def _box(axes: Any, x: float, y: float, text: str, color: str) -> None:
    style = {"boxstyle": "round,pad=0.35", "facecolor": color, "edgecolor": "#444444"}
    axes.text(x, y, text, ha="center", va="center", fontsize=8, bbox=style, zorder=3)
