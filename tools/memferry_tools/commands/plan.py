"""``memferry plan``."""

from __future__ import annotations

from typing import Annotated

import typer

from ..train.presets import PRESETS

KNOWN = " or ".join((", ".join(list(PRESETS)[:-1]), list(PRESETS)[-1]))
PRESET = Annotated[
    str | None,
    typer.Option(help=f"{KNOWN}.  [default: the profile's model, or llama-1b]"),
]
SHAPE = Annotated[
    str | None,
    typer.Option(help="Sizes in place of the model's own, e.g. layers=4,vocabulary=512."),
]
CONFIG = Annotated[
    str | None,
    typer.Option(help="Instead: a Hugging Face config.json (Llama, Mistral, GPT-2, BERT), or its folder."),
]
TIED = Annotated[bool, typer.Option("--tied", help="Share the embedding's weight with the output's.")]
MICRO_BATCH = Annotated[int | None, typer.Option(help="Sequences at a time.  [default: the preset's, or 8]")]
SEQUENCE = Annotated[
    int | None, typer.Option("--seq", "--sequence", help="Tokens in a sequence.  [default: the preset's, or 1024]")
]
DTYPE = Annotated[str, typer.Option(help="Weights in compute: bf16, fp16 or fp32.")]
CHECKPOINTING = Annotated[
    str | None,
    typer.Option(help="Blocks recompute their activations: on, off, or auto for each as it suits."),
]
PROFILE = Annotated[str | None, typer.Option(help="Times of this model on its device; formulas without.")]
TOPOLOGY = Annotated[str | None, typer.Option(help="The machine's links, as memferry topo --json writes them.")]
FIXTURE = Annotated[str | None, typer.Option(help="Links of a machine that comes with MemFerry, e.g. a100-x8.")]
DEVICE = Annotated[int, typer.Option(help="Which device of the topology.")]
RANKS = Annotated[int, typer.Option(help="Devices that train together, each with a micro-batch of its own.")]
HELPERS = Annotated[
    bool,
    typer.Option("--helpers", help="Devices of the topology that do not train relay copies for those that do."),
]
MODES = Annotated[str | None, typer.Option(help="Modes by hand, e.g. 'embedding=dha, blocks.*=stream+inplace'.")]
NUMERICS = Annotated[str, typer.Option(help="exact, or relaxed: modes that may change the last bit are allowed.")]
EARLY = Annotated[
    bool, typer.Option("--early", help="Updates made in backward count: gradients are not, or seldom, clipped.")
]


def command(
    preset: PRESET = None,
    config: CONFIG = None,
    shape: SHAPE = None,
    device_memory: Annotated[str | None, typer.Option(help="The device budget, e.g. 24GiB.")] = None,
    host_memory: Annotated[str | None, typer.Option(help="The host budget; by default no limit.")] = None,
    largest: Annotated[
        bool, typer.Option("--largest", help="Find the largest Llama-like model that trains in both budgets.")
    ] = False,
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
    numerics: NUMERICS = "exact",
    early: EARLY = False,
    spare_slabs: Annotated[
        int | None, typer.Option(help="For them; by default what host memory has room for.")
    ] = None,
    reserve: Annotated[
        float | None, typer.Option(help="The share of gradient bytes that may stay on the device, 0 to 1.")
    ] = None,
    gradient_memory: Annotated[str | None, typer.Option(help="The same in bytes, e.g. 512MiB.")] = None,
    partial: Annotated[bool, typer.Option("--partial", help="Weights that come and go may stay in part.")] = False,
    save: Annotated[str | None, typer.Option(help="Write the plan here.")] = None,
    save_config: Annotated[
        str | None, typer.Option(help="Write the sizes of --largest here, for memferry train --config.")
    ] = None,
    json: Annotated[
        str | None, typer.Option(help="Write plan, machine, bounds, timeline and memory here.")
    ] = None,
    plot: Annotated[str | None, typer.Option(help="Draw the timeline here, as PNG.")] = None,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(help="Plan nothing; compare two files of --save.  Exit status 1: they decide differently."),
    ] = None,
) -> int:
    """Decide where weights are read, how gradients leave and who updates, within two budgets; needs no device."""
    settings = dict(locals())
    from ..plan import job

    if settings["compare"] is not None:
        return job.compare(*settings["compare"])
    return job.run(job.PlanJob.build(settings))
