"""Which family a model is of, by its layers' shapes alone."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from .model import Shape, Workload, fingerprint_of
from .shapes import TRAIN, Batch, Dimensions, Names, transformer

_NUMBERED = re.compile(r"(.+)\.(\d+)")


def recognise(layers: Mapping[str, Sequence[Shape]], batch: Batch, name: str = "this model") -> Workload | None:
    """A model as one of the families that formulas know, or None.

    Parameters
    ----------
    layers : mapping of str to sequence of tuple of int
        Shapes of every layer's parameters, by the names that the runtime gives layers, in the model's order.
    batch : Batch
    name : str

    Returns
    -------
    Workload or None
        One whose layers have the very names and sizes.
    """
    wanted = fingerprint_of(batch.dtype, {layer: list(map(_numel, shapes)) for layer, shapes in layers.items()})
    for size, names in _candidates(layers):
        found = transformer(name, size, batch, names)
        if found.fingerprint == wanted:
            return found
    return None


def _candidates(layers: Mapping[str, Sequence[Shape]]) -> Iterator[tuple[Dimensions, Names]]:
    """Sizes and names that could be meant: all whose blocks have the right parameters."""
    numbered = [match for match in map(_NUMBERED.fullmatch, layers) if match is not None]
    tables = [layer for layer, shapes in layers.items() if len(shapes) == 1 and len(shapes[0]) == 2]
    if not numbered or not tables:
        return
    prefix = numbered[0][1]
    block = layers[numbered[0][0]]
    vocabulary, hidden = layers[tables[0]][0]
    count = sum(match[1] == prefix for match in numbered)
    vectors = [layer for layer, shapes in layers.items() if all(len(shape) == 1 for shape in shapes)]
    head = tables[-1] if len(tables) > 1 and layers[tables[-1]][0] == (vocabulary, hidden) else None
    others = [layer for layer in tables[1:] if layer != head]
    names = Names(tables[0], prefix, vectors[0] if vectors else TRAIN.norm, head or TRAIN.head, *others[:1])
    positions = layers[others[0]][0][0] if others else 0
    for ffn, kv, gated, fused, biases in _blocks(block):
        size = Dimensions(
            hidden=hidden,
            layers=count,
            ffn=ffn,
            heads=1,  # work does not depend on it
            vocabulary=vocabulary,
            kv_width=kv,
            positions=positions,
            gated=gated,
            fused=fused,
            biases=biases,
            tied=head is None,
        )
        if sorted(map(_numel, size.block_shapes)) == sorted(map(_numel, block)):
            yield size, names


def _blocks(block: Sequence[Shape]) -> Iterator[tuple[int, int, bool, bool, bool]]:
    widths = sorted({length for shape in block for length in shape})
    flags = (True, False)
    yield from itertools.product(widths, widths, flags, flags, flags)


def _numel(shape: Shape) -> int:
    product = 1
    for length in shape:
        product *= length
    return product
