"""Where a layer's parameters lie: flat slabs, one for each kind of state.

A layer's weights lie in one slab, so that one copy moves them; its gradients in another of the same shape.
Master weights and the optimizer's state are fp32.  Offsets are multiples of 256 bytes, so that every parameter
starts a cache line and a vector, and device kernels see the alignment that a framework's own allocator gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from memferry_allocator.sizes import align_up

ALIGNMENT = 256
FP32 = 4
MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter as the layout sees it.

    Attributes
    ----------
    name : str
    numel, itemsize : int
        Elements, and bytes of one of them in the compute dtype.
    gradient_itemsize : int, optional
        Bytes of one element of the gradient; by default of the compute dtype.
    trainable : bool
        Whether it gets a gradient.
    updated : bool
        Whether the optimizer updates it.
    master : bool
        Whether it has an fp32 master copy beside the weight (its compute dtype is not fp32).
    state : tuple of str
        What else the optimizer keeps for each of its elements, by the names that it has in ``optimizer.state``.
    """

    name: str
    numel: int
    itemsize: int
    trainable: bool
    updated: bool
    master: bool
    state: tuple[str, ...] = MOMENTS
    gradient_itemsize: int | None = None

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def gradient_nbytes(self) -> int:
        return self.numel * (self.gradient_itemsize or self.itemsize)


@dataclass(frozen=True)
class Slot:
    """Byte offsets of one parameter in its layer's slabs; -1 where it has no such thing.

    Attributes
    ----------
    state : mapping of str to int
        Of the optimizer's state, by name; empty where it does not update the parameter.
    """

    spec: ParameterSpec
    weight: int
    gradient: int
    master: int
    state: Mapping[str, int]


@dataclass(frozen=True)
class LayerLayout:
    """A layer: its parameters' slots and the sizes of its slabs in bytes."""

    name: str
    slots: tuple[Slot, ...]
    weight_nbytes: int
    gradient_nbytes: int
    state_nbytes: int

    @property
    def host_nbytes(self) -> int:
        return self.weight_nbytes + self.gradient_nbytes + self.state_nbytes


class _Slab:
    def __init__(self) -> None:
        self.nbytes = 0

    def take(self, nbytes: int) -> int:
        offset = self.nbytes
        self.nbytes = align_up(offset + max(nbytes, 1), ALIGNMENT)
        return offset


def lay_out(name: str, specs: Iterable[ParameterSpec]) -> LayerLayout:
    """Give every parameter of a layer its place."""
    weights, gradients, state = _Slab(), _Slab(), _Slab()
    slots = []
    for spec in specs:
        fp32 = spec.numel * FP32
        slots.append(
            Slot(
                spec,
                weight=weights.take(spec.nbytes),
                gradient=gradients.take(spec.gradient_nbytes) if spec.trainable else -1,
                master=state.take(fp32) if spec.updated and spec.master else -1,
                state={key: state.take(fp32) for key in spec.state} if spec.updated else {},
            )
        )
    return LayerLayout(name, tuple(slots), weights.nbytes, gradients.nbytes, state.nbytes)
