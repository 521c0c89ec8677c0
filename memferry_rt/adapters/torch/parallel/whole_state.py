"""Master weights and optimizer state of which every host has a part, put together for who reads them whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from ....errors import RankError
from ....layout import LayerLayout, Slot
from ....parallel import Part, Share
from ..layer import LayerState
from .ranks import Ranks

_WHAT = "the state of other hosts"
_END = -1


class WholeState:
    """Puts state together, one tensor at a time.

    Parameters
    ----------
    ranks : Ranks
        Of several hosts.
    layers : sequence of LayerState
    ready : callable
        Raises where this rank cannot meet the others.
    """

    def __init__(self, ranks: Ranks, layers: Sequence[LayerState], ready: Callable[[], None]) -> None:
        self._ranks = ranks
        self._layers = layers
        self._ready = ready

    def whole(self, layer: LayerState, index: int, kind: str) -> torch.Tensor:
        """A parameter's state in its shape, in memory of its own; all ranks call this alike.

        Parameters
        ----------
        layer : LayerState
        index : int
        kind : str
            As for `LayerState.cpu_state`.
        """
        mine = self._row(layer, index, kind)
        return self._put_together(layer, index, self._ranks.assembly.exchange(mine, _WHAT))

    def begin(self, what: str) -> None:
        """Meet all ranks, which are about to call `whole`.

        Raises
        ------
        RankError
            One goes another way, or has failed.
        """
        if self._ranks.failed:
            raise RankError(f"{what}: {_WHAT} cannot be had, for the job has failed; begin at the last checkpoint")
        self._ready()
        self._ranks.fence(what)

    # -- for the first rank alone -----------------------------------------------------------------------
    def ask(self, layer: LayerState, index: int, kind: str) -> torch.Tensor:
        """As `whole`, on the first rank, while the first ranks of the other hosts `serve`."""
        self._command([layer.index, index, _kinds(layer.layout.slots[index]).index(kind)])
        rows = self._ranks.assembly.bring(self._row(layer, index, kind), _WHAT)
        return self._put_together(layer, index, rows)

    @contextlib.contextmanager
    def asking(self, what: str) -> Iterator[None]:
        """On the first rank: in here it may `ask`."""
        self._ranks.assembly.meet([], what)
        try:
            yield
        finally:
            self._command([_END, 0, 0])

    def serve(self, what: str) -> None:
        """On the first ranks of the other hosts: give the first of all what it asks for, until it is content."""
        self._ranks.assembly.meet([], what)
        while True:
            number, index, kind = self._command([0, 0, 0])
            if number == _END:
                return
            layer = self._layers[number]
            name = _kinds(layer.layout.slots[index])[kind]
            self._ranks.assembly.bring(self._row(layer, index, name), _WHAT)

    def _command(self, words: list[int]) -> list[int]:
        told = torch.from_numpy(np.array(words, np.int64))
        self._ranks.assembly.spread(told, "what the first rank asks for")
        return told.tolist()

    # -- rows ---------------------------------------------------------------------------------------------
    def _row(self, layer: LayerState, index: int, kind: str) -> torch.Tensor:
        """What this host has of it, one part after the other, as long as on the host that has most."""
        flat = layer.state(index, kind)
        counts = [_count(_parts(peer, layer.layout, index)) for peer in self._ranks.share.peers]
        row = torch.empty(max(1, *counts), dtype=flat.dtype, device="cpu")
        at = 0
        for part in _parts(self._ranks.share, layer.layout, index):
            row[at : at + part.count] = flat[part.start : part.start + part.count]
            at += part.count
        return row

    def _put_together(self, layer: LayerState, index: int, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        form = layer.geometry[index]
        whole = torch.empty_strided(form.shape, form.stride, dtype=torch.float32, device="cpu")
        flat = whole.as_strided((whole.numel(),), (1,))
        for peer, row in zip(self._ranks.share.peers, rows, strict=True):
            at = 0
            for part in _parts(peer, layer.layout, index):
                flat[part.start : part.start + part.count] = row[at : at + part.count]
                at += part.count
        return whole


def _kinds(slot: Slot) -> list[str]:
    return ["master", *slot.state]


def _parts(share: Share, layout: LayerLayout, index: int) -> list[Part]:
    """Of one parameter, what the host of a rank has."""
    return [part for part in share.held(layout) if part.index == index]


def _count(parts: Sequence[Part]) -> int:
    return sum(part.count for part in parts)
