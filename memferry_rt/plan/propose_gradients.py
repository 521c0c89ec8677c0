"""Gradient modes that the programs propose, for the simulator to judge."""

from __future__ import annotations

from .choice import Choice
from .compose import Composer
from .gradients import Gradient, Offload, device_limit, offload_gradients, offload_in_time
from .modes import GradientMode, StateMode
from .setting import Setting

POINTS = 8  # of the fronts in the version with time


def within_reserve(
    setting: Setting, choice: Choice, composer: Composer, reserve: float
) -> tuple[GradientMode, ...]:
    """Modes with no more than a share of all gradient bytes on the device, as far as kernels allow."""
    gradients = _gradients(setting, choice, composer)
    return within_limit(setting, choice, composer, device_limit(gradients, reserve))


def within_limit(setting: Setting, choice: Choice, composer: Composer, limit: int) -> tuple[GradientMode, ...]:
    """Modes with no more than so many bytes on the device, as far as kernels allow, at the least cost."""
    gradients = _gradients(setting, choice, composer)
    movable = sum(gradient.nbytes for gradient in gradients if gradient.inplace is not None)
    limit = max(limit, sum(gradient.nbytes for gradient in gradients) - movable)
    found = offload_gradients(gradients, limit)
    while found is None:  # what rounding leaves over
        limit += max(1, movable // 64)
        found = offload_gradients(gradients, limit)
    return _modes(found)


def in_time(
    setting: Setting, choice: Choice, composer: Composer, ring_nbytes: int
) -> tuple[GradientMode, ...] | None:
    """Modes with which backward and its copies are over first, with gradients leaving through a ring of this size.

    None if one that may not be written in place is larger than the ring.
    """
    order = list(reversed(_gradients(setting, choice, composer)))
    found = offload_in_time(order, ring_nbytes, points=POINTS)
    return None if found is None else tuple(reversed(_modes(found)))


def _modes(found: Offload) -> tuple[GradientMode, ...]:
    return tuple(GradientMode.INPLACE if out else GradientMode.BUFFER for out in found.inplace)


def _gradients(setting: Setting, choice: Choice, composer: Composer) -> list[Gradient]:
    """Of every layer, in forward order; where state stays on the device its gradient does not move."""
    workload, machine = setting.workload, setting.machine
    gradients = []
    for number, (spec, each, cost) in enumerate(zip(workload.layers, choice.layers, setting.costs, strict=True)):
        weight = choice.layers[workload.owners[number]].weight
        stays = each.state is StateMode.RESIDENT
        able = not stays and composer.may_write_home(number, weight)
        repeated = cost.recompute[weight].alone(machine) if each.recompute else 0.0
        kept = cost.backward[weight, GradientMode.BUFFER].alone(machine)
        inplace = cost.backward[weight, GradientMode.INPLACE].alone(machine) if able else None
        copy = 0.0 if stays else spec.gradient_nbytes / machine.from_device
        gradients.append(
            Gradient(spec.gradient_nbytes, repeated + kept, None if inplace is None else repeated + inplace, copy)
        )
    return gradients
