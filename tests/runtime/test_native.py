"""The native update kernel: there where a compiler is, and PyTorch's own bits in every variant."""

from __future__ import annotations

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memferry_rt.adapters.torch.native_adam import agrees, trusted_kernel
from memferry_rt.native import AdamKernel, AdamSettings, load_adam
from memferry_rt.native.adam import VARIANTS

from .harness import Job, assert_same, offloaded, plain
from .models import Decoder, next_token_loss

need_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc: installed without the kernel")
OUTPUTS = ("out_parameter", "out_exp_avg", "out_exp_avg_sq")
rates = st.floats(0.0, 0.9999)


@need_compiler
def test_it_is_there_and_trusted() -> None:
    assert trusted_kernel() is not None


def _variants() -> list[AdamKernel]:
    return [kernel for name in VARIANTS if (kernel := load_adam(name)) is not None]


@need_compiler
@settings(max_examples=40, deadline=None)
@given(
    chosen=st.builds(
        AdamSettings,
        lr=st.floats(1e-6, 1.0),
        beta1=rates,
        beta2=rates,
        eps=st.floats(1e-12, 1e-2),
        weight_decay=st.just(0.0) | st.floats(0, 0.5),
        decoupled=st.booleans(),
        maximize=st.booleans(),
    ),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    elements=st.integers(1, 40) | st.integers(1, 5000),
)
def test_every_variant_gives_the_bits_of_torch(chosen: AdamSettings, dtype: str, elements: int) -> None:
    for kernel in _variants():
        assert agrees(kernel, chosen, dtype, elements=elements), kernel.variant


@need_compiler
@pytest.mark.parametrize("kernel", _variants(), ids=lambda kernel: str(kernel.variant))
@pytest.mark.parametrize("elsewhere", [{"out_parameter"}, {"out_exp_avg", "out_exp_avg_sq"}, set(OUTPUTS)])
def test_new_state_elsewhere_leaves_the_old_as_it_was(kernel: AdamKernel, elsewhere: set[str]) -> None:
    count = 5 * 1024 + 64
    chosen = AdamSettings(1e-3, 0.9, 0.999, 1e-8, 0.01, decoupled=True, maximize=False)
    prepared = kernel.prepare(chosen, 3.0, 0.5)
    start = dict(zip(OUTPUTS, torch.rand(3, count), strict=True))
    gradient = torch.randn(count)

    def update(state: dict[str, torch.Tensor], out: dict[str, torch.Tensor]) -> None:
        kernel.update(
            prepared,
            gradient=gradient.data_ptr(),
            gradient_dtype="float32",
            weight=0,
            count=count,
            **{name.removeprefix("out_"): tensor.data_ptr() for name, tensor in state.items()},
            **{name: tensor.data_ptr() for name, tensor in out.items()},
        )

    expected = {name: tensor.clone() for name, tensor in start.items()}
    update(expected, {})
    state = {name: tensor.clone() for name, tensor in start.items()}
    out = {name: torch.full((count,), -1.0) for name in elsewhere}
    update(state, out)
    for name in OUTPUTS:
        assert torch.equal(out.get(name, state[name]), expected[name]), name
        if name in elsewhere:
            assert torch.equal(state[name], start[name]), name


@need_compiler
def test_the_comparison_can_fail() -> None:
    kernel = load_adam()
    assert kernel is not None
    chosen = AdamSettings(1e-3, 0.9, 0.999, 1e-8, 0.01, decoupled=True, maximize=False)
    prepare = kernel.prepare
    try:
        kernel.prepare = lambda chosen, step, scale: prepare(chosen, step, scale * (1 + 2**-23))  # type: ignore[method-assign]
        assert not agrees(kernel, chosen, "float32")
    finally:
        del kernel.prepare
    assert agrees(kernel, chosen, "float32")


@need_compiler
def test_infinities_and_nans_go_the_same_way() -> None:
    chosen = AdamSettings(1e-3, 0.9, 0.999, 1e-8, 0.01, decoupled=True, maximize=False)
    gradient = torch.randn(256).bfloat16()
    gradient[::7], gradient[1::7], gradient[2::7] = float("inf"), float("-inf"), float("nan")
    start = [torch.randn(256), torch.randn(256), torch.rand(256)]
    expected = [tensor.clone() for tensor in start]
    torch._fused_adamw_(
        [expected[0]], [gradient.float()], [expected[1]], [expected[2]], [], [torch.tensor(5.0)],
        lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
    for kernel in _variants():
        got = [tensor.clone() for tensor in start]
        weight = torch.zeros(256, dtype=torch.bfloat16)
        kernel.update(
            kernel.prepare(chosen, 5.0, 1.0),
            parameter=got[0].data_ptr(),
            gradient=gradient.data_ptr(),
            gradient_dtype="bfloat16",
            exp_avg=got[1].data_ptr(),
            exp_avg_sq=got[2].data_ptr(),
            weight=weight.data_ptr(),
            count=256,
        )
        for one, other in zip(expected, got, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(weight, got[0].bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_the_kernel_the_result_is_the_same(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(lambda: Decoder(layers=4), next_token_loss, steps=4, dtype=dtype)
    expected = plain(job)
    assert_same(expected, offloaded(job, share=0.5))
    monkeypatch.setattr("memferry_rt.adapters.torch.native_adam.load_adam", lambda: None)
    trusted_kernel.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="without its native update kernel"):
            assert_same(expected, offloaded(job, share=0.5))
    finally:
        trusted_kernel.cache_clear()


@need_compiler
def test_a_kernel_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memferry_rt.adapters.torch.native_adam.agrees", lambda *_: False)
    trusted_kernel.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="differ in the last bit"):
            assert trusted_kernel() is None
    finally:
        trusted_kernel.cache_clear()
