"""Training through the runtime: what it begins with, what it allows, and how it ends when it ends early."""

from __future__ import annotations

import mmap
import signal
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from memferry_allocator import Driver, registrations
from memferry_rt import BudgetError
from memferry_rt.adapters.torch import convert
from memferry_tools.errors import ToolError
from memferry_tools.train import offloaded as offloaded_module
from memferry_tools.train.data import Batches
from memferry_tools.train.device import find_target
from memferry_tools.train.initial import model_on_cpu
from memferry_tools.train.interrupts import Interrupts
from memferry_tools.train.loop import run_steps
from memferry_tools.train.model import Block, Decoder
from memferry_tools.train.offloaded import OffloadedTraining, Placement
from memferry_tools.train.recipe import Recipe

from .conftest import SMALL

Start = Callable[..., OffloadedTraining]


@pytest.fixture
def start(recipe: Recipe, batches: Batches) -> Start:
    def make(**placement: int) -> OffloadedTraining:
        return OffloadedTraining(recipe, batches, Placement(find_target("emulated"), **placement))

    return make


def assert_nothing_is_left(driver: Driver) -> None:
    assert registrations(driver).nbytes == 0
    memory = driver.memory_info(0)
    assert memory.free == memory.total


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_made_layer_by_layer_are_those_made_at_once(recipe: Recipe, batches: Batches, dtype: str) -> None:
    recipe = replace(recipe, dtype=dtype)
    with OffloadedTraining(recipe, batches, Placement(find_target("emulated"))) as training:
        masters = training.parameters()
    expected = dict(model_on_cpu(recipe).named_parameters())
    assert masters.keys() == expected.keys()
    assert all(torch.equal(masters[name], expected[name]) for name in expected)


def test_first_weights_are_there_a_layer_at_a_time(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they take beside the state goes back to the system, so that a model needs no more than its state."""
    pages: list[weakref.ref[mmap.mmap]] = []
    alive = []

    class Pages(mmap.mmap):
        def __new__(cls, number: int, nbytes: int, flags: int) -> Pages:
            made = super().__new__(cls, number, nbytes, flags=flags)
            pages.append(weakref.ref(made))
            alive.append(sum(page() is not None for page in pages))
            return made

    monkeypatch.setattr(convert, "OWN_MAPPING", 1)
    own = SimpleNamespace(mmap=Pages, MAP_PRIVATE=mmap.MAP_PRIVATE, MAP_ANONYMOUS=mmap.MAP_ANONYMOUS)
    monkeypatch.setattr(convert, "mmap", own)
    with start() as training:
        assert len(pages) == len(list(Decoder(SMALL).parameters()))
        assert max(alive) <= len(list(Block(SMALL).parameters()))
        masters = training.parameters()
    assert not any(page() is not None for page in pages)
    expected = dict(model_on_cpu(training._recipe).named_parameters())
    assert all(torch.equal(masters[name], expected[name]) for name in expected)


def test_the_default_budget_is_the_smallest_that_works_where_a_third_is_less(
    recipe: Recipe, batches: Batches
) -> None:
    recipe = replace(recipe, shape=replace(SMALL, layers=1, vocabulary=300))
    target = find_target("emulated")
    with OffloadedTraining(recipe, batches, Placement(target)) as training:
        budget = training.report().device_memory
    assert recipe.weight_nbytes // 3 < budget < recipe.weight_nbytes
    short = OffloadedTraining(recipe, batches, Placement(target, device_memory=budget - 1))
    with pytest.raises(BudgetError), short:
        pass


def test_a_finished_training_leaves_nothing(start: Start, recipe: Recipe) -> None:
    with start() as training:
        driver = training._runtime.driver
        arena = weakref.ref(training._runtime.arena)
        run = run_steps(training, recipe, lambda sample: None, keep_parameters=True)
    assert_nothing_is_left(driver)
    assert arena() is None  # its pages are free for the reference, although the parameters were kept
    assert len(run.parameters) == len(list(Decoder(recipe.shape).parameters()))


class Stop(Exception):
    """What somebody's code raises."""


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_an_exception_is_passed_on_and_leaves_nothing(
    start: Start, recipe: Recipe, monkeypatch: pytest.MonkeyPatch, step: int, place: str
) -> None:
    forward = Decoder.forward
    calls = iter(range(100))

    def stop(*_: object) -> None:
        raise Stop

    def stop_in_backward(module: torch.nn.Module, arguments: object, output: torch.Tensor) -> None:
        output.register_hook(stop)  # later blocks' gradients are on their way then

    def fail(self: Decoder, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if next(calls) == step:
            self.blocks[1].register_forward_hook(stop if place == "forward" else stop_in_backward)
        return forward(self, tokens, targets)

    monkeypatch.setattr(Decoder, "forward", fail)
    with pytest.raises(Stop) as caught, start() as training:  # noqa: PT012 - how the end is reached matters
        driver = training._runtime.driver
        run_steps(training, recipe, lambda sample: None, keep_parameters=False)
    assert caught.value.__cause__ is None  # nothing else went wrong
    assert_nothing_is_left(driver)


@pytest.mark.parametrize("check", range(1, 9))
def test_ctrl_c_at_any_check_leaves_nothing(
    start: Start, recipe: Recipe, monkeypatch: pytest.MonkeyPatch, check: int
) -> None:
    with pytest.raises(KeyboardInterrupt) as caught, start() as training:  # noqa: PT012
        driver = training._runtime.driver
        checks = iter(range(1, 100))
        look = training._interrupts.check

        def press() -> None:
            if next(checks) == check:
                signal.raise_signal(signal.SIGINT)
            look()

        monkeypatch.setattr(training._interrupts, "check", press)
        run_steps(training, recipe, lambda sample: None, keep_parameters=False)
    assert caught.value.__cause__ is None  # nothing else went wrong
    assert_nothing_is_left(driver)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_while_weights_are_made(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    first_weights = offloaded_module.FirstWeights

    class Pressed(first_weights):  # type: ignore[misc, valid-type]
        def __call__(self, module: torch.nn.Module) -> None:
            signal.raise_signal(signal.SIGINT)
            super().__call__(module)

    monkeypatch.setattr(offloaded_module, "FirstWeights", Pressed)
    with pytest.raises(KeyboardInterrupt), start():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("checkpointing", "place", "call"),
    [
        (False, "forward", 1),
        (False, "backward", 1),
        (True, "forward", 1),
        (True, "backward", 1),
        (True, "forward", 3),  # the first block that is recomputed
    ],
)
def test_too_little_for_the_activations_says_how_much_is_needed(
    recipe: Recipe, batches: Batches, checkpointing: bool, place: str, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(recipe, checkpointing=checkpointing)
    forward = Block.forward
    calls = iter(range(100))

    def run_out(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total …")

    def fail(self: Block, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        number = next(calls)
        if number == call and place == "forward":
            run_out()
        result = forward(self, x, *rest)
        if number == call:
            result.register_hook(run_out)
        return result

    monkeypatch.setattr(Block, "forward", fail)
    placement = Placement(find_target("emulated"), device_memory=1 << 20)
    with pytest.raises(ToolError) as caught, OffloadedTraining(recipe, batches, placement) as training:  # noqa: PT012
        driver = training._runtime.driver
        training.step(0)
    message = str(caught.value)
    for part in ("--device-memory: 1.00 MiB is too small", "2.50 GiB more", "--micro-batch"):
        assert part in message
    assert ("--checkpointing" in message) is not checkpointing
    assert "the smallest that works is about 2561MiB" in message  # the pool, and what torch asked for
    assert_nothing_is_left(driver)


def test_interrupts_wait_for_the_check_and_the_second_does_not() -> None:
    with Interrupts() as interrupts:
        interrupts.check()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_interrupts_leave_somebody_elses_handler_alone() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with Interrupts() as interrupts:
            signal.raise_signal(signal.SIGINT)
            interrupts.check()
        assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_interrupts_do_nothing_in_another_thread() -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with Interrupts() as interrupts:
                interrupts.check()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures
