"""Costs and machines: formulas against what was measured, and numbers with their sources."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memferry_rt.adapters.torch import budget
from memferry_rt.errors import PlanError
from memferry_rt.plan import (
    H200,
    Batch,
    Copy,
    CopySample,
    Dimensions,
    GradientMode,
    LayerKind,
    LayerProfile,
    Phase,
    Profile,
    Timing,
    WeightMode,
    WeightPlace,
    Workload,
    machine_from_profile,
    machine_from_topology,
    make_layer,
)
from memferry_rt.plan import choice as planned
from memferry_rt.plan.cost import Work, costs
from memferry_rt.plan.model import slab_sizes
from memferry_transport.topology import machine

from .machines import LLAMA_1B, decoder


def linear(tokens: int) -> Workload:
    """``x @ W.T`` with W of 11008 x 4096, as in the measurements."""
    layer = make_layer(
        "layer",
        LayerKind.LINEAR,
        [(11008, 4096)],
        "bfloat16",
        flops=2 * tokens * 11008 * 4096,
        traffic_nbytes=0,
        kernels=1,
    )
    return Workload("linear", (layer,), "bfloat16", 1, tokens, 0)


@pytest.mark.parametrize(
    ("tokens", "seconds"), [(256, 2.1e-3), (512, 4.3e-3), (1024, 8.8e-3), (4096, 40e-3), (16384, 157e-3)]
)
def test_a_product_with_its_weight_in_host_memory_takes_what_was_measured(tokens: int, seconds: float) -> None:
    work = costs(linear(tokens), H200)[0].forward[WeightMode.DHA]
    assert work.alone(H200) == pytest.approx(seconds, rel=0.15)


@pytest.mark.parametrize(("tokens", "seconds"), [(1024, 0.19e-3), (8192, 1.4e-3), (32768, 5.3e-3)])
def test_an_embedding_read_in_place_takes_what_was_measured(tokens: int, seconds: float) -> None:
    size = replace(LLAMA_1B, hidden=4096, vocabulary=128256, layers=1)
    work = costs(decoder(size, 1, tokens), H200)[0].forward[WeightMode.DHA]
    assert work.alone(H200) == pytest.approx(seconds, rel=0.15)


@pytest.mark.parametrize(("tokens", "seconds"), [(1024, 1.82e-3), (8192, 2.64e-3)])
def test_a_gradient_written_in_place_takes_about_what_was_measured(tokens: int, seconds: float) -> None:
    """Of the weight alone; that of the input is computed in the same backward, and hides some of it."""
    work = costs(linear(tokens), H200)[0].backward[WeightMode.STREAM, GradientMode.INPLACE]
    assert work.alone(H200) == pytest.approx(seconds, rel=0.35)


def test_a_whole_model_computes_as_long_as_was_measured() -> None:
    """llama-1b, 8 x 1024, activations recomputed, everything in device memory: 0.197 s with its update."""
    workload = decoder(LLAMA_1B, 8, 1024)
    total = 0.0
    for layer, cost in zip(workload.layers, costs(workload, H200), strict=True):
        total += cost.forward[WeightMode.RESIDENT].seconds
        total += cost.backward[WeightMode.RESIDENT, GradientMode.BUFFER].seconds
        total += cost.recompute[WeightMode.RESIDENT].seconds if layer.recompute else 0
    assert total == pytest.approx(0.19, rel=0.05)


def test_work_alone_is_the_longest_of_its_parts() -> None:
    assert Work(1.0, read_nbytes=H200.host_reads * 2).alone(H200) == pytest.approx(2)
    assert Work(1.0, write_nbytes=H200.host_writes * 3).alone(H200) == pytest.approx(3)
    assert Work(5.0, panel_nbytes=H200.to_device * 3).alone(H200) == pytest.approx(5)


def test_an_embedding_needs_no_weights_in_backward() -> None:
    cost = costs(decoder(), H200)[0]
    assert not cost.backward_needs_weights
    assert cost.backward[WeightMode.DHA, GradientMode.BUFFER].read_nbytes == 0
    assert WeightMode.DHA_THEN_LOAD not in cost.forward


def test_of_an_embeddings_gradient_only_the_rows_that_were_used_are_written() -> None:
    workload = decoder(LLAMA_1B, 1, 1024)
    work = costs(workload, H200)[0].backward[WeightMode.STREAM, GradientMode.INPLACE]
    assert work.write_nbytes == 2 * 1024 * 2048 * 2 < workload.layers[0].gradient_nbytes / 10


# -- what the runtime does --------------------------------------------------------------------------------
def test_slabs_are_the_runtimes() -> None:
    """Sixteen bytes a parameter, each parameter at a multiple of 256 bytes."""
    assert slab_sizes("layer", [(1000,), (10, 10)], "bfloat16") == (
        2048 + 256,
        2048 + 256,
        3 * 4096 + 3 * 512,
        2000,
    )
    assert slab_sizes("layer", [(1000,)], "float32") == (4096, 4096, 2 * 4096, 4000)
    with pytest.raises(PlanError, match="'int8' is not known"):
        slab_sizes("layer", [(1,)], "int8")


def test_shares_are_made_by_the_runtimes_numbers() -> None:
    assert planned.RING_UNIT == budget.RING_UNIT
    assert planned.SMALLEST_RING == budget.SMALLEST_RING
    assert planned.SMALLEST_STREAM == budget.SMALLEST_STREAM
    assert planned.LARGEST_STREAM == budget.LARGEST_STREAM
    assert planned.SLACK == 1 + budget.SLACK


# -- models -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Batch(0, 1), "micro_batch: 0"),
        (lambda: Batch(1, 1, "int8"), "dtype: 'int8'"),
        (lambda: Dimensions(0, 1, 1, 1, 1), "hidden: 0"),
        (lambda: Workload("none", (), "bfloat16", 1, 1, 0), "no parameters"),
        (lambda: Workload("two", linear(1).layers * 2, "bfloat16", 1, 1, 0), "two layers have one name"),
        (
            lambda: Workload("lost", (replace(linear(1).layers[0], borrows="gone"),), "bfloat16", 1, 1, 0),
            "layer borrows of 'gone'",
        ),
    ],
)
def test_models_that_make_no_sense_are_refused(make: object, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        make()  # type: ignore[operator]


def test_a_fingerprint_is_of_names_sizes_and_dtype() -> None:
    first = decoder()
    assert first.fingerprint == decoder(micro_batch=7, recompute=False).fingerprint
    assert first.fingerprint != replace(first, dtype="float16").fingerprint
    renamed = (replace(first.layers[0], name="wte"), *first.layers[1:])
    assert first.fingerprint != replace(first, layers=renamed).fingerprint


def test_a_tied_head_has_no_weights_of_its_own() -> None:
    tied = decoder(replace(LLAMA_1B, tied=True))
    assert tied.owners[-1] == 0
    assert tied.parameters == decoder(LLAMA_1B).parameters - 32000 * 2048


# -- machines ---------------------------------------------------------------------------------------------
def test_every_number_says_where_it_is_from() -> None:
    for name in H200.__dataclass_fields__:
        if name not in ("name", "ranks", "sources", "peers_over_host", "relays_to_device", "relays_from_device"):
            assert H200.sources[name]


def test_a_topology_gives_the_links() -> None:
    found = machine_from_topology(machine("a100-x8"), 3)
    assert found.to_device < H200.to_device
    assert found.host_reads < H200.host_reads
    assert "topology" in found.sources["to_device"]
    assert found.sources["kernel_share"] == H200.sources["kernel_share"]


def test_of_devices_and_hosts_that_are_known_their_own_numbers_are_taken() -> None:
    found = machine_from_topology(machine("a100-x8"))
    assert found.matmul < H200.matmul / 3
    assert "of the maker's figure" in found.sources["matmul"]
    assert found.host_memory > H200.host_memory
    assert "DDR4" in found.sources["host_memory"]
    assert machine_from_topology(machine("h200-x1")).host_memory == H200.host_memory
    assert machine_from_topology(machine("a100-x8"), like=H200).matmul == H200.matmul


def test_helpers_relay_and_ranks_share() -> None:
    topology = machine("hgx-h200-x8")
    alone, helped = machine_from_topology(topology), machine_from_topology(topology, helpers=True)
    assert helped.to_device == alone.to_device
    assert len(helped.relays_to_device) == 6
    four = machine_from_topology(topology, ranks=4, helpers=True)
    assert (four.ranks, len(four.relays_to_device), len(four.relays_from_device)) == (4, 1, 1)
    assert machine_from_topology(topology, ranks=8).ranks == 8


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"device": 8}, "device 8"),
        ({"ranks": 9}, "9 ranks"),
        ({"helpers": True, "ranks": 8}, "all 8 devices train, and have no time to relay"),
        ({"device": 1, "ranks": 8}, "device 1 of 8 ranks"),
    ],
)
def test_devices_that_there_are_not_are_refused(settings: dict[str, int], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        machine_from_topology(machine("hgx-h200-x8"), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"to_device": 0}, "to_device: 0 is not more than 0"),
        ({"both_ways": 0.4}, "both_ways: 0.4"),
        ({"kernel_share": 1}, "kernel_share: 1"),
        ({"ranks": 0}, "0 ranks"),
    ],
)
def test_machines_that_cannot_be_are_refused(numbers: dict[str, float], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        replace(H200, **numbers)  # type: ignore[arg-type]


def test_a_profile_gives_what_it_has_measured() -> None:
    beside = Timing(Phase.FORWARD, (1e-3,), WeightPlace.HOST, beside=Copy.TO_DEVICE, copy_rate=3e10)
    layer = LayerProfile("layer", LayerKind.LINEAR, 1, 2, 2, 12, ((1,),), 1, (beside,))
    profile = Profile(
        "Other device",
        "2.11.0",
        "bfloat16",
        1,
        1,
        False,
        (layer,),
        to_device=(
            CopySample(1 << 20, (1e-5 + (1 << 20) / 4e10,)),
            CopySample(1 << 30, (1e-5 + (1 << 30) / 4e10,)),
        ),
        cpu_update_rate=5e9,
        host_memory_rate=2e11,
        both_ways=0.8,
    )
    found = machine_from_profile(profile)
    assert found.name == "Other device"
    assert found.to_device == pytest.approx(4e10)
    assert found.copy_latency == pytest.approx(1e-5)
    assert found.kernel_share == pytest.approx(0.25)
    assert (found.cpu_update, found.host_memory, found.both_ways) == (1.4e11, 2e11, 0.8)
    assert found.sources["to_device"] == "profile of Other device"
    assert found.from_device == H200.from_device
