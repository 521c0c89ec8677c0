"""The norm's sums, accumulation and changes of dtype: as docs/numerics.md says, and as PyTorch does them."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memferry_rt.native import load_gradient_kernels
from memferry_rt.native.module import VARIANTS

from .updates import dtypes, lengths, wide_range

KERNELS = [kernels for name in VARIANTS if (kernels := load_gradient_kernels(name)) is not None]
pytestmark = pytest.mark.skipif(not KERNELS, reason="installed without the native kernels")


def reference_sum(values: npt.NDArray[np.float64]) -> float:
    """The tree of docs/numerics.md: blocks of 4096, 64 lanes, halves added; blocks' sums the same way again."""
    while True:
        blocks = []
        for start in range(0, len(values), 4096):
            block = values[start : start + 4096]
            rows = np.zeros((64, 64))
            rows.ravel()[: len(block)] = block
            lanes = rows[0].copy()
            for row in rows[1:]:
                lanes += row
            while len(lanes) > 1:
                half = len(lanes) // 2
                lanes = lanes[:half] + lanes[half:]
            blocks.append(lanes[0])
        values = np.array(blocks)
        if len(values) == 1:
            return float(values[0])


@given(dtype=dtypes, numel=lengths | st.integers(4000, 30_000), seed=st.integers(0, 2**32))
def test_the_sum_of_squares_is_the_tree_s(dtype: str, numel: int, seed: int) -> None:
    values = wide_range(numel, dtype, torch.Generator().manual_seed(seed))
    expected = reference_sum(values.double().numpy() ** 2)
    for kernels in KERNELS:
        assert kernels.square_sum(values.data_ptr(), dtype, numel) == expected
    close = torch.linalg.vector_norm(values.double()).item()
    assert math.isclose(math.sqrt(expected), close, rel_tol=1e-12)


def test_a_sum_of_many_blocks() -> None:
    """More of them than one block holds, so that their sums make a second level and a third."""
    values = torch.randn(4096 * 4096 + 12345, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = reference_sum(values.double().numpy() ** 2)
    assert KERNELS[-1].square_sum(values.data_ptr(), "bfloat16", values.numel()) == expected


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_shows(bad: float) -> None:
    for kernels in KERNELS:
        for place in (0, 63, 64, 4095, 4096, 9999):
            values = torch.ones(10_000)
            values[place] = bad
            assert not math.isfinite(kernels.square_sum(values.data_ptr(), "float32", 10_000))


def test_nothing_has_the_norm_zero() -> None:
    assert KERNELS[-1].square_sum(0, "float32", 0) == 0.0


@given(target=dtypes, source=dtypes, numel=lengths, seed=st.integers(0, 2**32))
def test_sums_are_torch_s(target: str, source: str, numel: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    start, other = wide_range(numel, target, generator), wide_range(numel, source, generator)
    expected = (start.float() + other.float()).to(start.dtype)
    if target == source:
        assert torch.equal(start + other, expected)
    for kernels in KERNELS:
        got = start.clone()
        kernels.add(got.data_ptr(), target, other.data_ptr(), source, numel)
        assert torch.equal(got, expected)


def every_half(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_half_widens_to_itself(dtype: str) -> None:
    halves = every_half(getattr(torch, dtype))
    for kernels in KERNELS:
        got = torch.empty(len(halves))
        kernels.convert(got.data_ptr(), "float32", halves.data_ptr(), dtype, len(halves))
        torch.testing.assert_close(got, halves.float(), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(got.signbit() & ~got.isnan(), halves.float().signbit() & ~got.isnan())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrowing_rounds_as_torch_does(dtype: str) -> None:
    """At, and a bit to either side of, every half and every middle between two; and anywhere."""
    half = getattr(torch, dtype)
    edges = every_half(half).float()
    edges = edges[edges.isfinite()].sort().values
    middles = (edges[1:].double() + edges[:-1].double()).div(2).float()
    exact = torch.cat([edges, middles, torch.tensor([65519.0, 65520.0, 3.4e38, -3.4e38, float("inf")])])
    bits = torch.cat([exact.view(torch.int32) + offset for offset in (-1, 0, 1)])
    anywhere = torch.randint(-(2**31), 2**31 - 1, (1 << 18,), generator=torch.Generator().manual_seed(3))
    wide = torch.cat([bits, anywhere.to(torch.int32)]).view(torch.float32)
    expected = wide.to(half)
    for kernels in KERNELS:
        got = torch.empty(len(wide), dtype=half)
        kernels.convert(got.data_ptr(), dtype, wide.data_ptr(), "float32", len(wide))
        same = (got.view(torch.int16) == expected.view(torch.int16)) | (got.isnan() & expected.isnan())
        assert bool(same.all())
        canonical = 0x7FC0 if dtype == "bfloat16" else 0x7E00
        assert set(got[got.isnan()].view(torch.int16).tolist()) == {canonical}
