"""From a model, a machine and two budgets to a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memferry_allocator import format_size

from ..errors import BudgetError, PlanError
from .assemble import build_plan
from .choice import (
    Choice,
    gradient_nbytes,
    host_nbytes,
    share_device,
)
from .compose import Composer
from .cost import LayerCost, costs
from .evaluate import Evaluator, Outcome, Run
from .exchange import for_ranks, with_exchange
from .machine import H200, Machine
from .model import Workload
from .modes import GradientMode, LayerModes, StateMode, WeightMode, parse_modes
from .options import PlanOptions
from .plan import Plan
from .profile import Profile
from .profiled import with_measured_memory
from .search import Search
from .setting import Setting

DEFAULT_ARM = "what the runtime does without a plan"


@dataclass(frozen=True)
class Planned:
    """A plan, and what it was made with: for whoever wants to know more than the plan says."""

    plan: Plan
    setting: Setting
    options: PlanOptions
    composer: Composer
    evaluator: Evaluator
    outcome: Outcome
    profile: Profile | None = None

    def run(self) -> Run:
        """The plan's iteration, with memory and segments recorded."""
        return self.evaluator.run(self.outcome.choice, record=True)


def make_plan(
    workload: Workload, options: PlanOptions, machine: Machine = H200, profile: Profile | None = None
) -> Planned:
    """The plan with the shortest iteration that is found.

    Parameters
    ----------
    workload : Workload
    options : PlanOptions
    machine : Machine
    profile : Profile, optional
        Of this model on this device; where it says nothing, formulas do.

    Raises
    ------
    BudgetError
        Nothing fits; it names the smallest budget that is enough.
    PlanError
        Modes by hand name a layer that there is not, or a mode that a layer cannot have; or the profile is of
        another model.
    """
    planned = _search(workload, options, machine, profile)
    if not (machine.relays_to_device or machine.relays_from_device):
        return planned
    alone = _search(workload, options, machine.with_relays(0, 0), profile)
    choices = dict.fromkeys((planned.outcome.choice, alone.outcome.choice))
    adaptive = Evaluator(planned.setting, options.device_memory)
    outcomes = [outcome for choice in choices if (outcome := adaptive(choice)) is not None]
    best = min(outcomes, key=lambda outcome: outcome.seconds)
    arms = {**planned.plan.arms, "without devices that relay": alone.plan.seconds}
    relayed = adaptive.machine_of(best.choice).relayed
    note = (
        f"predicted with idle devices that relay {relayed}" if relayed else "idle devices that relay gain nothing"
    )
    notes = (*planned.plan.notes, note)
    plan = build_plan(planned.setting, planned.options, adaptive, best, arms=arms, notes=notes)
    return replace(planned, plan=plan, evaluator=adaptive, outcome=best)


def _search(workload: Workload, options: PlanOptions, machine: Machine, profile: Profile | None) -> Planned:
    """The best plan, with all idle devices relaying that there are."""
    options = for_ranks(options, machine)
    setting, composer = _set_up(workload, options, machine, profile)
    evaluator = Evaluator(setting, options.device_memory, adaptive=False)
    search = Search(evaluator, composer, options)
    search.run()
    if search.best is None:
        raise BudgetError(
            "device_memory",
            options.device_memory,
            smallest_that_fits(setting.workload, [composer.compose(knobs) for knobs in search.simplest()]),
            "what torch computes with, and the weights that must be there at once, take more",
        )
    baseline = evaluator(composer.compose(composer.start()))
    best = search.best
    limited = options.reserve is not None or options.gradient_memory is not None
    if not limited and baseline is not None and baseline.seconds <= best.seconds:
        best = baseline
    arms, notes = _arms(search, evaluator, composer, baseline), _notes(search, options, profile)
    plan = build_plan(setting, options, evaluator, best, arms=arms, notes=notes)
    return Planned(plan, setting, options, composer, evaluator, best, profile)


def plan_by_hand(
    workload: Workload,
    options: PlanOptions,
    machine: Machine = H200,
    profile: Profile | None = None,
    choice: Choice | None = None,
) -> Planned:
    """The plan that a choice or modes by hand make, without a search.

    Weights of which nothing is said are streamed, their gradients leave through the ring, and the CPU updates.

    Raises
    ------
    BudgetError
        It does not fit; the error names the smallest device budget that is enough for these modes.
    PlanError
        As for `make_plan`.
    """
    options = for_ranks(options, machine)
    setting, composer = _set_up(workload, options, machine, profile)
    choice = choice or composer.compose(composer.start())
    evaluator = Evaluator(setting, options.device_memory)
    outcome = evaluator(choice)
    if outcome is None:
        smallest = smallest_that_fits(setting.workload, [choice])
        raise BudgetError("device_memory", options.device_memory, smallest, "these modes need more")
    plan = build_plan(setting, options, evaluator, outcome)
    return Planned(plan, setting, options, composer, evaluator, outcome, profile)


def plan_as_offload(
    workload: Workload, options: PlanOptions, machine: Machine = H200, profile: Profile | None = None
) -> Planned:
    """What the runtime does by itself without a plan, to compare plans and predictions with; errors as above."""
    options = for_ranks(options, machine)
    setting, composer = _set_up(workload, options, machine, profile)
    search = Search(Evaluator(setting, options.device_memory), composer, options)
    return plan_by_hand(workload, options, machine, profile, composer.compose(search.as_offload()))


def _set_up(
    workload: Workload, options: PlanOptions, machine: Machine, profile: Profile | None
) -> tuple[Setting, Composer]:
    """What every plan begins with, after everything that was given is found to be possible."""
    if profile is not None:
        profile.check(dtype=workload.dtype, tokens=workload.tokens, shapes=_shapes(workload))
        workload = with_measured_memory(workload, profile)
    workload = with_exchange(workload, machine.ranks)
    exact = options.numerics == "exact"
    setting = Setting(
        workload,
        costs(workload, machine, profile, exact=exact),
        machine,
        options.early,
        options.overlap,
        options.loads == "gathered",
    )
    none = {layer.name: LayerModes() for layer in workload.layers}
    given = none | parse_modes(options.modes, [layer.name for layer in workload.layers if layer.parameters])
    _check_given(workload, setting.costs, given, exact)
    _check_states(given, options)
    _check_host(workload, options)
    return setting, Composer(workload, setting.costs, options, given)


def smallest_that_fits(workload: Workload, choices: Sequence[Choice]) -> int:
    """Bytes of the smallest device budget in which one of these fits, to a MiB."""
    low, high = 0, 1 << 50
    while high - low > 1 << 20:
        middle = (low + high) // 2
        if any(share_device(workload, choice, middle).fits for choice in choices):
            high = middle
        else:
            low = middle
    return high


def _shapes(workload: Workload) -> dict[str, tuple[tuple[int, ...], ...]]:
    return {layer.name: layer.shapes for layer in workload.layers if layer.parameters}


def _check_given(
    workload: Workload, costs: Sequence[LayerCost], given: dict[str, LayerModes], exact: bool
) -> None:
    relaxed = "; numerics='relaxed' allows more" if exact else ""
    for layer, cost in zip(workload.layers, costs, strict=True):
        modes = given[layer.name]
        if modes.weight is not None and modes.weight not in cost.forward:
            able = ", ".join(mode.value for mode in cost.weight_modes())
            raise PlanError(f"modes: {layer.name} cannot have {modes.weight.value}; it can have {able}{relaxed}")
        weight = modes.weight or WeightMode.STREAM
        if modes.gradient is GradientMode.INPLACE and modes.gradient not in cost.gradient_modes(weight):
            why = "several layers add to its gradient, or it has none"
            raise PlanError(f"modes: {layer.name} cannot have inplace, but buffer: {why}")
        resident = modes.weight is WeightMode.RESIDENT
        if modes.state is StateMode.RESIDENT and not resident:
            raise PlanError(
                f"modes: {layer.name} has state:resident without weights that stay; write resident+state:resident"
            )


def _check_states(given: dict[str, LayerModes], options: PlanOptions) -> None:
    for name, modes in given.items():
        if modes.state is not None and modes.state not in options.state_modes:
            able = ", ".join(sorted(mode.value for mode in options.state_modes))
            raise PlanError(
                f"modes: the state of {name} cannot be {modes.state.value} here, where it can be {able}; with "
                "several ranks it stays in host memory, which all read"
            )


def _check_host(workload: Workload, options: PlanOptions) -> None:
    needed = host_nbytes(workload, Choice((), options.spares or 0))
    if options.host_memory is not None and needed > options.host_memory:
        raise BudgetError(
            "host_memory", options.host_memory, needed, "weights, gradients and optimizer state take more"
        )


def _arms(search: Search, evaluator: Evaluator, composer: Composer, baseline: Outcome | None) -> dict[str, float]:
    """Other plans' times, by what they are."""
    arms = {} if baseline is None else {"all streamed, updated by the CPU": baseline.seconds}
    start = search.embeddings_direct(composer.start())
    direct = evaluator(composer.compose(start))
    if direct is not None and start != composer.start():
        arms["the same, embeddings read in place"] = direct.seconds
    default = evaluator(composer.compose(search.as_offload()))
    if default is not None:
        arms[DEFAULT_ARM] = default.seconds
    for reserve, outcome in sorted(search.reserves.items(), reverse=True):
        arms[f"this plan, {reserve:.0%} of gradient bytes on the device"] = outcome.seconds
    return arms


def _notes(search: Search, options: PlanOptions, profile: Profile | None) -> list[str]:
    notes = []
    if profile is None:
        notes.append("no profile: times are by formula; profile the model on its device for better ones")
    elif profile.emulated:
        notes.append("the profile is of an emulated device: its times say nothing of a real one")
    best, nothing = search.best, search.reserves.get(0.0)
    if best is not None and options.gradient_memory is not None:
        there = gradient_nbytes(search.workload, best.choice)
        if there > options.gradient_memory:
            notes.append(
                f"{format_size(there)} of gradients are made on the device: no others can be written in place"
            )
    if best is not None and nothing is not None and nothing.seconds > best.seconds * 1.001:
        notes.append(
            f"writing all gradients to host memory in place would take {nothing.seconds / best.seconds - 1:.1%} "
            "longer than letting them leave through the ring"
        )
    return notes
