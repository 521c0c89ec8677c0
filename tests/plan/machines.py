"""Small models for the tests of plans."""

from __future__ import annotations

from memferry_rt.plan import Batch, Dimensions, LayerKind, Workload, make_layer, transformer

MIB, GIB = 1 << 20, 1 << 30
TINY = Dimensions(256, 4, 512, 4, 4096, fused=True)
LLAMA_1B = Dimensions(2048, 22, 5632, 16, 32000, fused=True)
LLAMA_3B = Dimensions(3200, 26, 8640, 25, 32000, fused=True)
LARGE_VOCABULARY = Dimensions(2048, 22, 5632, 16, 256000, fused=True)


def decoder(
    size: Dimensions = TINY, micro_batch: int = 2, sequence: int = 128, recompute: bool | None = True
) -> Workload:
    return transformer("model", size, Batch(micro_batch, sequence, recompute=recompute))


def chain(sizes: list[int], flops: list[float]) -> Workload:
    """Linear layers, square, of these widths."""
    layers = [
        make_layer(
            f"layer.{number}",
            LayerKind.LINEAR,
            [(width, width)],
            "bfloat16",
            flops=work,
            traffic_nbytes=0,
            kernels=1,
            activation_nbytes=1 << 16,
        )
        for number, (width, work) in enumerate(zip(sizes, flops, strict=True))
    ]
    return Workload("chain", tuple(layers), "bfloat16", 1, 64, working_nbytes=1 << 20)
