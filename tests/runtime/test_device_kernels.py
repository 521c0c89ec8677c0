"""Device kernels give the CPU's bits: their source run on the CPU, and the stand-ins on the emulated device."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memferry_allocator import EmulatedOptions, RaceError, open_driver
from memferry_rt.device_kernels import (
    Spread,
    compile,
    module,
    open_device_adam,
    open_device_gradients,
    open_device_moves,
)
from memferry_rt.device_kernels.layout import Coefficients, Operands, aligned_groups
from memferry_rt.errors import DeviceKernelError
from memferry_rt.native import AdamSettings, load_adam
from memferry_rt.native.module import kernels

from .device_cases import Machine, check_combine, check_move, check_scatter, check_square_sum, check_update
from .updates import PLAIN, State, dtypes, lengths, settings_of_adam, where_tails_differ, wide_range

pytestmark = pytest.mark.skipif(load_adam() is None, reason="installed without the native kernels")
ALIGNED = 64


# -- the CUDA source, on the CPU --------------------------------------------------------------------------------
class SourceModule:
    """Stands in for `DeviceModule`: the same calls, into the same source compiled by the host's compiler."""

    sizes = staticmethod(module.DeviceModule.sizes)
    threads = 64

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def launch(
        self,
        name: str,
        stream: Any,
        *,
        threads: int,
        arguments: list[Any],
        blocks: int | None = None,
        block: int = threads,
    ) -> None:
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        block = min(block, self.threads)
        grid = max(1, min(blocks or 2, -(-threads // block)))
        self._library.launch(name.encode(), grid, block, pointers)


class HostDriver(SimpleNamespace):
    """All memory is the host's."""

    name = "cuda"

    def launch(self, *_: Any, **__: Any) -> AbstractContextManager[None]:
        return nullcontext()


class OnTheHost(Machine):
    def __init__(self, driver: Any) -> None:
        self.adam, self.gradients = open_device_adam(driver, 0), open_device_gradients(driver, 0)
        self.moves, self.driver = open_device_moves(driver, 0), driver
        self.stream: Any = None
        self.kept: list[torch.Tensor] = []

    def put(self, tensor: torch.Tensor, *, mapped: bool, shift: int) -> int:
        room = torch.empty(tensor.numel() + shift + ALIGNED, dtype=tensor.dtype)
        first = -(room.data_ptr() // tensor.element_size()) % (ALIGNED // tensor.element_size()) + shift
        self.kept.append(room[first : first + tensor.numel()].copy_(tensor))
        return self.kept[-1].data_ptr()

    def get(self, ptr: int, like: torch.Tensor) -> torch.Tensor:
        raw = (ctypes.c_uint8 * (like.numel() * like.element_size())).from_address(ptr)
        return torch.frombuffer(raw, dtype=like.dtype).clone()

    def release(self) -> None:
        self.kept.clear()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnTheHost]:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    library = tmp_path_factory.mktemp("cuda") / "kernels.so"
    here = Path(__file__).parent
    subprocess.run(
        [compiler, "-std=c++20", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-pthread", "-x", "c++", "-w",
         f"-I{compile.SOURCE.parent}", f"-I{compile.HEADERS[0].parent}", "-o", str(library),
         str(here / "cuda_on_cpu.hpp")],
        check=True,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "open_module", lambda *_: SourceModule(ctypes.CDLL(str(library))))
        yield OnTheHost(HostDriver())


# -- the emulated device ----------------------------------------------------------------------------------------
class Emulated(Machine):
    def __init__(self) -> None:
        self.driver = open_driver("emulated", emulated=EmulatedOptions())
        self.adam, self.gradients = open_device_adam(self.driver, 0), open_device_gradients(self.driver, 0)
        self.moves = open_device_moves(self.driver, 0)
        self.stream = self.driver.create_stream(0)
        self.registered: list[torch.Tensor] = []
        self.allocated: list[int] = []

    def put(self, tensor: torch.Tensor, *, mapped: bool, shift: int) -> int:
        itemsize = tensor.element_size()
        nbytes = (tensor.numel() + shift) * itemsize
        room = torch.empty(tensor.numel() + shift, dtype=tensor.dtype)
        room[shift:] = tensor
        if mapped:
            self.driver.host_register(room.data_ptr(), nbytes)
            self.registered.append(room)
            return self.driver.host_device_pointer(room.data_ptr(), 0) + shift * itemsize
        ptr = self.driver.malloc(0, nbytes)
        self.allocated.append(ptr)
        self.driver.copy(ptr, room.data_ptr(), nbytes, stream=self.stream)
        return ptr + shift * itemsize

    def get(self, ptr: int, like: torch.Tensor) -> torch.Tensor:
        got = torch.empty_like(like)
        self.driver.copy(got.data_ptr(), ptr, like.numel() * like.element_size(), stream=self.stream)
        self.stream.synchronize()
        return got

    def release(self) -> None:
        self.driver.synchronize(0)
        for room in self.registered:
            self.driver.host_unregister(room.data_ptr())
        for ptr in self.allocated:
            self.driver.free(0, ptr)
        self.registered.clear()
        self.allocated.clear()


@pytest.fixture(scope="module")
def emulated() -> Emulated:
    return Emulated()


@pytest.fixture(scope="module", params=["source", "emulated"])
def machine(request: pytest.FixtureRequest) -> Machine:
    found: Machine = request.getfixturevalue(request.param)
    return found


@given(
    chosen=settings_of_adam,
    dtype=dtypes,
    numel=lengths,
    mapped=st.booleans(),
    elsewhere=st.booleans(),
    shift=st.integers(0, 7),
    step=st.integers(1, 1000),
    scale=st.just(1.0) | st.floats(1e-3, 1.0),
    blocks=st.integers(1, 4) | st.none(),
)
def test_updates(machine: Machine, chosen: AdamSettings, dtype: str, numel: int, **chances: Any) -> None:
    check_update(machine, chosen, dtype, numel, **chances)


@pytest.mark.parametrize("numel", [*range(1, 18), 1027])
@pytest.mark.parametrize("shift", [0, 3])
def test_tails(machine: Machine, numel: int, shift: int) -> None:
    state, gradient = where_tails_differ(numel)
    check_update(machine, PLAIN, "float32", numel, shift=shift, state=state, gradient=gradient)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_updates_by_what_is_no_number(machine: Machine, dtype: str) -> None:
    generator = torch.Generator().manual_seed(1)
    state, gradient = State.random(519, dtype, generator), wide_range(519, dtype, generator)
    for number, bad in enumerate((float("inf"), float("-inf"), float("nan"))):
        gradient[number::11], state.parameter[3 + number :: 11] = bad, bad
        state.exp_avg[6 + number :: 22], state.exp_avg_sq[17 + number :: 22] = bad, bad
    check_update(machine, PLAIN, dtype, 519, state=state, gradient=gradient)


@settings(max_examples=20)
@given(dtype=dtypes, numel=lengths | st.integers(4000, 20_000), shift=st.integers(0, 9), mapped=st.booleans())
def test_sums_of_squares(machine: Machine, dtype: str, numel: int, shift: int, mapped: bool) -> None:
    values = wide_range(numel, dtype, torch.Generator().manual_seed(numel))
    check_square_sum(machine, values, mapped=mapped, shift=shift)


@given(target=dtypes, source_dtype=dtypes, numel=lengths, shift=st.integers(0, 5))
def test_additions_and_dtypes(machine: Machine, target: str, source_dtype: str, numel: int, shift: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    check_combine(
        machine, wide_range(numel, target, generator), wide_range(numel, source_dtype, generator), shift=shift
    )


# -- order ------------------------------------------------------------------------------------------------------
def test_an_update_that_races_is_found(emulated: Emulated) -> None:
    state = State.random(100, "float32", torch.Generator().manual_seed(1))
    pointers = [emulated.put(tensor, mapped=False, shift=0) for tensor in [*state.tensors(), torch.rand(100)]]
    other = emulated.driver.create_stream(0)
    prepared = emulated.adam.prepare(PLAIN, 1.0, 1.0)

    def update() -> None:
        emulated.adam.update(
            other, prepared, parameter=pointers[0], exp_avg=pointers[1], exp_avg_sq=pointers[2],
            weight=pointers[3], gradient=pointers[4], gradient_dtype="float32", count=100,
        )  # fmt: skip

    other.wait(emulated.stream.record())
    for ptr in pointers:  # each of them
        emulated.driver.fill(ptr, 0, 8, stream=emulated.stream)
        with pytest.raises(RaceError, match="device Adam"):
            update()
        other.wait(emulated.stream.record())
    update()
    for ptr in pointers:
        with pytest.raises(RaceError, match="device Adam"):
            emulated.driver.fill(ptr, 0, 8, stream=emulated.stream)
    emulated.stream.wait(other.record())
    emulated.driver.fill(pointers[0], 0, 8, stream=emulated.stream)


def test_nothing_to_update_touches_nothing(machine: Machine) -> None:
    machine.adam.update(
        machine.stream, machine.adam.prepare(PLAIN, 1.0, 1.0), parameter=0, exp_avg=0, exp_avg_sq=0, weight=0,
        gradient=0, gradient_dtype="bfloat16", count=0,
    )  # fmt: skip


# -- layout -----------------------------------------------------------------------------------------------------
def test_structures_are_those_of_the_header() -> None:
    native = kernels()
    assert native is not None
    for name, structure in (("memferry_adam_operands", Operands), ("memferry_adam", Coefficients)):
        assert native.ffi.sizeof(name) == ctypes.sizeof(structure)
        for field in structure._fields_:
            assert native.ffi.offsetof(name, field[0]) == getattr(structure, field[0]).offset, field[0]


@given(
    pointers=st.lists(st.tuples(st.integers(0, 100), st.sampled_from([2, 4])), min_size=1, max_size=5),
    count=st.integers(0, 50),
)
def test_groups_are_aligned_and_as_many_as_there_can_be(pointers: list[tuple[int, int]], count: int) -> None:
    arrays = [(4096 + place * itemsize, itemsize) for place, itemsize in pointers]
    head, groups = aligned_groups(arrays, count)
    assert 0 <= head + 4 * groups <= count
    if groups:
        assert all((pointer + head * itemsize) % (4 * itemsize) == 0 for pointer, itemsize in arrays)
        assert count - head - 4 * groups < 4
    elif count >= 7:
        assert len({place % 4 for place, _ in pointers}) > 1


# -- machines without -------------------------------------------------------------------------------------------
def test_without_nvrtc_there_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import nvrtc

    def missing() -> None:
        raise RuntimeError("no libnvrtc.so.13")

    monkeypatch.setattr(nvrtc, "nvrtcVersion", missing)
    compile.compile_kernels.cache_clear()
    with pytest.raises(DeviceKernelError, match="install nvidia-cuda-nvrtc"):
        compile.compile_kernels((9, 0))


def test_without_native_kernels_the_emulated_device_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memferry_rt.device_kernels.adam.load_adam", lambda: None)
    monkeypatch.setattr("memferry_rt.device_kernels.gradients.load_gradient_kernels", lambda: None)
    driver = open_driver("emulated")
    for opening in (open_device_adam, open_device_gradients):
        with pytest.raises(DeviceKernelError, match="gcc"):
            opening(driver, 0)


def test_nvrtc_compiles_the_source_without_contraction() -> None:
    """Where the library is installed; no device is needed for it."""
    try:
        ptx = compile.compile_kernels((99, 0)).decode()
    except DeviceKernelError as error:
        pytest.skip(str(error))
    assert "fma.rn.f32" in ptx
    for loose in (".ftz", ".approx", ".full", "fma.rn.f64", "mad."):
        lines = [line for line in ptx.splitlines() if loose in line and (".f32" in line or ".f64" in line)]
        assert not lines, lines[:3]


# -- moving bytes -------------------------------------------------------------------------------------------------
@given(
    width=st.integers(1, 40),
    rows=st.integers(1, 30),
    gaps=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    spread=st.builds(Spread, st.integers(1, 3), st.booleans(), st.booleans()),
    mapped=st.booleans(),
)
@settings(max_examples=15)
def test_rows_are_moved(
    machine: Machine, width: int, rows: int, gaps: tuple[int, int], spread: Spread, mapped: bool
) -> None:
    check_move(machine, width, rows, gaps, spread, mapped)
    machine.release()


@given(
    width=st.integers(1, 40),
    rows=st.lists(st.integers(0, 60), unique=True, min_size=1, max_size=40),
    left_out=st.integers(0, 4),
    zeros=st.booleans(),
    blocks=st.integers(1, 3),
)
@settings(max_examples=15)
def test_rows_are_scattered(
    machine: Machine, width: int, rows: list[int], left_out: int, zeros: bool, blocks: int
) -> None:
    check_scatter(machine, width, rows, left_out, zeros, blocks)
    machine.release()


def test_rows_that_are_not_aligned_are_refused(machine: Machine) -> None:
    for wrong in [(8, 16, 0, 16, 16), (0, 24, 0, 16, 16), (0, 16, 4, 16, 16), (0, 16, 0, 16, 12)]:
        with pytest.raises(ValueError, match="not aligned"):
            machine.moves.copy_rows(*wrong, 1, stream=machine.stream)
    with pytest.raises(ValueError, match="in parts"):
        machine.moves.copy_rows(0, 1 << 20, 0, 1 << 20, 1 << 20, 1 << 16, stream=machine.stream)
