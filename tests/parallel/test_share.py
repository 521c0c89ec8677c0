"""Every trained element belongs to one rank, in parts that the native arithmetic can begin at."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memferry_rt import UnsupportedError
from memferry_rt.layout import LayerLayout, ParameterSpec, lay_out
from memferry_rt.native.adam import VECTOR
from memferry_rt.parallel import Share, count_hosts, held_nbytes, held_spans, parts_between


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


@given(layout=layouts(), each=st.integers(1, 4), hosts=st.integers(1, 3))
def test_parts_cover_everything_once(layout: LayerLayout, each: int, hosts: int) -> None:
    owners = {index: [0] * slot.spec.numel for index, slot in enumerate(layout.slots)}
    for rank in range(each * hosts):
        share = Share(rank, each * hosts, hosts)
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


def _follow(pieces: list[tuple[int, int]]) -> bool:
    return all(one[1] == other[0] for one, other in itertools.pairwise(pieces))


@given(layout=layouts(), each=st.integers(1, 4), hosts=st.integers(1, 3))
def test_pieces_of_peers_are_their_column(layout: LayerLayout, each: int, hosts: int) -> None:
    columns = []
    for rank in range(each):
        share = Share(rank, each * hosts, hosts)
        pieces = [peer.piece(layout) for peer in share.peers]
        assert _follow(pieces)
        columns.append((pieces[0][0], pieces[-1][1]))
        for peer in share.peers:
            assert peer.local == rank
            assert peer.column(layout) == columns[-1]
        assert columns[-1][1] - columns[-1][0] <= share.column_nbytes(layout)
        assert share.column_parts(layout) == parts_between(layout, *columns[-1])
    assert columns[0][0] == 0
    assert columns[-1][1] == layout.gradient_nbytes
    assert _follow(columns)


@given(layout=layouts(), each=st.integers(1, 4), hosts=st.integers(1, 3))
def test_hosts_hold_all_state_once_and_nothing_else(layout: LayerLayout, each: int, hosts: int) -> None:
    copies = np.zeros(layout.state_nbytes, np.int64)
    for host in range(hosts):
        share = Share(host * each, each * hosts, hosts)
        spans = held_spans([layout, layout], share, 512)
        assert held_nbytes([layout, layout], share) == sum(span.nbytes for span in spans)
        slabs = layout.weight_nbytes + layout.gradient_nbytes
        first, *others = [span for span in spans if span.ptr < 512 + layout.host_nbytes]
        assert first == (512, slabs)
        for ptr, nbytes in others:
            copies[ptr - 512 - slabs :][:nbytes] += 1
    places = np.zeros_like(copies)
    for slot in layout.slots:
        for place in (slot.master, *slot.state.values()) if slot.spec.trainable else ():
            places[place : place + 4 * slot.spec.numel] = 1
    assert np.array_equal(copies if hosts > 1 else places, places)


def test_hosts_are_counted() -> None:
    assert count_hosts(["a x"]) == 1
    assert count_hosts(["a x", "a x", "b x", "b x"]) == 2
    assert count_hosts(["b x", "a x", "c x"]) == 3
    for keys in (["a", "b", "b"], ["a", "b", "a", "b"], ["a", "a", "b"]):
        with pytest.raises(UnsupportedError, match="rank 0 on a, rank 1 on"):
            count_hosts(keys)


def test_a_layer_smaller_than_its_ranks() -> None:
    layout = lay_out("small", [ParameterSpec("one", 1, 4, True, True, False)])
    found = [Share(rank, 4).parts(layout) for rank in range(4)]
    assert [len(parts) for parts in found] == [1, 0, 0, 0]
