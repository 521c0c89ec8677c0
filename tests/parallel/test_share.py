"""Every trained element belongs to one rank, in parts that the native arithmetic can begin at."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from memferry_rt.layout import LayerLayout, ParameterSpec, lay_out
from memferry_rt.native.adam import VECTOR
from memferry_rt.parallel import Share


@st.composite
def layouts(draw: st.DrawFn) -> LayerLayout:
    specs = [
        ParameterSpec(
            name=str(number),
            numel=draw(st.integers(0, 3000)),
            itemsize=draw(st.sampled_from([2, 4])),
            gradient_itemsize=draw(st.sampled_from([None, 4])),
            trainable=draw(st.booleans()),
            updated=True,
            master=True,
        )
        for number in range(draw(st.integers(1, 6)))
    ]
    return lay_out("layer", specs)


@given(layout=layouts(), size=st.integers(1, 9))
def test_parts_cover_everything_once(layout: LayerLayout, size: int) -> None:
    owners = {index: [0] * slot.spec.numel for index, slot in enumerate(layout.slots)}
    for rank in range(size):
        share = Share(rank, size)
        start, end = share.piece(layout)
        assert 0 <= start <= end <= layout.gradient_nbytes
        assert end - start <= share.piece_nbytes(layout)
        for part in share.parts(layout):
            slot = layout.slots[part.index]
            itemsize = slot.spec.gradient_nbytes // slot.spec.numel
            assert part.start % VECTOR == 0
            assert start <= slot.gradient + part.start * itemsize
            assert slot.gradient + (part.start + part.count) * itemsize <= end
            for element in range(part.start, part.start + part.count):
                owners[part.index][element] += 1
    for index, slot in enumerate(layout.slots):
        assert set(owners[index]) <= {1 if slot.spec.trainable else 0}


@given(layout=layouts(), size=st.integers(1, 9))
def test_pieces_follow_one_another(layout: LayerLayout, size: int) -> None:
    pieces = [Share(rank, size).piece(layout) for rank in range(size)]
    assert pieces[0][0] == 0
    assert pieces[-1][1] == layout.gradient_nbytes
    assert all(one[1] == other[0] for one, other in itertools.pairwise(pieces))


def test_a_layer_smaller_than_its_ranks() -> None:
    layout = lay_out("small", [ParameterSpec("one", 1, 4, True, True, False)])
    found = [Share(rank, 4).parts(layout) for rank in range(4)]
    assert [len(parts) for parts in found] == [1, 0, 0, 0]
