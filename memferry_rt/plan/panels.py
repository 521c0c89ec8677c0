"""Weights in panels: when a layer ends whose weights pass through a ring while it computes."""

from __future__ import annotations

from collections.abc import Sequence


def ring_ends(
    panels: Sequence[int], slots: int, rate: float, seconds: float, *, latency: float = 0.0, ended: float = 0.0
) -> tuple[float, float]:
    """The ends of the last panel's load and of its kernel.

    ``L[q] = max(L[q-1], E[q-slots]) + load`` and ``E[q] = max(E[q-1], L[q]) + seconds``: a panel is loaded into
    the slot of an earlier one, whose kernel must be over.

    Parameters
    ----------
    panels : sequence of int
        Bytes of each.
    slots : int
        Of the ring, 1 or more.
    rate : float
        Bytes per second of the copies.
    seconds : float
        That the layer computes, shared by the panels in proportion to their bytes.
    latency : float
        Seconds, of each copy.
    ended : float
        When link and compute stream are free.
    """
    if slots < 1:
        raise ValueError(f"a ring has at least one slot, not {slots}")
    total = sum(panels)
    loads, ends = ended, [ended]
    for number, nbytes in enumerate(panels):
        free = ends[number + 1 - slots] if number >= slots else ended
        loads = max(loads, free) + latency + nbytes / rate
        ends.append(max(ends[-1], loads) + seconds * nbytes / total)
    return loads, ends[-1]


def cut_panels(nbytes: int, panel: int) -> list[int]:
    """Panels of `panel` bytes, the last one of what is left."""
    return [min(panel, nbytes - start) for start in range(0, nbytes, panel)]
