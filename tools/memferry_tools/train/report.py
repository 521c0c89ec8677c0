"""What a run says of itself, as text."""

from __future__ import annotations

from memferry_allocator import format_size
from memferry_rt import HelperReport, Report

from ..screen import Row
from .device import Target
from .loop import Run, Sample
from .options import TrainOptions
from .recipe import Recipe
from .tokens import Tokens
from .verify import Comparison

_DTYPES = {"float32": "fp32", "bfloat16": "bf16"}


def plan_rows(options: TrainOptions, recipe: Recipe, tokens: Tokens, target: Target) -> list[Row]:
    """What a run will do."""
    shape = recipe.shape
    clipping = "not clipped" if recipe.max_grad_norm is None else f"clipped to norm {recipe.max_grad_norm:g}"
    tying = "tied" if shape.tied else "untied"
    return [
        (
            "model",
            f"{options.model}: {shape.parameters:,} parameters; {shape.layers} blocks, hidden {shape.hidden}, "
            f"feed-forward {shape.ffn}, {shape.heads} heads, vocabulary {shape.vocabulary}, {tying}",
        ),
        *_adapter_rows(recipe),
        ("text", f"{tokens.source}: {len(tokens.ids):,} tokens"),
        (
            "steps",
            f"{recipe.steps} of {_ranks_text(recipe)}{recipe.accumulate} x {recipe.micro_batch} x {recipe.seq} "
            "tokens, activations " + ("recomputed in backward" if recipe.checkpointing else "kept"),
        ),
        (
            "optimizer",
            f"AdamW, lr {recipe.lr:g}, weight decay {recipe.weight_decay:g}, gradients {clipping}",
        ),
        ("device", _device_text(target)),
    ]


def _adapter_rows(recipe: Recipe) -> list[Row]:
    if recipe.adapters is None:
        return []
    text = f"of rank {recipe.adapters} on the attention projections: {recipe.trained_parameters:,} parameters"
    return [("adapters", f"{text}, which alone train")]


def _ranks_text(recipe: Recipe) -> str:
    return "" if recipe.ranks == 1 else f"{recipe.ranks} ranks x "


def plan_row(report: Report) -> Row:
    """Who has planned, and what is done otherwise."""
    return "plan", "; ".join((report.plan_source, *report.plan_notes))


def placement_rows(report: Report, recipe: Recipe) -> list[Row]:
    """What is where, once it is there."""
    weights, gradients = recipe.weight_nbytes, recipe.gradient_nbytes
    state = report.host_nbytes - weights - gradients
    share = report.device_memory / weights
    planned = [] if report.plan_source == "default" else [plan_row(report)]
    return [
        *planned,
        (
            "budget",
            f"{format_size(report.device_memory)} of device memory, {share:.0%} of the weights: pool "
            f"{format_size(report.pool_nbytes)}, of which {format_size(report.ring_nbytes)} is the gradient ring",
        ),
        (
            "host",
            f"{format_size(report.host_nbytes)}: {_DTYPES[recipe.dtype]} weights {format_size(weights)}, "
            f"gradients {format_size(gradients)}, fp32 optimizer state {format_size(state)}; "
            f"{report.host_nbytes_per_parameter:.1f} bytes a parameter",
        ),
        ("layers", f"{report.layers}, each moved as one piece"),
        *([("helpers", report.helpers_note)] if report.helpers_note else []),
    ]


def step_text(sample: Sample, steps: int) -> str:
    """One step."""
    norm = "" if sample.grad_norm is None else f"  gradient norm {sample.grad_norm:8.4f}"
    memory = "" if sample.device_peak_bytes is None else f"  device {format_size(sample.device_peak_bytes)}"
    helped = f"  helpers {format_size(sample.helper_bytes)}" if sample.helper_bytes else ""
    return (
        f"step {sample.step:>{len(str(steps))}}/{steps}  loss {sample.loss:.4f}{norm}"
        f"  {sample.tokens_per_second:,.0f} tokens/s{memory}{helped}"
    )


def step_words(sample: Sample) -> str:
    """The most important of a step, in at most 40 characters."""
    memory = "" if sample.device_peak_bytes is None else f" {format_size(sample.device_peak_bytes)}"
    return f"loss {sample.loss:.3f} {sample.tokens_per_second:,.0f} tokens/s{memory}"


def summary_rows(run: Run, report: Report, recipe: Recipe, target: Target) -> list[Row]:
    """What came of a run."""
    first, last = run.samples[0], run.samples[-1]
    counted = len(run.samples) - run.warm_up
    rows = [
        ("loss", f"{first.loss:.4f} -> {last.loss:.4f} in {len(run.samples)} steps"),
        (
            "iteration",
            f"{run.iteration_s:.3f} s, median of {counted} after {run.warm_up} to warm up; "
            f"{recipe.tokens_per_step / run.iteration_s:,.0f} tokens/s"
            + (" on the CPU of this machine" if target.emulated else ""),
        ),
        (
            "device",
            f"at most {format_size(report.device_peak)} of the {format_size(report.device_memory)} budget in use",
        ),
        (
            "moved",
            f"{format_size(report.host_to_device_nbytes)} to the device, "
            f"{format_size(report.device_to_host_nbytes)} back",
        ),
        *[("helpers", _helper_text(helper)) for helper in report.helpers],
        (
            "host",
            f"{report.host_nbytes_per_parameter:.1f} bytes a parameter; traffic by count "
            f"{format_size(report.dram_nbytes_per_step)} a step",
        ),
        ("update", _update_text(report)),
        ("time", _time_text(report)),
    ]
    if report.skipped_steps:
        rows.append(("skipped", f"{report.skipped_steps} steps: their gradient norm was not finite"))
    return rows


def _helper_text(helper: HelperReport) -> str:
    """What a device has lent."""
    return (
        f"device {helper.device} carried {format_size(helper.carried_in)} of it to the device and "
        f"{format_size(helper.carried_out)} back, with {format_size(helper.device_nbytes)} of its memory; "
        f"{helper.health}"
    )


def _update_text(report: Report) -> str:
    """Who updated how much in the last step, and how fast."""
    rates = report.update_rates
    elsewhere = report.resident_parameters + report.streamed_parameters + report.early_parameters
    on_cpu = report.updated_parameters - elsewhere
    speed = f"CPU {rates.cpu / 1e9:.2f} and streaming {rates.device / 1e9:.2f} Gparam/s"
    return (
        f"parameters in the last step: {report.resident_parameters:,} where they live on the device, "
        f"{report.streamed_parameters:,} streamed through it, {report.early_parameters:,} during backward, "
        f"{on_cpu:,} on the CPU; {speed}, {'measured' if rates.samples else 'assumed'}"
    )


def _time_text(report: Report) -> str:
    """What the device did in the last iteration; the parts are the whole."""
    times = report.times
    return (
        f"of the last iteration's {times.total:.4f} s on the device's clock: busy {times.busy:.4f} "
        f"({times.busy_share:.0%}), exposed optimizer {times.update + times.step:.4f} (waiting for updates "
        f"{times.update:.4f}, in step() {times.step:.4f}), exposed copies {times.copy:.4f}"
    )


def comparison_text(comparison: Comparison) -> str:
    """What a comparison with plain PyTorch found."""
    compared = (
        f"{comparison.losses} losses of {comparison.steps} steps and {comparison.parameters} parameters of "
        f"{comparison.values:,} values"
    )
    if comparison.identical:
        return f"identical to the bit with plain PyTorch: {compared}"
    return (
        f"NOT identical with plain PyTorch: first in {comparison.first_difference}; largest difference "
        f"{comparison.max_abs_difference:g}; compared were {compared}"
    )


def _device_text(target: Target) -> str:
    if target.emulated:
        return (
            f"{target.text}, EMULATED in host memory: what moves where is real, times are those of the CPU, on "
            "which torch computes"
        )
    return f"{target.text}, {target.name}"
