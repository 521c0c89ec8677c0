"""Which part of a layer belongs to which rank: arithmetic on its layout alone, the same everywhere."""

from __future__ import annotations

from dataclasses import dataclass

from memferry_allocator.sizes import align_up

from ..layout import ALIGNMENT, LayerLayout


@dataclass(frozen=True)
class Part:
    """The elements ``start`` … ``start + count`` of the parameter with this index in its layer."""

    index: int
    start: int
    count: int


@dataclass(frozen=True)
class Share:
    """One rank of `size`.

    A layer's slab of gradients is cut in `size` pieces of equal length, the last of which reach beyond its end
    where it does not divide.  A rank owns the elements whose gradients lie in its piece, and with them their
    master weights, moments and rounded weights.  Cuts lie at multiples of 256 bytes, as parameters do: so
    parts begin at whole vectors, and the native arithmetic has the bits that it has for the whole.
    """

    rank: int
    size: int

    def piece_nbytes(self, layout: LayerLayout) -> int:
        """Bytes of every rank's piece of a layer's gradients."""
        return align_up(-(-layout.gradient_nbytes // self.size), ALIGNMENT)

    def piece(self, layout: LayerLayout) -> tuple[int, int]:
        """Where the own piece begins and ends in the slab of gradients; empty where that is too small."""
        nbytes = self.piece_nbytes(layout)
        start = min(self.rank * nbytes, layout.gradient_nbytes)
        return start, min(start + nbytes, layout.gradient_nbytes)

    def parts(self, layout: LayerLayout) -> list[Part]:
        """The elements that this rank owns, in the order of the layer's parameters."""
        start, end = self.piece(layout)
        found = []
        for index, slot in enumerate(layout.slots):
            if not slot.spec.trainable or not slot.spec.numel:
                continue
            itemsize = slot.spec.gradient_nbytes // slot.spec.numel
            first = max(start - slot.gradient, 0) // itemsize
            last = min(end - slot.gradient, slot.spec.gradient_nbytes) // itemsize
            if last > first:
                found.append(Part(index, first, last - first))
        return found
