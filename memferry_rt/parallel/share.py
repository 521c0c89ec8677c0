"""Which part of a layer belongs to which rank: arithmetic on its layout alone, the same everywhere."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    """One rank of `size`, on one of `hosts`, which have the ranks one host after the other.

    A layer's slab of gradients is cut in `size` pieces of equal length, the last of which reach beyond its end
    where it does not divide.  A rank owns the elements whose gradients lie in its piece, and with them their
    master weights, moments and rounded weights.  Cuts lie at multiples of 256 bytes, as parameters do: so
    parts begin at whole vectors, and the native arithmetic has the bits that it has for the whole.

    The ranks with one number on their hosts, the `local` one, are peers.  Their pieces lie side by side, in the
    order of the hosts, and are a column: what a rank brings to its host's pages.
    """

    rank: int
    size: int
    hosts: int = 1

    @property
    def locals(self) -> int:
        """Ranks of one host."""
        return self.size // self.hosts

    @property
    def local(self) -> int:
        """The own number among them."""
        return self.rank % self.locals

    @property
    def host(self) -> int:
        return self.rank // self.locals

    @property
    def peers(self) -> list[Share]:
        """The ranks with this local number, by host; this one is among them."""
        return [replace(self, rank=host * self.locals + self.local) for host in range(self.hosts)]

    @property
    def neighbours(self) -> list[Share]:
        """The ranks of this host, by local number; this one is among them."""
        return [replace(self, rank=self.host * self.locals + local) for local in range(self.locals)]

    # -- bytes ----------------------------------------------------------------------------------------
    def piece_nbytes(self, layout: LayerLayout) -> int:
        """Bytes of every rank's piece of a layer's gradients."""
        return align_up(-(-layout.gradient_nbytes // self.size), ALIGNMENT)

    def column_nbytes(self, layout: LayerLayout) -> int:
        """Bytes of every column."""
        return self.hosts * self.piece_nbytes(layout)

    def piece(self, layout: LayerLayout) -> tuple[int, int]:
        """Where the own piece begins and ends in the slab of gradients; empty where that is too small."""
        return self._pieces(layout, self.local * self.hosts + self.host, 1)

    def column(self, layout: LayerLayout) -> tuple[int, int]:
        """Where the own column begins and ends; on one host it is the piece."""
        return self._pieces(layout, self.local * self.hosts, self.hosts)

    def _pieces(self, layout: LayerLayout, first: int, count: int) -> tuple[int, int]:
        nbytes = self.piece_nbytes(layout)
        start = min(first * nbytes, layout.gradient_nbytes)
        return start, min((first + count) * nbytes, layout.gradient_nbytes)

    # -- elements -------------------------------------------------------------------------------------
    def parts(self, layout: LayerLayout) -> list[Part]:
        """The elements that this rank owns, in the order of the layer's parameters."""
        return parts_between(layout, *self.piece(layout))

    def column_parts(self, layout: LayerLayout) -> list[Part]:
        """The elements of the own column."""
        return parts_between(layout, *self.column(layout))

    def held(self, layout: LayerLayout) -> list[Part]:
        """The elements whose state this host has: what its ranks own, in their order."""
        return [part for rank in self.neighbours for part in rank.parts(layout)]


def parts_between(layout: LayerLayout, start: int, end: int) -> list[Part]:
    """The elements of which the gradients lie between two places in their slab."""
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
