"""The process groups of ranks on several hosts, beside the one that the user gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ....parallel import Share


@dataclass(frozen=True)
class Network:
    """Groups that this rank is in.

    Attributes
    ----------
    neighbours : ProcessGroup or None
        The ranks of its host, with the backend of the user's group; None where it is alone there.
    peers : ProcessGroup
        The ranks of all hosts that have its local number, with that backend.
    carriers : ProcessGroup
        The peers, by gloo, for what is in host memory.
    """

    neighbours: Any
    peers: Any
    carriers: Any


_known: WeakKeyDictionary[Any, Network] = WeakKeyDictionary()


def network_of(group: Any, share: Share) -> Network:
    """The groups for a group's ranks; all call this alike.  They are made once, and end with torch's groups.

    Their time-out is twice that of the group: whoever waits for them has given up before, with a clear error.
    """
    found = _known.get(group)
    if found is None:
        timeout = 2 * timeout_of(group)
        neighbours = _new(group, share.neighbours, None, timeout) if share.locals > 1 else None
        peers = _new(group, share.peers, None, timeout)
        by_gloo = backend_of(group, "cpu") == "gloo"
        carriers = peers if by_gloo else _new(group, share.peers, "gloo", timeout)
        found = _known[group] = Network(neighbours, peers, carriers)
    return found


def backend_of(group: Any, device: str) -> str:
    """What carries a group's tensors of a device; "none" where nothing does."""
    try:
        return str(group._get_backend(torch.device(device)).name())
    except RuntimeError:
        return "none"


def timeout_of(group: Any) -> float:
    """A group's time-out in seconds."""
    for device in ("cpu", "cuda"):
        try:
            timeout = group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
        return float(timeout / timedelta(seconds=1))
    return 1800.0


def _new(group: Any, members: Sequence[Share], backend: str | None, timeout: float) -> Any:
    return dist.new_group(
        [dist.get_global_rank(group, member.rank) for member in members],
        timeout=timedelta(seconds=timeout),
        backend=backend or dist.get_backend(group),
        use_local_synchronization=True,  # processes that are not in the user's group know nothing of it
    )
