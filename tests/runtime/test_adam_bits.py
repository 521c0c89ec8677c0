"""The update has one arithmetic: PyTorch's own, in every variant of the native kernel and however it is cut."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memferry_rt.adapters.torch.torch_adam import Batch, update_batch
from memferry_rt.native import AdamKernel, AdamSettings, AdamTuning, load_adam
from memferry_rt.native.adam import VECTOR
from memferry_rt.native.module import VARIANTS

from .updates import (
    PLAIN,
    State,
    assert_same_bits,
    dtypes,
    lengths,
    settings_of_adam,
    torch_update,
    where_tails_differ,
    wide_range,
)

KERNELS = [kernel for name in VARIANTS if (kernel := load_adam(name)) is not None]
pytestmark = pytest.mark.skipif(not KERNELS, reason="installed without the native kernels")
in_every_variant = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: str(kernel.variant))


@given(
    chosen=settings_of_adam,
    dtype=dtypes,
    numel=lengths,
    step=st.integers(1, 10**6),
    scale=st.just(1.0) | st.floats(1e-4, 2.0),
    seed=st.integers(0, 2**32),
)
def test_every_variant_gives_the_bits_of_torch(
    chosen: AdamSettings, dtype: str, numel: int, step: int, scale: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    expected, gradient = State.random(numel, dtype, generator), wide_range(numel, dtype, generator)
    start = expected.clone()
    torch_update(expected, gradient, chosen, float(step), scale)
    for kernel in KERNELS:
        prepared = kernel.prepare(chosen, float(step), scale)
        got, old = start.clone(), start.clone()
        kernel.run(prepared, got.operands(gradient))
        assert_same_bits(expected, got, kernel.variant)
        out = start.blank()
        kernel.run(prepared, old.operands(gradient, out))
        assert_same_bits(expected, out, f"{kernel.variant}, elsewhere")
        assert_same_bits(start, old, f"{kernel.variant}, what was read")


@in_every_variant
@pytest.mark.parametrize("numel", [*range(1, 2 * VECTOR + 1), 1023, 1025, 4099])
def test_the_tail_is_rounded_as_torch_rounds_it(kernel: AdamKernel, numel: int) -> None:
    """With one element more, or one less, taken for the tail's the bits would differ."""
    expected, gradient = where_tails_differ(numel)
    start = expected.clone()
    torch_update(expected, gradient, PLAIN, 1.0, 1.0)
    tail = numel % VECTOR
    for claimed in {max(0, tail - 1), tail, min(numel, tail + 1)}:
        got = start.clone()
        kernel.run(kernel.prepare(PLAIN, 1.0, 1.0), replace(got.operands(gradient), tail=claimed))
        assert torch.equal(got.exp_avg_sq, expected.exp_avg_sq) == (claimed == tail)


@in_every_variant
@given(cuts=st.lists(st.integers(1, 700), max_size=6), last=st.integers(0, VECTOR - 1), seed=st.integers(0, 99))
def test_pieces_make_the_whole(kernel: AdamKernel, cuts: list[int], last: int, seed: int) -> None:
    """A parameter may be cut at any multiple of a vector."""
    generator = torch.Generator().manual_seed(seed)
    ends = [VECTOR * sum(cuts[: number + 1]) for number in range(len(cuts))]
    numel = VECTOR * (sum(cuts) + 1) + last
    whole, gradient = State.random(numel, "bfloat16", generator), wide_range(numel, "bfloat16", generator)
    cut = whole.clone()
    prepared = kernel.prepare(PLAIN, 2.0, 0.5)
    kernel.run(prepared, whole.operands(gradient))
    for start, end in zip([0, *ends], [*ends, numel], strict=True):
        kernel.run(prepared, cut.operands(gradient, start=start, end=end))
    assert_same_bits(whole, cut)


@in_every_variant
@given(
    block=st.integers(1, 4096),
    stream_out=st.booleans(),
    stream_weight=st.booleans(),
    shift=st.integers(0, 17),
    numel=lengths,
)
def test_the_tuning_changes_no_bit_and_nothing_beside(
    kernel: AdamKernel, block: int, stream_out: bool, stream_weight: bool, shift: int, numel: int
) -> None:
    """At any alignment of what is written."""
    generator = torch.Generator().manual_seed(numel)
    old, gradient = State.random(numel, "float16", generator), wide_range(numel, "float16", generator)
    expected = old.clone()
    torch_update(expected, gradient, PLAIN, 1.0, 1.0)
    tuned = load_adam(kernel.variant, AdamTuning(block, stream_out, stream_weight))
    assert tuned is not None
    room = State.random(numel + shift + 40, "float16", generator)
    before = room.clone()
    part = State(*(tensor[shift : shift + numel] for tensor in room.tensors()))
    tuned.run(tuned.prepare(PLAIN, 1.0, 1.0), old.operands(gradient, part))
    assert_same_bits(expected, part)
    for tensor, untouched in zip(room.tensors(), before.tensors(), strict=True):
        assert torch.equal(tensor[:shift], untouched[:shift])
        assert torch.equal(tensor[shift + numel :], untouched[shift + numel :])


@in_every_variant
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_infinities_and_nans_go_the_same_way(kernel: AdamKernel, dtype: str) -> None:
    generator = torch.Generator().manual_seed(2)
    expected = State.random(263, dtype, generator)
    gradient = torch.randn(263, generator=generator).to(getattr(torch, dtype))
    gradient[::7], gradient[1::7], gradient[2::7] = float("inf"), float("-inf"), float("nan")
    expected.parameter[3::7], expected.exp_avg[4::7], expected.exp_avg_sq[5::7] = (
        float(text) for text in ("inf", "-inf", "nan")
    )
    got = expected.clone()
    torch_update(expected, gradient, PLAIN, 5.0, 1.0)
    kernel.run(kernel.prepare(PLAIN, 5.0, 1.0), got.operands(gradient))
    assert_same_bits(expected, got)


@contextmanager
def _flushing_subnormals() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such mode")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@in_every_variant
def test_subnormals_are_kept_whatever_the_thread_does_with_them(kernel: AdamKernel) -> None:
    state = State(*(torch.full((20,), 2e-39) for _ in range(3)), weight=torch.zeros(20, dtype=torch.bfloat16))
    gradient = torch.full((20,), 3e-39)
    expected = state.clone()
    torch_update(expected, gradient, PLAIN, 1.0, 1.0)
    assert expected.exp_avg_sq.min() > 0
    with _flushing_subnormals():
        kernel.run(kernel.prepare(PLAIN, 1.0, 1.0), state.operands(gradient))
        assert float(torch.full((1,), 1e-39) * 1.0) == 0.0  # the mode is still what the caller has set
    assert_same_bits(expected, state)


# -- many steps -------------------------------------------------------------------------------------------------
SIZES = (1, 7, 8, 13, 64, 1000, 5003)


def _train(steps: int, dtype: str, optimizer_class: type[torch.optim.Optimizer]) -> None:
    """The user's optimizer, fused; beside it every other way, each with state of its own."""
    generator = torch.Generator().manual_seed(steps)
    parameters = [torch.nn.Parameter(torch.randn(numel, generator=generator)) for numel in SIZES]
    optimizer = optimizer_class(parameters, lr=1e-2, weight_decay=0.1, fused=True)
    blanks = [torch.zeros(numel) for numel in SIZES]
    first = [
        State(p.detach().clone(), z.clone(), z.clone(), torch.zeros_like(z, dtype=torch.bfloat16))
        for p, z in zip(parameters, blanks, strict=True)
    ]
    ways = {f"{kernel.variant} {way}": [s.clone() for s in first] for kernel in KERNELS for way in ("in", "out")}
    spares = {kernel.variant: [state.blank() for state in first] for kernel in KERNELS}
    by_torch = [state.clone() for state in first]
    for step in range(1, steps + 1):
        group = optimizer.param_groups[0]
        group["lr"] = 1e-2 / step
        settings = AdamSettings(
            group["lr"], *group["betas"], group["eps"], group["weight_decay"],
            decoupled=optimizer_class is torch.optim.AdamW, maximize=False,
        )  # fmt: skip
        magnitude = 10.0 ** torch.randint(-6, 3, (1,), generator=generator)
        gradients = [
            (torch.randn(numel, generator=generator) * magnitude).to(getattr(torch, dtype)) for numel in SIZES
        ]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.float() * 0.5
        optimizer.step()
        _torch_operations(by_torch, gradients, settings, step)
        for kernel in KERNELS:
            prepared = kernel.prepare(settings, float(step), 0.5)
            old, new = ways[f"{kernel.variant} out"], spares[kernel.variant]
            for number, gradient in enumerate(gradients):
                kernel.run(prepared, ways[f"{kernel.variant} in"][number].operands(gradient))
                kernel.run(prepared, old[number].operands(gradient, new[number]))
            ways[f"{kernel.variant} out"], spares[kernel.variant] = new, old
        for number, parameter in enumerate(parameters):
            state = optimizer.state[parameter]
            expected = State(
                parameter.detach(), state["exp_avg"], state["exp_avg_sq"], parameter.detach().bfloat16()
            )
            for way, states in {**ways, "torch operations": by_torch}.items():
                assert_same_bits(expected, states[number], f"step {step}, {way}, {SIZES[number]} elements")


def _torch_operations(
    states: list[State], gradients: list[torch.Tensor], settings: AdamSettings, step: int
) -> None:
    batch = Batch(0)
    for number, (state, gradient) in enumerate(zip(states, gradients, strict=True)):
        batch.add(
            number,
            master=state.parameter,
            exp_avg=state.exp_avg,
            exp_avg_sq=state.exp_avg_sq,
            gradient=gradient,
            weight=state.weight,
        )
    update_batch(batch, settings, [torch.tensor(float(step)) for _ in states], 0.5)


@pytest.mark.parametrize("steps", [50, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adam], ids=lambda kind: str(kind.__name__))
def test_every_way_stays_the_same_over_many_steps(
    steps: int, dtype: str, optimizer: type[torch.optim.Optimizer]
) -> None:
    _train(steps, dtype, optimizer)


def test_threads_may_share_what_was_prepared() -> None:
    kernel = KERNELS[-1]
    generator = torch.Generator().manual_seed(1)
    states = [State.random(3000, "float32", generator) for _ in range(4)]
    gradient = torch.randn(3000, generator=generator)
    expected = [state.clone() for state in states]
    prepared = kernel.prepare(PLAIN, 7.0, 1.0)
    for state in expected:
        torch_update(state, gradient, PLAIN, 7.0, 1.0)
    threads = [threading.Thread(target=kernel.run, args=(prepared, s.operands(gradient))) for s in states]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(expected, states, strict=True):
        assert_same_bits(one, other)
