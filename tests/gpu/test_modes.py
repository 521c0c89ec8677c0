"""Modes of layers on a CUDA device: the bits of plain PyTorch there, changed every step; and counters."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import nn
from torch.utils.checkpoint import checkpoint

import memferry_rt
from memferry_tools.train.reference import pieces

pytestmark = pytest.mark.gpu

VOCABULARY, WIDTH, TOKENS, BATCH = 12288, 512, 128, 2  # tables of two pieces of the norm
EMBEDDING = ["resident", "stream", "dha"]
BLOCK = [*EMBEDDING, "dha_then_load", "ring"]
GRADIENT = ["buffer", "inplace"]
LR = 1e-3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, layers: int = 3, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.checkpointed = checkpointed

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, VOCABULARY, (BATCH, TOKENS + 1), generator=generator).cuda()
    return F.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())


def built(dtype: torch.dtype, checkpointed: bool) -> Model:
    torch.manual_seed(0)
    return Model(checkpointed=checkpointed).to(dtype)


def plain(
    dtype: torch.dtype, steps: int, accumulate: int, *, checkpointed: bool = False
) -> dict[str, torch.Tensor]:
    model = built(dtype, checkpointed)
    masters = {name: p.detach().float().clone() for name, p in model.named_parameters()}
    model.cuda()
    optimizer = torch.optim.AdamW(masters.values(), lr=LR, fused=True)
    for number in range(steps):
        for micro in range(accumulate):
            (loss_of(model, number * accumulate + micro) / accumulate).backward()
        total = 0.0
        for parameter in model.parameters():
            for norm in torch._foreach_norm(pieces(parameter.grad), 2, dtype=torch.float64):
                total += float(norm) * float(norm)
        scale = min(1.0, 1.0 / (math.sqrt(total) + 1e-6))
        for name, parameter in model.named_parameters():
            masters[name].grad = parameter.grad.float().cpu()
            if scale != 1.0:
                masters[name].grad.mul_(scale)
            parameter.grad = None
        optimizer.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(masters[name])
    return masters


def offloaded(
    dtype: torch.dtype, steps: int, micro_steps: int, plans: Any, *, checkpointed: bool = False, **options: Any
) -> tuple[dict[str, torch.Tensor], memferry_rt.Report]:
    """Trained with `plans` one after the other, changed at every step."""
    model = built(dtype, checkpointed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    options = {"device_memory": "2GiB", "pool_memory": "256MiB", **options}
    memferry_rt.offload(model, optimizer, device="cuda", max_grad_norm=1.0, plan=plans[0], **options)
    runtime = memferry_rt.runtime_of(model)
    try:
        for number in range(steps):
            if number:
                memferry_rt.set_plan(model, plans[number % len(plans)])
            for micro in range(micro_steps):
                (loss_of(model, number * micro_steps + micro) / micro_steps).backward()
            optimizer.step()
            optimizer.zero_grad()
        found = {name: value.clone() for name, value in runtime.master_parameters().items()}
        return found, runtime.report()
    finally:
        memferry_rt.restore(model)


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value.view(torch.int32), other[name].contiguous().view(torch.int32)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight", BLOCK)
@pytest.mark.parametrize("gradient", GRADIENT)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_every_mode_has_the_bits_of_plain_pytorch(
    dtype: torch.dtype, weight: str, gradient: str, checkpointed: bool
) -> None:
    table = weight if weight in EMBEDDING else "dha"
    plan = {"embedding": f"{table}+{gradient}", "blocks.*": f"{weight}+{gradient}", "head": f"{weight}+{gradient}"}
    got, _ = offloaded(dtype, 3, 2, [plan], checkpointed=checkpointed, accumulate=2)
    assert_same(plain(dtype, 3, 2, checkpointed=checkpointed), got)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"async_step": True, "spare_slabs": 3}, {"optimizer_split": 1.0}])
def test_modes_changed_at_every_step(dtype: torch.dtype, options: dict[str, Any]) -> None:
    dice = random.Random(3)
    known = {"embedding": EMBEDDING, "blocks.0": BLOCK, "blocks.1": BLOCK, "blocks.2": BLOCK, "head": BLOCK}
    plans = [
        {name: f"{dice.choice(modes)}+{dice.choice(GRADIENT)}" for name, modes in known.items()}
        for _ in range(100)
    ]
    got, _ = offloaded(dtype, 100, 1, plans, **options)
    assert_same(plain(dtype, 100, 1), got)


def test_modes_are_proved_by_counters() -> None:
    plan = {"embedding": "dha+inplace", "blocks.0": "dha+inplace", "blocks.1": "ring+inplace"}
    _, report = offloaded(torch.bfloat16, 2, 1, [plan], optimizer_split="cpu")
    layers = {layer.name: layer for layer in report.per_layer}
    for name in ("embedding", "blocks.0"):
        assert layers[name].copied_in == layers[name].pool_nbytes == 0
        assert layers[name].read_in_place > 0
        assert layers[name].written_in_place > 0
    assert layers["embedding"].read_in_place == 2 * BATCH * TOKENS * WIDTH * 2
    assert layers["embedding"].copied_out == layers["blocks.1"].pool_nbytes == 0
    assert layers["blocks.2"].copied_in > 0
    assert layers["blocks.2"].copied_out > 0
    assert layers["blocks.2"].written_in_place == 0


def test_panels_that_differ_are_not_used() -> None:
    """Or do not differ: the parameters are the same either way, and weights went through the ring or were read."""
    plan = {"blocks.*": "ring+inplace"}
    got, report = offloaded(torch.bfloat16, 2, 1, [plan], optimizer_split="cpu")
    assert_same(plain(torch.bfloat16, 2, 1), got)
    for layer in report.per_layer:
        if layer.name.startswith("blocks"):
            assert layer.copied_in + layer.read_in_place >= 2 * 2 * (2 * 4 * WIDTH * WIDTH * 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_relaxed_numerics_are_close_to_float64(dtype: torch.dtype) -> None:
    plan = {"blocks.*": "ring+inplace", "head": "ring+inplace"}
    got, _ = offloaded(dtype, 2, 1, [plan], numerics="relaxed")
    expected = plain(dtype, 2, 1)
    for name, value in got.items():
        assert torch.allclose(value, expected[name], rtol=0, atol=4 * LR), name  # Adam's largest steps, both ways


def test_autocast_in_place() -> None:
    results = []
    for offload in (False, True):
        model = built(torch.float32, False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
        if offload:
            memferry_rt.offload(model, optimizer, device="cuda", device_memory="2GiB", plan="*=dha+inplace")
        else:
            model.cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_of(model, 0)
        loss.backward()
        results.append([parameter.grad.cpu() for parameter in model.parameters()])
        if offload:
            memferry_rt.restore(model)
    assert all(map(torch.equal, *results))
