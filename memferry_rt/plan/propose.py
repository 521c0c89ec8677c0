"""Weight modes that the programs propose, for the simulator to judge."""

from __future__ import annotations

from dataclasses import replace

from .choice import Choice
from .compose import Composer
from .evaluate import Run
from .modes import GradientMode, StateMode, WeightMode
from .setting import Setting
from .ways import Step, Way, best_ways, with_loads


def propose_weights(
    setting: Setting, choice: Choice, run: Run, composer: Composer, count: int, *, contention: bool = True
) -> list[tuple[WeightMode, ...]]:
    """The best modes of all weights by the programs of forward and backward.

    With `contention`, first those with kernels that take from the link what they read.

    Parameters
    ----------
    setting : Setting
    choice : Choice
        Where the releases of weights are from, and which stay on the device.
    run : Run
        Its iteration.
    composer : Composer
    count : int
        How many of each kind, at the most.
    contention : bool
    """
    layers = setting.workload.layers
    owners = setting.workload.owners
    steps = [_forward_step(setting, choice, run, composer, number) for number in range(len(layers))]
    alone = best_ways([replace(step, occupies=0.0) for step in steps], count=count)
    proposals = []
    sparing = [with_loads(steps, found) for found in best_ways(steps, count=count)] if contention else []
    for found in [*sparing, *alone]:
        weights = [each.weight for each in choice.layers]
        for number, way in enumerate(found.ways):
            if owners[number] == number and way is Way.DIRECT:
                weights[number] = WeightMode.DHA
            elif owners[number] == number and way is Way.LOAD and weights[number] is not WeightMode.RESIDENT:
                weights[number] = WeightMode.STREAM
        wanted = tuple(_wish(mode) for mode in weights)
        proposals += [wanted, _with_reloads(setting, composer, wanted)]
    return list(dict.fromkeys(proposals))


def _wish(mode: WeightMode) -> WeightMode:
    """Streamed weights that stay are still a matter of room."""
    return WeightMode.STREAM if mode is WeightMode.RESIDENT else mode


def _forward_step(setting: Setting, choice: Choice, run: Run, composer: Composer, number: int) -> Step:
    owner = setting.workload.owners[number]
    spec, cost, machine = setting.workload.layers[owner], setting.costs[number], setting.machine
    here = choice.layers[owner].weight is WeightMode.RESIDENT and choice.layers[owner].state is not StateMode.CPU
    update = run.iteration.update.get(owner)
    release = 0.0 if update is None else max(0.0, run.trace.ends[update] - run.begin)
    allowed = composer.allowed(owner)
    direct = cost.forward[WeightMode.DHA].alone(machine) if WeightMode.DHA in allowed else None
    may_load = WeightMode.STREAM in allowed or choice.layers[owner].weight is WeightMode.RESIDENT
    borrowed = owner != number  # the loads and the choice are its owner's
    return Step(
        seconds=cost.forward[WeightMode.STREAM].alone(machine),
        load=machine.load_seconds(spec.weight_nbytes) if may_load and not borrowed else None,
        direct=None if borrowed else direct,
        occupies=cost.forward[WeightMode.DHA].read_nbytes / machine.to_device if direct is not None else 0.0,
        here=here or borrowed or not (may_load or direct is not None),
        release=release,
    )


def _with_reloads(setting: Setting, composer: Composer, weights: tuple[WeightMode, ...]) -> tuple[WeightMode, ...]:
    """Layers that forward reads in place, with a copy for backward where the program of backward wants one."""
    machine, layers = setting.machine, setting.workload.layers
    order = list(range(len(layers) - 1, -1, -1))
    steps = []
    for number in order:
        cost, owner = setting.costs[number], setting.workload.owners[number]
        mode = weights[owner]
        recompute = cost.recompute[WeightMode.STREAM].seconds if layers[number].recompute else 0.0
        here = cost.backward[WeightMode.STREAM, GradientMode.BUFFER].alone(machine) + recompute
        may_reload = WeightMode.DHA_THEN_LOAD in composer.allowed(owner)
        if mode is not WeightMode.DHA or not may_reload or owner != number:
            load = machine.load_seconds(layers[owner].weight_nbytes) if mode is WeightMode.STREAM else None
            steps.append(Step(here, load=load, here=load is None))
            continue
        direct = cost.backward[WeightMode.DHA, GradientMode.BUFFER].alone(machine)
        if layers[number].recompute:
            direct += cost.recompute[WeightMode.DHA].alone(machine)
        steps.append(Step(here, load=machine.load_seconds(layers[number].weight_nbytes), direct=direct))
    found = best_ways(steps)[0]
    result = list(weights)
    for number, way in zip(order, found.ways, strict=True):
        if way is Way.LOAD and result[number] is WeightMode.DHA:
            result[number] = WeightMode.DHA_THEN_LOAD
    return tuple(result)
