"""How ranks are placed on hosts."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import UnsupportedError


def count_hosts(keys: Sequence[str]) -> int:
    """How many hosts ranks are on.

    Parameters
    ----------
    keys : sequence of str
        Of each rank its `host_key`.

    Raises
    ------
    UnsupportedError
        Hosts have different numbers of ranks, or not one host's ranks after the other's.
    """
    hosts = list(dict.fromkeys(keys))
    each = len(keys) // len(hosts)
    if list(keys) != [host for host in hosts for _ in range(each)]:
        names = ", ".join(f"rank {rank} on {key.split()[0]}" for rank, key in enumerate(keys))
        raise UnsupportedError(
            "process_group: hosts need equal numbers of ranks, those of one after those of the other, and found "
            f"are {names}; start as many processes on each, as torchrun does, those of a host in one container"
        )
    return len(hosts)
