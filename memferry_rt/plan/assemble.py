"""A choice that was judged, as a plan."""

from __future__ import annotations

from collections.abc import Sequence

from .choice import NEEDS_SLAB, Choice, host_nbytes, slab_nbytes, state_nbytes
from .evaluate import Evaluator, Outcome, Run
from .model import LayerSpec
from .modes import StateMode, WeightMode
from .options import PlanOptions
from .plan import LayerPlan, Plan
from .setting import Setting


def build_plan(
    setting: Setting,
    options: PlanOptions,
    evaluator: Evaluator,
    outcome: Outcome,
    *,
    arms: dict[str, float] | None = None,
    notes: Sequence[str] = (),
) -> Plan:
    """A judged choice as a plan."""
    workload, shares, choice = setting.workload, outcome.shares, outcome.choice
    run = evaluator.run(choice)
    layers = tuple(_layer(setting, choice, run, number) for number in range(len(workload.layers)))
    return Plan(
        model=workload.name,
        fingerprint=workload.fingerprint,
        device=setting.machine.name,
        dtype=workload.dtype,
        micro_batch=workload.micro_batch,
        sequence=workload.sequence,
        ranks=setting.machine.ranks,
        numerics=options.numerics,
        device_memory=options.device_memory,
        host_memory=options.host_memory or 0,
        layers=layers,
        torch_nbytes=shares.torch,
        pool_nbytes=shares.pool,
        ring_nbytes=shares.ring,
        stream_nbytes=shares.stream,
        panel_nbytes=shares.panels,
        pinned_nbytes=shares.pinned,
        resident_nbytes=shares.states,
        slab_nbytes=shares.slabs,
        spare_slabs=choice.spares,
        host_nbytes=host_nbytes(workload, choice),
        seconds=outcome.seconds,
        device_peak_nbytes=run.trace.peak_nbytes,
        arms=arms or {},
        notes=tuple(notes),
    )


def _layer(setting: Setting, choice: Choice, run: Run, number: int) -> LayerPlan:
    spec, each, cost = setting.workload.layers[number], choice.layers[number], setting.costs[number]
    owner = setting.workload.owners[number]
    mode, machine = choice.layers[owner].weight, setting.machine
    backward = cost.backward[mode, each.gradient].alone(machine)
    if each.recompute:
        backward += cost.recompute[mode].alone(machine)
    replaced = machine.ranks > 1 or each.state is StateMode.CPU
    copied = mode in NEEDS_SLAB or (mode is WeightMode.RESIDENT and replaced)
    update = run.iteration.update.get(number)
    return LayerPlan(
        spec.name,
        spec.kind,
        spec.parameters,
        spec.weight_nbytes,
        spec.gradient_nbytes,
        spec.state_nbytes,
        mode,
        each.gradient,
        each.state,
        each.recompute,
        each.resident_nbytes,
        _device_nbytes(spec, mode, each.state) + each.resident_nbytes,
        cost.forward[mode].alone(machine),
        backward,
        machine.load_seconds(slab_nbytes(spec, each) or spec.weight_nbytes) if copied and spec.parameters else 0.0,
        0.0 if update is None else max(0.0, run.trace.ends[update] - run.begin),
        cost.source,
    )


def _device_nbytes(spec: LayerSpec, weight: WeightMode, state: StateMode) -> int:
    nbytes = spec.weight_nbytes if weight is WeightMode.RESIDENT else 0
    return nbytes + (state_nbytes(spec) if state is StateMode.RESIDENT else 0)
