"""What device kernels must do, whoever runs them: the same cases for every implementation."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import torch

from memferry_allocator import Stream
from memferry_rt.device_kernels import DeviceAdam, DeviceGradients, DeviceMoves, Spread
from memferry_rt.native import AdamSettings, load_adam, load_gradient_kernels

from .updates import State, assert_same_bits, name_of, wide_range


class Machine(ABC):
    """A device under test and its memories."""

    adam: DeviceAdam
    gradients: DeviceGradients
    moves: DeviceMoves
    stream: Stream
    driver: Any

    @abstractmethod
    def put(self, tensor: torch.Tensor, *, mapped: bool, shift: int) -> int:
        """A copy where the device can use it, `shift` elements behind an aligned address: its pointer."""

    @abstractmethod
    def get(self, ptr: int, like: torch.Tensor) -> torch.Tensor:
        """What lies at a pointer that `put` gave, once everything enqueued is done."""

    @abstractmethod
    def release(self) -> None:
        """Give back everything that was put, once everything enqueued is done."""


def check_update(
    machine: Machine,
    settings: AdamSettings,
    dtype: str,
    numel: int,
    *,
    mapped: bool = False,
    elsewhere: bool = False,
    shift: int = 0,
    step: int = 1,
    scale: float = 1.0,
    blocks: int | None = None,
    state: State | None = None,
    gradient: torch.Tensor | None = None,
) -> None:
    """The device's update of random state has the bits of the CPU kernel's."""
    machine.release()
    kernel = load_adam()
    assert kernel is not None
    generator = torch.Generator().manual_seed(numel + step)
    state = State.random(numel, dtype, generator) if state is None else state
    gradient = wide_range(numel, dtype, generator) if gradient is None else gradient
    old = [machine.put(tensor, mapped=mapped, shift=shift) for tensor in state.tensors()]
    new = [machine.put(tensor, mapped=not mapped, shift=shift) for tensor in state.blank().tensors()]
    if not elsewhere:
        new = old
    there = machine.put(gradient, mapped=mapped, shift=shift)
    operands = replace(
        state.operands(gradient),
        parameter=old[0],
        exp_avg=old[1],
        exp_avg_sq=old[2],
        weight=new[3],
        out_parameter=new[0],
        out_exp_avg=new[1],
        out_exp_avg_sq=new[2],
        gradient=there,
    )
    before = state.clone()
    machine.adam.run(machine.stream, machine.adam.prepare(settings, float(step), scale), operands, blocks=blocks)
    got = State(*(machine.get(ptr, like) for ptr, like in zip(new, state.tensors(), strict=True)))
    kernel.run(kernel.prepare(settings, float(step), scale), state.operands(gradient))
    assert_same_bits(state, got)
    assert torch.equal(bits(machine.get(there, gradient)), bits(gradient))
    if elsewhere:
        read = [machine.get(ptr, like) for ptr, like in zip(old, before.tensors(), strict=True)]
        assert_same_bits(before, State(*read), "what was read")


def check_square_sum(machine: Machine, values: torch.Tensor, *, mapped: bool = False, shift: int = 0) -> None:
    """The device's sum has the bits of the CPU kernel's."""
    machine.release()
    kernels = load_gradient_kernels()
    assert kernels is not None
    count, dtype = values.numel(), name_of(values.dtype)
    ptr = machine.put(values, mapped=mapped, shift=shift)
    room = torch.full((machine.gradients.norm_scratch(count) // 8,), -1.0, dtype=torch.float64)
    scratch = machine.put(room, mapped=mapped, shift=0)
    where = machine.gradients.square_sum(machine.stream, ptr, dtype, count, scratch)
    got = machine.get(where, room[-1:]).item()
    expected = kernels.square_sum(values.data_ptr(), dtype, count)
    assert got == expected or (math.isnan(got) and math.isnan(expected))


def check_combine(machine: Machine, target: torch.Tensor, source: torch.Tensor, *, shift: int = 0) -> None:
    """The device's sums and changes of dtype have the bits of the CPU kernels'."""
    machine.release()
    kernels = load_gradient_kernels()
    assert kernels is not None
    into, of = name_of(target.dtype), name_of(source.dtype)
    for add in (False, True):
        there = machine.put(target, mapped=False, shift=shift)
        other = machine.put(source, mapped=True, shift=shift)
        work = machine.gradients.add if add else machine.gradients.convert
        work(machine.stream, there, into, other, of, target.numel())
        expected = target.clone()
        (kernels.add if add else kernels.convert)(expected.data_ptr(), into, source.data_ptr(), of, target.numel())
        got = machine.get(there, target)
        assert bool(((bits(got) == bits(expected)) | (got.isnan() & expected.isnan())).all())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def check_move(
    machine: Machine, width: int, rows: int, gaps: tuple[int, int], spread: Spread, mapped: bool
) -> None:
    """Rows of units arrive, and nothing between them changes."""
    pitches = [width + gap for gap in gaps]
    units = torch.arange(4 * pitches[0] * rows, dtype=torch.float32).view(rows, 4 * pitches[0])
    poison = torch.full((rows, 4 * pitches[1]), float("nan"))
    source, target = (
        machine.put(values.view(-1), mapped=far, shift=0)
        for values, far in ((units, mapped), (poison, not mapped))
    )
    sizes = [16 * size for size in (pitches[1], pitches[0], width)]
    machine.moves.copy_rows(
        target, sizes[0], source, sizes[1], sizes[2], rows, stream=machine.stream, spread=spread
    )
    poison[:, : 4 * width] = units[:, : 4 * width]
    assert torch.equal(machine.get(target, poison.view(-1)).view(torch.int32), poison.view(-1).view(torch.int32))


def check_scatter(machine: Machine, width: int, rows: list[int], left_out: int, zeros: bool, blocks: int) -> None:
    """Rows that are named get values or zeros, but for those left out; the others stay."""
    table = torch.full((max(rows, default=0) + 2, 4 * width), 7.0)
    values = torch.arange(4 * width * len(rows), dtype=torch.float32).view(len(rows), 4 * width)
    skip = torch.tensor([number % 4 == left_out for number in range(len(rows))], dtype=torch.uint8)
    numbers = torch.tensor(rows, dtype=torch.int64)
    places = [machine.put(t.view(-1), mapped=t is table, shift=0) for t in (table, numbers, values, skip)]
    with machine.driver.launch(machine.stream):
        machine.moves.scatter_rows(
            places[0], places[1], 0 if zeros else places[2], places[3] if left_out < 4 else 0, 16 * width,
            len(rows), stream=machine.stream, blocks=blocks,
        )  # fmt: skip
    kept = skip == 0 if left_out < 4 else torch.ones(len(rows), dtype=torch.bool)
    table[numbers[kept]] = 0.0 if zeros else values[kept]
    assert torch.equal(machine.get(places[0], table.view(-1)), table.view(-1))
