"""Models as their profiles know them: any that was measured, of whatever family."""

from __future__ import annotations

from dataclasses import replace

from .choice import FRAGMENTATION, WORKSPACES
from .model import LayerSpec, Workload, slab_sizes
from .profile import LayerKind, LayerProfile, Profile


def workload_from_profile(profile: Profile, name: str = "model") -> Workload:
    """The model that a profile was made of.

    What torch reserved is taken as it was, so that layers recompute as they did; nothing is left to choose there.
    """
    layers = tuple(_layer(layer, profile) for layer in profile.layers)
    working = 0
    if profile.torch_nbytes is not None:
        working = int(max(0, profile.torch_nbytes - WORKSPACES) / FRAGMENTATION)
    return Workload(
        name, layers, profile.dtype, profile.micro_batch, profile.sequence, working, profile.torch_nbytes
    )


def with_measured_memory(workload: Workload, profile: Profile) -> Workload:
    """With what a profile says that torch reserves, if its layers recomputed as the workload's do by default."""
    recomputes = any(layer.recompute for layer in workload.layers if layer.kind is LayerKind.BLOCK)
    if profile.torch_nbytes is None or profile.checkpointing is not recomputes:
        return workload
    return replace(workload, measured_nbytes=profile.torch_nbytes)


def _layer(layer: LayerProfile, profile: Profile) -> LayerSpec:
    matrices = 0 if layer.kind is LayerKind.EMBEDDING else sum(_matrix(shape) for shape in layer.shapes)
    return LayerSpec(
        layer.name,
        layer.kind,
        layer.shapes,
        layer.parameters,
        layer.weight_nbytes,
        layer.gradient_nbytes,
        layer.state_nbytes,
        slab_sizes(layer.name, layer.shapes, profile.dtype)[3],
        flops=2.0 * layer.tokens * matrices,
        traffic_nbytes=float(layer.activation_nbytes or 0),
        kernels=1,
        recompute=profile.checkpointing and layer.kind is LayerKind.BLOCK,
    )


def _matrix(shape: tuple[int, ...]) -> int:
    """Elements of a matrix; vectors are in no product."""
    product = 1
    for size in shape:
        product *= size
    return product if len(shape) > 1 else 0
