"""Operators on plain tensors give the bits of autograd's, whatever the dtype, the shape and the panels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from hypothesis import given
from hypothesis import strategies as st

from memferry_rt.adapters.torch.operators import (
    LinearShape,
    accumulate_rows,
    bias_gradient,
    embedding_forward,
    embedding_gradient_rows,
    exact_modes,
    linear_forward,
    linear_input_gradient,
    same_bytes,
    weight_gradient,
    write_rows,
)
from memferry_rt.panels import borders

HALVES = [torch.bfloat16, torch.float16]
DTYPES = st.sampled_from([torch.float32, torch.float64, *HALVES])
SIZES = st.integers(1, 24)
SEEDS = st.integers(0, 2**32 - 1)
STEPS = st.integers(1, 24)
LEADS = st.lists(st.integers(1, 6), min_size=1, max_size=2).map(tuple)


def random(seed: int, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (values * 2.0 ** (seed % 7 - 3)).to(dtype)


def whole(seed: int, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers, sums of whose products are exact in any order."""
    return torch.randint(-2, 3, size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def poisoned(like: torch.Tensor) -> torch.Tensor:
    return torch.full_like(like, float("nan"))


class Linear:
    """A linear layer's operands, and what autograd makes of them."""

    def __init__(
        self,
        seed: int,
        lead: tuple[int, ...],
        inner: int,
        outer: int,
        dtype: torch.dtype,
        bias: bool,
        make: object = random,
    ) -> None:
        values = whole if make is whole else random
        self.x = values(seed, *lead, inner, dtype=dtype)
        self.weight = values(seed + 1, outer, inner, dtype=dtype)
        self.dy = values(seed + 2, *lead, outer, dtype=dtype)
        self.bias = values(seed + 3, outer, dtype=dtype) if bias else None
        leaves = [self.x, self.weight] + ([self.bias] if self.bias is not None else [])
        known = [leaf.clone().requires_grad_() for leaf in leaves]
        y = F.linear(*known)
        y.backward(self.dy)
        self.y = y.detach()
        self.gradients = [leaf.grad for leaf in known]

    @property
    def outer(self) -> int:
        return self.weight.shape[0]

    @property
    def inner(self) -> int:
        return self.weight.shape[1]


linears = st.builds(Linear, SEEDS, LEADS, SIZES, SIZES, DTYPES, st.booleans())
exact_linears = st.builds(Linear, SEEDS, LEADS, SIZES, SIZES, DTYPES, st.booleans(), st.just(whole))


@given(case=linears)
def test_a_linear_layer_without_panels_has_autograds_bits(case: Linear) -> None:
    assert same_bytes(linear_forward(case.x, case.weight, case.bias), case.y)
    assert same_bytes(linear_input_gradient(case.dy, case.weight, x=case.x), case.gradients[0])
    home = poisoned(case.weight)
    weight_gradient(case.dy, case.x, home)
    assert same_bytes(home, case.gradients[1])
    if case.bias is not None:
        home = poisoned(case.bias)
        bias_gradient(case.dy, home)
        assert same_bytes(home, case.gradients[2])


@given(case=exact_linears, step=STEPS)
def test_panels_cover_a_linear_layer(case: Linear, step: int) -> None:
    """With sums that are exact in every order values show that each element is made of all it needs."""
    rows = [(a, b, case.weight[a:b].clone()) for a, b in borders(case.outer, step)]
    columns = [(a, b, case.weight[:, a:b].contiguous()) for a, b in borders(case.inner, step)]
    nothing = poisoned(case.weight)
    assert torch.equal(linear_forward(case.x, nothing, case.bias, rows), case.y)
    assert torch.equal(linear_input_gradient(case.dy, nothing, columns, x=case.x), case.gradients[0])
    home, seen = poisoned(case.weight), []
    weight_gradient(
        case.dy,
        case.x,
        home,
        borders=borders(case.outer, step),
        visit=lambda start, stop, panel: seen.append((start, stop, panel.clone())),
    )
    assert torch.equal(home, case.gradients[1])
    assert [(start, stop) for start, stop, _ in seen] == borders(case.outer, step)
    assert torch.equal(torch.cat([panel for *_, panel in seen]), home)


def test_rows_of_a_linear_input_that_lies_by_columns() -> None:
    leaf = random(5, 7, 12).t().requires_grad_()
    weight, dy = random(6, 9, 7), random(7, 12, 9)
    F.linear(leaf, weight).backward(dy)
    assert leaf.grad is not None
    panels = [(a, b, weight[:, a:b].contiguous()) for a, b in borders(7, 3)]
    assert same_bytes(linear_input_gradient(dy, weight, x=leaf), leaf.grad)
    torch.testing.assert_close(linear_input_gradient(dy, weight, panels, x=leaf), leaf.grad)


# -- accumulation -----------------------------------------------------------------------------------------------
@given(first=linears, seed=SEEDS, step=st.none() | STEPS)
def test_a_weight_gradient_is_added_as_autograd_adds(first: Linear, seed: int, step: int | None) -> None:
    """The product is rounded to the dtype, then added; a whole panel equals torch's product of the panel."""
    x, dy = (
        random(seed, *first.x.shape, dtype=first.x.dtype),
        random(seed + 1, *first.dy.shape, dtype=first.x.dtype),
    )
    so_far = first.gradients[1]
    home = so_far.clone()
    parts = None if step is None else borders(first.outer, step)
    weight_gradient(dy, x, home, partial=True, borders=parts)
    left, right = dy.reshape(-1, first.outer).t(), x.reshape(-1, first.inner)
    for start, stop in parts or [(0, first.outer)]:
        assert same_bytes(home[start:stop], so_far[start:stop] + left[start:stop] @ right)
    if first.bias is not None:
        home = first.gradients[2].clone()
        bias_gradient(dy, home, partial=True)
        assert same_bytes(home, first.gradients[2] + dy.reshape(-1, first.outer).sum(0))


# -- embeddings -------------------------------------------------------------------------------------------------
class Lookup:
    """An embedding's operands, and its dense gradient."""

    def __init__(
        self,
        seed: int,
        table_rows: int,
        width: int,
        lead: tuple[int, ...],
        dtype: torch.dtype,
        padding: int | None,
        by_freq: bool,
        ids: torch.dtype,
    ) -> None:
        self.table = random(seed, table_rows, width, dtype=dtype)
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, table_rows, lead, generator=generator, dtype=ids)
        self.dy = random(seed + 1, *lead, width, dtype=dtype)
        self.padding = None if padding is None else padding % (2 * table_rows) - table_rows
        self.by_freq = by_freq
        leaf = self.table.clone().requires_grad_()
        y = F.embedding(self.ids, leaf, padding_idx=self.padding, scale_grad_by_freq=by_freq)
        y.backward(self.dy)
        self.y = y.detach()
        assert leaf.grad is not None
        self.gradient = leaf.grad

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        return embedding_gradient_rows(
            self.ids, self.dy, self.table.shape[0], self.padding, scale_grad_by_freq=self.by_freq
        )


lookups = st.builds(
    Lookup,
    SEEDS,
    st.integers(1, 12),
    st.integers(1, 9),
    LEADS | st.just((0,)),
    DTYPES,
    st.none() | st.integers(0, 23),
    st.booleans(),
    st.sampled_from([torch.int32, torch.int64]),
)


@given(case=lookups)
def test_an_embeddings_rows_have_the_dense_gradients_bits(case: Lookup) -> None:
    assert same_bytes(embedding_forward(case.ids, case.table), case.y)
    rows, values = case.rows()
    assert torch.equal(rows, rows.unique())
    dense = torch.zeros_like(case.table)
    write_rows(dense, rows, values)
    assert same_bytes(dense, case.gradient)


@given(case=lookups, seed=SEEDS)
def test_rows_that_are_not_written_again_become_zero(case: Lookup, seed: int) -> None:
    count = case.table.shape[0]
    previous = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[: seed % (count + 1)]
    home = torch.zeros_like(case.table)
    home[previous] = float("nan")
    write_rows(home, *case.rows(), previous)
    assert same_bytes(home, case.gradient)


@given(case=lookups, seed=SEEDS)
def test_rows_are_accumulated_as_dense_gradients_are(case: Lookup, seed: int) -> None:
    shape = (seed % 9 + 1,)
    ids = torch.randint(0, case.table.shape[0], shape, generator=torch.Generator().manual_seed(seed))
    dy = random(seed, *shape, case.table.shape[1], dtype=case.table.dtype)
    dy[::2] = -0.0
    leaf = case.table.clone().requires_grad_()
    leaf.grad = case.gradient.clone()
    leaf.grad[case.gradient == 0] = -0.0  # a sum that was rounded to it: adding 0 makes it 0
    home = torch.zeros_like(case.table)
    write_rows(home, torch.arange(len(home)), leaf.grad.clone())
    F.embedding(ids, leaf).backward(dy)
    more = embedding_gradient_rows(ids, dy, len(home))
    write_rows(home, *accumulate_rows(home, *more, torch.arange(len(home))))
    assert same_bytes(home, leaf.grad)


def test_rows_that_nobody_names() -> None:
    home = torch.zeros(5, 3)
    rows, values = embedding_gradient_rows(torch.empty(0, dtype=torch.int64), torch.empty(0, 3), 5)
    assert rows.shape == (0,)
    home[2] = 1
    write_rows(home, rows, values, torch.tensor([2]))
    assert not home.any()


# -- exactness --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ways_that_run_the_plain_kernels_are_exact(dtype: torch.dtype) -> None:
    shape = LinearShape(8, 16, 24, dtype)
    found = exact_modes(shape, device=torch.device("cpu"), host=torch.clone)
    assert found.forward_host
    assert found.input_gradient_host
    assert found.weight_gradient_host


def test_a_way_that_differs_is_found() -> None:
    """A host whose memory loses a bit."""

    def host(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        copy.view(-1)[-1] += 1
        return copy

    shape = LinearShape(8, 16, 24, torch.float32, bias=True)
    found = exact_modes(shape, device=torch.device("cpu"), host=host)
    assert not found.forward_host
    assert not found.input_gradient_host
    assert found.weight_gradient_host
