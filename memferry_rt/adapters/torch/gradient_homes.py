"""Where gradients are at home, and who else has tensors over it.

Whoever keeps a ``grad`` that is no longer its parameter's keeps its values, as in PyTorch: before a home is
written to anew, a tensor object over it that somebody else holds gets memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from memferry_allocator import Driver, Event, Span, Stream
from memferry_allocator.driver import Bracket
from memferry_transport import TransferEngine

from .gradient_slot import GradientSlot, lies_alike, storage_of
from .layer import LayerState


@dataclass(eq=False)
class LayerHome:
    """A layer's gradients at home, and the bracket under which the device may touch them there."""

    span: Span
    on_device: bool = False
    bracket: Bracket | None = None
    fresh: bool = False
    slots: list[GradientSlot] = field(default_factory=list)

    def end_bracket(self) -> None:
        """The device's use of them ends with what has been enqueued by now."""
        if self.bracket is not None:
            self.bracket.end()
            self.bracket = None


class GradientHomes:
    """Keeps gradients at home, and apart from what users do with theirs.

    Parameters
    ----------
    driver, engine
        The device and who copies.
    stream : callable
        The stream on which the calling thread's kernels run.
    settle : callable
        Told that gradients of a layer are about to change; blocks until no update reads them any more.
    wait : callable
        Lets a stream wait for the event of a copy.
    """

    def __init__(
        self,
        driver: Driver,
        engine: TransferEngine,
        *,
        stream: Callable[[], Stream],
        settle: Callable[[LayerState], None],
        wait: Callable[[Stream, Event], None],
    ) -> None:
        self._driver = driver
        self._engine = engine
        self._stream = stream
        self._settle = settle
        self._wait = wait
        self._homes: dict[LayerState, LayerHome] = {}
        self.slots: list[GradientSlot] = []

    def move_home(self, layer: LayerState) -> None:
        """A layer's gradients belong somewhere else from now on; those that are there come along.

        After a failure each of them is where it was or where it belongs; a further call moves the others.
        """
        home = self._homes.get(layer)
        if home is None:
            return
        home.end_bracket()
        for slot in home.slots:
            self._let_go(slot)
        slab = layer.gradients_on_device
        home.on_device = slab is not None
        home.span = layer.gradient_span if slab is None else slab.span
        for slot in home.slots:
            span = Span(home.span.ptr + layer.layout.slots[slot.index].gradient, slot.span.nbytes)
            if span != slot.span:
                self._move(slot, span, on_device=home.on_device)

    @torch.no_grad()
    def _move(self, slot: GradientSlot, span: Span, *, on_device: bool) -> None:
        unchanged = slot.version == slot.home._version
        present = slot.parameter.grad is slot.home
        if present:
            to = span if on_device else self._device_span(span)
            reads = [self._home_span(slot)]
            with self._driver.launch(self._stream(), reads=reads, writes=[to], label=f"move of {slot.name}"):
                slot.layer.gradient_home(slot.index).copy_(slot.home)
        slot.rehome(span)
        if present:
            slot.show(slot.home)
            slot.version = slot.home._version if unchanged else -1

    def _separate(self, present: list[GradientSlot]) -> None:
        """Gradients that lie in the home of another, or otherwise in their own, get memory of their own.

        They could not be taken over one after the other.
        """
        foreign = [slot for slot in present if slot.parameter.grad is not slot.home]
        if not foreign:
            return
        owners = {id(slot.home): slot for slot in self.slots}
        storages = {storage_of(slot.home) for slot in self.slots}
        for slot in foreign:
            gradient = slot.parameter.grad
            assert gradient is not None
            slot.refuse_odd(gradient)
            owner = owners.get(id(gradient))
            if owner is not None and owner.home is gradient:
                self._settle(owner.layer)
                self._let_go(owner)
            elif storage_of(gradient) in storages and not lies_alike(gradient, slot.home):
                gradient.data = gradient.detach().clone()

    @torch.no_grad()
    def _let_go(self, slot: GradientSlot, device: str | None = None) -> None:
        """If somebody else holds the tensor over a gradient's home, give it its values in memory of its own.

        The gradient has a new tensor over its home then.  No update is reading it.
        """
        present = slot.parameter.grad is slot.home
        if present:  # which does not count
            slot.parameter.grad = None
        held, old = slot.held, slot.home
        if present:
            slot.show(old)
        if not held:
            return
        stream = self._stream()
        if slot.leaving is not None:
            self._wait(stream, slot.leaving)
        with torch.inference_mode(False), torch.no_grad():
            if self._homes[slot.layer].bracket is not None:
                own = old.to(device or old.device, copy=True)
            else:
                reads = [self._home_span(slot)]
                with self._driver.launch(stream, reads=reads, label=f"kept gradient of {slot.name}"):
                    own = old.to(device or old.device, copy=True)
            if not slot.on_device:
                slot.layer.gradients[slot.index] = old.data
            old.data = own
        slot.rehome(slot.span)

    def _take_over(self, slot: GradientSlot, gradient: torch.Tensor) -> None:
        self._settle(slot.layer)
        self._let_go(slot)
        home = self._homes[slot.layer]
        if home.bracket is not None:
            slot.home.copy_(gradient)
            return
        with self._writes_home(slot, "the user's gradient of"):
            slot.home.copy_(gradient)

    def _writes_home(self, slot: GradientSlot, what: str) -> Bracket:
        return self._driver.launch(self._stream(), writes=[self._home_span(slot)], label=f"{what} {slot.name}")

    def _home_span(self, slot: GradientSlot) -> Span:
        """A gradient's home as kernels reach it."""
        return slot.span if slot.on_device else self._device_span(slot.span)

    def _device_span(self, span: Span) -> Span:
        pointer = self._driver.host_device_pointer(span.ptr, self._engine.device)
        return Span(pointer, span.nbytes)
