"""Views with a shape and an element type."""

from __future__ import annotations

import gc
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memferry_allocator import (
    ClosedError,
    EmulatedDriver,
    InvalidRequestError,
    Mode,
    Place,
    ShadowSpace,
)

from .machine import pattern
from .shadow_world import LAZY, SIZE, World

SIZES = {
    "uint8": 1, "float16": 2, "float32": 4, "float64": 8, "complex128": 16, "bool": 1,
    "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize("place", [Place.DEVICE, Place.MAPPED])
def test_every_element_type_has_its_size(world: World, place: Place, dtype: str) -> None:
    with world.part.acquire(place, Mode.READ, stream=world.stream) as view:
        typed = view.typed(dtype)
        assert (typed.dtype.name, typed.dtype.itemsize) == (dtype, SIZES[dtype])
        assert typed.shape == (SIZE // SIZES[dtype],)
        assert typed.strides == (SIZES[dtype],)
        assert (typed.ptr, typed.nbytes, typed.stream) == (view.ptr, SIZE, world.stream)
        assert typed.read_only


@given(
    shape=st.lists(st.integers(0, 7), max_size=4),
    dtype=st.sampled_from([np.float32, np.dtype("int16"), "complex64", np.float64]),
    offset=st.integers(0, 600),
)
def test_shapes_and_strides_are_numpys(shape: list[int], dtype: Any, offset: int) -> None:
    """A typed view describes what NumPy would make of the same bytes, or is refused where NumPy is."""
    driver = EmulatedDriver()
    with ShadowSpace(driver, device_budget=SIZE) as space:
        part = space.allocate("b", 800, options=LAZY)[0]
        with part.acquire(Place.DEVICE, Mode.READ_WRITE, stream=driver.create_stream(0)) as view:
            size = np.dtype(dtype).itemsize
            if offset % size or offset + math.prod(shape) * size > 800:
                with pytest.raises(InvalidRequestError, match=r"view of b\[0\]"):
                    view.typed(dtype, shape, offset=offset)
                return
            typed = view.typed(dtype, tuple(shape), offset=offset)
            expected = np.ndarray(shape, dtype, buffer=np.zeros(800, np.uint8), offset=offset)
            assert typed.shape == expected.shape
            assert typed.nbytes == expected.nbytes
            assert not expected.size or typed.strides == expected.strides
            assert typed.ptr == view.ptr + offset
            assert not typed.read_only


def test_parts_are_counted_in_elements(world: World) -> None:
    with world.part.acquire(Place.DEVICE, Mode.READ, stream=world.stream) as view:
        whole = view.typed("bfloat16", (4, 8), offset=64)
        part = whole.part(5, (3, 2))
        assert (part.ptr, part.shape, part.strides, part.nbytes) == (view.ptr + 74, (3, 2), (4, 2), 12)
        assert part.part(6).shape == (0,)
        assert whole.part(30).shape == (2,)
        for start, shape in ((33, None), (30, 3), (0, (5, 8)), (-1, None), (1.5, None)):
            with pytest.raises(InvalidRequestError):
                whole.part(start, shape)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "shape", "offset", "match"),
    [
        ("float32", 257, 0, "shape"),
        ("float32", (1 << 62, 1 << 62), 0, "shape"),
        ("float32", (-1, 4), 0, "negative"),
        ("float32", 1.5, 0, "not an integer"),
        ("float32", "12", 0, "not an integer"),
        ("float32", None, 2, "aligned"),
        ("float32", None, SIZE + 4, "beyond"),
        ("float32", None, -4, "negative"),
        ("float32", None, "0", "not an integer"),
        ("float64", None, 4, "aligned"),
        ("complex128", None, 8, "aligned"),
        ("S3", None, 0, "no whole number"),
        ("float31", None, 0, "dtype"),
        (None, None, 0, "dtype"),
        (object, None, 0, "dtype"),
        ("S", None, 0, "dtype"),
        (7, None, 0, "dtype"),
    ],
)
def test_what_does_not_fit(world: World, dtype: Any, shape: Any, offset: Any, match: str) -> None:
    view = world.part.acquire(Place.MAPPED, Mode.READ, stream=world.stream)
    with view, pytest.raises(InvalidRequestError, match=match):
        view.typed(dtype, shape, offset=offset)
    with world.part.acquire(Place.HOST, Mode.READ) as view, pytest.raises(InvalidRequestError, match=match):
        view.array(dtype, shape, offset=offset)


def test_typed_views_end_with_their_view(world: World) -> None:
    view = world.part.acquire(Place.DEVICE, Mode.READ, stream=world.stream)
    typed = view.typed("float32")
    view.release()
    for use in (lambda: typed.ptr, lambda: typed.part(1), lambda: view.typed("float32")):
        with pytest.raises(ClosedError, match="acquire it again"):
            use()
    host = world.part.acquire(Place.HOST, Mode.READ)
    host.release()
    with pytest.raises(ClosedError, match="acquire it again"):
        host.array()


def test_each_place_has_its_kind(world: World) -> None:
    host = world.part.acquire(Place.HOST, Mode.READ)
    with host, pytest.raises(InvalidRequestError, match=r"use array\(\)"):
        host.typed("float32")
    device = world.part.acquire(Place.DEVICE, Mode.READ, stream=world.stream)
    with device, pytest.raises(InvalidRequestError, match=r"use typed\(\)"):
        device.array()


def test_host_arrays_are_the_bytes(world: World) -> None:
    with world.part.acquire(Place.HOST, Mode.READ_WRITE) as view:
        array = view.array(np.float32, (2, 3), offset=8)
        assert array.flags.writeable
        array[:] = 1.5
    expected = pattern(SIZE)
    expected[8:32] = np.frombuffer(np.full(6, 1.5, np.float32).tobytes(), np.uint8)
    assert np.array_equal(world.read(world.part, Place.DEVICE), expected)
    with world.part.acquire(Place.HOST, Mode.READ) as view:
        assert not view.array("float64").flags.writeable
        assert np.array_equal(view.array(), expected)
        with pytest.raises(InvalidRequestError, match="uint16"):
            view.array("bfloat16")
        assert view.array("uint16", 0).shape == (0,)


def test_arrays_keep_the_pages_that_the_space_took(world: World) -> None:
    buffer = world.space.allocate("own", SIZE, options=LAZY)
    with buffer[0].acquire(Place.HOST, Mode.WRITE) as view:
        array = view.array()
        array[:] = 9
    buffer.close()
    gc.collect()
    assert set(array) == {9}
