"""Parts of a runtime, made of what it has already."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ...device_update import DeviceUpdate
from ...updates import UpdateQueue
from .adam_state import AdamPatch
from .early import EarlyUpdates, SpareSlab
from .gradient_slot import GradientSlot
from .gradients import GradientFlow
from .layer import LayerState
from .parallel import RankGradients, RankUpdates
from .rules import AdamRule, UpdateRule
from .step import StepUpdates
from .torch_adam import single_threaded
from .update import AdamUpdate, LayerUpdate

if TYPE_CHECKING:
    from .runtime import Runtime


def update_queue(runtime: Runtime, rule: UpdateRule, *, feeder: bool) -> UpdateQueue:
    """The queue of the CPU's updates, with a thread that feeds the device where one is wanted and can be."""
    ranks, emulated = runtime.ranks, runtime.factory.emulated
    queue: Callable[..., UpdateQueue] = UpdateQueue
    if ranks is not None:
        queue = functools.partial(RankUpdates, ranks, runtime.layers, emulated=emulated)
    threads = torch.get_num_threads()
    made = queue(start=single_threaded, native=rule.native, feeder=feeder and not emulated)
    torch.set_num_threads(threads)
    return made


def gradient_flow(
    runtime: Runtime, *, settle: Callable[[LayerState], None], arrived: Callable[[GradientSlot], None]
) -> GradientFlow:
    """What sends gradients home, of all parameters that are trained.

    Parameters
    ----------
    runtime : Runtime
    settle, arrived : callable
        See `GradientFlow`.
    """
    flow: Callable[..., GradientFlow] = GradientFlow
    if runtime.ranks is not None:
        flow = functools.partial(RankGradients, runtime.ranks, runtime.factory.torch_device)
    made = flow(
        driver=runtime.driver,
        engine=runtime.memory.engine,
        stream=runtime.stream,
        settle=settle,
        arrived=arrived,
        wait=runtime.stalls.wait,
        ring_tensor=runtime.factory.device,
        accumulate=runtime.options.accumulate,
    )
    for name, parameter in runtime.model.named_parameters():
        if parameter.requires_grad:
            made.attach(name, parameter, *runtime.home[parameter])
    return made


def step_updates(runtime: Runtime, rule: UpdateRule, update: DeviceUpdate | None) -> StepUpdates:
    """Who makes the updates of a step, by the optimizer's rule."""
    ranks = runtime.ranks
    group_of = runtime.patch.group_of()
    plans: dict[LayerState, LayerUpdate] = {}
    for layer in runtime.layers:
        groups = {
            index: group_of[parameter]
            for index, parameter in enumerate(layer.parameters)
            if layer.layout.slots[index].spec.updated
        }
        if groups:
            parts = None if ranks is None else ranks.share.parts(layer.layout)
            plans[layer] = rule.plan(layer, groups, parts)
    split = runtime.options.optimizer_split
    made = StepUpdates(
        runtime.driver,
        runtime.layers,
        plans,
        runtime.memory,
        runtime.patch,
        runtime.updates,
        update,
        split=split if isinstance(split, float) else None,
        stream=runtime.stream,
        shared=ranks is not None,
    )
    if isinstance(runtime.updates, RankUpdates):
        runtime.updates.streamed_until = lambda layer: made.streamed_until(runtime.layers[layer])
    return made


def early_updates(runtime: Runtime, rule: UpdateRule, spares: list[SpareSlab]) -> EarlyUpdates | None:
    """Who makes updates during backward, if that is what the native kernel of Adam does here."""
    if not isinstance(rule, AdamRule) or rule.kernel is None:
        return None
    updates = runtime.step_updates
    plans = {layer: plan for layer, plan in updates.plans.items() if isinstance(plan, AdamUpdate)}
    assert isinstance(runtime.patch, AdamPatch)
    return EarlyUpdates(
        runtime.driver,
        plans,
        runtime.patch,
        runtime.updates,
        rule.kernel,
        runtime.gradients.slots,
        spares,
        streamed_until=updates.streamed_until,
    )
