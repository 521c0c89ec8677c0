"""Whether a native kernel beside Adam's may be used: only where it has the class's bits, found out by trying."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import SGD, Adagrad, Optimizer

from ...native import OneStateKernel, OneStateOperands, load_one_state
from .arithmetics import Arithmetic, arithmetic_of, fill_whole
from .entries import Held
from .generic import ParameterUpdate, capture
from .lion import Lion

ELEMENTS = 4096 + 7
STEPS = 3
_TRIED: dict[str, tuple[Callable[[Any], Optimizer], ...]] = {
    "sgd": (
        lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.03),
        lambda p: SGD(p, lr=0.1, momentum=0.7, nesterov=True, weight_decay=0.03, maximize=True),
        lambda p: SGD(p, lr=0.1),
    ),
    "adagrad": (lambda p: Adagrad(p, lr=0.1, lr_decay=0.01, weight_decay=0.03, fused=True),),
    "lion": (lambda p: Lion(p, lr=0.01, weight_decay=0.3),),
}


@functools.cache
def trusted_one_state(name: str) -> OneStateKernel | None:
    """The native kernel of a name if it is installed and agrees with this PyTorch, else None."""
    kernel = load_one_state(name)
    if kernel is None or not all(agrees(kernel, build) for build in _TRIED[name]):
        return None
    return kernel


def agrees(
    kernel: OneStateKernel,
    build: Callable[[Any], Optimizer],
    *,
    elements: int = ELEMENTS,
    steps: int = STEPS,
    dtype: torch.dtype = torch.float32,
) -> bool:
    """Whether kernel and class give the same bits, for gradients over the whole range of fp32.

    Parameters
    ----------
    dtype : torch.dtype
        Of gradients; with a half the rounded weights are compared too.
    """
    with torch.device("cpu"):
        return _agree(kernel, build, elements, steps, dtype)


def _agree(
    kernel: OneStateKernel, build: Callable[[Any], Optimizer], elements: int, steps: int, dtype: torch.dtype
) -> bool:
    generator = torch.Generator().manual_seed(elements)
    draw = functools.partial(torch.randn, elements, generator=generator, dtype=torch.float32)
    plain = torch.nn.Parameter(draw())
    optimizer = build([plain])
    arithmetic = arithmetic_of(optimizer)
    assert arithmetic is not None
    mine, room = plain.detach().clone(), {arithmetic.state: torch.zeros_like(plain, requires_grad=False)}
    state = {key: value.clone() for key, value in optimizer.state[plain].items()}
    if arithmetic.state in state:
        state[arithmetic.state] = room[arithmetic.state].copy_(state[arithmetic.state])
    weights = [torch.zeros(elements, dtype=dtype) for _ in range(2)]
    update, settings = ParameterUpdate(optimizer, plain.detach()), capture(optimizer.param_groups[0])
    for _ in range(steps):
        exponent = torch.randint(-38, 8 if dtype is not torch.float16 else 4, (elements,), generator=generator)
        gradient = (draw() * 10.0**exponent).to(dtype)
        update.run(gradient, settings, 0.7, weights[0], optimizer.state[plain], {})
        run_alone(kernel, arithmetic, settings, Held({plain: state}, plain, room), mine, gradient, weights[1], 0.7)
    pairs = [(plain.detach(), mine), (weights[0], weights[1])]
    pairs += [(value, state[key]) for key, value in optimizer.state[plain].items()]
    return all(torch.equal(_bits(one), _bits(other)) for one, other in pairs)


def run_alone(
    kernel: OneStateKernel,
    arithmetic: Arithmetic,
    settings: dict[str, Any],
    held: Held,
    master: torch.Tensor,
    gradient: torch.Tensor,
    weight: torch.Tensor,
    scale: float,
) -> None:
    """One update in the calling thread; `settings` are of `capture`."""
    coefficients, state = arithmetic.begin(
        arithmetic.settings(settings), held, scale, lambda: torch.empty_like(master), fill_whole
    )
    operands = OneStateOperands(
        parameter=master.data_ptr(),
        state=0 if state is None else state.data_ptr(),
        gradient=gradient.data_ptr(),
        gradient_dtype=name_of(gradient.dtype),
        weight=weight.data_ptr(),
        weight_dtype=name_of(weight.dtype),
        count=master.numel(),
    )
    kernel.run(kernel.prepare(coefficients), operands)


def name_of(dtype: torch.dtype) -> str:
    """As the native kernels call it."""
    return str(dtype).removeprefix("torch.")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """For comparison; NaNs are alike."""
    known = torch.where(tensor.isnan(), torch.zeros_like(tensor), tensor)
    return known.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
