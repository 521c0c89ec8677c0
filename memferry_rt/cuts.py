"""How matrices in host memory are cut in panels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from memferry_allocator import Span
from memferry_allocator.sizes import align_up

SLOTS = 3  # one is read, one is full, one is being filled
PANEL = 8 << 20  # bytes
SLOT_UNIT = 512
ALIGNMENTS = (256, 64, 8, 1)  # what numbers of a panel's rows or columns are multiples of, for the kernels' tiles


@dataclass(frozen=True)
class HostMatrix:
    """A row-major matrix in registered host memory.

    Attributes
    ----------
    span : Span
        By its host address.
    rows, columns, itemsize : int
    """

    span: Span
    rows: int
    columns: int
    itemsize: int

    def __post_init__(self) -> None:
        if self.span.nbytes != self.rows * self.columns * self.itemsize:
            raise ValueError(
                f"{self.rows} x {self.columns} elements of {self.itemsize} bytes do not fill "
                f"{self.span.nbytes} bytes"
            )


class Cut(NamedTuple):
    """How a matrix is cut: by rows, or by columns; each panel but the last has `step` of them."""

    by_columns: bool
    step: int

    def borders(self, matrix: HostMatrix) -> list[tuple[int, int]]:
        """Where each panel begins and ends."""
        return borders(matrix.columns if self.by_columns else matrix.rows, self.step)


class Panel(NamedTuple):
    """Rows or columns ``start`` to ``stop`` of a matrix, without gaps in device memory."""

    start: int
    stop: int
    rows: int
    columns: int
    span: Span


def borders(count: int, step: int) -> list[tuple[int, int]]:
    """`count` things in parts of `step`; the last part has what is left."""
    return [(start, min(count, start + step)) for start in range(0, count, step)]


def panel_step(count: int, nbytes: int, largest: int = PANEL) -> int:
    """How many of `count` rows or columns, of `nbytes` bytes each, a panel of at most `largest` bytes has.

    A multiple of the largest of `ALIGNMENTS` that fits, and panels of a matrix as equal as that allows.
    """
    fitting = max(1, largest // max(1, nbytes))
    unit = next(unit for unit in ALIGNMENTS if unit <= fitting)
    parts = -(-count // (fitting // unit * unit))
    return min(count, -(-count // (max(1, parts) * unit)) * unit) or 1


def ring_nbytes(matrices: Iterable[tuple[int, int, int]]) -> int:
    """The ring for matrices of so many rows, columns, and bytes an element; 0 for none."""
    slots = [
        max(min(PANEL, rows * columns * itemsize), rows * itemsize, columns * itemsize)
        for rows, columns, itemsize in matrices
    ]
    return SLOTS * align_up(max(slots, default=0), SLOT_UNIT)
