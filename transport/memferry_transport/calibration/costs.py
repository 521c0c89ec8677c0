"""What the ways of a machine were measured to cost: plain data, in a file, with its samples and its date."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from memferry_allocator import Direction

from ..cost import LinearCost
from ..paths import Path


@dataclass(frozen=True)
class Measured:
    """One way in one direction.

    Attributes
    ----------
    cost : LinearCost
        Fitted to the samples.
    samples : mapping of int to tuple of float
        Seconds by size in bytes.
    """

    cost: LinearCost
    samples: Mapping[int, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Calibration:
    """What the transfer engine decides by.

    Attributes
    ----------
    machine : str
        Names the machine's make: devices, their order and their links.  A calibration counts for no other.
    source : str
        ``"measured"``, ``"emulated"``, or where published figures come from.
    date : str
        ISO 8601, UTC.
    ways : mapping of (Path, Direction) to Measured
    slice_bytes : int
        Of relays: what their costs were measured with.
    break_even_bytes : mapping of (int, Direction) to int
        By device and direction: from this size on several ways beat one plain copy.
    join_s : mapping of (int, Direction) to float
        By device and direction: seconds that a transfer over several ways takes beyond the slowest of them, alone.
    duplex : mapping of int to float
        By device: both directions at once, as a share of the sum of each alone.
    """

    machine: str
    source: str
    date: str
    ways: Mapping[tuple[Path, Direction], Measured]
    slice_bytes: int
    break_even_bytes: Mapping[tuple[int, Direction], int] = field(default_factory=dict)
    join_s: Mapping[tuple[int, Direction], float] = field(default_factory=dict)
    duplex: Mapping[int, float] = field(default_factory=dict)

    def cost(self, path: Path, direction: Direction) -> LinearCost | None:
        """A way's cost; None if it was not measured."""
        measured = self.ways.get((path, direction))
        return None if measured is None else measured.cost
