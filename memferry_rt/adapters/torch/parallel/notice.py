"""Why a rank cannot go on, for the ranks of other hosts, which have no board in common with it."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ....errors import RankError

LOOK_AFTER = 0.5  # seconds between two looks: each asks over the network


class Notice:
    """A note in the store of the process group; the first one counts.

    Parameters
    ----------
    group : ProcessGroup
    name : str
        Of the note, the same on all ranks and for this training alone.
    rank : int
    """

    def __init__(self, group: Any, name: str, rank: int) -> None:
        store: Any = dist.PrefixStore  # type: ignore[attr-defined]  # public, and not declared so
        self._store = store(f"memferry {name}/", distributed_c10d._get_process_group_store(group))
        self._rank = rank
        self._looked = 0.0

    def put(self, error: BaseException) -> None:
        """Say why this rank ends."""
        text = str(error) if isinstance(error, RankError) else f"rank {self._rank} has failed: {_text(error)}"
        with contextlib.suppress(RuntimeError):  # who keeps the store may be what has ended
            if not self._store.check(["note"]):
                self._store.set("note", text)

    def read(self, now: bool) -> str | None:
        """What some rank has said; at most so often that the network does not mind, unless `now`."""
        clock = time.monotonic()
        if clock - self._looked < LOOK_AFTER and not now:
            return None
        self._looked = clock
        try:
            return self._store.get("note").decode() if self._store.check(["note"]) else None
        except RuntimeError:  # then connections end as well, and that is told
            return None


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
