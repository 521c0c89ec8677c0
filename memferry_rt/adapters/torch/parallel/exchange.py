"""Every rank's gradient of a layer goes in, and the mean over all ranks of the own piece comes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ....errors import RankError
from ....layout import LayerLayout
from ....parallel import Part
from .ranks import Ranks


@dataclass(eq=False)
class Flight:
    """A layer's gradient on its way between the ranks; the buffers live until it has landed."""

    sent: torch.Tensor
    received: torch.Tensor
    work: Any


class PieceExchange:
    """Sends the pieces of a layer's gradient to their owners, who add them up.

    The sum is made in fp32, in the order of the ranks, divided by their number, and rounded once: whatever carries
    the pieces, its bits are the same in every run.

    Parameters
    ----------
    ranks : Ranks
    device : torch.device
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks = ranks
        self._device = device

    def send(self, layout: LayerLayout, gradients: Mapping[int, torch.Tensor]) -> Flight:
        """Begin; the same layers in the same order on every rank.

        Parameters
        ----------
        layout : LayerLayout
        gradients : mapping of int to Tensor
            Flat, by index in the layer, in the dtype of their home; one that is missing counts as zero.
        """
        nbytes = self._ranks.size * self._ranks.share.piece_nbytes(layout)
        sent = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        for index, flat in gradients.items():
            start = layout.slots[index].gradient
            sent[start : start + flat.numel() * flat.element_size()].view(flat.dtype).copy_(flat)
        received = torch.empty_like(sent)
        try:
            work = dist.all_to_all_single(received, sent, group=self._ranks.group, async_op=True)
        except RuntimeError as error:
            raise self._ended(error) from error
        return Flight(sent, received, work)

    def land(
        self, flight: Flight, layout: LayerLayout, parts: Sequence[Part], dtypes: Callable[[int], torch.dtype]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """The own piece, as bytes, and each part of it as a flat view; the present stream waits for it.

        Parameters
        ----------
        flight, layout
            Of `send`.
        parts : sequence of Part
            Of this rank.
        dtypes : callable
            Of a parameter's gradient, by index.
        """
        self._wait(flight.work)
        start, end = self._ranks.share.piece(layout)
        piece = torch.zeros(end - start, dtype=torch.uint8, device=self._device)
        theirs = flight.received.view(self._ranks.size, -1)
        views = {}
        for part in parts:
            dtype = dtypes(part.index)
            first = layout.slots[part.index].gradient + part.start * dtype.itemsize - start
            place = slice(first, first + part.count * dtype.itemsize)
            views[part.index] = piece[place].view(dtype)
            views[part.index].copy_(self._mean([row[place].view(dtype) for row in theirs]))
        return piece, views

    def _mean(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        total = values[0].to(torch.float32, copy=True)
        for value in values[1:]:
            total.add_(value)
        return total.div_(len(values))

    def _wait(self, work: Any) -> None:
        if self._device.type != "cuda":  # there it is the stream that waits
            self._ranks.board.wait(work.is_completed, "a layer's gradients")
        try:
            work.wait()
        except RuntimeError as error:
            raise self._ended(error) from error

    def _ended(self, error: Exception) -> RankError:
        """What has happened to another rank, if the board knows; else what the process group says."""
        self._ranks.board.check()
        return RankError(f"the process group has failed, perhaps because a rank has ended: {error}")
