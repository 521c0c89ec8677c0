"""New weights of what ranks of other hosts own, on their way to this host's pages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ....layout import LayerLayout
from ....parallel import Part, Share
from ..layer import LayerState
from .ranks import Ranks

WINDOW = 4  # layers under way at a time


@dataclass(frozen=True)
class _Journey:
    layer: LayerState
    number: int
    found: torch.Tensor  # a row of bytes from each host
    work: Any  # None where there is nothing to carry


class NewWeights:
    """Exchanges the new weights of the layers that a step updates, in its order, which all ranks share.

    Peers, the ranks of all hosts with one local number, give each other what they have updated, and each writes
    what it gets to the pages of its host.  Then their column of the layer is new there.  Nothing blocks: whoever
    waits for a layer calls `go_on` until it is there.

    Parameters
    ----------
    ranks : Ranks
    layers : sequence of LayerState
    arrived : callable of (layer, number)
        Told of every layer whose column is new on this host.
    """

    def __init__(self, ranks: Ranks, layers: Sequence[LayerState], arrived: Callable[[int, int], None]) -> None:
        self._ranks = ranks
        self._layers = layers
        self._arrived = arrived
        self._expected: deque[int] = deque()
        self._ready: dict[int, int] = {}
        self._under_way: deque[_Journey] = deque()

    def expect(self, layer: int) -> None:
        """The next layer that is updated in this step."""
        self._expected.append(layer)

    def ready(self, layer: int, number: int) -> None:
        """This rank's part of a layer's update with that number is at home."""
        self._ready[layer] = number

    def go_on(self) -> None:
        """Take in what has come, and send what is ready and has its turn.

        Raises
        ------
        RankError
            The process group has failed.
        """
        while self._expected and self._expected[0] in self._ready and len(self._under_way) < WINDOW:
            layer = self._expected.popleft()
            self._under_way.append(self._send(self._layers[layer], self._ready.pop(layer)))
        while self._under_way and (self._under_way[0].work is None or self._under_way[0].work.is_completed()):
            self._land(self._under_way.popleft())

    def _send(self, layer: LayerState, number: int) -> _Journey:
        share, network = self._ranks.share, self._ranks.network
        assert network is not None
        nbytes = max(sum(_nbytes(layer, part) for part in _updated(layer.layout, peer)) for peer in share.peers)
        mine = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        found = torch.empty(share.hosts, nbytes, dtype=torch.uint8, device="cpu")
        if not nbytes:
            return _Journey(layer, number, found, None)
        for home, place in _rows(layer, _updated(layer.layout, share), mine):
            place.copy_(home)
        try:
            work = dist.all_gather(list(found), mine, group=network.carriers, async_op=True)
        except RuntimeError as error:
            raise self._ranks.assembly.ended(error) from error
        return _Journey(layer, number, found, work)

    def _land(self, journey: _Journey) -> None:
        share, layer = self._ranks.share, journey.layer
        if journey.work is not None:
            self._ranks.assembly.wait(journey.work)
        for peer, row in zip(share.peers, journey.found, strict=True):
            if peer.host != share.host:
                for home, place in _rows(layer, _updated(layer.layout, peer), row):
                    home.copy_(place)
        self._arrived(layer.index, journey.number)


def _updated(layout: LayerLayout, share: Share) -> list[Part]:
    return [part for part in share.parts(layout) if layout.slots[part.index].spec.updated]


def _nbytes(layer: LayerState, part: Part) -> int:
    return part.count * layer.geometry[part.index].dtype.itemsize


def _rows(layer: LayerState, parts: Sequence[Part], row: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each part its weights at home, as bytes, and its place in a row."""
    found, at = [], 0
    for part in parts:
        home = layer.cpu_weight(part.index)[part.start : part.start + part.count].view(torch.uint8)
        found.append((home, row[at : at + home.numel()]))
        at += home.numel()
    return found
