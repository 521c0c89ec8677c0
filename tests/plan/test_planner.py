"""The planner: within both budgets, never worse than streaming everything, and as good as what can be tried."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memferry_rt.errors import BudgetError, PlanError, UnknownLayerError
from memferry_rt.plan import (
    H200,
    Dimensions,
    GradientMode,
    LayerKind,
    LayerProfile,
    Phase,
    PlanOptions,
    Profile,
    StateMode,
    Timing,
    WeightMode,
    WeightPlace,
    Workload,
    find_bounds,
    largest_model,
    make_plan,
    next_best,
    one_more,
    workload_from_profile,
)
from memferry_rt.plan.arms import ablation
from memferry_rt.plan.choice import host_nbytes, share_device
from memferry_rt.plan.cost import Source
from memferry_rt.plan.planner import plan_by_hand
from memferry_rt.plan.propose import propose_weights
from memferry_rt.plan.propose_gradients import in_time
from memferry_rt.plan.shapes import Batch

from .machines import GIB, LARGE_VOCABULARY, LLAMA_1B, MIB, TINY, chain, decoder


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 5),
    st.sampled_from((256, 512, 1024)),
    st.integers(1, 8),
    st.sampled_from((64, 512)),
    st.floats(0, 1.5),
    st.booleans(),
    st.sampled_from((None, True, False)),
    st.booleans(),
)
def test_a_plan_keeps_to_both_budgets(
    layers: int,
    hidden: int,
    batch: int,
    sequence: int,
    room: float,
    relaxed: bool,
    recompute: bool | None,
    also: bool,
) -> None:
    size = Dimensions(hidden, layers, 2 * hidden, 4, 8192, fused=True, tied=also)
    workload = decoder(size, batch, sequence, recompute)
    with pytest.raises(BudgetError) as caught:
        make_plan(workload, PlanOptions(MIB))
    device = caught.value.smallest + int(room * workload.parameters * 16)
    host = sum(layer.weight_nbytes + layer.gradient_nbytes + layer.state_nbytes for layer in workload.layers)
    options = PlanOptions(
        device,
        int(host * 1.3),
        early=relaxed,
        numerics="relaxed" if relaxed else "exact",
        partial=also,
        evaluations=30,
    )
    planned = make_plan(workload, options)
    plan = planned.plan
    assert plan.device_peak_nbytes <= device
    assert plan.host_nbytes <= int(host * 1.3)
    assert plan.torch_nbytes + plan.pool_nbytes == device
    assert planned.run().trace.peak_nbytes == plan.device_peak_nbytes
    for layer in plan.layers:
        assert relaxed or layer.weight is not WeightMode.RING
        assert layer.state is not StateMode.RESIDENT or layer.weight is WeightMode.RESIDENT


def test_the_smallest_budget_is_enough_and_less_is_not() -> None:
    workload = decoder()
    with pytest.raises(BudgetError, match=r"device_memory: 1\.00 MiB is too small") as caught:
        make_plan(workload, PlanOptions(MIB))
    make_plan(workload, PlanOptions(caught.value.smallest))
    with pytest.raises(BudgetError):
        make_plan(workload, PlanOptions(caught.value.smallest - 2 * MIB))


def test_host_memory_is_sixteen_bytes_a_parameter_and_no_less() -> None:
    workload = decoder(LLAMA_1B)
    with pytest.raises(BudgetError, match=r"host_memory: 1\.00 GiB is too small") as caught:
        make_plan(workload, PlanOptions(24 * GIB, host_memory=GIB))
    assert caught.value.smallest == pytest.approx(16 * workload.parameters, rel=0.001)
    assert make_plan(workload, PlanOptions(24 * GIB, host_memory=caught.value.smallest)).plan.spare_slabs == 0


@pytest.mark.parametrize("memory", [3, 6, 12, 24])
def test_it_is_never_slower_than_streaming_everything(memory: int) -> None:
    plan = make_plan(decoder(LLAMA_1B, 8, 1024), PlanOptions(memory * GIB)).plan
    assert plan.seconds <= plan.arms["all streamed, updated by the CPU"]
    assert plan.seconds <= plan.arms["what the runtime does without a plan"]


def test_more_memory_is_not_worse() -> None:
    times = [
        make_plan(decoder(LLAMA_1B, 8, 1024), PlanOptions(memory * GIB)).plan.seconds
        for memory in (4, 8, 16, 24, 32)
    ]
    for less, more in itertools.pairwise(times):
        assert more <= less * 1.01


def test_of_a_few_layers_no_weight_modes_are_better() -> None:
    """The search against all combinations of weight modes, with everything else by hand."""
    workload = chain([512, 1024, 768, 1536], [3e9, 1e9, 9e9, 2e9])
    machine = replace(H200, to_device=H200.to_device / 8, from_device=H200.from_device / 8)
    options = PlanOptions(
        share_device(workload, plan_by_hand(workload, PlanOptions(GIB)).outcome.choice, 0).torch + 12 * MIB,
        state_modes=frozenset({StateMode.CPU}),
        modes="*=buffer",
    )
    found = make_plan(workload, options, machine).plan.seconds
    every = []
    for modes in itertools.product((WeightMode.STREAM, WeightMode.RESIDENT, WeightMode.DHA), repeat=4):
        by_hand = {layer.name: mode for layer, mode in zip(workload.layers, modes, strict=True)}
        try:
            every.append(plan_by_hand(workload, replace(options, modes=by_hand), machine).plan.seconds)
        except BudgetError:
            continue
    assert found <= min(every) * 1.02


def test_a_hundred_layers_take_no_more_evaluations_than_allowed() -> None:
    workload = decoder(replace(LLAMA_1B, layers=100), 8, 1024)
    planned = make_plan(workload, PlanOptions(24 * GIB, evaluations=20))
    assert planned.evaluator.count <= 22, "and the arms that are shown beside the plan"


def test_a_large_vocabulary_is_read_in_place() -> None:
    plan = make_plan(decoder(LARGE_VOCABULARY, 1, 1024), PlanOptions(6 * GIB)).plan
    assert plan.layer("embedding").weight is WeightMode.DHA
    loading = plan_by_hand(decoder(LARGE_VOCABULARY, 1, 1024), PlanOptions(6 * GIB)).plan
    reading = plan_by_hand(decoder(LARGE_VOCABULARY, 1, 1024), PlanOptions(6 * GIB, modes="embedding=dha")).plan
    assert reading.seconds < loading.seconds


def test_the_programs_propose_what_hides_a_long_load() -> None:
    """Where updates are over at once, the large table is what a forward waits for; most blocks are copied."""
    workload = decoder(LARGE_VOCABULARY, 1, 1024)
    quick = replace(H200, cpu_update=1e16, host_memory=1e16)
    streamed = plan_by_hand(workload, PlanOptions(24 * GIB), quick)
    found = propose_weights(streamed.setting, streamed.outcome.choice, streamed.run(), streamed.composer, count=3)
    assert found[0][0] is WeightMode.DHA
    assert found[0][1:-2].count(WeightMode.STREAM) > 11


def test_the_same_question_has_the_same_answer() -> None:
    plans = [make_plan(decoder(LLAMA_1B, 8, 1024), PlanOptions(6 * GIB)).plan for _ in range(2)]
    assert plans[0] == plans[1]


def test_what_slabs_leave_over_keeps_part_of_a_layer() -> None:
    workload = chain([2048] * 6, [1e9] * 6)
    streamed = plan_by_hand(workload, PlanOptions(GIB))
    nbytes, torch = workload.layers[0].weight_nbytes, streamed.plan.torch_nbytes
    options = PlanOptions(torch + 4 * nbytes + nbytes // 2, modes="*=stream+buffer+cpu", partial=True)
    plan = make_plan(workload, options).plan
    parts = [layer.resident_nbytes for layer in plan.layers if layer.resident_nbytes]
    assert len(parts) == 1
    assert 0 < parts[0] < nbytes
    assert parts[0] % (2 * MIB) == 0
    assert plan.pinned_nbytes == parts[0]
    assert plan.seconds <= make_plan(workload, replace(options, partial=False)).plan.seconds


# -- by hand ----------------------------------------------------------------------------------------------
def test_modes_by_hand_are_kept() -> None:
    options = PlanOptions(8 * GIB, modes="embedding=dha, blocks.*=stream+cpu, blocks.3=inplace, head=resident")
    plan = make_plan(decoder(LLAMA_1B), options).plan
    assert plan.layer("embedding").weight is WeightMode.DHA
    assert plan.layer("head").weight is WeightMode.RESIDENT
    assert {plan.layer(f"blocks.{number}").state for number in range(22)} == {StateMode.CPU}
    assert {plan.layer(f"blocks.{number}").weight for number in range(22)} == {WeightMode.STREAM}
    assert plan.layer("blocks.3").gradient is GradientMode.INPLACE


@pytest.mark.parametrize(
    ("modes", "error", "words"),
    [
        ("layers.*=dha", UnknownLayerError, "no layer is called 'layers"),
        ("(small)=dha", UnknownLayerError, "no layer is called '.small.'"),
        ("blocks.0=ring", PlanError, "blocks.0 cannot have ring; it can have .*relaxed"),
        ("embedding=dha_then_load", PlanError, "embedding cannot have dha_then_load"),
        ("blocks.0=stream+state:resident", PlanError, "without weights that stay"),
    ],
)
def test_modes_that_cannot_be_are_refused(modes: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make_plan(decoder(), PlanOptions(GIB, modes=modes))


def test_what_the_runtime_cannot_do_is_left_out() -> None:
    workload, slow = decoder(LARGE_VOCABULARY, 1, 1024), replace(H200, to_device=5e9, from_device=5e9)
    free = make_plan(workload, PlanOptions(6 * GIB), slow).plan
    assert free.layer("embedding").weight is WeightMode.DHA
    options = PlanOptions(
        6 * GIB, host_kinds=frozenset({LayerKind.BLOCK}), gradient_modes=frozenset({GradientMode.BUFFER})
    )
    bound = make_plan(workload, options, slow).plan
    assert bound.layer("embedding").weight is not WeightMode.DHA
    assert {layer.gradient for layer in bound.layers} == {GradientMode.BUFFER}
    assert bound.seconds >= free.seconds
    only = replace(options, host_kinds=frozenset(), modes="embedding=dha", gradient_modes=frozenset(GradientMode))
    assert make_plan(workload, only, slow).plan.layer("embedding").weight is WeightMode.DHA, "by hand it is"
    assert {layer.gradient for layer in make_plan(workload, only, slow).plan.layers} == {GradientMode.BUFFER}


def test_a_layer_without_weights_of_its_own_has_no_modes() -> None:
    tied = decoder(replace(TINY, tied=True))
    plan = make_plan(tied, PlanOptions(GIB)).plan
    assert "head" not in plan.modes
    assert plan.layer("head").weight is plan.layer("embedding").weight
    with pytest.raises(UnknownLayerError, match="no layer is called 'head'"):
        make_plan(tied, PlanOptions(GIB, modes="head=dha"))


def test_a_gradient_that_several_layers_add_to_is_not_written_in_place() -> None:
    with pytest.raises(PlanError, match="embedding cannot have inplace, but buffer: several layers add"):
        make_plan(decoder(replace(TINY, tied=True)), PlanOptions(GIB, modes="embedding=inplace"))


def test_relaxed_numerics_allow_the_ring() -> None:
    options = PlanOptions(GIB, modes="blocks.0=ring", numerics="relaxed")
    assert make_plan(decoder(), options).plan.layer("blocks.0").weight is WeightMode.RING


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"numerics": "fast"}, "numerics: 'fast'"),
        ({"reserve": 2.0}, "reserve: 2.0"),
        ({"spares": -1}, "spares: -1"),
        ({"weight_modes": frozenset({WeightMode.DHA})}, "can always stream"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        PlanOptions(GIB, **settings)  # type: ignore[arg-type]


# -- gradients --------------------------------------------------------------------------------------------
def test_the_reserve_decides_how_much_of_the_gradients_is_on_the_device() -> None:
    workload = decoder(LLAMA_1B, 8, 1024)
    total = sum(layer.gradient_nbytes for layer in workload.layers)
    for reserve in (1.0, 0.75, 0.5, 0.25):
        options = PlanOptions(6 * GIB, reserve=reserve, state_modes=frozenset({StateMode.CPU}))
        plan = make_plan(workload, options).plan
        on_device = sum(layer.gradient_nbytes for layer in plan.layers if layer.gradient is GradientMode.BUFFER)
        assert on_device <= reserve * total
        assert on_device >= (reserve - 0.1) * total


def test_a_limit_in_bytes_is_kept_or_it_is_said_that_it_cannot_be() -> None:
    workload = decoder(LLAMA_1B, 8, 1024)
    options = PlanOptions(6 * GIB, gradient_memory=512 * MIB, state_modes=frozenset({StateMode.CPU}))
    plan = make_plan(workload, options).plan
    assert sum(each.gradient_nbytes for each in plan.layers if each.gradient is GradientMode.BUFFER) <= 512 * MIB
    assert not any("made on the device" in note for note in plan.notes)
    nothing = replace(options, gradient_modes=frozenset({GradientMode.BUFFER}))
    assert any("made on the device" in note for note in make_plan(workload, nothing).plan.notes)
    with pytest.raises(PlanError, match="gradient_memory: 1 is no limit beside reserve"):
        PlanOptions(GIB, reserve=0.5, gradient_memory=1)


def test_the_version_with_time_sees_what_a_small_ring_makes_wait() -> None:
    """Copies are slow and the ring is small: some gradients are written in place, others leave meanwhile."""
    workload = chain([1024] * 8, [4e11] * 8)
    slow = replace(H200, from_device=1e9, host_writes=1e9)
    planned = plan_by_hand(workload, PlanOptions(GIB), slow)
    nbytes = workload.layers[0].gradient_nbytes
    modes = in_time(planned.setting, planned.outcome.choice, planned.composer, nbytes)
    assert modes is not None
    assert set(modes) == set(GradientMode)
    everything = in_time(planned.setting, planned.outcome.choice, planned.composer, 8 * nbytes)
    assert everything is not None
    assert everything.count(GradientMode.INPLACE) <= modes.count(GradientMode.INPLACE)
    tied = plan_by_hand(decoder(replace(TINY, tied=True)), PlanOptions(GIB))
    assert in_time(tied.setting, tied.outcome.choice, tied.composer, 1) is None, "it must be kept, and has no room"


def test_a_slow_link_on_which_nothing_on_the_device_loses_is_found_and_said() -> None:
    slow = replace(H200, host_writes=H200.host_writes / 8, from_device=H200.from_device / 4)
    plan = make_plan(decoder(LLAMA_1B, 1, 1024), PlanOptions(6 * GIB), slow).plan
    assert any("in place would take" in note and "longer" in note for note in plan.notes)
    nothing = plan.arms["this plan, 0% of gradient bytes on the device"]
    assert nothing > plan.seconds * 1.01
    assert sum(layer.gradient is GradientMode.INPLACE for layer in plan.layers) < len(plan.layers) // 2


# -- profiles ---------------------------------------------------------------------------------------------
def profile_of(workload: Workload, only: str, *, exact: bool | None = None) -> Profile:
    layers = [
        LayerProfile(
            layer.name,
            layer.kind,
            layer.parameters,
            layer.weight_nbytes,
            layer.gradient_nbytes,
            layer.state_nbytes,
            layer.shapes,
            workload.tokens,
            timings=()
            if layer.name != only
            else (
                Timing(Phase.FORWARD, (0.5,)),
                Timing(Phase.BACKWARD, (1.0,)),
                Timing(Phase.FORWARD, (0.7,), WeightPlace.HOST, exact=exact),
            ),
        )
        for layer in workload.layers
    ]
    return Profile(
        "NVIDIA H200", "2.11.0", workload.dtype, workload.micro_batch, workload.sequence, False, tuple(layers)
    )


def test_what_is_measured_counts_and_what_is_not_goes_by_formula() -> None:
    workload = decoder()
    plan = make_plan(workload, PlanOptions(GIB), profile=profile_of(workload, "blocks.1")).plan
    assert plan.layer("blocks.1").source is Source.PROFILE
    assert plan.layer("blocks.1").forward_seconds == 0.5
    assert plan.layer("blocks.1").backward_seconds == pytest.approx(1.5), "with the forward that it repeats"
    assert plan.layer("blocks.0").source is Source.FORMULA
    assert not any("no profile" in note for note in plan.notes)
    assert any("no profile" in note for note in make_plan(workload, PlanOptions(GIB)).plan.notes)


def test_a_mode_that_was_measured_to_change_bits_is_left_out() -> None:
    workload = decoder()
    options = PlanOptions(GIB, modes="blocks.1=dha")
    for exact in (True, None):
        measured = profile_of(workload, "blocks.1", exact=exact)
        assert make_plan(workload, options, profile=measured).plan.layer("blocks.1").forward_seconds == 0.7
    with pytest.raises(PlanError, match=r"blocks\.1 cannot have dha"):
        make_plan(workload, options, profile=profile_of(workload, "blocks.1", exact=False))
    relaxed = replace(options, numerics="relaxed")
    make_plan(workload, relaxed, profile=profile_of(workload, "blocks.1", exact=False))


def test_what_torch_was_measured_to_reserve_counts() -> None:
    workload = decoder()
    measured = replace(profile_of(workload, "blocks.1"), torch_nbytes=512 * MIB, checkpointing=True)
    plan = make_plan(workload, PlanOptions(GIB), profile=measured).plan
    assert plan.torch_nbytes == int(1.06 * 512 * MIB)
    other = replace(measured, checkpointing=False)
    assert make_plan(workload, PlanOptions(GIB), profile=other).plan.torch_nbytes < 256 * MIB
    whatever = make_plan(workload_from_profile(measured), PlanOptions(GIB), profile=measured).plan
    assert whatever.torch_nbytes == plan.torch_nbytes
    assert [layer.weight_nbytes for layer in whatever.layers] == [layer.weight_nbytes for layer in plan.layers]


def test_a_profile_of_another_model_is_refused() -> None:
    other = profile_of(decoder(replace(TINY, layers=2)), "blocks.1")
    with pytest.raises(PlanError, match="of another model"):
        make_plan(decoder(), PlanOptions(GIB), profile=other)


# -- why --------------------------------------------------------------------------------------------------
def test_what_bounds_an_update_on_a_slow_host_is_its_memory() -> None:
    slow = replace(H200, host_memory=60e9)
    bounds = find_bounds(make_plan(decoder(LLAMA_1B, 1, 1024), PlanOptions(6 * GIB), slow))
    assert bounds[0].name == "DRAM"
    assert bounds[0].busy > 0.8
    assert {bound.name for bound in bounds} == {"compute", "H2D", "D2H", "CPU", "DRAM"}
    assert all(0 <= bound.busy <= 1 for bound in bounds)


def test_what_bounds_a_large_batch_is_computing() -> None:
    bounds = find_bounds(make_plan(decoder(LLAMA_1B, 32, 2048), PlanOptions(80 * GIB)))
    assert bounds[0].name == "compute"
    assert bounds[0].busy > 0.9


def test_the_next_best_mode_is_no_better_and_one_of_the_layers() -> None:
    planned = make_plan(decoder(LLAMA_1B, 8, 1024), PlanOptions(6 * GIB))
    found = next_best(planned)
    assert set(found) == {layer.name for layer in planned.plan.layers}
    for layer in planned.plan.layers:
        assert found[layer.name].mode is not layer.weight
        assert found[layer.name].seconds >= -0.003 * planned.plan.seconds


def test_one_more_gib_helps_where_state_waits_for_room() -> None:
    planned = make_plan(decoder(LLAMA_1B, 8, 1024), PlanOptions(8 * GIB, host_memory=64 * GIB))
    saved = one_more(planned, 4 * GIB)
    assert saved["device_memory"] > 0.01 * planned.plan.seconds
    assert saved["host_memory"] == 0


# -- largest ----------------------------------------------------------------------------------------------
def test_the_largest_model_fills_host_memory_and_fits() -> None:
    options = PlanOptions(24 * GIB, host_memory=128 * GIB)
    found = largest_model(options, Batch(1, 1024, recompute=True))
    assert found.parameters >= 8e9
    assert found.parameters > 0.995 * 128 * GIB / 16, "sixteen bytes each, and hardly any left over"
    assert found.planned.plan.host_nbytes <= 128 * GIB
    one_layer_more = decoder(replace(found.size, layers=found.size.layers + 1), 1, 1024)
    assert host_nbytes(one_layer_more, replace(found.planned.outcome.choice, layers=())) > 128 * GIB


def test_without_a_host_budget_or_with_one_that_is_too_small_there_is_no_largest() -> None:
    batch = Batch(1, 1024, recompute=True)
    with pytest.raises(PlanError, match="host_memory: the largest model depends on it"):
        largest_model(PlanOptions(24 * GIB), batch)
    with pytest.raises(BudgetError, match="host_memory"):
        largest_model(PlanOptions(24 * GIB, host_memory=32 * MIB), batch)
    with pytest.raises(BudgetError, match="device_memory"):
        largest_model(PlanOptions(64 * MIB, host_memory=64 * GIB), batch)


# -- arms -------------------------------------------------------------------------------------------------
def test_each_idea_is_shown_and_none_makes_it_slower_but_the_one_that_ignores_contention() -> None:
    options = PlanOptions(6 * GIB, host_memory=64 * GIB, early=True)
    arms = ablation(decoder(LARGE_VOCABULARY, 1, 1024), options)
    assert [arm.name for arm in arms][:3] == ["serial", "pipelined loads", "embeddings read in place"]
    kept = [arm.seconds for arm in arms if arm.name != "planner without contention"]
    assert kept[0] > kept[1]
    assert kept[3:] == sorted(kept[3:], reverse=True)
    assert kept[-1] < 0.8 * kept[1]
    assert len(arms) == 10


def test_the_kinds_of_layers_have_the_modes_that_their_kernels_allow() -> None:
    workload = decoder()
    planned = make_plan(workload, PlanOptions(GIB, numerics="relaxed"))
    for layer, cost in zip(workload.layers, planned.setting.costs, strict=True):
        products = layer.kind in (LayerKind.BLOCK, LayerKind.HEAD)
        assert (WeightMode.RING in cost.forward) == products
        assert GradientMode.INPLACE in cost.gradient_modes(WeightMode.STREAM)
