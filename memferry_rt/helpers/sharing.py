"""Which idle devices help whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def share_out(
    devices: Sequence[int],
    trained: Sequence[int],
    reaches: Callable[[int, int], bool] = lambda device, helper: True,
) -> list[tuple[int, ...]]:
    """Idle devices for each that trains, the same number for all: who trains together waits for the slowest.

    Turn by turn each takes the first that is left and that it reaches.  So of 8 devices of which the first 4
    train, device ``r`` is helped by device ``4 + r``.  What is left over helps nobody.

    Parameters
    ----------
    devices : sequence of int
        All of them.
    trained : sequence of int
        Those that train, rank by rank.
    reaches : callable
        Whether a device and a helper read and write each other's memory.

    Returns
    -------
    list of tuple of int
        For each of `trained` its helpers.
    """
    left = [device for device in devices if device not in trained]
    shares: list[list[int]] = [[] for _ in trained]
    while True:
        turn: list[int] = []
        for device in trained:
            able = (helper for helper in left if helper not in turn and reaches(device, helper))
            found = next(able, None)
            if found is None:
                return [tuple(share) for share in shares]
            turn.append(found)
        if not turn:
            return []
        for share, helper in zip(shares, turn, strict=True):
            share.append(helper)
            left.remove(helper)
