"""Gradients of which every rank keeps a part at home: the mean over the ranks, made while backward goes on.

A layer's gradients stay autograd's until all of them are there.  Then the ranks exchange its pieces, each adds up
its own and sends it home, into the pages that all share.  The ranks go through the layers in one agreed order;
what is not complete when backward ends follows then, with zeros for what is missing.  After backward ``grad`` is
the whole mean on every rank, to be read and not to be written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memferry_allocator import Direction, Span, Stream

from ....errors import OffloadError, UnsupportedError
from ....parallel import Meetings
from ....plan.modes import GradientMode
from ..contributions import Contribution
from ..gradient_slot import GradientSlot
from ..gradients import GradientFlow
from ..layer import LayerState
from ..norm import norms_of
from ..saved import in_backward
from .consent import digest
from .exchange import Column, Flight, PieceExchange
from .ranks import Ranks


class RankGradients(GradientFlow):
    """A `GradientFlow` of one rank among several.

    Parameters
    ----------
    ranks : Ranks
    device : torch.device
    options
        As for `GradientFlow`.
    """

    def __init__(self, ranks: Ranks, device: torch.device, **options: Any) -> None:
        super().__init__(**options)
        self._ranks = ranks
        self._meetings = Meetings(ranks.gather)
        self._exchange = PieceExchange(ranks, device)
        self._emulated = device.type == "cpu"
        self._tasks: set[int] = set()  # backwards that are under way, one inside the other
        self._begun = False
        self._by_index: dict[int, LayerState] = {}  # layers that have gradients
        self._uses: dict[int, bool] = {}  # layers of this forward by their first use; whether again after others
        self._used_last = -1
        self._completed: dict[int, None] = {}  # layers in this backward, in this order
        self._repeated: set[int] = set()  # layers that have got several gradients of one parameter in a backward
        self._safe: set[int] = set()  # layers that are used again after others, and get all gradients at once
        self._held: set[int] = set()  # layers that stay until this backward ends: more may come
        self._expected: list[int] = []  # how the next backward completes layers; empty before the first
        self._order: list[LayerState] = []
        self._turn = 0
        self._flying: list[tuple[LayerState, Flight]] = []
        self._local: dict[LayerState, dict[GradientSlot, torch.Tensor]] = {}
        self._kept: set[GradientSlot] = set()  # whose home has the sum of earlier micro-steps
        self._given: set[GradientSlot] = set()  # what this backward has given a gradient
        self._norms: dict[GradientSlot, torch.Tensor] = {}  # of the own parts

    # -- set-up ---------------------------------------------------------------------------------------
    def attach(self, name: str, parameter: nn.Parameter, layer: LayerState, index: int) -> GradientSlot:
        self._by_index[layer.index] = layer
        return super().attach(name, parameter, layer, index)

    # -- during backward --------------------------------------------------------------------------------
    def used(self, layer: LayerState) -> None:
        """See `GradientFlow.used`."""
        known = layer.index in self._uses
        if layer.index != self._used_last and not (known and in_backward()):
            self._uses[layer.index] = known
            self._used_last = layer.index
        self._in_backward()

    def forward_begins(self) -> None:
        """See `GradientFlow.forward_begins`."""
        self._uses.clear()
        self._used_last = -1

    def _in_backward(self) -> None:
        """If this is within a backward, be told of its end.

        Of backwards inside one another the outermost counts, and only a use outside of the inner ones sees it.
        """
        task = torch._C._current_graph_task_id()
        if task < 0:
            self.require_ended()
            self._tasks.clear()  # one that was begun has ended by an exception, before it had made a gradient
        elif task not in self._tasks:
            self._tasks.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._backward_ended(task))

    def _backward_ended(self, task: int) -> None:
        self._tasks.discard(task)
        if not self._tasks and self._begun:
            with self._ranks.told():
                self._complete()

    @torch.no_grad()
    def _arrive(self, slot: GradientSlot) -> None:
        gradient, partial = slot.parameter.grad, slot.partial
        slot.arriving, slot.partial = False, None
        assert gradient is not None
        slot.refuse_odd(gradient)
        self._in_backward()
        with self._ranks.told():
            if not self._begun:
                if partial is not None and not _is_as_left(slot, partial):
                    raise _changed(slot)
                self._begin({slot} if partial is not None else set(), slot)
            self._advance()  # of the layer before: hooks of users have seen its gradients by now
            local = self._local.setdefault(slot.layer, {})
            if slot in self._given:
                self._repeated.add(slot.layer.index)
            if slot in local:
                gradient.add_(local[slot])
            local[slot] = gradient
            self._given.add(slot)
            if len(local) == len(self._homes[slot.layer].slots):
                self._completed.setdefault(slot.layer.index)

    def offer(self, slot: GradientSlot, contribution: Contribution) -> torch.Tensor:
        """The gradient itself: what is written home is the mean over the ranks."""
        return contribution.dense()

    def _begin(self, kept: set[GradientSlot], arriving: GradientSlot | None) -> bool:
        """Meet the other ranks, at a backward with what it gives first or at a step; whether any is in a backward.

        Behind it nobody reads gradients at home any more, and all have kept the same of them.  Behind a step that
        all make, no device reads weights any more.
        """
        for slot in self.slots:
            gradient = slot.parameter.grad
            if gradient is None or slot is arriving:
                continue
            if not _is_as_left(slot, gradient):
                raise _changed(slot)
            kept.add(slot)
        for layer, home in self._homes.items():
            self._settle(layer)
            for slot in home.slots:
                if slot not in kept:
                    self._let_go(slot)
        self._end_brackets()
        if arriving is None:
            self._driver.synchronize(self._engine.device)
        else:
            self._stream().synchronize()
        same = digest(" ".join(slot.name for slot in self.slots if slot in kept))
        order = self._meetings.begin(same, self._forecast(), step=arriving is None)
        if order is None:
            return False
        self._kept = kept
        self._begun, self._turn, self._given = True, 0, set()
        self._order = [self._by_index[index] for index in order]
        again = {index for index, again in self._uses.items() if again}
        self._held = (again - self._safe) | self._repeated
        self.forward_begins()
        self._completed.clear()
        return True

    def _forecast(self) -> list[int]:
        """All layers, in the order in which a backward will complete them.

        That is as in the last one; in the first the other way round than forward uses them, those that it uses
        again after others at the end.
        """
        if self._expected:
            return self._expected
        once = [index for index, again in self._uses.items() if index in self._by_index and not again]
        rest = sorted(self._by_index.keys() - set(once), reverse=True)
        return [*reversed(once), *rest]

    def _advance(self) -> None:
        """Exchange every layer whose turn it is and whose gradients are complete."""
        while self._turn < len(self._order):
            layer = self._order[self._turn]
            if layer.index in self._held or len(self._local.get(layer, ())) < len(self._homes[layer].slots):
                return
            self._take_off(layer)
            self._turn += 1

    def _take_off(self, layer: LayerState) -> None:
        local = self._local.pop(layer, {})
        flat = {slot.index: slot.flat(slot.widened(gradient)) for slot, gradient in local.items()}
        flight = self._exchange.send(layer.layout, flat, lambda index: layer.geometry[index].gradient_dtype)
        for slot in local:
            slot.show(slot.home)
        before, self._flying = self._flying, []
        for earlier, other in before:  # each is on one leg of its way while backward computes
            column = other.go_on()
            if column is None:
                self._flying.append((earlier, other))
            else:
                self._land(earlier, column)
        self._flying.append((layer, flight))

    def _land(self, layer: LayerState, column: Column) -> None:
        """Send home what this rank brings there, and take the norm of what it owns."""
        home, stream, share = self._homes[layer], self._stream(), self._ranks.share
        slots = {slot.index: slot for slot in home.slots}
        parts = {part.index: part for part in share.column_parts(layer.layout)}
        for index, part in parts.items():
            if slots[index] in self._kept:
                self._add_home(slots[index], column.views[index], part.start, stream)
        for own in share.parts(layer.layout):
            first = own.start - parts[own.index].start
            self._norms[slots[own.index]] = norms_of([column.views[own.index][first : first + own.count]])[0]
        start, end = share.column(layer.layout)
        if layer.plan.gradient is GradientMode.INPLACE:
            for index, part in parts.items():
                self._write_home(slots[index], column.views[index], part.start, stream)
        elif end > start:
            self._send_piece(layer, Span(home.span.ptr + start, end - start), column.data, stream)

    def _add_home(self, slot: GradientSlot, view: torch.Tensor, start: int, stream: Stream) -> None:
        if self._last is not None:  # what is there may be on its way
            self._wait(stream, self._last)
        flat = slot.home.as_strided((slot.home.numel(),), (1,))
        with self._driver.launch(stream, reads=[self._home_span(slot)], label=f"add to {slot.name}"):
            view.add_(flat[start : start + view.numel()])

    def _write_home(self, slot: GradientSlot, view: torch.Tensor, start: int, stream: Stream) -> None:
        flat = slot.home.as_strided((slot.home.numel(),), (1,))
        with self._writes_home(slot, "gradient of"):
            flat[start : start + view.numel()].copy_(view)
        slot.layer.traffic.written_in_place += view.numel() * view.element_size()
        self._is_written(slot, stream)

    def _send_piece(self, layer: LayerState, target: Span, piece: torch.Tensor, stream: Stream) -> None:
        assert self._ring is not None
        for part in self._ring.pieces(target.nbytes, stream):
            segment = self._segment(part.span, torch.uint8)
            with self._driver.launch(stream, writes=[part.span], label=f"gradients of {layer.name}"):
                segment.copy_(piece[part.offset : part.offset + part.span.nbytes])
            self._lane.wait(stream.record())
            place = Span(target.ptr + part.offset, part.span.nbytes)
            try:
                self._last = self._engine.copy(place, part.span, Direction.DEVICE_TO_HOST, stream=self._lane).event
            except BaseException:
                self._last = self._lane.record()
                raise
            finally:
                assert self._last is not None
                self._ring.leaving(part, self._last)

    # -- the end of backward ------------------------------------------------------------------------------
    def _complete(self) -> None:
        """Exchange what is left, and make the whole mean every parameter's ``grad``."""
        leaving, self._turn = self._order[self._turn :], len(self._order)
        while True:
            for layer in leaving:
                self._take_off(layer)
            while self._flying:
                layer, flight = self._flying.pop(0)
                self._land(layer, flight.land())
            self._came_home()
            leaving, norms = self._agree()
            self._kept |= self._given
            if not leaving:
                break
        self._show(norms)
        self._safe |= self._held.intersection(self._completed) - self._repeated
        early = [index for index in self._completed if index not in self._repeated]
        self._expected = [*early, *(layer.index for layer in self._order if layer.index not in early)]
        self._begun, self._kept = False, set()
        for home in self._homes.values():
            home.fresh = True
        self.finish()

    def _came_home(self) -> None:
        """Block until the own pieces are at home."""
        if self._ranks.several_hosts and not self._emulated:  # a peer that has ended is noticed here, not by NCCL
            self._ranks.assembly.meet([], "the exchange of gradients")
        if self._last is None:
            return
        if not self._emulated:
            last = self._last
            self._ranks.board.wait(last.query, "the exchange of gradients")
        self._last.synchronize()

    def _agree(self) -> tuple[list[LayerState], list[float]]:
        """Learn what has arrived on any rank: the layers of which some rank has more to send, and all norms.

        A parameter that gets a second gradient when its layer has left already, as reentrant checkpoints do to one
        that is used twice, is what more there may be.
        """
        outcome = self._meetings.end(
            [bool(self._local.get(layer)) for layer in self._order],
            [slot in self._given for slot in self.slots],
            self._own_norms(),
        )
        self._given = {slot for slot, here in zip(self.slots, outcome.arrived, strict=True) if here}
        late = [layer for layer, more in zip(self._order, outcome.late, strict=True) if more]
        return late, outcome.norms

    def _own_norms(self) -> list[float]:
        """Of the own part of each parameter's gradient."""
        known = [slot for slot in self.slots if slot in self._norms]
        values = torch.stack([self._norms[slot] for slot in known]).tolist() if known else []
        of = dict(zip(known, values, strict=True))
        return [of.get(slot, 0.0) for slot in self.slots]

    def _show(self, norms: list[float]) -> None:
        """Make the mean at home the ``grad`` of every parameter that has got one on any rank."""
        for slot, norm in zip(self.slots, norms, strict=True):
            if slot not in self._kept:
                continue
            slot.show(slot.home)
            slot.version = slot.home._version
            slot.norm = torch.tensor([norm], dtype=torch.float64, device="cpu")

    def finish(self) -> None:
        if not self._begun:
            super().finish()

    def end_use(self) -> None:
        """See `GradientFlow.end_use`; of a backward, too, that has ended by an exception."""
        super().finish()
        super().end_use()

    def require_ended(self) -> None:
        """Refuse to meet other ranks, which are in the midst of a backward that has ended here by an exception.

        Raises
        ------
        OffloadError
        """
        if self._begun:
            with self._ranks.told():
                raise _aborted()

    # -- in step ------------------------------------------------------------------------------------------
    def collect(self, *, changed_unseen: bool = False) -> list[GradientSlot]:
        """See `GradientFlow.collect`; while other ranks are in a backward, this one takes part with zeros."""
        self.require_ended()
        if changed_unseen:
            raise UnsupportedError(
                "GradScaler.unscale_() before step() with process_group: every rank would scale what all share; "
                "leave it out, step() unscales, and clip with max_grad_norm"
            )
        while self._begin(set(), None):
            self._complete()
        return [slot for slot in self.slots if slot.parameter.grad is not None]

    def _end_brackets(self) -> None:
        for home in self._homes.values():
            if home.bracket is not None:
                home.bracket.end()
                home.bracket = None


def _is_as_left(slot: GradientSlot, gradient: torch.Tensor) -> bool:
    """Whether it is what backward has left, and nobody has written to it."""
    return gradient is slot.home and slot.version == slot.home._version


def _aborted() -> OffloadError:
    return OffloadError(
        "a backward has ended by an exception after the ranks had begun to exchange its gradients; start the job "
        "again from its last checkpoint"
    )


def _changed(slot: GradientSlot) -> UnsupportedError:
    return UnsupportedError(
        f"{slot.name}: its grad was written to or replaced; with process_group all ranks share it, so it may only "
        "be read, or set to None on all ranks: clip with max_grad_norm, and scale the loss instead"
    )
