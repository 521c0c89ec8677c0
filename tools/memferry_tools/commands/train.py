"""``memferry train``."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from ..optional import require
from .plan import KNOWN, SHAPE


def command(
    preset: Annotated[str | None, typer.Option(help=f"The model: {KNOWN}.  [default: tiny]")] = None,
    config: Annotated[
        str | None,
        typer.Option(
            help="Instead: the sizes in the config.json of a Llama-like model of Hugging Face, or in its folder."
        ),
    ] = None,
    shape: SHAPE = None,
    tied: Annotated[bool, typer.Option("--tied", help="Share the embedding's weight with the output's.")] = False,
    data: Annotated[
        str | None,
        typer.Option(help="Text file, or folder of text files; by default Python's own standard library."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Local Hugging Face tokenizer, file or folder; bytes by default.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cuda:N or emulated.")] = "auto",
    device_memory: Annotated[
        str | None,
        typer.Option(
            help="Device memory to use, e.g. 6GiB: MemFerry's pool and what torch reserves together. By default "
            "a third of the weights on the emulated device, three quarters of what is free on a real one."
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            help="Take no more host memory than this; what the model leaves of it lets updates begin in backward."
        ),
    ] = None,
    pool_memory: Annotated[
        str | None, typer.Option(help="How much of --device-memory is MemFerry's pool; found out by default.")
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            help="Modes of layers, e.g. embedding=dha+inplace,blocks.*=stream: where weights are read (resident, "
            "stream, dha, dha_then_load, ring), how gradients leave (buffer, inplace).  [default: stream+buffer]"
        ),
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(help="Train by a plan in place of --mode: a file of `memferry plan --save`, or auto."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Weights in compute: fp32 or bf16; auto takes bf16 on CUDA and fp32 elsewhere.")
    ] = "auto",
    micro_batch: Annotated[int | None, typer.Option(help="Sequences at a time.  [default: the preset's]")] = None,
    seq: Annotated[
        int | None, typer.Option("--seq", "--sequence", help="Tokens in a sequence.  [default: the preset's]")
    ] = None,
    accumulate: Annotated[int, typer.Option(help="Micro-batches in a step.")] = 1,
    accumulate_dtype: Annotated[
        str, typer.Option(help="Sum their gradients in this: fp32, or auto for the dtype of the weights.")
    ] = "auto",
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 100,
    lr: Annotated[float | None, typer.Option(help="Learning rate.  [default: the preset's]")] = None,
    weight_decay: Annotated[float, typer.Option(help="AdamW's weight decay.")] = 0.01,
    max_grad_norm: Annotated[float, typer.Option(help="Clip gradients to this norm; 0 does not clip.")] = 1.0,
    checkpointing: Annotated[
        bool | None,
        typer.Option(
            "--checkpointing/--no-checkpointing",
            help="Recompute each block's activations in backward.  [default: the preset's]",
        ),
    ] = None,
    async_step: Annotated[
        bool, typer.Option("--async-step/--no-async-step", help="Let the next forward begin beside the update.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Of the first weights and of the batches.")] = 0,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic", help="Use kernels alone whose results are the same every time, as --verify."
        ),
    ] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Repeat the run in plain PyTorch; exit status 1 if one bit differs."),
    ] = False,
    save: Annotated[
        str | None, typer.Option(help="Folder for a checkpoint, written at the end; it always holds a whole one.")
    ] = None,
    save_every: Annotated[int | None, typer.Option(help="Write it after every so many steps, too.")] = None,
    resume: Annotated[
        str | None, typer.Option(help="Go on from the checkpoint in this folder, to --steps steps in all.")
    ] = None,
    json: Annotated[str | None, typer.Option(help="Write settings, machine, samples and summary here.")] = None,
    helpers: Annotated[
        str | None,
        typer.Option(
            help="Devices that do not train and lend their links to those that do, e.g. 1,2; auto takes idle ones."
        ),
    ] = None,
    adapters: Annotated[
        int | None,
        typer.Option(help="Train low-rank adapters of this rank on the attention projections, and nothing else."),
    ] = None,
) -> int:
    """Train a Llama-like language model through a budget of device memory."""
    settings = dict(locals())  # the options, by their names
    from ..train.options import TrainOptions

    options = TrainOptions.build(**settings)
    # OpenMP threads that spin while they wait take cores from the update; it is read when torch loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    require("torch", what="training", install="'memferry-rt[torch]'")
    from ..train.job import run

    return run(options)
