"""From a model, a machine and two budgets to a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import BudgetError, PlanError
from .choice import NEEDS_SLAB, Choice, host_nbytes, share_device, slab_nbytes, state_nbytes
from .compose import Composer
from .cost import LayerCost, costs
from .evaluate import Evaluator, Outcome, Run
from .iteration import Setting
from .machine import H200, Machine
from .model import LayerSpec, Workload
from .modes import GradientMode, LayerModes, StateMode, WeightMode, parse_modes
from .options import PlanOptions
from .plan import LayerPlan, Plan
from .profile import Profile
from .profiled import with_measured_memory
from .search import Search


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
    setting, composer = _set_up(workload, options, machine, profile)
    evaluator = Evaluator(setting, options.device_memory)
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
    if baseline is not None and baseline.seconds <= best.seconds:
        best = baseline
    arms, notes = _arms(search, evaluator, composer, baseline), _notes(search, profile)
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
    setting, composer = _set_up(workload, options, machine, profile)
    choice = choice or composer.compose(composer.start())
    evaluator = Evaluator(setting, options.device_memory)
    outcome = evaluator(choice)
    if outcome is None:
        smallest = smallest_that_fits(setting.workload, [choice])
        raise BudgetError("device_memory", options.device_memory, smallest, "these modes need more")
    plan = build_plan(setting, options, evaluator, outcome)
    return Planned(plan, setting, options, composer, evaluator, outcome, profile)


def _set_up(
    workload: Workload, options: PlanOptions, machine: Machine, profile: Profile | None
) -> tuple[Setting, Composer]:
    """What every plan begins with, after everything that was given is found to be possible."""
    if profile is not None:
        profile.check(dtype=workload.dtype, tokens=workload.tokens, shapes=_shapes(workload))
        workload = with_measured_memory(workload, profile)
    exact = options.numerics == "exact"
    setting = Setting(
        workload, costs(workload, machine, profile, exact=exact), machine, options.early, options.overlap
    )
    given = parse_modes(options.modes, [layer.name for layer in workload.layers])
    _check_given(workload, setting.costs, given, exact)
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
    copied = mode in NEEDS_SLAB or (mode is WeightMode.RESIDENT and each.state is StateMode.CPU)
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
            raise PlanError(f"modes: {layer.name} cannot have inplace, but buffer; its kernels add to gradients")
        resident = modes.weight is WeightMode.RESIDENT
        if modes.state is StateMode.RESIDENT and not resident:
            raise PlanError(
                f"modes: {layer.name} has state:resident without weights that stay; write resident+state:resident"
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
    for reserve, outcome in sorted(search.reserves.items(), reverse=True):
        arms[f"this plan, {reserve:.0%} of gradient bytes on the device"] = outcome.seconds
    return arms


def _notes(search: Search, profile: Profile | None) -> list[str]:
    notes = []
    if profile is None:
        notes.append("no profile: times are by formula; profile the model on its device for better ones")
    best, nothing = search.best, search.reserves.get(0.0)
    if best is not None and nothing is not None and nothing.seconds > best.seconds * 1.001:
        notes.append(
            f"writing all gradients to host memory in place would take {nothing.seconds / best.seconds - 1:.1%} "
            "longer than letting them leave through the ring"
        )
    return notes
