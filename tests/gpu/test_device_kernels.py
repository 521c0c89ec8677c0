"""On a real device: the kernels that NVRTC compiles have the bits of the CPU's, whatever memory they work on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memferry_allocator import open_driver
from memferry_rt.device_kernels import MAPPED_BLOCKS, open_device_adam, open_device_gradients, open_device_moves
from memferry_rt.native import AdamSettings, load_adam

from ..runtime.device_cases import Machine, check_combine, check_square_sum, check_update
from ..runtime.updates import PLAIN, State, dtypes, settings_of_adam, where_tails_differ, wide_range

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(load_adam() is None, reason="installed without the native kernels"),
]
lengths = st.integers(1, 40) | st.integers(1, 5000) | st.integers(100_000, 300_000)


class Cuda(Machine):
    def __init__(self) -> None:
        self.driver = open_driver("cuda")
        self.driver.memory_info(0)
        self.adam, self.gradients = open_device_adam(self.driver, 0), open_device_gradients(self.driver, 0)
        self.moves = open_device_moves(self.driver, 0)
        self.stream = self.driver.create_stream(0)
        self.registered: list[torch.Tensor] = []
        self.allocated: list[int] = []

    def put(self, tensor: torch.Tensor, *, mapped: bool, shift: int) -> int:
        itemsize = tensor.element_size()
        nbytes = (tensor.numel() + shift) * itemsize
        room = torch.empty(-(-nbytes // 4096) * 4096 + 4096, dtype=torch.uint8)
        room = room[-room.data_ptr() % 4096 :][: -(-nbytes // 4096) * 4096]  # pages of its own
        room[shift * itemsize : nbytes] = tensor.view(torch.uint8)
        if mapped:
            self.driver.host_register(room.data_ptr(), room.numel())
            self.registered.append(room)
            return self.driver.host_device_pointer(room.data_ptr(), 0) + shift * itemsize
        ptr = self.driver.malloc(0, nbytes)
        self.allocated.append(ptr)
        self.driver.copy(ptr, room.data_ptr(), nbytes, stream=self.stream)
        self.stream.synchronize()
        return ptr + shift * itemsize

    def get(self, ptr: int, like: torch.Tensor) -> torch.Tensor:
        got = torch.empty_like(like)
        self.driver.copy(got.data_ptr(), ptr, like.numel() * like.element_size(), stream=self.stream)
        self.stream.synchronize()
        return got

    def release(self) -> None:
        self.stream.synchronize()
        for room in self.registered:
            self.driver.host_unregister(room.data_ptr())
        for ptr in self.allocated:
            self.driver.free(0, ptr)
        self.registered.clear()
        self.allocated.clear()


@pytest.fixture(scope="module")
def machine() -> Iterator[Cuda]:
    machine = Cuda()
    yield machine
    machine.release()
    machine.stream.close()


@given(
    chosen=settings_of_adam,
    dtype=dtypes,
    numel=lengths,
    mapped=st.booleans(),
    elsewhere=st.booleans(),
    shift=st.integers(0, 7),
    step=st.integers(1, 1000),
    scale=st.just(1.0) | st.floats(1e-3, 1.0),
    blocks=st.sampled_from([1, MAPPED_BLOCKS, None]),
)
def test_updates(machine: Cuda, chosen: AdamSettings, dtype: str, numel: int, **chances: Any) -> None:
    check_update(machine, chosen, dtype, numel, **chances)


@pytest.mark.slow
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_many_elements(machine: Cuda, dtype: str, mapped: bool) -> None:
    check_update(machine, PLAIN, dtype, (1 << 24) + 3, mapped=mapped, step=9, scale=0.3)


@pytest.mark.parametrize("numel", [*range(1, 18), 1027])
@pytest.mark.parametrize("shift", [0, 3])
def test_tails(machine: Cuda, numel: int, shift: int) -> None:
    state, gradient = where_tails_differ(numel)
    check_update(machine, PLAIN, "float32", numel, shift=shift, state=state, gradient=gradient)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_updates_by_what_is_no_number(machine: Cuda, dtype: str, mapped: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    state, gradient = State.random(519, dtype, generator), wide_range(519, dtype, generator)
    for number, bad in enumerate((math.inf, -math.inf, math.nan)):
        gradient[number::11], state.parameter[3 + number :: 11] = bad, bad
        state.exp_avg[6 + number :: 22], state.exp_avg_sq[17 + number :: 22] = bad, bad
    check_update(machine, PLAIN, dtype, 519, mapped=mapped, state=state, gradient=gradient)


def test_subnormals(machine: Cuda) -> None:
    state = State(*(torch.full((4099,), 2e-39) for _ in range(3)), weight=torch.zeros(4099).bfloat16())
    check_update(machine, PLAIN, "float32", 4099, state=state, gradient=torch.full((4099,), 3e-39))


@given(dtype=dtypes, numel=lengths, shift=st.integers(0, 9), mapped=st.booleans())
def test_sums_of_squares(machine: Cuda, dtype: str, numel: int, shift: int, mapped: bool) -> None:
    values = wide_range(numel, dtype, torch.Generator().manual_seed(numel))
    check_square_sum(machine, values, mapped=mapped, shift=shift)


def test_a_sum_of_many_blocks(machine: Cuda) -> None:
    check_square_sum(machine, torch.randn(4096 * 4096 + 12345).bfloat16())


@given(target=dtypes, source=dtypes, numel=lengths, shift=st.integers(0, 5))
def test_additions_and_dtypes(machine: Cuda, target: str, source: str, numel: int, shift: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    check_combine(machine, wide_range(numel, target, generator), wide_range(numel, source, generator), shift=shift)


def test_torch_s_own_streams_order_the_update(machine: Cuda) -> None:
    """On the default stream and on another of torch's, between torch's kernels."""
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            state = State.random(1 << 20, "float32", torch.Generator().manual_seed(1))
            there = State(*(tensor.cuda() for tensor in state.tensors()))
            gradient = torch.rand(1 << 20)
            made = gradient.cuda() * 2 - 1
            ours = machine.driver.stream_from_handle(0, stream.cuda_stream)
            machine.adam.run(ours, machine.adam.prepare(PLAIN, 1.0, 1.0), there.operands(made))
            doubled = there.parameter * 2
        kernel = load_adam()
        assert kernel is not None
        same = gradient * 2 - 1  # operands are addresses: what they are of must have a name
        kernel.run(kernel.prepare(PLAIN, 1.0, 1.0), state.operands(same))
        torch.cuda.synchronize()
        assert torch.equal(doubled.cpu(), state.parameter * 2)
