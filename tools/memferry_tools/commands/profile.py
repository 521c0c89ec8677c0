"""``memferry profile``."""

from __future__ import annotations

from typing import Annotated

import typer

from ..optional import require
from .plan import SHAPE


def command(
    preset: Annotated[str | None, typer.Option(help="Whose layers; see memferry train.  [default: tiny]")] = None,
    config: Annotated[str | None, typer.Option(help="Instead: a config.json; see memferry train.")] = None,
    shape: SHAPE = None,
    micro_batch: Annotated[
        int | None, typer.Option(help="Sequences in a micro-batch. [default: the preset's]")
    ] = None,
    sequence: Annotated[
        int | None, typer.Option("--seq", "--sequence", help="Tokens in a sequence. [default: the preset's]")
    ] = None,
    checkpointing: Annotated[
        bool | None,
        typer.Option(
            "--checkpointing/--no-checkpointing", help="Whether blocks are recomputed. [default: the preset's]"
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, fp32 or bf16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cuda:0 or emulated.")] = "auto",
    anew: Annotated[bool, typer.Option("--anew", help="Measure, even if it was measured here before.")] = False,
    json: Annotated[str | None, typer.Option(help="Write the profile here, for memferry plan.")] = None,
) -> int:
    """Measure a model's layers in every mode: weights on the device, at home or in panels, gradients likewise."""
    settings = dict(locals())
    require("torch", what="profiling", install="'memferry-rt[torch]'")
    from ..profile.job import run
    from ..profile.options import ProfileOptions

    return run(ProfileOptions.build(**settings))
