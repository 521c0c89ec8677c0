"""What of the model's host memory one of several hosts has: all weights and gradients, and state of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memferry_allocator import Span
from memferry_allocator.sizes import align_up

from ..layout import ALIGNMENT, FP32, LayerLayout
from .share import Share


def held_spans(layouts: Sequence[LayerLayout], share: Share, begin: int) -> list[Span]:
    """The bytes that a host uses, as offsets in an arena whose layers are cut from `begin` on, in their order."""
    spans = []
    for layout in layouts:
        slabs = align_up(layout.weight_nbytes, ALIGNMENT) + align_up(layout.gradient_nbytes, ALIGNMENT)
        spans.append(Span(begin, slabs))
        begin += slabs
        spans.extend(Span(begin + span.ptr, span.nbytes) for span in _state_spans(layout, share))
        begin += align_up(layout.state_nbytes, ALIGNMENT)
    return spans


def held_nbytes(layouts: Sequence[LayerLayout], share: Share) -> int:
    """How many they are; pages come whole, so that somewhat more are taken."""
    return sum(span.nbytes for span in held_spans(layouts, share, 0))


def _state_spans(layout: LayerLayout, share: Share) -> Iterator[Span]:
    """In the slab of state."""
    if share.hosts == 1:
        yield Span(0, layout.state_nbytes)
        return
    for part in share.held(layout):
        slot = layout.slots[part.index]
        for place in (slot.master, *slot.state.values()):
            if place >= 0:
                yield Span(place + part.start * FP32, part.count * FP32)
