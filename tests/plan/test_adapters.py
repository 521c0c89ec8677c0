"""Frozen models with adapters: what of them is trained, and that the rest only comes and goes."""

from __future__ import annotations

import pytest

from memferry_rt.errors import PlanError
from memferry_rt.plan import H200, Batch, Dimensions, PlanOptions, StateMode, make_plan, transformer
from memferry_rt.plan.adapters import with_adapters
from memferry_rt.plan.planner import plan_as_offload, plan_by_hand
from memferry_rt.plan.rates import Flow
from memferry_transport.cost import LinearCost

from .machines import GIB, LLAMA_1B
from .test_relays import helped

SIZE = Dimensions(2048, 6, 5632, 16, 32000, fused=True)
WHOLE = transformer("model", SIZE, Batch(1, 1024, recompute=True))
MODEL = with_adapters(WHOLE, SIZE, 16)
LITTLE = PlanOptions(int(1.2 * GIB))


def test_only_adapters_have_gradients_and_state() -> None:
    trained = 16 * (2048 + 3 * 2048 + 2048 + 2048)
    for before, layer in zip(WHOLE.layers, MODEL.layers, strict=True):
        block = layer.name.startswith("blocks")
        assert layer.parameters == before.parameters + (trained if block else 0)
        assert layer.weight_nbytes >= before.weight_nbytes
        assert layer.gradient_nbytes == (2 * trained if block else 0)
        assert layer.state_nbytes == (12 * trained if block else 0)
    assert MODEL.fingerprint != WHOLE.fingerprint


def test_separate_projections_have_an_adapter_each() -> None:
    size = Dimensions(256, 2, 512, 4, 4096, kv_width=64)
    model = with_adapters(transformer("model", size, Batch(1, 64)), size, 4)
    block = model.layers[model.index["blocks.0"]]
    assert block.shapes[-8:] == ((4, 256), (256, 4), (4, 256), (64, 4), (4, 256), (64, 4), (4, 256), (256, 4))


def test_frozen_weights_are_loaded_and_never_updated() -> None:
    planned = plan_by_hand(MODEL, LITTLE)
    amounts = planned.run().trace.amounts
    trained = sum(layer.gradient_nbytes for layer in MODEL.layers)
    assert amounts[Flow.COPY_OUT] == pytest.approx(2 * trained), "of two backwards"
    assert amounts[Flow.COPY_IN] > sum(layer.weight_nbytes for layer in MODEL.layers)
    assert planned.plan.layer("head").gradient.value == "buffer"
    assert planned.plan.seconds < plan_by_hand(WHOLE, LITTLE).plan.seconds / 2


def test_frozen_weights_that_have_room_stay() -> None:
    planned = plan_as_offload(MODEL, PlanOptions(8 * GIB))
    assert all(layer.state is StateMode.RESIDENT for layer in planned.plan.layers if layer.state_nbytes)
    assert planned.run().trace.amounts[Flow.COPY_IN] == 0


def test_a_helper_gains_where_the_link_binds() -> None:
    size = Dimensions(4096, 8, 11008, 32, 32000, fused=True)
    model = with_adapters(transformer("model", size, Batch(1, 1024, recompute=True)), size, 16)
    options, relay = PlanOptions(3 * GIB), helped(LinearCost(31e-6, 55.4e9))
    alone, together = (plan_as_offload(model, options, machine).plan.seconds for machine in (H200, relay))
    assert alone / together > 1.4


def test_plans_are_made_for_them() -> None:
    made = make_plan(MODEL, PlanOptions(2 * GIB)).plan
    assert made.seconds <= plan_as_offload(MODEL, PlanOptions(2 * GIB)).plan.seconds
    assert made.host_nbytes < 2 * sum(layer.weight_nbytes for layer in WHOLE.layers)


def test_a_rank_of_nothing_is_refused() -> None:
    with pytest.raises(PlanError, match="adapters: 0 is no rank"):
        with_adapters(WHOLE, LLAMA_1B, 0)
