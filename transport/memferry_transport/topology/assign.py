"""Which device helps which, where several load or unload at the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memferry_allocator import Direction

from ..cost import LinearCost
from ..errors import InvalidTransferError
from ..paths import Path
from ..quotas import SLOWEST, slice_quotas
from .model import Topology
from .shared import Room, fair_direct_rates
from .ways import MOST_RELAYS, SLICE_BYTES, helpers, require_device, way_cost


@dataclass(frozen=True)
class Assignment:
    """A device's ways, and how much each of them carries.

    Attributes
    ----------
    paths : tuple of Path
        Those that carry anything, the direct one first.
    quotas : tuple of int
        Bytes for each; whole slices, but for the direct one's.
    costs : tuple of LinearCost
        Of each, beside everything else that is assigned.
    seconds : float
        Until the last of them has ended.
    """

    paths: tuple[Path, ...]
    quotas: tuple[int, ...]
    costs: tuple[LinearCost, ...]
    seconds: float


def assign(
    topology: Topology,
    loads: Mapping[int, int],
    direction: Direction = Direction.HOST_TO_DEVICE,
    *,
    slice_bytes: int = SLICE_BYTES,
) -> dict[int, Assignment]:
    """Ways and quotas of devices that load at the same time.

    A device with work of its own helps nobody, so that symmetrical loads take no relay; an idle one helps one
    device.  The devices choose in turn, the one with the most bytes first.  What direct ways share is divided
    evenly between them; relays get what is left.

    Parameters
    ----------
    topology : Topology
    loads : mapping of int to int
        Bytes by device.
    direction : Direction
    slice_bytes : int

    Returns
    -------
    dict of int to Assignment
        For each device that has bytes to move.

    Raises
    ------
    InvalidTransferError
        A device that is not there, or less than no bytes.
    """
    for device, nbytes in loads.items():
        require_device(topology, device)
        if nbytes < 0:
            raise InvalidTransferError(f"device {device}: {nbytes} bytes")
    moving = sorted((device for device in loads if loads[device]), key=lambda device: (-loads[device], device))
    chosen = _choose(topology, moving, direction, slice_bytes)
    return {device: _share_out(loads[device], chosen[device], slice_bytes) for device in sorted(moving)}


def _choose(
    topology: Topology, moving: Sequence[int], direction: Direction, slice_bytes: int
) -> dict[int, list[tuple[Path, LinearCost]]]:
    """In turns, one helper each, until a turn finds none."""
    direct = {device: way_cost(topology, Path(device), direction, slice_bytes) for device in moving}
    fair = fair_direct_rates(topology, {device: cost.bytes_per_second for device, cost in direct.items()})
    room = Room(topology)
    chosen: dict[int, list[tuple[Path, LinearCost]]] = {}
    for device in moving:
        room.take(Path(device), fair[device])
        chosen[device] = [(Path(device), LinearCost(direct[device].alpha_s, fair[device]))]
    idle = {device.ordinal for device in topology.devices}.difference(moving)
    found = True
    while found:
        found = False
        for device in moving:
            way = _next(topology, device, idle, room, direction, slice_bytes)
            if way is not None and len(chosen[device]) <= MOST_RELAYS:
                path, cost = way
                assert path.helper is not None
                idle.remove(path.helper)
                room.take(path, cost.bytes_per_second)
                chosen[device].append(way)
                found = True
    return chosen


def _next(
    topology: Topology, device: int, idle: set[int], room: Room, direction: Direction, slice_bytes: int
) -> tuple[Path, LinearCost] | None:
    able = [Path(device, helper) for helper in helpers(topology, device)]
    alone = {
        path: way_cost(topology, path, direction, slice_bytes).bytes_per_second for path in (Path(device), *able)
    }
    for path in able:
        rate = room.left(path, alone[path])
        if path.helper in idle and rate >= SLOWEST * max(alone.values()):
            return path, LinearCost(way_cost(topology, path, direction, slice_bytes).alpha_s, rate)
    return None


def _share_out(nbytes: int, ways: Sequence[tuple[Path, LinearCost]], slice_bytes: int) -> Assignment:
    costs = [cost for _, cost in ways]
    quotas = slice_quotas(nbytes, costs, slice_bytes)
    used = [index for index, quota in enumerate(quotas) if quota]
    return Assignment(
        paths=tuple(ways[index][0] for index in used),
        quotas=tuple(quotas[index] for index in used),
        costs=tuple(costs[index] for index in used),
        seconds=max(costs[index].seconds(quotas[index]) for index in used),
    )
