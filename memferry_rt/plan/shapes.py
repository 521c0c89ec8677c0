"""Models of known families from their sizes alone: decoders like Llama and GPT-2, and encoders like BERT.

How much work and memory a layer needs is counted in units of one activation, tokens × hidden × itemsize bytes.
The numbers of units are those of eager PyTorch, counted on tensors without data; work on device memory is fitted
to a whole iteration of llama-1b on an H200 (0.197 s with everything in device memory).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import PlanError
from .model import ITEMSIZE, LayerSpec, Shape, Workload, make_layer, slab_sizes
from .profile import LayerKind

SMALL = "(small)"
SMALL_LAYER = 256 << 10  # bytes; the runtime merges layers below it
LOGITS_AT_ONCE = 1 << 25  # of `memferry train`; more are scored in pieces, and computed twice
_TRAFFIC = 3.7  # bytes of device memory that elementwise work moves, over what it keeps
_KERNELS = 45  # of a block's forward in eager mode


@dataclass(frozen=True)
class Names:
    """What layers are called: the table of tokens, blocks without their number, the last norm, the output; and the
    table of positions and the matrix before the output, where there are such."""

    embedding: str
    block: str
    norm: str
    head: str
    positions: str = "positions"
    dense: str = "dense"


TRAIN = Names("embedding", "blocks", "norm", "head")  # of `memferry train`


@dataclass(frozen=True)
class Batch:
    """A micro-batch, the compute dtype, and whether blocks recompute (None: the planner may choose).

    Raises
    ------
    PlanError
        A number that is not positive, or a dtype that is not known.
    """

    micro_batch: int
    sequence: int
    dtype: str = "bfloat16"
    recompute: bool | None = None

    def __post_init__(self) -> None:
        for name in ("micro_batch", "sequence"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name}: {getattr(self, name)} is not 1 or more")
        if self.dtype not in ITEMSIZE:
            raise PlanError(f"dtype: {self.dtype!r} is not known; it is one of {', '.join(ITEMSIZE)}")

    @property
    def tokens(self) -> int:
        return self.micro_batch * self.sequence

    def unit(self, width: int) -> int:
        """Bytes of one activation of this width."""
        return self.tokens * width * ITEMSIZE[self.dtype]


def most(name: str) -> int:
    """What a size may be at most; beyond it nothing ends in time, or numbers of bytes overflow."""
    return 4096 if name == "layers" else 1 << 24


@dataclass(frozen=True)
class Dimensions:
    """Sizes of a transformer.

    Attributes
    ----------
    hidden, layers, ffn, heads, vocabulary : int
    kv_width : int, optional
        Width of all keys together; `hidden` by default.
    positions : int
        Rows of the table of positions; 0 where there is none.
    gated : bool
        Whether the feed-forward part has a gate (three matrices in place of two).
    fused : bool
        Whether one matrix makes queries, keys and values.
    types : int
        Rows of the table of token types, in encoders like BERT: these have a matrix before the output too, and
        what is small outside of blocks is one layer.
    biases : bool
        Whether matrices have biases, and norms two vectors.
    tied : bool
        Whether the output's weight is the embedding's.
    causal : bool
    """

    hidden: int
    layers: int
    ffn: int
    heads: int
    vocabulary: int
    kv_width: int = 0
    positions: int = 0
    types: int = 0
    gated: bool = True
    fused: bool = False
    biases: bool = False
    tied: bool = False
    causal: bool = True

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "ffn", "heads", "vocabulary"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name}: {getattr(self, name)} is not 1 or more")
        for name in ("hidden", "layers", "ffn", "heads", "vocabulary", "kv_width", "positions", "types"):
            if getattr(self, name) > most(name):
                raise PlanError(f"{name}: {getattr(self, name)} is more than {most(name)}, and no model's")

    @property
    def block_shapes(self) -> tuple[Shape, ...]:
        """Of one block's parameters."""
        hidden, kv = self.hidden, self.kv_width or self.hidden
        inner = [(hidden + 2 * kv, hidden)] if self.fused else [(hidden, hidden), (kv, hidden), (kv, hidden)]
        matrices: list[Shape] = [*inner, (hidden, hidden)]
        matrices += [(self.ffn, hidden)] * (2 if self.gated else 1) + [(hidden, self.ffn)]
        vectors: list[Shape] = [(shape[0],) for shape in matrices] if self.biases else []
        return (*matrices, *vectors, *[(hidden,)] * (4 if self.biases else 2))

    @property
    def parameters(self) -> int:
        """How many a model of these sizes has."""
        return transformer("", self, Batch(1, 1)).parameters


def transformer(name: str, size: Dimensions, batch: Batch, names: Names = TRAIN) -> Workload:
    """A decoder or encoder whose loss is the cross entropy over its vocabulary.

    Parameters
    ----------
    name : str
    size : Dimensions
    batch : Batch
    names : Names
        Those that the layers of this family have.
    """
    blocks = [_block(f"{names.block}.{number}", size, batch) for number in range(size.layers)]
    tables = [_embedding(names.embedding, size.vocabulary, size.hidden, batch)]
    if size.positions:
        tables.append(_embedding(names.positions, size.positions, size.hidden, batch))
    last = [_norm(names.norm, size, batch)]
    if size.types:
        last.append(_dense(names.dense, size, batch))
    layers = merge_small([*tables, *blocks, *last, _head(names, size, batch)], batch.dtype)
    return Workload(name, layers, batch.dtype, batch.micro_batch, batch.sequence, _loss_nbytes(size, batch))


def merge_small(layers: Sequence[LayerSpec], dtype: str) -> tuple[LayerSpec, ...]:
    """What is outside of blocks and tiny beside them is one layer, as the runtime cuts models.

    Its parameters are the first one's; the others borrow them.
    """
    own = [layer for layer in layers if layer.parameters]
    nbytes = {layer.name: layer.parameters * ITEMSIZE[dtype] for layer in own}
    limit = min(SMALL_LAYER, sum(nbytes.values()) // (4 * len(own)))
    small = [layer for layer in own if layer.kind is not LayerKind.BLOCK and nbytes[layer.name] < limit]
    if len(small) < 2:
        return tuple(layers)
    shapes = tuple(shape for layer in small for shape in layer.shapes)
    weights, gradients, state, largest = slab_sizes(SMALL, shapes, dtype)
    owner = replace(
        small[0],
        name=SMALL,
        shapes=shapes,
        parameters=sum(layer.parameters for layer in small),
        weight_nbytes=weights,
        gradient_nbytes=gradients,
        state_nbytes=state,
        largest_nbytes=largest,
    )
    nothing: dict[str, Any] = {"shapes": (), "parameters": 0, "borrows": SMALL, "largest_nbytes": 0}
    nothing |= {"weight_nbytes": 0, "gradient_nbytes": 0, "state_nbytes": 0}
    merged = []
    for layer in layers:
        if layer.borrows in {each.name for each in small}:
            layer = replace(layer, borrows=SMALL)
        merged.append(owner if layer is small[0] else replace(layer, **nothing) if layer in small else layer)
    return tuple(merged)


def _norm(name: str, size: Dimensions, batch: Batch) -> LayerSpec:
    shapes: list[Shape] = [(size.hidden,)] * (2 if size.biases else 1)
    if size.types:
        shapes = [(size.types, size.hidden), *[(size.hidden,)] * 4, (size.vocabulary,)]
    return make_layer(
        name,
        LayerKind.NORM,
        shapes,
        batch.dtype,
        flops=0,
        traffic_nbytes=4 * batch.unit(size.hidden),
        kernels=2,
        activation_nbytes=batch.unit(size.hidden),
    )


def _dense(name: str, size: Dimensions, batch: Batch) -> LayerSpec:
    return make_layer(
        name,
        LayerKind.LINEAR,
        [(size.hidden, size.hidden), (size.hidden,)],
        batch.dtype,
        flops=2 * batch.tokens * size.hidden**2,
        traffic_nbytes=6 * batch.unit(size.hidden),
        kernels=3,
        activation_nbytes=3 * batch.unit(size.hidden),
    )


def _embedding(name: str, rows: int, width: int, batch: Batch) -> LayerSpec:
    unit = batch.unit(width)
    return make_layer(
        name,
        LayerKind.EMBEDDING,
        [(rows, width)],
        batch.dtype,
        flops=0,
        traffic_nbytes=2 * unit,
        kernels=2,
        activation_nbytes=unit,
        replay_nbytes=unit + rows * width * ITEMSIZE[batch.dtype],
    )


def _block(name: str, size: Dimensions, batch: Batch) -> LayerSpec:
    unit, width = batch.unit(size.hidden), size.ffn / size.hidden
    matrices = sum(shape[0] * shape[1] for shape in size.block_shapes if len(shape) == 2)
    attention = 4 * batch.tokens * batch.sequence * size.hidden / (2 if size.causal else 1)
    activation = int(unit * (16 + (4 if size.gated else 3) * width))
    return make_layer(
        name,
        LayerKind.BLOCK,
        size.block_shapes,
        batch.dtype,
        flops=2 * batch.tokens * matrices + attention,
        traffic_nbytes=_TRAFFIC * activation,
        kernels=_KERNELS,
        input_nbytes=unit,
        activation_nbytes=activation,
        replay_nbytes=int(unit * (17.6 + 5.8 * width)),
        recompute=batch.recompute,
    )


def _head(names: Names, size: Dimensions, batch: Batch) -> LayerSpec:
    logits = batch.tokens * size.vocabulary
    return make_layer(
        names.head,
        LayerKind.HEAD,
        [] if size.tied else [(size.vocabulary, size.hidden)],
        batch.dtype,
        flops=2 * logits * size.hidden,
        traffic_nbytes=logits * (3 * ITEMSIZE[batch.dtype] + 12),
        kernels=6 * _pieces(size, batch),
        recompute=_pieces(size, batch) > 1,
        borrows=names.embedding if size.tied else None,
    )


def _pieces(size: Dimensions, batch: Batch) -> int:
    """In how many the loss is computed."""
    return -(-batch.tokens // max(1, LOGITS_AT_ONCE // size.vocabulary))


def _loss_nbytes(size: Dimensions, batch: Batch) -> int:
    """What the loss needs at the most: logits and their gradients, or gradients of the output's weight as they add
    up."""
    rows = min(batch.tokens, max(1, LOGITS_AT_ONCE // size.vocabulary))
    gradient = size.vocabulary * size.hidden * ITEMSIZE[batch.dtype]
    alone = 12.5 * rows * size.vocabulary
    if _pieces(size, batch) > 1:
        alone = max(3 * gradient, 14 * rows * size.vocabulary + gradient)
    return int(alone) + 2 * batch.unit(size.hidden)
