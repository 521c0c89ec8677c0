"""Gradients leave for host memory while backward goes on.

A gradient that autograd has made is copied into a small ring in device memory, in the compute stream's order,
and from there home, on the copy stream.  Autograd's own tensor is free again at once.  After backward, a
parameter's ``grad`` is a view of the gradient's home: host pages, as the device sees them.  The gradients of a
layer whose optimizer state lives on the device are at home there, and never leave; those of a layer that only
sums them there leave when their sum is complete.

A gradient of a layer whose gradients are made in place is written to its home by kernels, and never is in device
memory whole where an operator makes it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from memferry_allocator import Direction, Driver, Event, Span, Stream
from memferry_transport import TransferEngine

from ...device_kernels import DeviceMoves
from ...plan.modes import GradientMode
from ...staging import StagingRing
from .contributions import Contribution, joined, summed
from .gradient_homes import GradientHomes, LayerHome
from .gradient_slot import GradientSlot, accumulation
from .layer import LayerState
from .norm import norm_of
from .operators import LaneOutbox
from .outgoing import Outgoing


class GradientFlow(GradientHomes):
    """Sends gradients home as autograd makes them.

    Parameters
    ----------
    driver, engine, stream, settle, wait
        See `GradientHomes`.
    arrived : callable
        Told that a gradient is on its way home, where it stays until `settle` is called.
    ring_tensor : callable
        A uint8 tensor over a span of device memory.
    accumulate : int
        Micro-steps of a step.  What fewer have summed is not complete: `arrived` is not told of it, and it stays
        on the device where it has a home there.
    """

    def __init__(
        self,
        driver: Driver,
        engine: TransferEngine,
        *,
        stream: Callable[[], Stream],
        settle: Callable[[LayerState], None],
        arrived: Callable[[GradientSlot], None],
        wait: Callable[[Stream, Event], None],
        ring_tensor: Callable[[Span], torch.Tensor],
        accumulate: int = 1,
    ) -> None:
        super().__init__(driver, engine, stream=stream, settle=settle, wait=wait)
        self._arrived = arrived
        self._ring_tensor = ring_tensor
        self._accumulate = accumulate
        self._ring: StagingRing | None = None
        self._outgoing: Outgoing | None = None
        self._moves: DeviceMoves | None = None
        self._lane = engine.lane(Direction.DEVICE_TO_HOST)
        self._segments: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self._handles: list[RemovableHandle] = []
        self._accumulations: dict[GradientSlot, Any] = {}  # autograd itself forgets a node between backwards
        self._last: Event | None = None
        self._graph_task = -1

    # -- set-up ---------------------------------------------------------------------------------------
    def attach(self, name: str, parameter: nn.Parameter, layer: LayerState, index: int) -> GradientSlot:
        """Take over a parameter's gradient; the order of calls is the order of the norm."""
        slot = GradientSlot(name, parameter, layer, index)
        slot.rehome(slot.host_span)
        self.slots.append(slot)
        self._homes.setdefault(layer, LayerHome(layer.gradient_span)).slots.append(slot)

        # The garbage collector does not see through these hooks: they must not keep what they hang on alive.
        flow, known = weakref.ref(self), weakref.ref(slot)

        def before(gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...] | None:
            me, slot = flow(), known()
            if me is None or slot is None:
                return None
            pending = slot.take_pending()
            if pending and me._arrives_at_home(slot, gradients[0], pending):
                return (None,)
            slot.arriving = gradients[0] is not None and slot.parameter.requires_grad
            slot.partial = None
            if slot.arriving:
                slot.partial, slot.parameter.grad = slot.parameter.grad, None
            return (summed(pending, gradients[0]),) if pending else None

        def after(parameter: torch.Tensor) -> None:
            me, slot = flow(), known()
            if me is not None and slot is not None and slot.arriving:
                me._arrive(slot)

        # A hook on the parameter itself would also run for `autograd.grad`, and before hooks that may fail.
        node = self._accumulations[slot] = accumulation(parameter)
        self._handles.append(node.register_prehook(before))
        earlier = list(parameter._post_accumulate_grad_hooks or ())
        self._handles.append(parameter.register_post_accumulate_grad_hook(after))
        hooks = parameter._post_accumulate_grad_hooks
        for key in earlier:  # they are to see the sum; an OrderedDict's own order is not what autograd goes by
            hooks[key] = hooks.pop(key)
        return slot

    def use(
        self, ring: StagingRing | None = None, outgoing: Outgoing | None = None, moves: DeviceMoves | None = None
    ) -> None:
        """Exchange what gradients leave through; those under way have come home."""
        self._ring = ring
        self._outgoing = outgoing
        self._moves = moves
        self._segments.clear()

    def detach(self) -> None:
        """Let the parameters go; gradients that somebody keeps become ordinary CPU tensors, as all others."""
        for slot in self.slots:
            self._let_go(slot, device="cpu")
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._accumulations.clear()

    # -- during backward --------------------------------------------------------------------------------
    def forward_begins(self) -> None:
        """A forward of the whole model begins."""

    def used(self, layer: LayerState) -> None:
        """A layer's weights are used, perhaps by a backward."""

    @torch.no_grad()
    def _arrive(self, slot: GradientSlot) -> None:
        parameter = slot.parameter
        gradient, partial = parameter.grad, slot.partial
        slot.arriving, slot.partial = False, None
        assert gradient is not None
        slot.refuse_odd(gradient)
        stream = self._stream()
        home = self._homes[slot.layer]
        self._settle(slot.layer)
        slot.micro_steps = 1 if partial is None else slot.micro_steps + 1
        complete = slot.micro_steps >= self._accumulate
        gradient = slot.widened(gradient)
        if partial is not None:
            self._add(slot, gradient, partial, stream)
        if partial is not slot.home:
            self._let_go(slot)
        slot.norm = norm_of(slot.in_form(gradient)) if complete else None
        self._send(slot, home, gradient, stream, complete=complete)
        slot.show(slot.home)
        slot.version = slot.home._version if complete else -1
        home.fresh = True
        if complete:
            self._arrived(slot)
        if len(slot.parameter._post_accumulate_grad_hooks) > 1:
            self.finish()  # somebody else's hook may read it next
        else:
            self._at_end_of_backward()

    # -- gradients that are made at home ----------------------------------------------------------------
    def offer(self, slot: GradientSlot, contribution: Contribution) -> torch.Tensor | None:
        """What a module's backward gives autograd for a parameter.

        If the gradient can be made at home, that is something without memory in its place, which autograd adds to
        whatever else there is of it, and nothing the next times; nobody but the slot may see it.  Otherwise it is
        the gradient.
        """
        home = self._homes[slot.layer]
        may = slot.layer.plan.gradient is GradientMode.INPLACE and not home.on_device
        may = may and not torch.is_grad_enabled()  # by create_graph, which is refused when the gradient arrives
        if not may or not slot.is_alone or not self._accumulates(slot):
            return contribution.dense()
        first = all(earlier.task != contribution.task for earlier in slot.pending)
        slot.pending.append(contribution)
        if not first:
            return None
        parameter = slot.parameter
        return torch.full((), -0.0, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)

    def _is_written(self, slot: GradientSlot, stream: Stream) -> None:
        """A kernel on `stream` writes a gradient home: on the lane, whose events tell of all that came before."""
        self._lane.wait(stream.record())
        slot.leaving = self._last = self._lane.record()

    def _outbox(self, slot: GradientSlot, contribution: Contribution) -> LaneOutbox | None:
        nbytes = contribution.panel_nbytes(slot.home)
        return self._outgoing.box(slot.span, nbytes) if nbytes and self._outgoing is not None else None

    def _accumulates(self, slot: GradientSlot) -> bool:
        """Whether this backward puts a gradient into the parameter's ``grad``, not into a caller's hands."""
        try:
            return bool(torch._C._will_engine_execute_node(self._accumulations[slot]))
        except RuntimeError:  # `autograd.grad` for this very parameter
            return False

    @torch.no_grad()
    def _arrives_at_home(
        self, slot: GradientSlot, given: torch.Tensor | None, pending: Sequence[Contribution]
    ) -> bool:
        """Make a gradient at home if modules alone add to it, of one kind; whether it is there."""
        alone = given is not None and given.numel() > 0 and not any(given.stride())
        partial = slot.parameter.grad
        whole = joined(pending) if partial is None or len(pending) == 1 else None
        if whole is None or not alone or not (partial is None or partial is slot.home):
            return False
        stream, home = self._stream(), self._homes[slot.layer]
        self._settle(slot.layer)
        if partial is None:
            self._let_go(slot)
        self._wait_until_home(slot, stream)
        home.end_bracket()
        slot.micro_steps = 1 if partial is None else slot.micro_steps + 1
        complete = slot.micro_steps >= self._accumulate
        known = slot.written_rows
        rows = known[1] if known is not None and known[0] == slot.home._version else None
        slot.written_rows, slot.version = None, -1  # a failure leaves some of it written
        spans = [self._home_span(slot)]
        box = self._outbox(slot, whole) if partial is None else None
        if box is None:
            with self._driver.launch(
                stream, reads=[] if partial is None else spans, writes=spans, label=f"gradient of {slot.name}"
            ):
                written = whole.write(
                    slot.home,
                    partial=partial is not None,
                    rows=rows,
                    complete=complete,
                    scatter=None if self._moves is None else (self._moves, stream),
                )
        else:
            try:
                written = whole.write(slot.home, partial=False, rows=rows, complete=complete, outbox=box)
            finally:  # of one that fails some panels may have left
                if box.last is not None:
                    slot.leaving = self._last = box.last
        if box is None:  # what the copy engine carries home it has counted
            slot.layer.traffic.written_in_place += written.nbytes
        slot.layer.traffic.read_in_place += written.nbytes_read
        slot.written_rows = None if written.rows is None else (slot.home._version, written.rows)
        slot.norm = written.norm
        if box is None:
            self._is_written(slot, stream)
        if partial is None:
            slot.show(slot.home)
        slot.version = slot.home._version if complete else -1
        home.fresh = True
        if complete:
            self._arrived(slot)
        self._at_end_of_backward()
        return True

    def _add(self, slot: GradientSlot, gradient: torch.Tensor, partial: torch.Tensor, stream: Stream) -> None:
        """``partial + gradient`` into `gradient`, as autograd accumulates."""
        home = self._homes[slot.layer]
        if partial is not slot.home or home.bracket is not None:
            gradient.add_(partial)
            return
        self._wait_until_home(slot, stream)
        reads = [self._home_span(slot)]
        with self._driver.launch(stream, reads=reads, label=f"add to {slot.name}"):
            gradient.add_(partial)
        if not home.on_device:
            slot.layer.traffic.read_in_place += slot.span.nbytes

    def _send(
        self, slot: GradientSlot, home: LayerHome, gradient: torch.Tensor, stream: Stream, *, complete: bool
    ) -> None:
        slot.written_rows = None
        home.end_bracket()
        if home.on_device:
            self._wait_until_home(slot, stream)
            with self._writes_home(slot, "gradient of"):
                slot.home.copy_(gradient)
            if complete and slot.layer.sums is not None:
                self._deliver(slot, stream)
            return
        if slot.layer.plan.gradient is GradientMode.INPLACE:
            self._wait_until_home(slot, stream)
            with self._writes_home(slot, "gradient of"):
                slot.home.copy_(gradient)
            slot.layer.traffic.written_in_place += slot.span.nbytes
            self._is_written(slot, stream)
            return
        assert self._ring is not None
        flat = slot.flat(gradient)
        itemsize = flat.element_size()
        for piece in self._ring.pieces(slot.span.nbytes, stream):
            segment = self._segment(piece.span, flat.dtype)
            first = piece.offset // itemsize
            with self._driver.launch(stream, writes=[piece.span], label=f"gradient of {slot.name}"):
                segment.copy_(flat[first : first + segment.numel()])
            self._lane.wait(stream.record())
            left = functools.partial(self._ring.leaving, piece)
            self._copy_home(slot, Span(slot.span.ptr + piece.offset, piece.span.nbytes), piece.span, left)

    def _wait_until_home(self, slot: GradientSlot, stream: Stream) -> None:
        """Let kernels touch a gradient at home that this backward, or one that failed, has sent there."""
        if slot.leaving is not None:
            self._wait(stream, slot.leaving)
            slot.leaving = None

    def _deliver(self, slot: GradientSlot, stream: Stream) -> None:
        """Send a gradient that is at home on the device to where the CPU's update reads it."""
        slot.delivered = slot.home._version
        if slot.span.nbytes:
            self._lane.wait(stream.record())
            self._copy_home(slot, slot.host_span, slot.span)

    def _copy_home(
        self, slot: GradientSlot, home: Span, source: Span, left: Callable[[Event], None] = lambda event: None
    ) -> None:
        """Copy on the lane, and tell `left` its end; where that fails, a part of it may be under way."""
        try:
            end = self._engine.copy(home, source, Direction.DEVICE_TO_HOST, stream=self._lane).event
        except BaseException:
            slot.leaving = self._last = self._lane.record()
            left(self._last)
            raise
        slot.leaving = self._last = end
        left(end)

    def _segment(self, span: Span, dtype: torch.dtype) -> torch.Tensor:
        key = (*span, dtype)
        segment = self._segments.get(key)
        if segment is None:
            segment = self._segments[key] = self._ring_tensor(span).view(dtype)
        return segment

    # -- after backward -----------------------------------------------------------------------------------
    def _at_end_of_backward(self) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._graph_task:
            self._graph_task = task
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def finish(self) -> None:
        """Let the compute stream's later work, a user's reads among it, wait for the gradients' arrival."""
        self._graph_task = -1
        stream = self._stream()
        if self._last is not None:
            self._wait(stream, self._last)
            self._last = None
        for layer, home in self._homes.items():
            if home.fresh:
                spans = [home.span if home.on_device else self._device_span(home.span)]
                home.bracket = self._driver.launch(
                    stream, reads=spans, writes=spans, label=f"gradients of {layer.name} after backward"
                )
                home.fresh = False
                for slot in home.slots:
                    slot.leaving = None

    def require_ended(self) -> None:
        """Refuse what cannot be done where a backward has ended halfway."""

    def end_use(self) -> None:
        """The device's use of gradients at home ends with what has been enqueued by now."""
        self.finish()
        for home in self._homes.values():
            home.end_bracket()

    def collect(self, *, changed_unseen: bool = False) -> list[GradientSlot]:
        """The parameters that have a gradient now, each of them at home and with its norm up to date.

        A gradient that the user has put there or changed is taken over as it is.

        Parameters
        ----------
        changed_unseen : bool
            Something has changed gradients without counting their versions up; no norm is valid any more.
        """
        self.finish()
        for slot in self.slots:
            slot.micro_steps = 0
            slot.pending.clear()  # of backwards that failed
            slot.mixed = False
        present = [slot for slot in self.slots if slot.parameter.grad is not None]
        self._separate(present)
        for slot in present:
            gradient = slot.parameter.grad
            assert gradient is not None
            if gradient is slot.home and slot.version == slot.home._version and not changed_unseen:
                continue
            with torch.no_grad():
                if gradient is not slot.home:
                    self._take_over(slot, gradient)
                slot.norm = norm_of(slot.home)
            slot.version = slot.home._version
        return present

    def deliver(self, present: Sequence[GradientSlot], *, changed_unseen: bool = False) -> None:
        """Send home what is summed on the device and not yet there as it is, after `end_use`."""
        stream = self._stream()
        sent = []
        for slot in present:
            if slot.layer.sums is not None and (changed_unseen or slot.delivered != slot.home._version):
                self._settle(slot.layer)
                self._deliver(slot, stream)
                sent.append(slot)
        self.finish()
        for slot in sent:
            slot.leaving = None
