"""Why a plan is as it is: what bounds it, what a layer's next best mode would cost, what more memory buys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..errors import BudgetError
from .choice import Choice
from .cost import LayerCost, Work
from .evaluate import Evaluator, Run
from .machine import Machine
from .modes import StateMode, WeightMode
from .planner import Planned, make_plan
from .rates import Flow
from .setting import Setting

FASTER = 1.1  # what is asked of each bound: how much shorter would an iteration be


@dataclass(frozen=True)
class Bound:
    """Something that an iteration may be bound by.

    Attributes
    ----------
    name : str
    busy : float
        The share of the iteration in which it is used as much as can be, or computes.
    saved_seconds : float
        Of the iteration, if it were a tenth faster.
    """

    name: str
    busy: float
    saved_seconds: float


@dataclass(frozen=True)
class NextBest:
    """The weight mode that a layer would have if not its own, and what the iteration would take longer."""

    mode: WeightMode
    seconds: float


def find_bounds(planned: Planned) -> tuple[Bound, ...]:
    """What bounds the plan's iteration: the first would save most, were it faster."""
    run = planned.run()
    used = usage(run)
    bounds = []
    for name, setting in _faster(planned.setting).items():
        outcome = Evaluator(setting, planned.evaluator.device_memory)(planned.outcome.choice)
        saved = 0.0 if outcome is None else planned.outcome.seconds - outcome.seconds
        bounds.append(Bound(name, used[name], max(0.0, saved)))
    return tuple(sorted(bounds, key=lambda bound: -bound.saved_seconds))


def usage(run: Run) -> dict[str, float]:
    """How much of what there is of each resource the iteration uses, 0 to 1; of computing, how long it lasts."""
    used = dict.fromkeys(("compute", *(resource.name for resource in run.rates.resources)), 0.0)
    before = 0.0
    for segment in run.trace.segments:
        begin, before = max(before, run.begin), segment.end
        span = min(segment.end, run.end) - begin
        if span <= 0:
            continue
        for resource in run.rates.resources:
            flow = sum(use * segment.counts[kind] * segment.rates[kind] for kind, use in resource.use.items())
            used[resource.name] += span * flow / resource.capacity
    graph, trace = run.iteration.graph, run.trace
    for task, queue in enumerate(graph.queues):
        if queue == "compute":
            span = min(trace.ends[task], run.end) - max(trace.starts[task], run.begin)
            busy = sum(amount for kind, amount in graph.flows[task] if kind is Flow.TIME)
            used["compute"] += min(max(0.0, span), busy)
    return {name: value / run.seconds for name, value in used.items()}


def next_best(planned: Planned) -> Mapping[str, NextBest]:
    """For each layer that has weights, what one change of its mode would give; layers alike are asked once.

    The others stay as they are; state that is resident goes home if its weights no longer stay.
    """
    found: dict[str, NextBest] = {}
    known: dict[object, NextBest | None] = {}
    choice = planned.outcome.choice
    for number, (spec, each) in enumerate(zip(planned.setting.workload.layers, choice.layers, strict=True)):
        if not spec.parameters:
            continue
        key = (spec.kind, spec.shapes, each)
        if key not in known:
            known[key] = _alternative(planned, number)
        best = known[key]
        if best is not None:
            found[spec.name] = best
    return found


def _alternative(planned: Planned, number: int) -> NextBest | None:
    choice = planned.outcome.choice
    each = choice.layers[number]
    outcomes = []
    for mode in planned.composer.allowed(number):
        if mode is each.weight:
            continue
        state = each.state
        if state is StateMode.RESIDENT and mode is not WeightMode.RESIDENT:
            state = StateMode.CPU
        layers = list(choice.layers)
        layers[number] = replace(each, weight=mode, state=state, resident_nbytes=0)
        outcome = planned.evaluator(Choice(tuple(layers), choice.spares))
        if outcome is not None:
            outcomes.append((outcome.seconds - planned.outcome.seconds, mode))
    if not outcomes:
        return None
    seconds, mode = min(outcomes, key=lambda found: found[0])
    return NextBest(mode, seconds)


def one_more(planned: Planned, nbytes: int = 1 << 30) -> dict[str, float]:
    """Seconds of an iteration that so much more of each memory would save, with a plan of its own."""
    options, setting = planned.options, planned.setting
    saved = {}
    for name in ("device_memory", "host_memory"):
        now = getattr(options, name)
        if now is None:
            continue
        more = replace(options, **{name: now + nbytes})
        saved[name] = 0.0
        try:
            plan = make_plan(setting.workload, more, setting.machine, planned.profile).plan
        except BudgetError:  # of the other memory: it cannot be, this plan was made
            continue
        saved[name] = max(0.0, planned.outcome.seconds - plan.seconds)
    return saved


def _faster(setting: Setting) -> dict[str, Setting]:
    """The setting with one thing of it a tenth faster."""

    def machine(**rates: float) -> Setting:
        return replace(setting, machine=replace(setting.machine, **rates))  # type: ignore[arg-type]

    now: Machine = setting.machine
    peers = {"peers": machine(peers=now.peers * FASTER)} if now.ranks > 1 else {}
    return peers | {
        "compute": replace(setting, costs=tuple(map(_quicker, setting.costs))),
        "H2D": machine(to_device=now.to_device * FASTER, host_reads=now.host_reads * FASTER),
        "D2H": machine(from_device=now.from_device * FASTER, host_writes=now.host_writes * FASTER),
        "CPU": machine(cpu_update=now.cpu_update * FASTER),
        "DRAM": machine(host_memory=now.host_memory * FASTER),
    }


def _quicker(cost: LayerCost) -> LayerCost:
    def each(work: Work) -> Work:
        return replace(work, seconds=work.seconds / FASTER)

    return replace(
        cost,
        forward={mode: each(work) for mode, work in cost.forward.items()},
        recompute={mode: each(work) for mode, work in cost.recompute.items()},
        backward={mode: each(work) for mode, work in cost.backward.items()},
    )
