"""One run of ``memferry train``, from its options to its exit status."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

from memferry_rt import Report

from ..errors import ToolError
from ..screen import Screen
from ..version import version
from .checkpoints import Identity, Saved, check_savable
from .data import Batches
from .determinism import deterministic_kernels
from .device import Target, find_target
from .loop import Run, Sample, run_steps
from .memory import is_host_out_of_memory
from .offloaded import OffloadedTraining, Placement
from .options import TrainOptions
from .recipe import Recipe
from .reference import PlainTraining
from .report import comparison_text, placement_rows, plan_row, plan_rows, step_text, step_words, summary_rows
from .results import check_writable, results, write_results
from .text import read_text
from .tokens import tokenise
from .verify import Comparison, compare
from .workers import Workers, device_of, helpers_of, joined


def run(options: TrainOptions) -> int:
    """Train, show it, and keep the results.

    Returns
    -------
    int
        0, or 1 if a comparison was asked for and found a difference.
    """
    check_writable(options.json)
    check_savable(options.save, options.resume)
    device = device_of(options.device, helped=bool(options.helpers))
    try:
        with deterministic_kernels() if options.deterministic else nullcontext():
            return _run(options, device)
    except RuntimeError as error:
        if is_host_out_of_memory(error):
            raise ToolError(f"this machine has not enough memory for that: {error}") from error
        raise


def _run(options: TrainOptions, device: str) -> int:
    target = find_target(device, helped=bool(options.helpers))
    with joined(target.torch_device) as workers:
        if workers.size > 1 and options.verify:
            raise ToolError("--verify: plain PyTorch is one process; leave it out, or start one process")
        return _run_among(workers, options, target)


def _run_among(workers: Workers, options: TrainOptions, target: Target) -> int:
    saved = Saved.find(options.resume)
    tokens = tokenise(read_text(options.data), options.tokenizer)
    recipe = options.settle(emulated=target.emulated, vocabulary=tokens.vocabulary)
    recipe = replace(recipe, ranks=workers.size)
    batches = Batches(tokens, recipe, workers.rank)
    identity = Identity.of(options.model, recipe, tokens)
    if saved is not None:
        saved.check(identity, recipe.steps)
    screen = Screen(quiet=not workers.first)
    screen.title(f"memferry {version()}: train")
    screen.rows(plan_rows(options, recipe, tokens, target))
    if saved is not None:
        screen.rows([("resumed", f"{saved.path}, after {saved.step} steps")])
    first = 0 if saved is None else saved.step
    run, report = _train(options, recipe, batches, target, screen, identity, first, workers)
    screen.title("done")
    if options.plan == "auto":
        screen.rows([plan_row(report)])
    screen.rows(summary_rows(run, report, recipe, target))
    if options.save is not None:
        screen.rows([("saved", f"{options.save}, after {recipe.steps} steps")])
    comparison = _verify(run, recipe, batches, target, screen, first) if options.verify else None
    if options.json is not None and workers.first:
        write_results(options.json, results(options, recipe, tokens, target, run, report, comparison))
        screen.rows([("written", str(options.json))])
    return 0 if comparison is None or comparison.identical else 1


def _train(
    options: TrainOptions,
    recipe: Recipe,
    batches: Batches,
    target: Target,
    screen: Screen,
    identity: Identity,
    first: int,
    workers: Workers,
) -> tuple[Run, Report]:
    placement = Placement(
        target,
        device_memory=options.device_memory,
        host_memory=options.host_memory,
        pool_memory=options.pool_memory,
        plan=options.plan or options.mode,
        async_step=options.async_step,
        workers=workers,
        helpers=helpers_of(options.helpers),
    )
    with OffloadedTraining(recipe, batches, placement, options.resume) as training:

        def due(step: int) -> bool:
            between = options.save_every is not None and step % options.save_every == 0
            return options.save is not None and (step == recipe.steps or between)

        def save(step: int) -> None:
            assert options.save is not None
            training.save(options.save, identity.extra(step))

        screen.rows(placement_rows(training.report(), recipe))
        with screen.progress("training", recipe.steps - first) as show:
            shown = _shown(show, recipe)
            run = run_steps(
                training, recipe, shown, keep_parameters=options.verify, first=first, save=save, due=due
            )
        return run, training.report()


def _verify(run: Run, recipe: Recipe, batches: Batches, target: Target, screen: Screen, first: int) -> Comparison:
    """Compare with the uninterrupted run in plain PyTorch, whose `first` steps were made by an earlier process."""
    screen.title("the same steps in plain PyTorch" + (", and those before" if first else ""))
    training = PlainTraining(recipe, batches, target.torch_device)
    with screen.progress("verifying", recipe.steps) as show:
        reference = run_steps(training, recipe, _shown(show, recipe), keep_parameters=True)
    comparison = compare(run, reference.since(first))
    screen.rows([("verify", comparison_text(comparison))])
    return comparison


def _shown(show: Callable[[str, str], None], recipe: Recipe) -> Callable[[Sample], None]:
    return lambda sample: show(step_text(sample, recipe.steps), step_words(sample))
