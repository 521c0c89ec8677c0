"""DLPack's table of C functions: the quick way in and out, as right as the protocol."""

from __future__ import annotations

import ctypes
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from memferry_allocator import ClosedError, InvalidRequestError, Mode, Place, RaceError
from memferry_allocator.interop import DeviceType, as_device, as_host, as_pinned, from_dlpack, torch_tensor
from memferry_allocator.interop.dlpack import EXCHANGE, extension
from memferry_allocator.interop.torch_tensor import as_tensor

from .conftest import MIB, Bench
from .test_array import TORCH_TYPES, ones, torch_bytes

needs_a_table = pytest.mark.skipif(not hasattr(torch.Tensor, EXCHANGE), reason="this torch has no table")


class Table:
    """The table of a library: it refuses memory, having let go of it or not, and gives what is at `gives`."""

    FROM = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(ctypes.c_void_p))
    TO = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
    STREAM = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
    DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    NAME = b"dlpack_exchange_api"

    def __init__(
        self,
        *,
        lets_go: bool = False,
        major: int = 1,
        name: bytes = NAME,
        gives: int = 0,
        stream: int | None = None,
    ) -> None:
        self.lets_go, self.stream = lets_go, stream
        self._shape = (ctypes.c_int64 * 1)(64)
        device, one_dimension_of_bytes = 2, 1 | 0x10801 << 32
        self._tensor = (ctypes.c_uint64 * 10)(
            1, 0, 0, 0, gives, device, one_dimension_of_bytes, ctypes.addressof(self._shape)
        )
        self._functions = (self.FROM(self._from), self.TO(self._to), self.STREAM(self._stream))
        given, made, stream = (ctypes.cast(function, ctypes.c_void_p).value for function in self._functions)
        self._words = (ctypes.c_uint64 * 7)(major, 0, 0, given or 0, made or 0, 0, stream or 0)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        self._name = name
        self.capsule: Any = new(ctypes.addressof(self._words), self._name, None)

    def _from(self, source: object, out: Any) -> int:
        if not self._tensor[4]:
            return -1
        out[0] = ctypes.addressof(self._tensor)
        return 0

    def _to(self, form: int, out: Any) -> int:
        if self.lets_go:
            deleter = ctypes.c_void_p.from_address(form + 16).value
            assert deleter is not None
            self.DELETER(deleter)(form)
        return -1

    def _stream(self, kind: int, device: int, out: Any) -> int:
        if self.stream is None:
            return -1
        out[0] = self.stream
        return 0


# -- taking ----------------------------------------------------------------------------------------------
@needs_a_table
@pytest.mark.parametrize("name", TORCH_TYPES)
def test_a_tensor_is_taken_without_its_protocol(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.Tensor, "__dlpack__", None)
    whole = torch.zeros(4, 6, dtype=getattr(torch, name))
    tensor = whole.t()[2:, 1:]
    taken = from_dlpack(tensor)
    assert (taken.ptr, taken.shape, taken.strides) == (tensor.data_ptr(), (4, 3), (1, 6))
    assert (taken.kind.name, taken.device, taken.read_only) == (name, (1, 0), False)
    assert repr(taken).startswith(f"Imported(ptr={tensor.data_ptr():#x}, shape=(4, 3)")


def test_what_was_taken_of_a_tensor_is_kept_and_let_go() -> None:
    source = np.arange(1000)
    tensor = torch.from_numpy(source)
    gone = weakref.ref(source)
    taken = from_dlpack(tensor)
    del source, tensor
    assert gone() is not None
    del taken
    gc.collect()
    assert gone() is None


def test_tensors_that_the_protocol_refuses_are_refused() -> None:
    for refused in (
        torch.zeros(3, requires_grad=True),
        torch.nn.Parameter(torch.zeros(3)),
        torch.zeros(3, dtype=torch.complex64).conj(),
        torch.eye(3).to_sparse(),
    ):
        with pytest.raises(BufferError, match="Can't export"):
            from_dlpack(refused)
    assert from_dlpack(torch.nn.Parameter(torch.zeros(3), requires_grad=False)).shape == (3,)


def test_a_tensor_on_the_host_takes_no_stream(emulated: Bench) -> None:
    with pytest.raises(InvalidRequestError, match="no stream"):
        from_dlpack(torch.zeros(3), stream=emulated.stream)


@pytest.mark.parametrize("table", [Table(), Table(major=2), Table(name=b"other"), 5])
def test_a_table_that_does_not_help_leaves_the_protocol(table: Any) -> None:
    class Producer:
        __dlpack_c_exchange_api__ = table.capsule if isinstance(table, Table) else table
        source = np.arange(3)

        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

        def __dlpack__(self, **wanted: object) -> object:
            return self.source.__dlpack__()

    assert from_dlpack(Producer()).ptr == Producer.source.ctypes.data


@needs_a_table
def test_a_subclass_answers_for_itself() -> None:
    class Other(torch.Tensor):
        def __dlpack__(self, **wanted: Any) -> Any:
            return np.arange(5).__dlpack__()

    assert from_dlpack(torch.zeros(3).as_subclass(Other)).shape == (5,)


@pytest.mark.parametrize("same", [True, False])
def test_the_stream_follows_the_one_the_producer_works_on(emulated: Bench, same: bool) -> None:
    driver = emulated.driver
    consumer = driver.create_stream(0)
    producer = consumer if same else driver.create_stream(0)
    ptr = driver.malloc(0, 64)
    table = Table(gives=ptr, stream=int(producer.handle))

    class Producer:
        __dlpack_c_exchange_api__ = table.capsule

    driver.fill(ptr, 7, 64, stream=producer)
    if not same:
        with pytest.raises(RaceError):
            driver.fill(ptr, 8, 64, stream=consumer)
    with pytest.raises(InvalidRequestError, match="name the stream"):
        from_dlpack(Producer())
    taken = from_dlpack(Producer(), stream=consumer)
    assert (taken.ptr, taken.shape, taken.strides, taken.device) == (ptr, (64,), (1,), (2, 0))
    driver.fill(ptr, 8, 64, stream=consumer)
    driver.synchronize(0)
    table.stream = None  # the library no longer knows its stream: what it gave is let go, and the protocol asked
    with pytest.raises(InvalidRequestError, match="no __dlpack__"):
        from_dlpack(Producer(), stream=consumer)
    driver.free(0, ptr)
    for stream in {producer, consumer}:
        stream.close()


@pytest.mark.gpu
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("own", [True, False])
def test_tensors_of_a_device_are_taken_in_order(
    monkeypatch: pytest.MonkeyPatch, bench: Bench, direct: bool, own: bool
) -> None:
    """What torch still writes, on its default stream or another, is there for our stream."""
    if bench.driver.name != "cuda":
        pytest.skip("a real device's")
    if not direct:
        monkeypatch.setattr("memferry_allocator.interop.dlpack.EXCHANGE", "no such table")
    tensor = torch.zeros(16 * MIB, dtype=torch.int32, device="cuda")
    got = torch.zeros(16 * MIB, dtype=torch.int32, pin_memory=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream() if own else torch.cuda.default_stream()):
        for number in range(1, 4):
            for step in range(20):
                tensor.fill_(step)
            tensor.fill_(number)
            taken = from_dlpack(tensor, stream=bench.stream)
            assert (taken.ptr, taken.device) == (tensor.data_ptr(), (2, 0))
            bench.driver.copy(got.data_ptr(), taken.ptr, taken.nbytes, stream=bench.stream)
            bench.stream.synchronize()
            assert bool((got == number).all())
        with pytest.raises(InvalidRequestError, match="name the stream"):
            from_dlpack(tensor)


# -- giving ----------------------------------------------------------------------------------------------
@needs_a_table
@pytest.mark.parametrize("place", [Place.HOST, Place.DEVICE, Place.MAPPED])
def test_a_tensor_is_made_without_a_capsule(monkeypatch: pytest.MonkeyPatch, bench: Bench, place: Place) -> None:
    monkeypatch.delattr(torch_tensor, "_by_capsule")
    with bench.view(place) as view:
        array = (as_host if place is Place.HOST else as_device)(view, "int16", (3, 1, 5))
        tensor = as_tensor(array)
        assert (tensor.shape, tensor.stride(), tensor.dtype) == ((3, 1, 5), (5, 5, 1), torch.int16)
        assert tensor.data_ptr() == array.ptr
        del array, tensor


@pytest.mark.parametrize("name", TORCH_TYPES)
def test_a_torch_without_a_table_gets_capsules(monkeypatch: pytest.MonkeyPatch, bench: Bench, name: str) -> None:
    monkeypatch.setattr(torch_tensor, "_exchange", lambda _: None)
    ones(bench)
    with bench.view(Place.HOST) as view:
        tensor = as_tensor(as_host(view, name, (4, 128)))
        assert (tensor.dtype, tensor.shape) == (getattr(torch, name), (4, 128))
        assert (torch_bytes(tensor) == 1).all()
        del tensor


@pytest.mark.parametrize("lets_go", [False, True])
def test_a_library_that_refuses_holds_nothing(emulated: Bench, lets_go: bool) -> None:
    """Whether it had let go of the memory already or not."""
    table = Table(lets_go=lets_go)
    with emulated.view(Place.HOST) as view:
        array = as_host(view, "uint8")
        gone = weakref.ref(array)
        with pytest.raises(BufferError, match="no reason"):
            extension().make_object(array, array.ptr, array.shape, 0x10801, 1, 0, table.capsule)
        del array
        assert gone() is None


@pytest.mark.parametrize("shape", [(4, 4), (0,)])
@pytest.mark.parametrize("direct", [True, False])
def test_page_locked_memory_is_the_cpu_s(
    monkeypatch: pytest.MonkeyPatch, bench: Bench, shape: tuple[int, ...], direct: bool
) -> None:
    if not direct:
        monkeypatch.setattr(torch_tensor, "_exchange", lambda _: None)
    with bench.view(Place.HOST) as view:
        array = as_pinned(view, "int32", shape)
        array.device = (DeviceType.CUDA_HOST, 0)  # as with CUDA
        tensor = as_tensor(array)
        assert (tensor.device, tensor.shape) == (torch.device("cpu"), shape)
        if bench.driver.name == "cuda" and tensor.numel():
            assert tensor.is_pinned()
        del array, tensor


def test_a_released_view_makes_no_tensor(emulated: Bench) -> None:
    view = emulated.view(Place.HOST)
    array = as_host(view, "uint8")
    view._exports = None  # as if its owner had let go
    view.release()
    with pytest.raises(ClosedError):
        as_tensor(array)


def test_the_extension_refuses_what_it_cannot_describe(emulated: Bench) -> None:
    make = extension().make
    for wrong in (
        (),
        (None, 0, [1], 0x10801, 1, 0, False, False),
        (None, -1, (1,), 0x10801, 1, 0, False, False),
        (None, 0, ("1",), 0x10801, 1, 0, False, False),
        (None, 0, (1,) * 65, 0x10801, 1, 0, False, False),
        (None, 0, (1 << 63,), 0x10801, 1, 0, False, False),
    ):
        with pytest.raises((TypeError, ValueError, OverflowError, SystemError)):
            make(*wrong)
    with pytest.raises(ValueError, match="incorrect name"):
        extension().make_object(None, 0, (1,), 0x10801, 1, 0, Table(name=b"other").capsule)
    with pytest.raises(BufferError, match="version 2"):
        extension().take_object(None, Table(major=2).capsule)


def test_reading_views_stay_refused(emulated: Bench) -> None:
    with emulated.view(Place.HOST, Mode.READ) as view:
        with pytest.raises(InvalidRequestError, match="promise"):
            as_tensor(as_host(view, "uint8"))
        assert as_tensor(as_host(view, "uint8", promise_not_to_write=True)).shape == (view.nbytes,)
