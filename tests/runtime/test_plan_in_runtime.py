"""Plans of the planner, followed by the runtime: the same bits, and nothing ignored silently."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import memferry_rt
from memferry_allocator import EmulatedOptions
from memferry_rt import BudgetError, PlanError, UnsupportedError
from memferry_rt.adapters.torch.cut import cut_layers
from memferry_rt.plan import (
    GradientMode,
    LayerKind,
    LayerModes,
    LayerSpec,
    Plan,
    PlanOptions,
    StateMode,
    WeightMode,
    Workload,
    load_plan,
    make_layer,
    make_plan,
    save_plan,
)

from .harness import Job, Result, assert_same, offloaded, plain
from .models import Decoder, next_token_loss

TORCH = 72_000_000  # bytes: more than the planner leaves torch for so little a model
HOST_KINDS = frozenset({LayerKind.EMBEDDING, LayerKind.LINEAR, LayerKind.BLOCK, LayerKind.HEAD})


def _job(half: bool) -> Job:
    return Job(
        lambda: Decoder(layers=3),
        next_token_loss,
        steps=3,
        dtype=torch.bfloat16 if half else torch.float32,
        max_grad_norm=4.0,  # bites in some of the steps
        lr=1e-3,
    )


@cache
def _expected(half: bool) -> Result:
    return plain(_job(half))


def _workload(half: bool = True, layers: int = 3) -> Workload:
    dtype = "bfloat16" if half else "float32"
    cuts = cut_layers(Decoder(layers=layers).to(torch.bfloat16 if half else torch.float32))
    specs = [_spec(cut.name, [tuple(p.shape) for _, p in cut.parameters], dtype) for cut in cuts]
    order = ["embedding", *(f"blocks.{number}" for number in range(layers))]
    first = [spec for name in order for spec in specs if spec.name == name]
    return Workload("small", (*first, *(s for s in specs if s not in first)), dtype, 3, 12, 0)


def _spec(name: str, shapes: list[tuple[int, ...]], dtype: str) -> LayerSpec:
    kinds = {"embedding": LayerKind.EMBEDDING, "head": LayerKind.HEAD}
    kind = kinds.get(name, LayerKind.BLOCK if name.startswith("blocks") else LayerKind.OTHER)
    return make_layer(name, kind, shapes, dtype, flops=1e6, traffic_nbytes=1e6, kernels=3)


def _plan(pool: int, half: bool = True, **options: Any) -> Plan:
    """The best plan with so many bytes beside torch's."""
    options = {"host_kinds": HOST_KINDS, **options}
    return make_plan(_workload(half), PlanOptions(pool + TORCH, evaluations=40, **options)).plan


def _changed(plan: Plan, changes: Mapping[str, LayerModes]) -> Plan:
    """The plan with other modes of some layers."""

    def change(layer: Any) -> Any:
        modes = changes.get(layer.name, LayerModes()).over(layer.modes)
        return replace(layer, weight=modes.weight, gradient=modes.gradient, state=modes.state)

    return replace(plan, layers=tuple(map(change, plan.layers)))


@st.composite
def modes(draw: Any) -> dict[str, LayerModes]:
    """Of layers, any that the runtime can do together."""
    found = {}
    for name in ("embedding", "blocks.0", "blocks.1", "blocks.2"):
        weight = draw(st.sampled_from([WeightMode.STREAM, WeightMode.RESIDENT, WeightMode.DHA]))
        state = draw(st.sampled_from(list(StateMode) if weight is WeightMode.RESIDENT else list(StateMode)[:2]))
        resident = state is StateMode.RESIDENT
        gradient = GradientMode.BUFFER if resident else draw(st.sampled_from(list(GradientMode)))
        found[name] = LayerModes(weight, gradient, state)
    return found


@settings(max_examples=25, deadline=None)
@given(
    half=st.booleans(),
    kib=st.sampled_from([90, 120, 200, 400, 900]),
    given_modes=st.one_of(st.just({}), modes()),
    spares=st.sampled_from([0, 2]),
    async_step=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_plan_has_the_bits(
    half: bool, kib: int, given_modes: dict[str, LayerModes], spares: int, async_step: bool, seed: int
) -> None:
    pool = kib << (10 if half else 11)
    plan = _changed(_plan(pool, half, early=spares > 0, spares=spares), given_modes)
    options: dict[str, Any] = {"async_step": async_step, "seed": seed}
    try:
        got = offloaded(_job(half), device_memory=pool, plan=plan, **options)
    except BudgetError as error:  # weights and state that stay, and more: it names what is enough
        got = offloaded(_job(half), device_memory=error.smallest, plan=plan, **options)
    assert_same(_expected(half), got)


@pytest.fixture
def training() -> Any:
    """A model and an optimizer; restored at the end, where a test offloads them."""
    torch.manual_seed(0)
    model = Decoder(layers=3).to(torch.bfloat16)
    yield model, torch.optim.AdamW(model.parameters(), fused=True)
    if "_memferry_runtime" in model.__dict__:
        memferry_rt.restore(model)


def _offload(training: Any, plan: Any, **options: Any) -> memferry_rt.Runtime:
    model, optimizer = training
    options = {"device_memory": 4 << 20, "emulated": EmulatedOptions(), **options}
    memferry_rt.offload(model, optimizer, device="emulated", plan=plan, **options)
    return memferry_rt.runtime_of(model)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 0) -> None:
    next_token_loss(model, number).backward()
    optimizer.step()
    optimizer.zero_grad()


ALL = {
    "embedding": LayerModes(WeightMode.DHA, GradientMode.INPLACE, StateMode.CPU),
    "blocks.0": LayerModes(WeightMode.RESIDENT, GradientMode.BUFFER, StateMode.RESIDENT),
    "blocks.1": LayerModes(WeightMode.STREAM, GradientMode.BUFFER, StateMode.STREAMED),
    "blocks.2": LayerModes(WeightMode.STREAM, GradientMode.INPLACE, StateMode.CPU),
    "head": LayerModes(WeightMode.STREAM, GradientMode.BUFFER, StateMode.CPU),
    "(small)": LayerModes(WeightMode.STREAM, GradientMode.BUFFER, StateMode.CPU),
}


def test_the_plan_is_done(training: Any, tmp_path: Path) -> None:
    save_plan(_changed(_plan(4 << 20), ALL), tmp_path / "plan.json")
    plan = load_plan(tmp_path / "plan.json")
    runtime = _offload(training, plan)
    _step(*training)
    runtime.synchronize()
    report = runtime.report()
    done = {each.name: (each.weight_mode, each.gradient_mode, each.state_mode) for each in report.per_layer}
    assert done == {each.name: (each.weight.value, each.gradient.value, each.state.value) for each in plan.layers}
    updates = runtime.step_updates
    assert [layer.name for layer in updates.streamed] == ["blocks.1"]
    assert [layer.name for layer in runtime.memory.residents.layers] == ["blocks.0"]
    assert report.plan_source == "given plan"
    assert report.plan_notes == ()


def test_plans_are_exchanged_between_steps(training: Any) -> None:
    runtime = _offload(training, None)
    _step(*training)
    assert runtime.report().plan_source == "default"
    memferry_rt.set_plan(training[0], _changed(_plan(4 << 20), ALL))
    _step(*training)
    assert [layer.name for layer in runtime.step_updates.streamed] == ["blocks.1"]
    memferry_rt.set_plan(training[0], {})
    _step(*training)
    report = runtime.report()
    assert report.plan_source == "by hand"
    assert {each.state_mode for each in report.per_layer} == {""}


def test_what_is_done_otherwise_is_said(training: Any) -> None:
    plan = replace(_changed(_plan(4 << 20), ALL), spare_slabs=2, numerics="relaxed")
    notes = _offload(training, plan, spare_slabs=0, accumulate=2).report().plan_notes
    assert "2 spare slabs are planned, and there are 0" in notes[0]
    assert "relaxed numerics" in notes[1]
    assert "steps of one backward, and these have 2" in notes[2]


def test_streaming_without_room_is_said(training: Any) -> None:
    everything = {name: LayerModes(WeightMode.STREAM, GradientMode.BUFFER, StateMode.STREAMED) for name in ALL}
    plan = _changed(_plan(4 << 20), everything)
    report = _offload(training, plan, device_memory=22 << 10).report()
    assert report.stream_nbytes == 0
    assert "no room for that: the CPU updates" in report.plan_notes[0]


def test_spare_slabs_are_the_plans(training: Any) -> None:
    plan = replace(_changed(_plan(4 << 20), ALL), spare_slabs=2)
    assert _offload(training, plan).step_updates.early is not None


def _other_sizes(plan: Plan) -> Plan:
    first, *rest = plan.layers
    return replace(plan, fingerprint="0", layers=(replace(first, parameters=first.parameters + 1), *rest))


REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (lambda plan: replace(plan, fingerprint="0"), {}, PlanError, "other shapes"),
    (_other_sizes, {}, PlanError, "'embedding' has 1953 parameters in the plan, and 1952 here"),
    (lambda plan: replace(plan, fingerprint="0", layers=plan.layers[1:]), {}, PlanError, "in the model alone"),
    (lambda plan: replace(plan, fingerprint="0", dtype="float32"), {}, PlanError, "dtype is float32"),
    (
        lambda plan: replace(plan, layers=(replace(plan.layers[0], resident_nbytes=512), *plan.layers[1:])),
        {},
        UnsupportedError,
        "'embedding' 512 B of weights shall stay",
    ),
    (
        lambda plan: _changed(plan, {"(small)": LayerModes(WeightMode.RING)}),
        {},
        UnsupportedError,
        r"'\(small\)' cannot do 'ring'",
    ),
    (
        lambda plan: _changed(plan, {"blocks.0": LayerModes(gradient=GradientMode.INPLACE)}),
        {},
        UnsupportedError,
        "'blocks.0' has its state on the device and its gradient in place",
    ),
    (lambda plan: plan, {"optimizer_split": 0.5}, PlanError, "so does optimizer_split=0.5"),
    (lambda plan: plan, {"device_memory": 20 << 10}, BudgetError, "blocks.0 must be in it at once"),
    (lambda plan: replace(plan, spare_slabs=6), {"host_memory": "1MiB"}, BudgetError, "host_memory"),
]


@pytest.mark.parametrize(("change", "options", "error", "words"), REFUSED)
@pytest.mark.parametrize("later", [False, True])
def test_wrong_plans_change_nothing(
    training: Any, change: Any, options: dict[str, Any], error: type[Exception], words: str, later: bool
) -> None:
    plan = change(_changed(_plan(4 << 20), ALL))
    model, optimizer = training
    before = {name: value.clone() for name, value in model.state_dict().items()}
    if later and "host_memory" in options:
        return  # spare slabs are taken at offload()
    if later:
        runtime = _offload(
            training, None, **options if "device_memory" not in options else {"device_memory": 96 << 10}
        )
        if "device_memory" in options:
            plan = _changed(plan, {name: LayerModes(WeightMode.RESIDENT) for name in ALL})
            words = "must be in it at once"
        with pytest.raises(error, match=words):
            memferry_rt.set_plan(model, plan)
        assert runtime.report().plan_source == "default"
        assert {each.weight_mode for each in runtime.report().per_layer} == {"stream"}
        _step(model, optimizer)
        return
    with pytest.raises(error, match=words):
        _offload(training, plan, **options)
    assert "_memferry_runtime" not in model.__dict__
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_device_must_be_able_to_update(training: Any) -> None:
    model, _ = training
    plan = _changed(_plan(4 << 20), ALL)
    with pytest.raises(UnsupportedError, match=r"'blocks\.0' is resident, and the device cannot make"):
        _offload((model, torch.optim.SGD(model.parameters(), foreach=False)), plan)


@pytest.mark.gpu
def test_plans_of_another_device(training: Any) -> None:
    model, optimizer = training
    plan = replace(_changed(_plan(4 << 20), ALL), device="NVIDIA A100")
    with pytest.raises(PlanError, match="is for NVIDIA A100"):
        memferry_rt.offload(model, optimizer, device="cuda", device_memory="1GiB", plan=plan)


@pytest.mark.parametrize("back", [False, True])
def test_gradients_outlive_an_exchange_of_plans(training: Any, back: bool) -> None:
    """`plan="auto"` exchanges plans at the end of a step, when gradients are still there."""
    model, optimizer = training
    first, second = _changed(_plan(4 << 20), ALL), None
    runtime = _offload(training, first if back else second)
    next_token_loss(model, 0).backward()
    optimizer.step()
    before = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    runtime.plans.to(second if back else first)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, before[name]), name
    more = {}
    next_token_loss(model, 1).backward()
    for name, parameter in model.named_parameters():
        more[name] = parameter.grad.clone()
    optimizer.zero_grad()
    next_token_loss(model, 1).backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(more[name], before[name] + parameter.grad), name
