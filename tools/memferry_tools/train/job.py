"""One run of ``memferry train``, from its options to its exit status."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from memferry_rt import Report

from ..errors import ToolError
from ..screen import Screen
from ..version import version
from .data import Batches
from .determinism import deterministic_kernels
from .device import Target, find_target
from .loop import Run, Sample, run_steps
from .memory import is_host_out_of_memory
from .offloaded import OffloadedTraining, Placement
from .options import TrainOptions
from .recipe import Recipe
from .reference import PlainTraining
from .report import comparison_text, placement_rows, plan_rows, step_text, step_words, summary_rows
from .results import check_writable, results, write_results
from .text import read_text
from .tokens import tokenise
from .verify import Comparison, compare


def run(options: TrainOptions) -> int:
    """Train, show it, and keep the results.

    Returns
    -------
    int
        0, or 1 if a comparison was asked for and found a difference.
    """
    check_writable(options.json)
    try:
        with deterministic_kernels() if options.verify else nullcontext():
            return _run(options)
    except RuntimeError as error:
        if is_host_out_of_memory(error):
            raise ToolError(f"this machine has not enough memory for that: {error}") from error
        raise


def _run(options: TrainOptions) -> int:
    target = find_target(options.device)
    tokens = tokenise(read_text(options.data), options.tokenizer)
    recipe = options.settle(emulated=target.emulated, vocabulary=tokens.vocabulary)
    batches = Batches(tokens, recipe)
    screen = Screen()
    screen.title(f"memferry {version()}: train")
    screen.rows(plan_rows(options, recipe, tokens, target))
    run, report = _train(options, recipe, batches, target, screen)
    screen.title("done")
    screen.rows(summary_rows(run, report, recipe, target))
    comparison = _verify(run, recipe, batches, target, screen) if options.verify else None
    if options.json is not None:
        write_results(options.json, results(options, recipe, tokens, target, run, report, comparison))
        screen.rows([("written", str(options.json))])
    return 0 if comparison is None or comparison.identical else 1


def _train(
    options: TrainOptions, recipe: Recipe, batches: Batches, target: Target, screen: Screen
) -> tuple[Run, Report]:
    placement = Placement(
        target,
        device_memory=options.device_memory,
        host_memory=options.host_memory,
        pool_memory=options.pool_memory,
        async_step=options.async_step,
    )
    with OffloadedTraining(recipe, batches, placement) as training:
        screen.rows(placement_rows(training.report(), recipe))
        with screen.progress("training", recipe.steps) as show:
            run = run_steps(training, recipe, _shown(show, recipe), keep_parameters=options.verify)
        return run, training.report()


def _verify(run: Run, recipe: Recipe, batches: Batches, target: Target, screen: Screen) -> Comparison:
    screen.title("the same steps in plain PyTorch")
    training = PlainTraining(recipe, batches, target.torch_device)
    with screen.progress("verifying", recipe.steps) as show:
        reference = run_steps(training, recipe, _shown(show, recipe), keep_parameters=True)
    comparison = compare(run, reference)
    screen.rows([("verify", comparison_text(comparison))])
    return comparison


def _shown(show: Callable[[str, str], None], recipe: Recipe) -> Callable[[Sample], None]:
    return lambda sample: show(step_text(sample, recipe.steps), step_words(sample))
