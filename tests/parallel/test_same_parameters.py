"""N ranks train as one process does with all of their batches: to the bit, but for the norm's last place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from . import world
from .programs import MODELS, OPTIMIZERS, Job, Result, alone, together

BITS = Job(max_grad_norm=None)


def _assert_bits(one: Result, other: Result, what: object = "") -> None:
    assert one.parameters.keys() == other.parameters.keys()
    for name, value in one.parameters.items():
        assert torch.equal(value.view(torch.int32), other.parameters[name].view(torch.int32)), (what, name)


def _assert_ranks_agree(results: list[list[Result]]) -> None:
    for other in results[1:]:
        for mine, theirs in zip(results[0], other, strict=True):
            assert repr(mine.norms) == repr(theirs.norms)  # of a nan too
            assert mine.skipped == theirs.skipped
            _assert_bits(mine, theirs)


@pytest.mark.parametrize("size", [2, 3])
def test_any_model_has_the_bits_of_one_process(size: int) -> None:
    jobs = [replace(BITS, model=model) for model in MODELS]
    results = world.succeed(size, together, jobs)
    _assert_ranks_agree(results)
    for job, result in zip(jobs, results[0], strict=True):
        _assert_bits(result, alone(job, size), job)


HARDER = {
    "micro-steps": replace(BITS, accumulate=3),
    "half": replace(BITS, dtype=torch.bfloat16),
    "half, micro-steps": replace(BITS, dtype=torch.bfloat16, accumulate=2),
    "half, summed in fp32": replace(
        BITS, dtype=torch.bfloat16, accumulate=2, options={"accumulate_dtype": "float32", "accumulate": 2}
    ),
    **{name: replace(BITS, optimizer=name) for name in OPTIMIZERS},
    "half, SGD": replace(BITS, dtype=torch.bfloat16, optimizer="SGD"),
    "a rank without data": replace(BITS, accumulate=2, absent=frozenset({(0, 1), (2, 0)})),
    "nobody has data": replace(BITS, absent=frozenset({(1, 0), (1, 1)})),
    "not finite": replace(BITS, spoilt=frozenset({1})),
}


def test_harder_jobs_have_the_bits_of_one_process() -> None:
    results = world.succeed(2, together, list(HARDER.values()))
    _assert_ranks_agree(results)
    for name, job, result in zip(HARDER, HARDER.values(), results[0], strict=True):
        expected = alone(job, 2)
        assert result.skipped == expected.skipped, name
        _assert_bits(result, expected, name)


@pytest.mark.parametrize("size", [2, 4])
def test_clipping_is_by_the_norm_of_the_mean(size: int) -> None:
    job = Job(max_grad_norm=0.5)
    results = world.succeed(size, together, [job])
    _assert_ranks_agree(results)
    expected = alone(job, size)
    assert min(expected.norms) > 0.5
    torch.testing.assert_close(results[0][0].norms, expected.norms, rtol=1e-12, atol=0)
    for name, value in results[0][0].parameters.items():
        torch.testing.assert_close(value, expected.parameters[name], rtol=1e-5, atol=1e-7)


def test_one_process_with_the_whole_batch_differs_by_rounding_alone() -> None:
    job = Job(steps=6)
    [result] = world.succeed(2, together, [job])[0]
    summed = alone(replace(job, accumulate=2), 1)  # gradients added up by autograd, in another order
    for name, value in result.parameters.items():
        torch.testing.assert_close(value, summed.parameters[name], rtol=1e-4, atol=1e-5)


PLANS: list[dict[str, Any]] = [
    {"share": 3.0},
    {"share": 0.7, "options": {"async_step": True}},
    {"share": 0.7, "seed": 5, "options": {"optimizer_split": "cpu", "async_step": True}},
    {"share": 2.0, "options": {"plan": {"*": "dha+inplace"}, "async_step": True}},
    {"share": 2.0, "seed": 3, "options": {"plan": {"blocks.*": "dha_then_load+inplace", "head": "ring"}}},
    {"share": 9.0, "options": {"optimizer_split": 1.0}},
    {"share": 9.0, "seed": 9, "options": {"optimizer_split": 0.4, "async_step": True, "layers": ("blocks",)}},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_plan_and_every_run_has_the_same_bits(dtype: torch.dtype) -> None:
    job = Job(dtype=dtype, max_grad_norm=0.82)  # bites in some of the steps
    results = world.succeed(2, together, [job, job, *[replace(job, **plan) for plan in PLANS]])
    _assert_ranks_agree(results)
    assert min(results[0][0].norms) < 0.82 < max(results[0][0].norms)
    for other in results[0][1:]:
        assert other.losses == results[0][0].losses
        _assert_bits(other, results[0][0])
    assert [result.streamed > 0 for result in results[0]] == [False] * 7 + [True] * 2
