"""Budgets: never exceeded, and refused before anything changes where nothing can fit."""

from __future__ import annotations

import contextlib
import types
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import memferry_rt
from memferry_allocator import EmulatedOptions, InvalidRequestError, MemFerryError
from memferry_rt import BudgetError
from memferry_rt.adapters.torch.budget import plan_budget
from memferry_rt.adapters.torch.modes import LayerPlan
from memferry_rt.layout import LayerLayout, ParameterSpec, lay_out
from memferry_rt.plan import WeightMode

from .harness import Job, assert_same, offloaded, plain
from .models import Block, Decoder, next_token_loss


def _offload(model: nn.Module, **options: object) -> None:
    memferry_rt.offload(model, torch.optim.AdamW(model.parameters()), device="emulated", **options)


@pytest.mark.parametrize("tied", [False, True])
def test_the_smallest_budget_that_works_is_named_and_works(tied: bool) -> None:
    model = Decoder(tied=tied)
    pointers = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(BudgetError) as caught:
        _offload(model, device_memory=1024)
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert not model._forward_hooks
    smallest = caught.value.smallest
    with pytest.raises(BudgetError, match=str(smallest)):
        _offload(model, device_memory=smallest - 1)
    job = Job(lambda: Decoder(tied=tied), next_token_loss, steps=5)
    assert_same(plain(job), offloaded(job, device_memory=smallest))


class Container(nn.Module):
    """Owns a large parameter and blocks that run inside its forward: both are needed at once."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(600, 512))
        self.blocks = nn.ModuleList(Block(32) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table[ids][..., :32]
        for block in self.blocks:
            x = block(x) + self.table[ids][..., 32:64]
        return x


def test_a_container_and_what_runs_inside_it_fit_together() -> None:
    with pytest.raises(BudgetError, match=r"\(root\) and blocks") as caught:
        _offload(Container(), device_memory=600 * 512 * 4 + 10_000)
    job = Job(
        Container,
        lambda model, number: model(torch.arange(number, number + 5)).square().mean(),
        steps=4,
    )
    assert_same(plain(job), offloaded(job, device_memory=caught.value.smallest))


def test_host_memory_is_bounded_and_named() -> None:
    model = Decoder()
    with pytest.raises(BudgetError, match="host_memory") as caught:
        _offload(model, device_memory="1MiB", host_memory="100KiB")
    _offload(model, device_memory="1MiB", host_memory=caught.value.smallest)
    runtime = memferry_rt.runtime_of(model)
    assert runtime.report().host_nbytes - caught.value.smallest < 4096  # whole pages
    memferry_rt.restore(model)


def test_a_pool_given_by_hand() -> None:
    with pytest.raises(BudgetError, match=r"^device_memory: 1.00 MiB .* pool_memory .* works is 2048KiB"):
        _offload(Decoder(), device_memory="1MiB", pool_memory="2MiB")
    with pytest.raises(BudgetError, match="pool_memory"):
        _offload(Decoder(), device_memory="1MiB", pool_memory=1024)
    model = Decoder()
    _offload(model, device_memory="1MiB", pool_memory="300KiB")
    assert memferry_rt.runtime_of(model).report().pool_nbytes == 300 << 10
    memferry_rt.restore(model)


@pytest.mark.parametrize("size", ["24GB", "-1GiB", "", "lots", 0, -5, 1.5, None, True])
def test_sizes_that_are_none(size: object) -> None:
    with pytest.raises(InvalidRequestError, match="device_memory"):
        _offload(Decoder(), device_memory=size)


def test_more_than_the_device_has() -> None:
    with pytest.raises(InvalidRequestError, match="more than the device has"):
        _offload(Decoder(), device_memory="2MiB", emulated=EmulatedOptions(device_memory=1 << 20))


@pytest.mark.parametrize("device", ["cuda:0", "tpu", "emulated:3", "auto:1", "emulated:x"])
def test_devices_that_are_not_there(device: str) -> None:
    model = Decoder()
    if device == "cuda:0" and torch.cuda.is_available():
        pytest.skip("this machine has one")
    with pytest.raises(MemFerryError):
        memferry_rt.offload(model, torch.optim.AdamW(model.parameters()), device=device, device_memory="1MiB")


def test_a_model_without_parameters() -> None:
    model = nn.Sequential(nn.ReLU())
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    with pytest.raises(MemFerryError):
        memferry_rt.offload(model, optimizer, device="emulated", device_memory="1MiB")


def test_layers_named_by_hand() -> None:
    job = Job(Decoder, next_token_loss, steps=4)
    assert_same(plain(job), offloaded(job, share=1.0, layers=["blocks.0", "blocks.1.up"]))
    with pytest.raises(MemFerryError, match="nowhere"):
        _offload(Decoder(), device_memory="1MiB", layers=["nowhere"])


def test_host_memory_does_not_grow_over_steps() -> None:
    """Everything is allocated once: later iterations take no new pinned pages and no new device blocks."""
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters())
    memferry_rt.offload(model, optimizer, device="emulated", device_memory="120KiB")
    runtime = memferry_rt.runtime_of(model)
    seen = set()
    for number in range(6):
        next_token_loss(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number > 1:
            seen.add((runtime.driver.registered, runtime.memory.space.pool.peak, runtime.report().host_nbytes))
    assert len(seen) == 1
    memferry_rt.restore(model)


class FakeCuda:
    """What torch tells of one device, and takes: reserved bytes, their peak, and a cap."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, cached: int, held: int) -> None:
        self.reserved = self.peak = cached + held
        self.held = held
        self.fraction = 1.0
        properties = types.SimpleNamespace(total_memory=1 << 30)
        for name, value in {
            "get_device_properties": lambda device: properties,
            "set_per_process_memory_fraction": self._cap,
            "empty_cache": self._empty,
            "reset_peak_memory_stats": self._reset,
            "max_memory_reserved": lambda device: self.peak,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def _cap(self, fraction: float, device: int) -> None:
        self.fraction = fraction

    def _empty(self) -> None:
        self.reserved = self.held

    def _reset(self, device: int) -> None:
        self.peak = self.reserved

    def reserve(self, nbytes: int) -> None:
        self.reserved += nbytes
        self.peak = max(self.peak, self.reserved)


def test_what_torch_reserved_before_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch, cached=400 << 20, held=8 << 20)
    layers = [layout(f"layer{number}", 16 << 20) for number in range(8)]
    budget = plan_budget(256 << 20, layers, [(number,) for number in range(8)], pool=None, device=0)
    budget.begin()
    assert cuda.fraction == budget.torch_limit / (1 << 30)
    cuda.reserve(40 << 20)
    assert budget.peak(0) == budget.pool + (48 << 20) <= budget.total
    larger = budget.after_first_step()
    assert larger is not None
    assert larger.pool > budget.pool
    larger.apply()  # the peak of the first step still counts
    assert larger.peak(0) == larger.pool + (48 << 20) <= budget.total


@given(torch_nbytes=st.integers(1 << 20, 4 << 30), sizes=st.lists(st.integers(1, 200), min_size=1, max_size=8))
def test_the_smallest_total_leaves_torch_what_it_needs(torch_nbytes: int, sizes: list[int]) -> None:
    layers = [layout(f"layer{index}", size << 20) for index, size in enumerate(sizes)]
    groups = [(index,) for index in range(len(layers))]
    first = plan_budget(64 << 30, layers, groups, pool=None, device=0)
    smallest = first.smallest_for(torch_nbytes)
    assert plan_budget(smallest, layers, groups, pool=None, device=0).torch_limit >= torch_nbytes
    with contextlib.suppress(BudgetError):
        assert plan_budget(smallest - 2, layers, groups, pool=None, device=0).torch_limit < torch_nbytes


def layout(name: str, nbytes: int) -> LayerLayout:
    spec = ParameterSpec("weight", nbytes // 4, 4, trainable=True, updated=True, master=False)
    return lay_out(name, [spec])


def test_a_plan_that_needs_little_leaves_the_next_one_its_pool() -> None:
    layers = [layout(f"{number}", 4 << 20) for number in range(8)]
    groups = [(number,) for number in range(8)]
    default = plan_budget(256 << 20, layers, groups, pool=None, device=0)
    default = replace(default, pool=default.wanted).shared()
    little = plan_budget(
        256 << 20, layers, [], pool=None, device=0, plans=[LayerPlan(WeightMode.DHA)] * len(layers)
    ).replacing(default)
    assert little.pool < default.pool
    again = plan_budget(256 << 20, layers, groups, pool=None, device=0).replacing(little)
    assert again.pool == default.pool
