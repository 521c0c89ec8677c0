"""The native kernels of SGD, Adagrad and Lion have the bits of their classes, however they are called."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adagrad, Optimizer

import memferry_rt
from memferry_rt.adapters.torch.native_one_state import agrees, trusted_one_state
from memferry_rt.native import (
    AdagradSettings,
    AdamTuning,
    LionSettings,
    NativePool,
    OneStateKernel,
    OneStateOperands,
    SgdSettings,
    adagrad_coefficients,
    lion_coefficients,
    load_one_state,
    sgd_coefficients,
)
from memferry_rt.native.module import VARIANTS

NAMES = ("sgd", "adagrad", "lion")
KERNELS = [kernel for name in NAMES for variant in VARIANTS if (kernel := load_one_state(name, variant))]
pytestmark = pytest.mark.skipif(not KERNELS, reason="installed without the native kernels")


def _drawn(name: str, seed: int) -> Any:
    """An optimizer with settings drawn at random, corners among them."""
    draw = random.Random(seed)
    lr, decay, maximize = 10 ** draw.uniform(-4, 0), draw.choice([0.0, 0.03, 0.3]), draw.random() < 0.5

    def build(parameters: Any) -> Optimizer:
        if name == "sgd":
            momentum = draw.choice([0.0, 0.5, 0.9, 0.999])
            nesterov = momentum > 0 and draw.random() < 0.5
            dampening = 0.0 if nesterov else draw.choice([0.0, 0.1, 1.0])
            return SGD(
                parameters, lr=lr, momentum=momentum, dampening=dampening, weight_decay=decay, nesterov=nesterov,
                maximize=maximize, foreach=False,
            )  # fmt: skip
        if name == "adagrad":
            return Adagrad(
                parameters, lr=lr, lr_decay=draw.choice([0.0, 0.01]), weight_decay=decay, maximize=maximize,
                initial_accumulator_value=draw.choice([0.0, 0.1]), eps=draw.choice([1e-10, 1e-3]), fused=True,
            )  # fmt: skip
        betas = (draw.choice([0.0, 0.9]), draw.choice([0.0, 0.99, 1.0]))
        return memferry_rt.Lion(parameters, lr=lr, betas=betas, weight_decay=decay, maximize=maximize)

    return build


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: f"{kernel.name}-{kernel.variant}")
@pytest.mark.parametrize("seed", range(3))
def test_a_thousand_steps(kernel: OneStateKernel, seed: int) -> None:
    assert agrees(kernel, _drawn(kernel.name, seed), elements=77 + seed, steps=1000)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: f"{kernel.name}-{kernel.variant}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_formats_and_tails(kernel: OneStateKernel, dtype: torch.dtype) -> None:
    for elements in (1, 7, 8, 9, 15, 17, 31, 33, 4096 + 7, 20_003):
        assert agrees(kernel, _drawn(kernel.name, elements), elements=elements, steps=3, dtype=dtype), elements


@pytest.mark.parametrize("name", NAMES)
def test_a_difference_would_be_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = load_one_state(name)
    assert kernel is not None
    other = {"sgd": "SGD", "adagrad": "Adagrad", "lion": "Lion"}[name]
    right = OneStateKernel.prepare
    monkeypatch.setattr(
        OneStateKernel, "prepare", lambda kernel, c: right(kernel, type(c)(**{**vars(c), "minus_step": -0.0999}))
    )
    assert not agrees(kernel, _drawn(name, 1)), other


COEFFICIENTS = {
    "sgd": sgd_coefficients(SgdSettings(0.1, 0.9, 0.1, 0.03, True, False), 0.7, first=False),
    "adagrad": adagrad_coefficients(AdagradSettings(0.1, 0.01, 0.03, 1e-10, False), 7.0, 0.7),
    "lion": lion_coefficients(LionSettings(0.1, 0.9, 0.99, 0.03, True), 0.7),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tuning", [AdamTuning(), AdamTuning(96, False, False), AdamTuning(1000, True, True)])
def test_out_of_place_in_pieces_and_in_threads(name: str, tuning: AdamTuning) -> None:
    kernel, other = load_one_state(name), load_one_state(name, None, tuning)
    assert kernel is not None
    assert other is not None
    count = 10_007
    parameter, state, gradient = torch.randn(3, count).unbind()
    state.abs_()
    half = gradient.bfloat16()
    out = [torch.zeros(count) for _ in range(2)]
    weights = [torch.zeros(count, dtype=torch.float16) for _ in range(2)]
    operands = OneStateOperands(
        parameter=parameter.data_ptr(), state=state.data_ptr(), gradient=half.data_ptr(),
        gradient_dtype="bfloat16", weight=weights[0].data_ptr(), weight_dtype="float16", count=count,
        out_parameter=out[0].data_ptr(), out_state=out[1].data_ptr(),
    )  # fmt: skip
    before = parameter.clone(), state.clone()
    prepared = other.prepare(COEFFICIENTS[name])
    pool = NativePool(2)
    pool.submit(
        other.calls([(prepared, operands.part(at, min(999, count - at))) for at in range(0, count, 999)])
    ).wait()
    pool.close()
    assert torch.equal(before[0], parameter)
    assert torch.equal(before[1], state)
    in_place = OneStateOperands(
        parameter=parameter.data_ptr(), state=state.data_ptr(), gradient=half.data_ptr(),
        gradient_dtype="bfloat16", weight=weights[1].data_ptr(), weight_dtype="float16", count=count,
    )  # fmt: skip
    kernel.run(kernel.prepare(COEFFICIENTS[name]), in_place)
    assert torch.equal(out[0], parameter)
    assert torch.equal(out[1], state)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(before[0], parameter)


def test_the_kernels_are_trusted_here() -> None:
    assert all(trusted_one_state(name) is not None for name in NAMES)


def test_lion_is_that_of_the_paper() -> None:
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(50, dtype=torch.float64))
    expected, mean = parameter.detach().clone(), torch.zeros(50, dtype=torch.float64)
    optimizer = memferry_rt.Lion([parameter], lr=0.1, betas=(0.8, 0.9), weight_decay=0.2)
    for _ in range(20):
        parameter.grad = torch.randn(50, dtype=torch.float64)
        update = torch.sign(0.8 * mean + (1 - 0.8) * parameter.grad)
        expected -= 0.1 * (update + 0.2 * expected)
        mean = 0.9 * mean + (1 - 0.9) * parameter.grad
        optimizer.step()
    torch.testing.assert_close(parameter.detach(), expected)
    with pytest.raises(ValueError, match="betas"):
        memferry_rt.Lion([parameter], betas=(0.9, 1.1))
