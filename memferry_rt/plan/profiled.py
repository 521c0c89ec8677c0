"""Models as their profiles know them: any that was measured, of whatever family."""

from __future__ import annotations

import math
from dataclasses import replace

from .model import ITEMSIZE, LayerSpec, Workload, slab_sizes
from .profile import LayerKind, LayerProfile, Profile

BACKWARD = 1.25  # what a layer's backward needs, over what it keeps: as counted for a Llama's block


def workload_from_profile(profile: Profile, name: str = "model") -> Workload:
    """The model that a profile was made of.

    What torch reserved is taken as it was, if it was measured; else counted from what layers keep for backward.
    Layers recompute as they did.
    """
    layers = tuple(_layer(layer, profile) for layer in profile.layers)
    loss = max((2 * (layer.activation_nbytes or 0) for layer in profile.layers[-1:]), default=0)
    return Workload(name, layers, profile.dtype, profile.micro_batch, profile.sequence, loss, profile.torch_nbytes)


def with_measured_memory(workload: Workload, profile: Profile) -> Workload:
    """With what a profile says that torch reserves, if its layers recomputed as the workload's do by default."""
    recomputes = any(layer.recompute for layer in workload.layers if layer.kind is LayerKind.BLOCK)
    if profile.torch_nbytes is None or profile.checkpointing is not recomputes:
        return workload
    return replace(workload, measured_nbytes=profile.torch_nbytes)


def _layer(layer: LayerProfile, profile: Profile) -> LayerSpec:
    matrices = 0 if layer.kind is LayerKind.EMBEDDING else sum(_matrix(shape) for shape in layer.shapes)
    largest = slab_sizes(layer.name, layer.shapes, profile.dtype)[3]
    kept = layer.activation_nbytes or 0
    width = min((shape[-1] for shape in layer.shapes if len(shape) > 1), default=0)
    return LayerSpec(
        layer.name,
        layer.kind,
        layer.shapes,
        layer.parameters,
        layer.weight_nbytes,
        layer.gradient_nbytes,
        layer.state_nbytes,
        largest,
        flops=2.0 * layer.tokens * matrices,
        traffic_nbytes=float(kept),
        kernels=1,
        input_nbytes=profile.tokens * width * ITEMSIZE[profile.dtype],
        activation_nbytes=kept,
        replay_nbytes=int(BACKWARD * kept) + largest,
        recompute=profile.checkpointing and layer.kind is LayerKind.BLOCK,
    )


def _matrix(shape: tuple[int, ...]) -> int:
    """Elements of a matrix; vectors are in no product."""
    return math.prod(shape) if len(shape) > 1 else 0
