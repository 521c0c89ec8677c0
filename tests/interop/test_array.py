"""Views as arrays of other libraries: same bytes, right type, and nobody's memory goes while it is in use."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

from memferry_allocator import ClosedError, InvalidRequestError, Mode, Place, RaceError
from memferry_allocator.interop import (
    Array,
    DeviceType,
    as_device,
    as_host,
    as_pinned,
    element_type,
    from_dlpack,
)
from memferry_allocator.interop.torch_tensor import as_tensor

from .conftest import Bench

NUMPY_TYPES = ["bool", "float16", "float32", "float64", "complex64", "complex128"]
NUMPY_TYPES += [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
TORCH_TYPES = [*NUMPY_TYPES, "bfloat16", "float8_e4m3fn", "float8_e5m2"]


def torch_bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def ones(bench: Bench) -> None:
    """Bytes of which any type may be made, bool too."""
    with bench.view(Place.HOST, Mode.WRITE) as view:
        as_host(view, "uint8").numpy()[:] = 1


# -- the host --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NUMPY_TYPES)
def test_numpy_sees_a_host_view(bench: Bench, name: str) -> None:
    before = bench.content()
    with bench.view(Place.HOST) as view:
        array = as_host(view, name)
        for taken in (array.numpy(), np.from_dlpack(array)):
            assert taken.dtype == np.dtype(name)
            assert taken.nbytes == view.nbytes
            assert np.array_equal(taken.view(np.uint8), before)
        array.numpy().view(np.uint8)[:] = 7
        del array, taken
    assert (bench.content() == 7).all()


@pytest.mark.parametrize("name", TORCH_TYPES)
def test_torch_sees_a_host_view(bench: Bench, name: str) -> None:
    ones(bench)
    with bench.view(Place.HOST) as view:
        array = as_host(view, name, (4, 128))
        for taken in (torch.from_dlpack(array), as_tensor(array)):
            assert taken.dtype is getattr(torch, name)
            assert taken.shape == (4, 128)
            assert (torch_bytes(taken) == 1).all()
            taken.view(torch.uint8)[:] = 0
            taken.view(torch.uint8)[:] = 1
        del array, taken


def test_numpy_has_no_bfloat16(bench: Bench) -> None:
    with bench.view(Place.HOST) as view:
        with pytest.raises(InvalidRequestError, match="no view of bfloat16"):
            as_host(view, "bfloat16").numpy()
        gc.collect()


def test_a_reading_view_gives_read_only_arrays(bench: Bench) -> None:
    with bench.view(Place.HOST, Mode.READ) as view:
        array = as_host(view, "uint8")
        assert not array.numpy().flags.writeable
        assert not np.from_dlpack(array).flags.writeable
        with pytest.raises(BufferError, match="read-only"):
            array.__dlpack__()
        with pytest.raises(InvalidRequestError, match="promise"):
            as_tensor(array)
        assert as_tensor(as_host(view, "uint8", promise_not_to_write=True))[3] == 3
        assert as_host(view, "uint8", promise_not_to_write=True).__dlpack__() is not None
        del array


# -- the device ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("place", [Place.DEVICE, Place.MAPPED])
@pytest.mark.parametrize("name", TORCH_TYPES)
def test_torch_sees_a_device_view(bench: Bench, place: Place, name: str) -> None:
    ones(bench)
    stream = bench.stream
    with bench.view(place) as view:
        tensor = as_tensor(as_device(view, name, (8, 64)))
        assert tensor.dtype is getattr(torch, name)
        assert tensor.is_cuda == (bench.driver.name == "cuda")
        stream.synchronize()
        assert (torch_bytes(tensor) == 1).all()
        raw = tensor.view(torch.uint8)
        raw.fill_(3)
        if tensor.is_cuda:
            torch.cuda.synchronize()
        del tensor, raw
    content = bench.content()
    nbytes = 8 * 64 * element_type(name).itemsize
    assert (content[:nbytes] == 3).all()
    assert (content[nbytes:] == 1).all()


def test_work_on_another_stream_is_noticed(emulated: Bench) -> None:
    """The tensor is the view's stream's: work that nothing orders behind it is a race."""
    other = emulated.driver.create_stream(0)
    with emulated.view(Place.DEVICE) as view, pytest.raises(RaceError):
        emulated.driver.fill(view.ptr, 1, 16, stream=other)
    other.close()


def test_a_reading_view_lets_other_streams_in(bench: Bench) -> None:
    if bench.driver.name != "cuda":
        pytest.skip("streams of consumers are a real device's")
    with bench.view(Place.DEVICE, Mode.READ) as view:
        array = as_device(view, "uint8")
        for _ in range(2):
            array.__dlpack__(stream=1, max_version=(1, 0))
            assert len(view.streams) == 2
        array.__dlpack__(stream=-1, max_version=(1, 0))
        assert len(view.streams) == 2
        with pytest.raises(BufferError, match="per-thread"):
            array.__dlpack__(stream=2, max_version=(1, 0))
        with pytest.raises(BufferError, match="ambiguous"):
            array.__dlpack__(stream=0, max_version=(1, 0))
        del array
        gc.collect()
    with bench.view(Place.DEVICE, Mode.READ_WRITE) as view:
        array = as_device(view, "uint8")
        with pytest.raises(InvalidRequestError, match="one user"):
            array.__dlpack__(stream=1, max_version=(1, 0))
        array.__dlpack__(stream=int(bench.stream.handle), max_version=(1, 0))
        del array
        gc.collect()


# -- shapes ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), (), (1,), (2, 3, 4)])
def test_shapes(bench: Bench, shape: tuple[int, ...]) -> None:
    with bench.view(Place.HOST) as view:
        array = as_host(view, "float32", shape)
        assert array.numpy().shape == shape
        assert torch.from_dlpack(array).shape == shape
        assert as_tensor(array).shape == shape
        assert from_dlpack(array).nbytes == 4 * int(np.prod(shape))
        del array
    with bench.view(Place.DEVICE) as view:
        array = as_device(view, "float32", shape)
        assert as_tensor(array).shape == shape
        if bench.driver.name == "cuda":
            interface = array.__cuda_array_interface__
            assert interface["shape"] == shape
            assert (interface["data"][0] == 0) == (0 in shape)
            assert interface["stream"] not in (0, None)
        del array


def test_what_does_not_fit_is_refused(bench: Bench) -> None:
    with bench.view(Place.HOST) as view:
        for shape in [(64 << 10,), (-1,), (2, -4)]:
            with pytest.raises(InvalidRequestError, match="shape"):
                as_host(view, "float32", shape)
        with pytest.raises(InvalidRequestError, match="dtype"):
            as_host(view, "float7")
        with pytest.raises(InvalidRequestError, match="view in host"):
            as_device(view, "float32")
    with pytest.raises(ClosedError):
        as_host(view, "float32")
    with bench.view(Place.DEVICE) as view, pytest.raises(InvalidRequestError, match="view in device"):
        as_pinned(view, "float32")


@pytest.mark.parametrize("dtype", [np.float32, np.dtype("int16"), torch.bfloat16, "float8_e5m2", float, bool])
def test_types_are_named_in_many_ways(dtype: object) -> None:
    kind = element_type(dtype)
    assert element_type(kind.name) == kind


# -- life ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("take", [torch.from_dlpack, as_tensor])
def test_a_view_is_not_released_under_its_arrays(bench: Bench, take: Callable[[Array], torch.Tensor]) -> None:
    view = bench.view(Place.HOST)
    tensor = take(as_host(view, "uint8"))
    with pytest.raises(InvalidRequestError, match="drop them first"):
        view.release()
    tensor[:] = 5
    del tensor
    view.release()
    assert (bench.content() == 5).all()


def test_arrays_in_a_cycle_do_not_keep_a_view(bench: Bench) -> None:
    view = bench.view(Place.HOST)
    cycle: list[object] = [as_host(view, "uint8").numpy()]
    cycle.append(cycle)
    del cycle
    view.release()


@pytest.mark.parametrize("versioned", [False, True])
def test_a_capsule_nobody_takes_lets_go(bench: Bench, versioned: bool) -> None:
    with bench.view(Place.HOST) as view:
        array = as_host(view, "uint8")
        gone = weakref.ref(array)
        capsule = array.__dlpack__(max_version=(1, 0) if versioned else None)
        del array
        assert gone() is not None
        del capsule
        assert gone() is None


def test_an_array_released_gives_nothing_any_more(bench: Bench) -> None:
    with bench.view(Place.HOST) as view:
        array: Array = as_host(view, "uint8")
        view._exports = None  # as if its owner had let go
    with pytest.raises(ClosedError):
        array.__dlpack__(max_version=(1, 0))
    with pytest.raises(ClosedError):
        _ = array.__array_interface__


def test_asking_for_a_copy_or_another_device_is_refused(bench: Bench) -> None:
    with bench.view(Place.HOST) as view:
        array = as_pinned(view, "uint8")
        with pytest.raises(BufferError, match="shared"):
            array.__dlpack__(copy=True)
        with pytest.raises(BufferError, match="device"):
            array.__dlpack__(dl_device=(2, 0))
        with pytest.raises(BufferError, match="stream"):
            array.__dlpack__(stream=5)
        face = (DeviceType.CUDA_HOST if bench.driver.name == "cuda" else DeviceType.CPU, 0)
        assert array.__dlpack_device__() == face
        assert from_dlpack_device(array.__dlpack__(dl_device=(1, 0))) == (1, 0)
        del array


def from_dlpack_device(capsule: object) -> tuple[int, int]:
    class Producer:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

        def __dlpack__(self, stream: object = None) -> object:
            return capsule

    return from_dlpack(Producer()).device


# -- taking ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", TORCH_TYPES)
def test_torch_tensors_are_taken(name: str) -> None:
    tensor = torch.zeros(6, dtype=getattr(torch, name)).view(2, 3)
    taken = from_dlpack(tensor)
    assert (taken.ptr, taken.shape, taken.strides) == (tensor.data_ptr(), (2, 3), (3, 1))
    assert taken.kind.name == name
    assert taken.nbytes == tensor.nbytes
    assert taken.span == (tensor.data_ptr(), tensor.nbytes)
    assert taken.device == (1, 0)


def test_what_is_taken_outlives_its_producer() -> None:
    source = np.arange(1000, dtype=np.int64)
    gone = weakref.ref(source)
    taken = from_dlpack(source)
    del source
    assert gone() is not None
    del taken
    assert gone() is None


def test_an_array_that_is_not_contiguous_has_no_span() -> None:
    taken = from_dlpack(torch.zeros(4, 6).t())
    assert not taken.contiguous
    with pytest.raises(InvalidRequestError, match="contiguous"):
        _ = taken.span
    assert from_dlpack(torch.zeros(4, 1, 6)[:, :, :]).contiguous


def test_read_only_arrays_are_taken_as_such() -> None:
    source = np.zeros(4)
    source.flags.writeable = False
    assert from_dlpack(source).read_only
    assert not from_dlpack(np.zeros(4)).read_only


def test_nonsense_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="__dlpack__"):
        from_dlpack(object())


def test_host_memory_takes_no_stream(emulated: Bench) -> None:
    with pytest.raises(InvalidRequestError, match="no stream"):
        from_dlpack(np.zeros(3), stream=emulated.stream)


def test_a_capsule_is_taken_once() -> None:
    capsule = np.zeros(3).__dlpack__()

    class Producer:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

        def __dlpack__(self, **_: object) -> object:
            return capsule

    from_dlpack(Producer())
    with pytest.raises(ValueError, match="taken already"):
        from_dlpack(Producer())


def test_arguments_of_the_wrong_kind(emulated: Bench) -> None:
    for wrong in (None, 5, emulated.part):
        for make in (as_host, as_pinned, as_device):
            with pytest.raises(InvalidRequestError, match="no view"):
                make(wrong, "uint8")  # type: ignore[arg-type]
    with emulated.view(Place.HOST) as view:
        for dtype in ([("a", "f4")], {}, [1]):
            with pytest.raises(InvalidRequestError, match="dtype"):
                as_host(view, dtype)  # type: ignore[arg-type]
        for take in (lambda shape: as_host(view, "uint8", shape), lambda shape: view.array("uint8", shape)):
            with pytest.raises(InvalidRequestError, match="70 dimensions"):
                take((1,) * 70)
            assert take((1,) * 64) is not None


def test_producers_that_break_the_protocol() -> None:
    class Producer:
        def __init__(self, device: object) -> None:
            self.device = device
            self.capsule = np.zeros(3).__dlpack__()

        def __dlpack_device__(self) -> object:
            return self.device

        def __dlpack__(self, **_: object) -> object:
            return self.capsule

    for device in (None, 1, (1,), ("x", 0)):
        with pytest.raises(InvalidRequestError, match="__dlpack_device__"):
            from_dlpack(Producer(device))
    once = Producer((1, 0))
    assert from_dlpack(once).shape == (3,)
    with pytest.raises(InvalidRequestError, match="taken already"):
        from_dlpack(once)
