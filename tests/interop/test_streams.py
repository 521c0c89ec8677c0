"""Streams of other libraries, borrowed; and ours, lent."""

from __future__ import annotations

from typing import Any

import pytest

from memferry_allocator import DriverError, InvalidRequestError, UnsupportedError
from memferry_allocator.interop import BorrowedStreams, borrow_stream

from .conftest import Bench


class Foreign:
    """A stream of another library, by protocol."""

    def __init__(self, handle: int, version: int = 0) -> None:
        self._answer = (version, handle)

    def __cuda_stream__(self) -> tuple[int, int]:
        return self._answer


class TorchLike:
    def __init__(self, handle: int, index: int = 0) -> None:
        self.cuda_stream = handle
        self.device = type("Device", (), {"index": index})()


class CupyLike:
    def __init__(self, handle: int) -> None:
        self.ptr = handle


def handle_of(bench: Bench) -> int:
    handle = bench.stream.handle
    return int(handle) if bench.driver.name == "cuda" else int(handle.actor)


@pytest.mark.parametrize("kind", [Foreign, TorchLike, CupyLike])
def test_every_kind_is_borrowed(bench: Bench, kind: Any) -> None:
    stream = borrow_stream(bench.driver, 0, kind(handle_of(bench)))
    assert not stream.owned
    stream.record().synchronize()
    stream.close()
    bench.stream.record().synchronize()  # closing what is borrowed does nothing


def test_ours_stays_ours(bench: Bench) -> None:
    assert borrow_stream(bench.driver, 0, bench.stream) is bench.stream


def test_the_default_stream_is_never_meant_by_nothing(bench: Bench) -> None:
    for nothing in (None, object(), "0"):
        with pytest.raises(InvalidRequestError, match="default stream"):
            borrow_stream(bench.driver, 0, nothing)


def test_streams_of_elsewhere_are_refused(bench: Bench, emulated: Bench) -> None:
    with pytest.raises(InvalidRequestError, match="device"):
        borrow_stream(bench.driver, 0, TorchLike(handle_of(bench), index=3))
    with pytest.raises(InvalidRequestError, match="another device or driver"):
        borrow_stream(bench.driver, 0, emulated.stream)
    with pytest.raises(UnsupportedError, match="version 7"):
        borrow_stream(bench.driver, 0, Foreign(1, version=7))
    with pytest.raises(DriverError):
        borrow_stream(emulated.driver, 0, Foreign(123456))


def test_one_stream_however_often_it_is_borrowed(bench: Bench) -> None:
    known = BorrowedStreams(bench.driver, 0)
    first = known[Foreign(handle_of(bench))]
    assert known[CupyLike(handle_of(bench))] is first
    assert known[handle_of(bench)] is first


def test_ours_are_lent_by_protocol(bench: Bench) -> None:
    if bench.driver.name == "cuda":
        assert bench.stream.__cuda_stream__() == (0, int(bench.stream.handle))
        assert int(borrow_stream(bench.driver, 0, Foreign(int(bench.stream.handle))).handle) == handle_of(bench)
    else:
        with pytest.raises(UnsupportedError, match="none of CUDA's"):
            bench.stream.__cuda_stream__()
