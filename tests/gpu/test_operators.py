"""On a real device: operators over mapped host memory, panels through the ring, kernels that move bytes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from memferry_allocator import Direction, open_device
from memferry_rt.adapters.torch.operators import (
    LaneOutbox,
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
from memferry_rt.adapters.torch.profiling import Home, Stand
from memferry_rt.device_kernels import DeviceMoves, Spread, open_device_moves
from memferry_rt.panels import Cut, PanelRing, borders
from memferry_rt.staging import StagingRing

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
MIB = 1 << 20


@pytest.fixture(scope="module")
def stand() -> Iterator[Stand]:
    driver, device = open_device("cuda")
    torch.empty(1, device=torch.device("cuda", device))  # torch's context is there before ours is used
    stand = Stand(driver, device)
    with stand.computing():
        yield stand
    stand.close()


@pytest.fixture(scope="module")
def moves(stand: Stand) -> DeviceMoves:
    return open_device_moves(stand.driver, stand.device)


def random(seed: int, *size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(size, generator=generator, device="cuda").to(dtype)


def far(stand: Stand, values: torch.Tensor) -> Home:
    home = stand.home(tuple(values.shape), values.dtype)
    home.host.copy_(values.cpu())
    return home


def poisoned(stand: Stand, like: torch.Tensor) -> Home:
    return far(stand, torch.full_like(like, float("nan")))


def close_to(found: torch.Tensor, exact: torch.Tensor) -> bool:
    error = (found.double() - exact).abs().max() / exact.abs().max()
    return bool(error <= max(4 * torch.finfo(found.dtype).eps, 1e-5))


# -- moving bytes -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("nbytes", [16, 4096, 8 * 512 * 16 * 3 + 16, 5 * MIB + 48])
@pytest.mark.parametrize("blocks", [1, 2, 4, 64])
@pytest.mark.parametrize("warps", [False, True])
@pytest.mark.parametrize("settle", [False, True])
def test_a_kernel_moves_bytes_both_ways(
    stand: Stand, moves: DeviceMoves, nbytes: int, blocks: int, warps: bool, settle: bool
) -> None:
    spread = Spread(blocks, warps, settle)
    values = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    there, back = far(stand, values), stand.home((nbytes,), torch.uint8)
    here = stand.buffer((nbytes,), torch.uint8)
    moves.copy(here.span.ptr, stand.far(there), nbytes, stream=stand.stream, spread=spread)
    moves.copy(stand.far(back), here.span.ptr, nbytes, stream=stand.stream, spread=spread)
    stand.settle()
    assert torch.equal(back.host, values)


@pytest.mark.parametrize("spread", [Spread(4), Spread(132, warps=True), Spread(3, warps=True, settle=True)])
def test_a_kernel_gathers_columns(stand: Stand, moves: DeviceMoves, spread: Spread) -> None:
    values = torch.randint(0, 256, (301, 4096), dtype=torch.uint8)
    home, here = far(stand, values), stand.buffer((301, 160), torch.uint8)
    moves.copy_rows(here.span.ptr, 160, stand.far(home) + 48, 4096, 160, 301, stream=stand.stream, spread=spread)
    stand.settle()
    assert torch.equal(here.tensor.cpu(), values[:, 48:208])


@pytest.mark.parametrize("width", [16, 4096, 80])
def test_a_kernel_writes_rows_and_leaves_some_out(stand: Stand, moves: DeviceMoves, width: int) -> None:
    table = poisoned(stand, torch.empty(5000, width // 4, dtype=torch.float32))
    rows = torch.randperm(5000, device="cuda")[:3001]
    values = random(1, 3001, width // 4, dtype=torch.float32)
    skip = torch.rand(3001, device="cuda") < 0.3
    moves.scatter_rows(
        stand.far(table), rows.data_ptr(), values.data_ptr(), skip.data_ptr(), width, 3001, stream=stand.stream
    )
    stand.settle()
    expected = torch.full((5000, width // 4), float("nan"))
    expected[rows[~skip].cpu()] = values[~skip].cpu()
    assert same_bytes(table.host, expected)


# -- linear layers ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(3, 17, 72, 40), (1, 1, 64, 128), (4, 256, 1024, 512)])
def test_weights_in_host_memory_give_autograds_bits(
    stand: Stand, shape: tuple[int, int, int, int], bias: bool, dtype: torch.dtype
) -> None:
    batch, seq, inner, outer = shape
    x, dy = random(1, batch, seq, inner, dtype=dtype), random(2, batch, seq, outer, dtype=dtype)
    weight = random(3, outer, inner, dtype=dtype)
    leaves = [x, weight] + ([random(4, outer, dtype=dtype)] if bias else [])
    known = [leaf.clone().requires_grad_() for leaf in leaves]
    with torch.enable_grad():
        y = F.linear(*known)
        y.backward(dy)
    there, home = far(stand, weight), poisoned(stand, weight)
    assert same_bytes(linear_forward(x, there.mapped, leaves[2] if bias else None), y.detach())
    assert same_bytes(linear_input_gradient(dy, there.mapped, x=x), known[0].grad)
    weight_gradient(dy, x, home.mapped)
    stand.settle()
    assert same_bytes(home.host, known[1].grad.cpu())
    if bias:
        bias_home = poisoned(stand, leaves[2])
        bias_gradient(dy, bias_home.mapped)
        stand.settle()
        assert same_bytes(bias_home.host, known[2].grad.cpu())


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("tokens", [5, 1024, 4096])
def test_panels_through_the_ring(stand: Stand, moves: DeviceMoves, tokens: int, by_kernel: bool) -> None:
    outer, inner = 2816, 1024
    weight = random(1, outer, inner)
    home = far(stand, weight)
    pool = stand.pool(3 * MIB)
    ring = PanelRing(
        stand.driver, stand.engine, pool, stand.stream, nbytes=MIB, moves=moves if by_kernel else None
    )

    def panels(cut: Cut) -> Iterator[tuple[int, int, torch.Tensor]]:
        for panel in ring.panels(home.matrix, cut, stream=stand.stream):
            flat = stand.factory.device(panel.span).view(torch.bfloat16)
            yield panel.start, panel.stop, flat.view(panel.rows, panel.columns)

    x, dy = random(2, tokens, inner), random(3, tokens, outer)
    for _ in range(3):
        rows, columns = (ring.cut(home.matrix, by_columns=by_columns) for by_columns in (False, True))
        ring.prefetch(home.matrix, rows)
        y = linear_forward(x, home.host, None, panels(rows))
        dx = linear_input_gradient(dy, home.host, panels(columns))
    assert close_to(y, x.double() @ weight.double().t())
    assert close_to(dx, dy.double() @ weight.double())
    assert torch.allclose(y, F.linear(x, weight), rtol=0.05, atol=0.5)
    assert ring.bytes_in == 6 * home.span.nbytes
    ring.close(stand.stream)


def test_panels_stay_right_while_the_ring_is_overrun(stand: Stand) -> None:
    """Each panel is read by a slow chain of kernels; what the ring does not wait for would be overwritten."""
    values = torch.arange(256, dtype=torch.float32).repeat_interleave(4096).view(256, 4096)
    home = far(stand, values.cuda())
    ring = PanelRing(stand.driver, stand.engine, stand.pool(2 * MIB), stand.stream, nbytes=MIB // 2, slots=2)
    sums = torch.zeros(256, device="cuda")
    cut = Cut(False, 16)
    for panel in ring.panels(home.matrix, cut, stream=stand.stream):
        torch.cuda._sleep(3_000_000)
        flat = stand.factory.device(panel.span).view(torch.float32)
        sums[panel.start : panel.stop] = flat.view(panel.rows, panel.columns).mean(1)
    stand.settle()
    assert torch.equal(sums.cpu(), torch.arange(256, dtype=torch.float32))
    ring.close(stand.stream)


@pytest.mark.parametrize("carrier", ["engine", "kernel"])
@pytest.mark.parametrize("partial", [False, True])
def test_a_weight_gradient_goes_home_in_panels(
    stand: Stand, moves: DeviceMoves, carrier: str, partial: bool
) -> None:
    outer, inner, tokens = 2816, 1024, 2048
    x, dy = random(1, tokens, inner), random(2, tokens, outer)
    so_far = random(3, outer, inner)
    home = far(stand, so_far) if partial else poisoned(stand, so_far)
    ring = StagingRing(stand.pool(2 * MIB), 2 * MIB, stand.stream)
    box = LaneOutbox(
        stand.driver,
        stand.engine,
        ring,
        stand.factory.device,
        stream=stand.stream,
        home=home.span,
        moves=moves if carrier == "kernel" else None,
    )
    before = stand.engine.bytes_moved[Direction.DEVICE_TO_HOST]
    norms = []
    parts = borders(outer, 256)
    weight_gradient(
        dy,
        x,
        home.mapped,
        partial=partial,
        borders=parts,
        outbox=box,
        visit=lambda start, stop, panel: norms.append(torch._foreach_norm([panel], 2, dtype=torch.float64)[0]),
    )
    assert box.last is not None
    box.last.synchronize()
    for start, stop in parts:
        expected = dy[:, start:stop].t() @ x
        expected = expected + so_far[start:stop] if partial else expected
        assert close_to(home.host[start:stop].cuda(), expected.double())
    total = torch.stack(norms).square().sum().sqrt().cpu()
    torch.testing.assert_close(total, home.host.double().norm())
    moved = stand.engine.bytes_moved[Direction.DEVICE_TO_HOST] - before
    assert moved == (home.span.nbytes if carrier == "engine" else 0)
    ring.close(stand.stream)


# -- embeddings -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [7, 3000, 3073, 8192])  # torch has one kernel up to 3072 ids, and another
@pytest.mark.parametrize("padding", [None, 3, -1])
@pytest.mark.parametrize("by_freq", [False, True])
def test_rows_of_an_embedding_have_the_dense_gradients_bits(
    stand: Stand, moves: DeviceMoves, dtype: torch.dtype, tokens: int, padding: int | None, by_freq: bool
) -> None:
    table = random(1, 500, 136, dtype=dtype)
    ids = torch.randint(0, 500, (tokens,), device="cuda", generator=torch.Generator("cuda").manual_seed(2))
    ids[::3] = ids[0]
    dy = random(3, tokens, 136, dtype=dtype)
    leaf = table.clone().requires_grad_()
    with torch.enable_grad():
        y = F.embedding(ids, leaf, padding_idx=padding, scale_grad_by_freq=by_freq)
        y.backward(dy)
    there = far(stand, table)
    assert same_bytes(embedding_forward(ids, there.mapped), y.detach())
    home = far(stand, torch.zeros_like(table))
    before = torch.randperm(500, device="cuda")[:200]
    home.host[before.cpu()] = float("nan")
    rows, values = embedding_gradient_rows(ids, dy, 500, padding, scale_grad_by_freq=by_freq)
    write_rows(home.mapped, rows, values, before, moves=moves, stream=stand.stream)
    stand.settle()
    assert same_bytes(home.host, leaf.grad.cpu())


def test_rows_are_accumulated_as_dense_gradients_are(stand: Stand, moves: DeviceMoves) -> None:
    leaf = random(1, 3000, 64).requires_grad_()
    home, present = far(stand, torch.zeros(3000, 64, dtype=torch.bfloat16)), None
    for seed in range(4):
        ids = torch.randint(0, 3000, (700,), device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
        dy = random(seed, 700, 64)
        with torch.enable_grad():
            F.embedding(ids, leaf).backward(dy)
        rows, values = embedding_gradient_rows(ids, dy, 3000)
        if present is not None:
            rows, values = accumulate_rows(home.mapped, rows, values, present)
        write_rows(home.mapped, rows, values, moves=moves, stream=stand.stream)
        present = rows
    stand.settle()
    assert same_bytes(home.host, leaf.grad.cpu())


# -- exactness --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tokens", [256, 2048])
def test_ways_that_run_the_plain_kernels_are_exact(stand: Stand, tokens: int) -> None:
    homes = []

    def host(values: torch.Tensor) -> torch.Tensor:
        homes.append(far(stand, values))
        return homes[-1].mapped

    shape = LinearShape(tokens, 1024, 2816, torch.bfloat16)
    found = exact_modes(shape, device=stand.torch_device, host=host)
    assert found.forward_host
    assert found.input_gradient_host
    assert found.weight_gradient_host
    stand.settle()
