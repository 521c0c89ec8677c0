"""Modes are proved by what was submitted, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import memferry_rt
from memferry_allocator import EmulatedOptions
from memferry_rt import LayerReport, cuts
from memferry_rt.adapters.torch import contributions, exactness, norm
from memferry_rt.adapters.torch.operators import ExactModes

from .models import SEQUENCE, VOCABULARY, WIDTH, Decoder, checkpointed, next_token_loss, plainly, twice

TOKENS = 3 * SEQUENCE
ROW = WIDTH * 4
TABLE = VOCABULARY * ROW


@dataclass(frozen=True)
class Seen:
    """What one step submitted for each layer, and what the runtime says at its end."""

    layers: dict[str, LayerReport]
    report: memferry_rt.Report
    weights: dict[str, int]
    gradients: dict[str, int]


def one_step(plan: Any, *, run: Any = plainly, number: int = 2, micro_steps: int = 1, **options: Any) -> Seen:
    """The last of some steps."""
    torch.manual_seed(0)
    model = Decoder(run, layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    options = {"device_memory": "200KiB", "optimizer_split": "cpu", **options}
    memferry_rt.offload(model, optimizer, device="emulated", emulated=EmulatedOptions(), plan=plan, **options)
    runtime = memferry_rt.runtime_of(model)
    try:
        for _ in range(number):
            before = {layer.name: layer for layer in runtime.report().per_layer}
            for micro in range(micro_steps):
                next_token_loss(model, micro).backward()
            optimizer.step()
            optimizer.zero_grad()
        report = runtime.report()
        sizes = {layer.name: layer.weight_span.nbytes for layer in runtime.layers}
        gradients = {
            layer.name: sum(slot.spec.gradient_nbytes for slot in layer.layout.slots) for layer in runtime.layers
        }
        return Seen(
            {layer.name: _since(layer, before[layer.name]) for layer in report.per_layer},
            report,
            sizes,
            gradients,
        )
    finally:
        memferry_rt.restore(model)


def _since(now: LayerReport, before: LayerReport) -> LayerReport:
    counted = ("copied_in", "copied_out", "read_in_place", "written_in_place")
    differences = {name: getattr(now, name) - getattr(before, name) for name in counted}
    return LayerReport(**{**now.__dict__, **differences})


def test_streamed_layers_are_copied() -> None:
    seen = one_step(None)
    for name in ("embedding", "blocks.0", "blocks.1"):
        layer = seen.layers[name]
        assert (layer.weight_mode, layer.gradient_mode) == ("stream", "buffer")
        assert layer.copied_in in (seen.weights[name], 2 * seen.weights[name])
        assert layer.copied_out == seen.gradients[name]
        assert layer.read_in_place == layer.written_in_place == 0


def test_embedding_in_place_copies_nothing_and_takes_no_slab() -> None:
    seen = one_step("embedding=dha+inplace")
    layer = seen.layers["embedding"]
    assert layer.copied_in == layer.copied_out == layer.pool_nbytes == 0
    assert layer.read_in_place == TOKENS * ROW
    assert 0 < layer.written_in_place <= TABLE
    assert layer.written_in_place % ROW == 0


def test_rows_of_an_embedding_alone_are_written() -> None:
    """Those of this step, and those of the last one that are not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(500, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    memferry_rt.offload(
        model,
        optimizer,
        device="emulated",
        device_memory="100KiB",
        plan={"0": "dha+inplace"},
        optimizer_split="cpu",
    )
    runtime = memferry_rt.runtime_of(model)
    written = []
    for ids in ([3, 7, 3], [7, 9], [9]):
        before = runtime.report().per_layer[0].written_in_place
        model(torch.tensor(ids)).sum().backward()
        written.append((runtime.report().per_layer[0].written_in_place - before) // (8 * 4))
        gradient = model[0].weight.grad
        assert gradient is not None
        assert sorted(gradient.abs().sum(1).nonzero().flatten().tolist()) == sorted(set(ids))
        del gradient  # who keeps it gets the memory
        optimizer.step()
        optimizer.zero_grad()
    memferry_rt.restore(model)
    assert written == [500, 3, 2]


def test_block_that_is_read_at_home_takes_no_slab() -> None:
    layer = one_step({"blocks.*": "dha+inplace"}).layers["blocks.0"]
    assert layer.pool_nbytes == layer.copied_in == 0


@pytest.mark.parametrize("panel", [1 << 20, 2048])
def test_linears_through_the_ring(panel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows for the forward and columns for the input gradient: two copies, and the ring is all they take."""
    monkeypatch.setattr(cuts, "PANEL", panel)
    seen = one_step({"blocks.*": "ring+inplace"})
    matrix = 4 * WIDTH * WIDTH * 4
    for name in ("blocks.0", "blocks.1"):
        layer = seen.layers[name]
        assert layer.copied_in == 2 * 2 * matrix
        assert layer.pool_nbytes == 0
        assert _sent_home(layer) == seen.gradients[name]
        assert layer.read_in_place == 5 * WIDTH * 4 + 2 * 2 * WIDTH * 4  # biases, and the norm twice
    assert seen.report.panels_nbytes == cuts.SLOTS * min(panel, matrix)
    copied = sum(layer.copied_in for layer in seen.report.per_layer)
    assert copied == seen.report.host_to_device_nbytes


def test_block_in_place_reads_its_weights_in_forward_and_linears_again_in_backward() -> None:
    seen = one_step("blocks.*=dha+inplace")
    layer = seen.layers["blocks.0"]
    linears, biases, norm = 2 * 4 * WIDTH * WIDTH * 4, 5 * WIDTH * 4, 2 * WIDTH * 4
    assert layer.read_in_place == 2 * linears + biases + 2 * norm
    assert _sent_home(layer) == seen.gradients["blocks.0"]


def test_loaded_for_backward_alone() -> None:
    seen = one_step("blocks.*=dha_then_load")
    for name in ("blocks.0", "blocks.1"):
        layer = seen.layers[name]
        assert layer.copied_in == seen.weights[name]
        assert layer.read_in_place == sum((2 * 4 * WIDTH * WIDTH * 4, 5 * WIDTH * 4, 2 * WIDTH * 4))


def test_recomputed_forward_loads_what_is_loaded_for_backward() -> None:
    seen = one_step("blocks.*=dha_then_load", run=checkpointed(False), device_memory="100KiB")
    for name in ("blocks.0", "blocks.1"):
        assert seen.layers[name].copied_in == seen.weights[name]


def test_resident_weights_are_copied_once_after_each_update() -> None:
    seen = one_step("blocks.*=resident", device_memory="130KiB")
    for name in ("blocks.0", "blocks.1"):
        assert seen.layers[name].copied_in == seen.weights[name]
        assert seen.layers[name].pool_nbytes >= seen.weights[name]


def test_gradients_in_place_need_no_ring() -> None:
    seen = one_step("*=stream+inplace")
    assert seen.report.ring_nbytes == 0
    assert _sent_home(seen.layers["blocks.0"]) == seen.gradients["blocks.0"]


def test_sums_in_place_are_read_and_written() -> None:
    seen = one_step("blocks.*=stream+inplace", micro_steps=2)
    layer = seen.layers["blocks.0"]
    assert _sent_home(layer) == 2 * seen.gradients["blocks.0"]
    assert layer.read_in_place == seen.gradients["blocks.0"]


def test_streamed_optimizer_state_counts() -> None:
    seen = one_step("blocks.*=dha+inplace", optimizer_split=1.0)
    assert seen.report.streamed_parameters > 0
    layer = seen.layers["blocks.0"]
    assert layer.copied_in > seen.weights["blocks.0"]  # masters and moments


def test_new_weights_of_what_is_read_at_home_go_home() -> None:
    """Also where the device has made them."""
    seen = one_step("blocks.*=dha", optimizer_split=1.0, device_memory="1MiB")
    assert seen.layers["blocks.0"].pool_nbytes == 0


@pytest.mark.parametrize("full", [False, True], ids=["differ", "no-room-to-try"])
def test_panels_that_would_differ_are_not_used(full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the weight is read at home, and its gradient made whole before it is written there."""

    def trial(*_: Any, **__: Any) -> ExactModes:
        if full:
            raise torch.OutOfMemoryError
        return ExactModes(*[False] * 6)

    monkeypatch.setattr(cuts, "PANEL", 2048)
    monkeypatch.setattr(norm, "PIECE", 512)
    monkeypatch.setattr(exactness, "exact_modes", trial)
    dense: list[int] = []
    make = contributions.LinearWeight.dense
    monkeypatch.setattr(contributions.LinearWeight, "dense", lambda self: dense.append(1) or make(self))
    matrix = 4 * WIDTH * WIDTH * 4
    for numerics, copied, made in (("exact", 0, 2 * 2 * 2), ("relaxed", 4 * matrix, 0)):
        dense.clear()
        layer = one_step({"blocks.*": "ring+inplace"}, numerics=numerics).layers["blocks.0"]
        assert layer.copied_in == copied
        assert layer.read_in_place >= 4 * matrix - copied
        assert layer.written_in_place == (2 * matrix if made else 0) + (5 + 2) * WIDTH * 4
        assert layer.copied_out == (0 if made else 2 * matrix)
        assert len(dense) == made


def test_sums_of_one_module_are_made_in_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A linear layer that is called twice never has its gradient in device memory whole."""
    monkeypatch.setattr(norm, "PIECE", 512)
    monkeypatch.setattr(contributions.LinearWeight, "dense", lambda self: pytest.fail("made whole"))
    seen = one_step("blocks.*=dha+inplace", run=twice)
    assert _sent_home(seen.layers["blocks.0"]) == seen.gradients["blocks.0"]


def _sent_home(layer: LayerReport) -> int:
    """Gradients' bytes: in panels by the copy engine, and by kernels."""
    return layer.copied_out + layer.written_in_place
