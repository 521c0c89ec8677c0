"""What a runtime knows, put together as a report."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from memferry_allocator import Direction
from memferry_transport import Path

from .layer import LayerState
from .planned import notes_of
from .report import HelperReport, LayerReport, Report

if TYPE_CHECKING:
    from .runtime import Runtime


def report_of(runtime: Runtime) -> Report:
    """What is where now."""
    memory, updates = runtime.memory, runtime.step_updates
    moved = memory.bytes_moved
    return Report(
        device=f"{runtime.driver.name}:{runtime.device}",
        device_name=runtime.driver.device_info(runtime.device).name,
        layers=len(runtime.layers),
        parameters=sum(parameter.numel() for parameter in runtime.model.parameters()),
        weight_nbytes=memory.weights.nbytes,
        host_nbytes=runtime.arena.nbytes,
        device_memory=runtime.options.device_memory,
        pool_nbytes=memory.budget.pool,
        ring_nbytes=memory.budget.ring,
        stream_nbytes=memory.budget.stream,
        panels_nbytes=memory.budget.panels,
        device_peak=memory.budget.peak(memory.space.pool.peak),
        host_to_device_nbytes=moved[Direction.HOST_TO_DEVICE],
        device_to_host_nbytes=moved[Direction.DEVICE_TO_HOST],
        updated_parameters=updates.numel(updates.updated),
        resident_parameters=updates.numel(layer for layer in updates.updated if layer.residence is not None),
        streamed_parameters=updates.numel(updates.streamed),
        early_parameters=updates.numel(updates.made_early),
        update_rates=updates.rates,
        summed_parameters=updates.numel(layer for layer in updates.updated if layer.sums is not None),
        times=runtime.stalls.last,
        dram_nbytes=updates.cpu_nbytes + sum(moved.values()) + sum(map(_in_place, runtime.layers)),
        steps=runtime.steps,
        skipped_steps=runtime.skipped_steps,
        grad_norm=runtime.grad_norm,
        plan_source=runtime.plans.in_force.source,
        plan_notes=plan_notes(runtime),
        per_layer=tuple(_layer_report(runtime, layer) for layer in runtime.layers),
        helpers=_helpers(runtime),
        helpers_note=runtime.help.note,
    )


def plan_notes(runtime: Runtime) -> tuple[str, ...]:
    """What is done otherwise than the plan has it, now."""
    auto = () if runtime.autopilot is None or not runtime.autopilot.reason else (runtime.autopilot.reason,)
    if runtime.plan is None:
        return auto
    streaming = runtime.memory.streaming is not None
    return (*auto, *notes_of(runtime.plan, runtime.options, spares=runtime.spares, streaming=streaming))


def _helpers(runtime: Runtime) -> tuple[HelperReport, ...]:
    engine = runtime.memory.engine
    if not runtime.help.helpers:
        return ()
    ways = engine.health().paths
    return tuple(
        HelperReport(
            device=use.device,
            carried_in=use.bytes_in,
            carried_out=use.bytes_out,
            device_nbytes=use.staging_nbytes,
            health="; ".join(
                str(way) for way in ways if isinstance(way.path, Path) and way.path.helper == use.device
            ),
        )
        for use in engine.helpers()
    )


def _layer_report(runtime: Runtime, layer: LayerState) -> LayerReport:
    weights, slab = runtime.memory.weights[layer.index], layer.gradients_on_device
    pool = weights.reserved if weights.copy_address else 0
    if layer.residence is not None:
        pool += layer.residence.state.span.nbytes
    if slab is not None:
        pool += slab.span.nbytes
    traffic, plan = layer.traffic, layer.plan
    return LayerReport(
        name=layer.name,
        weight_mode=plan.weight.value,
        gradient_mode=plan.gradient.value,
        state_mode="" if plan.state is None else plan.state.value,
        loaded_modules=plan.loaded,
        pool_nbytes=pool,
        **dataclasses.asdict(traffic),
    )


def _in_place(layer: LayerState) -> int:
    return layer.traffic.read_in_place + layer.traffic.written_in_place
