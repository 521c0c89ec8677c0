"""A model as the planner sees it: its layers' bytes and work, without a framework."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..errors import PlanError
from ..layout import ParameterSpec, lay_out
from .profile import LayerKind

Shape = tuple[int, ...]
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class LayerSpec:
    """One layer, and what a micro-batch asks of it.

    Attributes
    ----------
    name : str
        As `memferry_rt.offload` cuts and names the model's layers.
    shapes : tuple of tuple of int
        Of its parameters, in the order of the layout.
    parameters : int
    weight_nbytes, gradient_nbytes, state_nbytes : int
        Of its slabs.
    largest_nbytes : int
        The gradient of its largest parameter.
    flops : float
        Of the matrix products of one forward.
    traffic_nbytes : float
        Device memory that the rest of a forward reads and writes.
    kernels : int
        Launched in a forward.
    input_nbytes, activation_nbytes : int
        Kept on the device from forward to backward where it recomputes, and where it does not.
    replay_nbytes : int
        What its backward needs beside those at the most: all of it where it recomputes, else what is left after
        `activation_nbytes`.
    recompute : bool or None
        Whether backward repeats its forward; None where the model allows both and the planner may choose.
    borrows : str or None
        The layer whose weights it uses, where it has none of its own (a head tied to the embedding).
    frozen : bool
        Whether (nearly) all of its weights get no gradient: backward computes those of activations alone.
    """

    name: str
    kind: LayerKind
    shapes: tuple[Shape, ...]
    parameters: int
    weight_nbytes: int
    gradient_nbytes: int
    state_nbytes: int
    largest_nbytes: int
    flops: float
    traffic_nbytes: float
    kernels: int
    input_nbytes: int = 0
    activation_nbytes: int = 0
    replay_nbytes: int = 0
    recompute: bool | None = False
    borrows: str | None = None
    frozen: bool = False

    def kept_nbytes(self, recompute: bool) -> int:
        """Kept on the device from forward to backward."""
        return self.input_nbytes if recompute else self.activation_nbytes

    def backward_nbytes(self, recompute: bool) -> int:
        """Needed on the device during its backward, beside what is kept."""
        return self.replay_nbytes if recompute else max(0, self.replay_nbytes - self.activation_nbytes)


@dataclass(frozen=True)
class Workload:
    """A model and its micro-batch.

    Attributes
    ----------
    name : str
    layers : tuple of LayerSpec
        In forward order.
    dtype : str
        The compute dtype.
    micro_batch, sequence : int
    working_nbytes : int
        What torch needs at the end of a forward, for the loss, beside weights, finished gradients and what layers
        keep for backward.
    measured_nbytes : int or None
        The most that torch reserved in a step with layers recomputing as by default; None goes by count.
    exchange_nbytes : int
        What torch needs during backward for gradients on their way between ranks.

    Raises
    ------
    PlanError
        Names are there twice, or a layer borrows of one that there is not.
    """

    name: str
    layers: tuple[LayerSpec, ...]
    dtype: str
    micro_batch: int
    sequence: int
    working_nbytes: int
    measured_nbytes: int | None = None
    exchange_nbytes: int = 0

    def __post_init__(self) -> None:
        if not any(layer.parameters for layer in self.layers):
            raise PlanError(f"{self.name}: the model has no parameters: there is nothing to plan")
        if len({layer.name for layer in self.layers}) < len(self.layers):
            raise PlanError(f"{self.name}: two layers have one name")
        for layer in self.layers:
            if layer.borrows is not None and layer.borrows not in self.index:
                raise PlanError(f"{self.name}: {layer.name} borrows of {layer.borrows!r}, which is no layer")

    @property
    def tokens(self) -> int:
        return self.micro_batch * self.sequence

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    @cached_property
    def index(self) -> dict[str, int]:
        return {layer.name: number for number, layer in enumerate(self.layers)}

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """For each layer, the one that has its weights: itself, but for those that borrow."""
        return tuple(
            number if layer.borrows is None else self.index[layer.borrows]
            for number, layer in enumerate(self.layers)
        )

    @cached_property
    def lookups(self) -> tuple[int, ...]:
        """The embeddings that nothing else uses: reading them in place moves only the rows that are looked up."""
        used = {owner for number, owner in enumerate(self.owners) if owner != number}
        return tuple(
            number
            for number, layer in enumerate(self.layers)
            if layer.kind is LayerKind.EMBEDDING and number not in used
        )

    @cached_property
    def fingerprint(self) -> str:
        """Of the dtype, names and sizes of parameters, in hexadecimal: what a plan must fit."""
        return fingerprint_of(self.dtype, self.sizes)

    @cached_property
    def sizes(self) -> dict[str, list[int]]:
        """For every layer with parameters of its own, how many elements each of them has."""
        return {layer.name: [_numel(shape) for shape in layer.shapes] for layer in self.layers if layer.parameters}


def fingerprint_of(dtype: str, sizes: Mapping[str, Iterable[int]]) -> str:
    """Of a model whose layers have parameters of these sizes, in elements."""
    made = sorted([name, sorted(numels)] for name, numels in sizes.items())
    return hashlib.sha256(json.dumps([dtype, made]).encode()).hexdigest()[:12]


def slab_sizes(name: str, shapes: Sequence[Shape], dtype: str) -> tuple[int, int, int, int]:
    """Bytes of a layer's slabs as the runtime lays them out for Adam, and of its largest gradient.

    Returns
    -------
    tuple of int
        Of weights, gradients and state, and of the largest gradient.

    Raises
    ------
    PlanError
        The dtype is none that models are computed in.
    """
    if dtype not in ITEMSIZE:
        raise PlanError(f"dtype: {dtype!r} is not known; it is one of {', '.join(ITEMSIZE)}")
    size = ITEMSIZE[dtype]
    specs = [
        ParameterSpec(f"{number}", _numel(shape), size, trainable=True, updated=True, master=size < 4)
        for number, shape in enumerate(shapes)
    ]
    layout = lay_out(name, specs)
    largest = max((spec.gradient_nbytes for spec in specs), default=0)
    return layout.weight_nbytes, layout.gradient_nbytes, layout.state_nbytes, largest


def make_layer(
    name: str,
    kind: LayerKind,
    shapes: Sequence[Shape],
    dtype: str,
    *,
    flops: float,
    traffic_nbytes: float,
    kernels: int,
    input_nbytes: int = 0,
    activation_nbytes: int = 0,
    replay_nbytes: int = 0,
    recompute: bool | None = False,
    borrows: str | None = None,
) -> LayerSpec:
    """A layer of parameters of these shapes."""
    weights, gradients, state, largest = slab_sizes(name, shapes, dtype)
    return LayerSpec(
        name,
        kind,
        tuple(shapes),
        sum(map(_numel, shapes)),
        weights,
        gradients,
        state,
        largest,
        flops,
        traffic_nbytes,
        kernels,
        input_nbytes,
        activation_nbytes,
        replay_nbytes,
        recompute,
        borrows,
    )


def _numel(shape: Shape) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
