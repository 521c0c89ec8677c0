"""``memferry simulate``."""

from __future__ import annotations

from typing import Annotated

import typer

from .plan import (
    CHECKPOINTING,
    CONFIG,
    DEVICE,
    DTYPE,
    EARLY,
    FIXTURE,
    HELPERS,
    MICRO_BATCH,
    MODES,
    PRESET,
    PROFILE,
    RANKS,
    SEQUENCE,
    SHAPE,
    TIED,
    TOPOLOGY,
)


def command(
    plan: Annotated[str | None, typer.Option(help="A plan of memferry plan --save; of the same model.")] = None,
    preset: PRESET = None,
    config: CONFIG = None,
    shape: SHAPE = None,
    device_memory: Annotated[
        str | None, typer.Option(help="The device budget, e.g. 24GiB.  [default: the plan's]")
    ] = None,
    host_memory: Annotated[str | None, typer.Option(help="The host budget; by default no limit.")] = None,
    micro_batch: MICRO_BATCH = None,
    sequence: SEQUENCE = None,
    dtype: DTYPE = "bf16",
    checkpointing: CHECKPOINTING = None,
    tied: TIED = False,
    profile: PROFILE = None,
    topology: TOPOLOGY = None,
    fixture: FIXTURE = None,
    device: DEVICE = 0,
    ranks: RANKS = 1,
    helpers: HELPERS = False,
    modes: MODES = None,
    early: EARLY = False,
    auto: Annotated[
        bool, typer.Option("--auto", help="What memferry train does by itself today, without a plan.")
    ] = False,
    ablation: Annotated[
        bool, typer.Option("--ablation", help="What each of the scheduler's ideas gains by itself.")
    ] = False,
    loads: Annotated[
        str,
        typer.Option(
            help="How several ranks load a layer: whole, as the runtime does, or gathered: each its part, and "
            "then the others' from them."
        ),
    ] = "whole",
    system: Annotated[
        str, typer.Option(help="memferry, or deepspeed: what ZeRO-2 with its optimizer offloaded would take.")
    ] = "memferry",
    json: Annotated[str | None, typer.Option(help="Write the iteration, usage, timeline and memory here.")] = None,
    plot: Annotated[str | None, typer.Option(help="Draw the timeline here, as PNG.")] = None,
) -> int:
    """Simulate an iteration of a plan, or of modes by hand, on any machine; needs no device."""
    settings = dict(locals())
    from ..plan import simulation

    return simulation.run(simulation.SimulateJob.build(settings))
