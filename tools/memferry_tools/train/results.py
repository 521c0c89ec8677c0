"""A run's results as JSON: settings, machine, every sample, and a summary."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from memferry_rt import Report

from .. import files
from ..machine import describe_machine
from ..version import version
from .device import Target
from .loop import Run
from .options import TrainOptions
from .recipe import Recipe
from .tokens import Tokens
from .verify import Comparison

SCHEMA = "memferry.train"
SCHEMA_VERSION = 1


def check_writable(path: Path | None) -> None:
    """Find out whether a result can be written, before time is spent on it."""
    files.check_writable(path, "--json")


def results(
    options: TrainOptions,
    recipe: Recipe,
    tokens: Tokens,
    target: Target,
    run: Run,
    report: Report,
    comparison: Comparison | None,
) -> dict[str, Any]:
    """Everything there is to keep of a run.  Seconds, bytes and tokens are numbers; NaN and infinity are null."""
    cuda = not target.emulated
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "memferry": version(),
        "settings": {
            "preset": options.model,
            "data": tokens.source,
            "data_tokens": len(tokens.ids),
            "device": target.text,
            "device_memory": report.device_memory,
            "host_memory": options.host_memory,
            "pool_memory": options.pool_memory,
            "mode": options.mode,
            "plan": options.plan if options.plan_file is None else str(options.plan_file),
            "async_step": options.async_step,
            "deterministic": options.deterministic,
            "verify": options.verify,
            "save": None if options.save is None else str(options.save),
            "save_every": options.save_every,
            "resume": None if options.resume is None else str(options.resume),
            "parameters": recipe.parameters,
            "trained_parameters": recipe.trained_parameters,
            "helpers": options.helpers,
            **dataclasses.asdict(recipe),
        },
        "machine": {
            **describe_machine(),
            "device": target.name,
            "emulated": target.emulated,
            "torch": torch.__version__,
            "torch_cuda": torch.version.cuda if cuda else None,
            "torch_threads": torch.get_num_threads(),
        },
        "samples": [dataclasses.asdict(sample) for sample in run.samples],
        "summary": {
            "iteration_s": run.iteration_s,
            "warm_up_steps": run.warm_up,
            "tokens_per_second": recipe.tokens_per_step / run.iteration_s,
            "device_peak_bytes": report.device_peak,
            "host_bytes_per_parameter": report.host_nbytes_per_parameter,
            "dram_bytes_per_step": report.dram_nbytes_per_step,
            "device_iteration": _device_iteration(report),
            "loss_first": run.samples[0].loss,
            "loss_last": run.samples[-1].loss,
            "verify": None if comparison is None else dataclasses.asdict(comparison),
        },
        "report": dataclasses.asdict(report),
    }


def _device_iteration(report: Report) -> dict[str, float]:
    """The last iteration on the device's clock; busy and the exposed times are the whole."""
    times = report.times
    return {
        "total_s": times.total,
        "busy_s": times.busy,
        "busy_share": times.busy_share,
        "exposed_optimizer_s": times.update + times.step,
        "exposed_copy_s": times.copy,
    }


def write_results(path: Path, content: dict[str, Any]) -> None:
    """Write JSON whole or not at all."""
    files.write_json(path, content, "--json")
