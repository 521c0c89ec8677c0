"""What each idea of the scheduler gains by itself: plans with one more of them at a time, by the simulator."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .evaluate import Evaluator
from .machine import H200, Machine
from .model import Workload
from .modes import StateMode, WeightMode
from .options import PlanOptions
from .planner import Planned, make_plan, plan_by_hand
from .profile import LayerKind, Profile
from .propose import propose_weights
from .simulate import Graph, simulate

_ON_HOST = frozenset({StateMode.CPU})
_PLAIN = frozenset({WeightMode.RESIDENT, WeightMode.STREAM})
_DIRECT = _PLAIN | {WeightMode.DHA}


@dataclass(frozen=True)
class Arm:
    """Seconds of an iteration with all ideas up to this one; and the plan, where there is one."""

    name: str
    seconds: float
    planned: Planned | None = None


def ablation(
    workload: Workload, options: PlanOptions, machine: Machine = H200, profile: Profile | None = None
) -> list[Arm]:
    """The arms, each with the ideas of those before it.

    An arm that finds nothing better is the one before it, so that times never grow; but for the plan that ignores
    contention, which is shown as it is, and not built upon.

    Raises
    ------
    BudgetError, PlanError
        As for `make_plan`.
    """
    base = replace(
        options, overlap=False, early=False, state_modes=_ON_HOST, weight_modes=_PLAIN, numerics="exact", modes=""
    )
    streamed = plan_by_hand(workload, base, machine, profile)
    embeddings = {layer.name: WeightMode.DHA for layer in workload.layers if layer.kind is LayerKind.EMBEDDING}
    direct = plan_by_hand(workload, replace(base, modes=embeddings, weight_modes=_DIRECT), machine, profile)
    arms = [
        Arm("serial", _serial_seconds(streamed), None),
        _arm("pipelined loads", streamed),
        _arm("embeddings read in place", direct),
        _ignoring_contention(replace(base, weight_modes=_DIRECT), workload, machine, profile, streamed),
    ]
    reload = _DIRECT | {WeightMode.DHA_THEN_LOAD}
    steps = [
        ("contention-aware planner", {"weight_modes": _DIRECT}),
        ("reload for backward", {"weight_modes": reload}),
        ("ring of panels (relaxed numerics)", {"weight_modes": frozenset(WeightMode), "numerics": "relaxed"}),
        ("update beside the next forward", {"overlap": True}),
        ("updates during backward", {"early": options.early}),
        ("updates shared with the device", {"state_modes": options.state_modes}),
    ]
    best = min(arms[1].seconds, arms[2].seconds)
    for name, change in steps:
        base = replace(base, **change)  # type: ignore[arg-type]
        found = make_plan(workload, base, machine, profile)
        best = min(best, found.plan.seconds)
        arms.append(Arm(name, best, found))
    return arms


def _arm(name: str, planned: Planned) -> Arm:
    return Arm(name, planned.plan.seconds, planned)


def _ignoring_contention(
    options: PlanOptions, workload: Workload, machine: Machine, profile: Profile | None, streamed: Planned
) -> Arm:
    """The best plan by the recurrence alone, run with contention."""
    run = streamed.run()
    direct = plan_by_hand(workload, options, machine, profile)
    weights = propose_weights(streamed.setting, streamed.outcome.choice, run, direct.composer, 1)[0]
    modes = {
        layer.name: mode for layer, mode in zip(workload.layers, weights, strict=True) if mode is WeightMode.DHA
    }
    return _arm(
        "planner without contention", plan_by_hand(workload, replace(options, modes=modes), machine, profile)
    )


def _serial_seconds(planned: Planned) -> float:
    """Everything one after the other: all tasks on one queue, in the order in which they were made."""
    evaluator: Evaluator = planned.evaluator
    run = evaluator.run(planned.outcome.choice)
    serial = Graph()
    graph = run.iteration.graph
    for task, label in enumerate(graph.labels):
        serial.add("all", label, graph.flows[task], after=graph.after[task], latency=graph.latencies[task])
    trace = simulate(serial, run.rates)
    return trace.ends[run.iteration.ends] - trace.ends[run.iteration.begins]
