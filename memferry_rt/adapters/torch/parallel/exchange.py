"""Every rank's gradient of a layer goes in, and the mean over all ranks of the own column comes out."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ....layout import LayerLayout
from ....parallel import Part
from .ranks import Ranks

Dtypes = Callable[[int], torch.dtype]  # of a parameter's gradient, by index in its layer


@dataclass(frozen=True)
class Column:
    """The mean of the own column.

    Attributes
    ----------
    data : Tensor
        Its bytes.
    views : mapping of int to Tensor
        Of each of its parts, flat, by index in the layer.
    """

    data: torch.Tensor
    views: Mapping[int, torch.Tensor]


class Flight:
    """A layer's gradient on its way between the ranks, leg by leg; what it needs lives until it has landed."""

    def __init__(self, legs: Generator[None, None, Column]) -> None:
        self._legs = legs
        next(legs)

    def go_on(self) -> Column | None:
        """End the present leg, and begin the next; the column where there is none.

        The present stream waits for what it needs.
        """
        try:
            next(self._legs)
        except StopIteration as end:
            column: Column = end.value
            return column
        return None

    def land(self) -> Column:
        """All that is left of the way."""
        while (column := self.go_on()) is None:
            pass
        return column


class PieceExchange:
    """Sends the pieces of a layer's gradient to their owners, who add them up.

    The sum is made in fp32: over the ranks of a host, in their order, and of these sums over the hosts, in theirs.
    It is divided by the number of ranks, and rounded once: whatever carries the pieces, its bits are the same in
    every run.  On several hosts the owners give the mean to their peers.

    Parameters
    ----------
    ranks : Ranks
    device : torch.device
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks = ranks
        self._share = ranks.share
        self._device = device

    def send(self, layout: LayerLayout, gradients: Mapping[int, torch.Tensor], dtypes: Dtypes) -> Flight:
        """Begin; the same layers in the same order on every rank, and their flights `go_on` so, too.

        Parameters
        ----------
        layout : LayerLayout
        gradients : mapping of int to Tensor
            Flat, by index in the layer, in the dtype of their home; one that is missing counts as zero.
        dtypes : callable
        """
        sent = torch.zeros(
            self._share.locals * self._share.column_nbytes(layout), dtype=torch.uint8, device=self._device
        )
        for index, flat in gradients.items():
            start = layout.slots[index].gradient
            sent[start : start + flat.numel() * flat.element_size()].view(flat.dtype).copy_(flat)
        return Flight(self._legs(layout, sent, dtypes))

    def _legs(self, layout: LayerLayout, sent: torch.Tensor, dtypes: Dtypes) -> Generator[None, None, Column]:
        share = self._share
        start, end = share.column(layout)
        parts = share.column_parts(layout)
        received = yield from self._between_neighbours(sent)
        theirs = [_views(row, start, parts, layout, dtypes) for row in received.view(share.locals, -1)]
        if share.hosts == 1:
            data = torch.zeros(end - start, dtype=torch.uint8, device=self._device)
            for index, view in _views(data, start, parts, layout, dtypes).items():
                view.copy_(_added([views[index] for views in theirs]).div_(share.size))
        else:
            sums = self._sums(layout, theirs)
            del sent, received, theirs  # it is long until the flight lands
            data = yield from self._between_hosts(layout, sums, dtypes)
            data = data[: end - start]
        return Column(data, _views(data, start, parts, layout, dtypes))

    # -- within a host --------------------------------------------------------------------------------
    def _between_neighbours(self, sent: torch.Tensor) -> Generator[None, None, torch.Tensor]:
        """Every neighbour's bytes of the own column."""
        if self._share.locals == 1:
            yield
            return sent
        network = self._ranks.network
        group = self._ranks.group if network is None else network.neighbours
        received = torch.empty_like(sent)
        work = self._begin(lambda: dist.all_to_all_single(received, sent, group=group, async_op=True))
        yield
        self._wait(work)
        return received

    # -- between hosts --------------------------------------------------------------------------------
    def _sums(self, layout: LayerLayout, theirs: Sequence[Mapping[int, torch.Tensor]]) -> torch.Tensor:
        """Of the neighbours' gradients, in fp32: for every host a row, its piece's parts side by side."""
        pieces = [peer.parts(layout) for peer in self._share.peers]
        longest = max(sum(part.count for part in parts) for parts in pieces)
        rows = torch.zeros(self._share.hosts, longest, dtype=torch.float32, device=self._device)
        places = [
            (part, view)
            for row, parts in zip(rows, pieces, strict=True)
            for part, view in zip(parts, _split(row, parts), strict=True)
        ]
        for whole in self._share.column_parts(layout):
            total = _added([views[whole.index] for views in theirs])
            for part, view in places:
                if part.index == whole.index:
                    view.copy_(total[part.start - whole.start :][: part.count])
        return rows

    def _between_hosts(
        self, layout: LayerLayout, sums: torch.Tensor, dtypes: Dtypes
    ) -> Generator[None, None, torch.Tensor]:
        """The mean of the whole column, as bytes: every peer adds up its piece over the hosts, and all get it."""
        share, network = self._share, self._ranks.network
        assert network is not None
        peers = network.peers
        mine = torch.zeros(share.piece_nbytes(layout), dtype=torch.uint8, device=self._device)
        whole = torch.empty(share.hosts, mine.numel(), dtype=torch.uint8, device=self._device)
        if not sums.numel():
            return whole.flatten()
        found = torch.empty_like(sums)
        work = self._begin(lambda: dist.all_to_all_single(found, sums, group=peers, async_op=True))
        yield
        self._wait(work)
        parts = share.parts(layout)
        total = _added(list(found)).div_(share.size)
        views = _views(mine, share.piece(layout)[0], parts, layout, dtypes)
        for part, place in zip(parts, _split(total, parts), strict=True):
            views[part.index].copy_(place)
        work = self._begin(lambda: dist.all_gather(list(whole), mine, group=peers, async_op=True))
        yield
        self._wait(work)
        return whole.flatten()

    # -- waiting --------------------------------------------------------------------------------------
    def _begin(self, begin: Callable[[], Any]) -> Any:
        try:
            return begin()
        except RuntimeError as error:
            raise self._ranks.assembly.ended(error) from error

    def _wait(self, work: Any) -> None:
        if self._device.type != "cuda":  # there it is the stream that waits
            self._ranks.board.wait(work.is_completed, "a layer's gradients")
        self._ranks.assembly.wait(work)


def _views(
    data: torch.Tensor, start: int, parts: Sequence[Part], layout: LayerLayout, dtypes: Dtypes
) -> dict[int, torch.Tensor]:
    """Parts in bytes that lie from `start` on in the slab of gradients, by index."""
    views = {}
    for part in parts:
        dtype = dtypes(part.index)
        first = layout.slots[part.index].gradient + part.start * dtype.itemsize - start
        views[part.index] = data[first : first + part.count * dtype.itemsize].view(dtype)
    return views


def _added(values: Sequence[torch.Tensor]) -> torch.Tensor:
    total = values[0].to(torch.float32, copy=True)
    for value in values[1:]:
        total.add_(value)
    return total


def _split(row: torch.Tensor, parts: Sequence[Part]) -> list[torch.Tensor]:
    """The place of each part where they lie one after the other."""
    return list(row[: sum(part.count for part in parts)].split([part.count for part in parts]))
