"""The native update kernel is there where a compiler is, and used where it has PyTorch's own bits."""

from __future__ import annotations

import shutil

import pytest
import torch

from memferry_rt.adapters.torch.native_adam import agrees, trusted_kernel
from memferry_rt.native import AdamSettings, load_adam

from .harness import Job, assert_same, offloaded, plain
from .models import Decoder, next_token_loss

need_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc: installed without the kernel")


@need_compiler
def test_it_is_there_and_trusted() -> None:
    assert trusted_kernel() is not None


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
