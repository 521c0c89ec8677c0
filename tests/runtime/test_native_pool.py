"""Native threads: every call runs once, in order of submission, and without the interpreter's lock."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memferry_rt import OffloadError
from memferry_rt.native import NativePool, load_adam, load_gradient_kernels

from ..threads import in_threads
from .updates import PLAIN, State, assert_same_bits

kernel = load_adam()
pytestmark = pytest.mark.skipif(kernel is None, reason="installed without the native kernels")


@pytest.fixture
def pool() -> Iterator[NativePool]:
    pool = NativePool(3)
    yield pool
    pool.close()


@given(
    threads=st.integers(1, 4),
    batches=st.lists(st.lists(st.integers(1, 3000), max_size=5), max_size=8),
)
def test_every_call_runs_once(threads: int, batches: list[list[int]]) -> None:
    assert kernel is not None
    generator = torch.Generator().manual_seed(len(batches))
    prepared = kernel.prepare(PLAIN, 3.0, 1.0)
    pool = NativePool(threads)
    running, states, expected, kept = [], [], [], []
    for sizes in batches:
        work = []
        for numel in sizes:
            state, gradient = State.random(numel, "float32", generator), torch.randn(numel, generator=generator)
            one = state.clone()
            kernel.run(prepared, one.operands(gradient))
            expected.append(one)
            states.append(state)
            kept.append(gradient)
            work.append((prepared, state.operands(gradient)))
        running.append(pool.submit(kernel.calls(work)))
    for batch in reversed(running):
        batch.wait()
        assert batch.done()
    for one, other in zip(expected, states, strict=True):
        assert_same_bits(one, other)
    pool.close()


def test_one_thread_keeps_the_order(pool: NativePool) -> None:
    """Twelve steps of one parameter, each submitted before the last has run."""
    assert kernel is not None
    single = NativePool(1)
    state, gradient = State.random(5000, "float32", torch.Generator().manual_seed(1)), torch.rand(5000)
    expected = state.clone()
    steps = [kernel.prepare(PLAIN, float(step), 1.0) for step in range(1, 13)]
    for prepared in steps:
        kernel.run(prepared, expected.operands(gradient))
    batches = [single.submit(kernel.calls([(prepared, state.operands(gradient))])) for prepared in steps]
    batches[-1].wait()
    assert all(batch.done() for batch in batches)
    assert_same_bits(expected, state)
    single.close()


def test_what_runs_lives_though_nobody_keeps_it(pool: NativePool) -> None:
    assert kernel is not None
    state, gradient = State.random(100_000, "float32", torch.Generator().manual_seed(1)), torch.rand(100_000)
    expected = state.clone()
    kernel.run(kernel.prepare(PLAIN, 1.0, 1.0), expected.operands(gradient))
    operands = state.operands(gradient)
    pool.submit(kernel.calls([(kernel.prepare(PLAIN, 1.0, 1.0), operands)]))
    gc.collect()
    pool.close()
    assert_same_bits(expected, state)


def test_several_threads_submit_and_wait(pool: NativePool) -> None:
    assert kernel is not None
    prepared = kernel.prepare(PLAIN, 1.0, 1.0)
    gradient = torch.rand(3000)
    states = [State.random(3000, "float32", torch.Generator().manual_seed(n)) for n in range(40)]
    expected = [state.clone() for state in states]
    for state in expected:
        kernel.run(prepared, state.operands(gradient))
    shared = pool.submit(kernel.calls([(prepared, states[0].operands(gradient))]))

    def work(number: int) -> None:
        mine = [pool.submit(kernel.calls([(prepared, s.operands(gradient))])) for s in states[1 + number :: 4]]
        shared.wait()
        for batch in mine:
            batch.wait()

    in_threads(4, work)
    for one, other in zip(expected, states, strict=True):
        assert_same_bits(one, other)


def test_other_kernels_run_there_too(pool: NativePool) -> None:
    gradients = load_gradient_kernels()
    assert gradients is not None
    values = torch.randn(3_000_001).bfloat16()
    calls, sums = gradients.squares(values.data_ptr(), "bfloat16", values.numel())
    assert calls.count == 3
    pool.submit(calls).wait()
    assert gradients.reduce(sums) == gradients.square_sum(values.data_ptr(), "bfloat16", values.numel())


def test_after_its_end(pool: NativePool) -> None:
    assert kernel is not None
    state, gradient = State.random(10, "float32", torch.Generator().manual_seed(1)), torch.rand(10)
    calls = kernel.calls([(kernel.prepare(PLAIN, 1.0, 1.0), state.operands(gradient))])
    batch = pool.submit(calls)
    pool.close()
    pool.close()
    assert batch.done()
    batch.wait()
    with pytest.raises(OffloadError, match="closed"):
        pool.submit(calls)


def test_a_pool_that_nobody_holds_ends_its_threads() -> None:
    before = len(os.listdir("/proc/self/task"))
    pool = NativePool(4)
    assert len(os.listdir("/proc/self/task")) == before + 4
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None
    assert len(os.listdir("/proc/self/task")) == before


@pytest.mark.parametrize("threads", [0, -1])
def test_impossible_numbers_of_threads_are_refused(threads: int) -> None:
    with pytest.raises(OffloadError, match="threads"):
        NativePool(threads)


def test_a_fork_and_an_exit_without_close_end() -> None:
    code = (
        "import os, sys\n"
        "from memferry_rt.native import NativePool\n"
        "pool = NativePool(2)\n"
        "child = os.fork()\n"
        "if child:\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "sys.exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["0"]
