"""Pages of a chosen NUMA node."""

from __future__ import annotations

import errno
from pathlib import Path

from ..errors import InvalidRequestError
from . import libc


def online_nodes(root: Path = Path("/sys/devices/system/node")) -> tuple[int, ...]:
    """The NUMA nodes of this machine; one where nothing says otherwise."""
    try:
        text = (root / "online").read_text().strip()
    except OSError:
        return (0,)
    nodes: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        nodes.extend(range(int(first), int(last or first) + 1))
    return tuple(nodes)


def bind(address: int, nbytes: int, node: int) -> str:
    """Take the pages of a range from `node` once they are touched; says why where that was not done.

    Raises
    ------
    InvalidRequestError
        This machine has several nodes, and none with that number.
    """
    nodes = online_nodes()
    if len(nodes) == 1:
        return f"not bound to NUMA node {node}: this machine has only node {nodes[0]}"
    if node not in nodes:
        raise InvalidRequestError(f"numa_node: this machine has {', '.join(map(str, nodes))}, and no node {node}")
    try:
        libc.bind(address, nbytes, node)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOSYS):
            raise InvalidRequestError(f"numa_node: node {node} cannot be bound to: {error}") from None
        return f"not bound to NUMA node {node}: this process is not allowed to ({error})"
    return ""
