"""Models of which only adapters are trained: small matrices beside attention's projections, all else frozen."""

from __future__ import annotations

from dataclasses import replace

from ..errors import PlanError
from ..layout import ParameterSpec, lay_out
from .model import ITEMSIZE, LayerSpec, Shape, Workload
from .profile import LayerKind
from .shapes import Dimensions


def with_adapters(workload: Workload, size: Dimensions, rank: int) -> Workload:
    """The same model with its weights frozen, and adapters on the projections of its blocks' attention.

    Parameters
    ----------
    workload : Workload
        Of `transformer`.
    size : Dimensions
        That it was made of.
    rank : int
        Each projection of shape (out, in) has two matrices more, (rank, in) and (out, rank).

    Raises
    ------
    PlanError
        The rank is less than 1.
    """
    if rank < 1:
        raise PlanError(f"adapters: {rank} is no rank of matrices; it is 1 or more")
    projections = size.block_shapes[: 2 if size.fused else 4]
    added = tuple(shape for out, width in projections for shape in ((rank, width), (out, rank)))
    layers = tuple(
        _frozen(layer, added if layer.kind is LayerKind.BLOCK else (), workload) for layer in workload.layers
    )
    return replace(workload, layers=layers)


def _frozen(layer: LayerSpec, added: tuple[Shape, ...], workload: Workload) -> LayerSpec:
    """The layer without gradients and state, but for those of what is added."""
    itemsize, tokens = ITEMSIZE[workload.dtype], workload.tokens
    shapes = (*layer.shapes, *added)
    specs = [
        ParameterSpec(f"{number}", _numel(shape), itemsize, trained, trained, master=trained and itemsize < 4)
        for number, shape in enumerate(shapes)
        for trained in [number >= len(layer.shapes)]
    ]
    layout = lay_out(layer.name, specs)
    more = sum(map(_numel, added))
    return replace(
        layer,
        shapes=shapes,
        parameters=layer.parameters + more,
        weight_nbytes=layout.weight_nbytes,
        gradient_nbytes=layout.gradient_nbytes,
        state_nbytes=layout.state_nbytes,
        largest_nbytes=max((spec.gradient_nbytes for spec in specs if spec.trainable), default=0),
        flops=layer.flops + 2 * tokens * more,
        frozen=True,
    )


def _numel(shape: Shape) -> int:
    product = 1
    for length in shape:
        product *= length
    return product
