"""What ranks cannot do together is refused on all of them, with the same message, and nothing is changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import memferry_rt
from memferry_allocator import MemFerryError, OutOfMemory, SharedArena
from memferry_rt import UnsupportedError
from memferry_rt.adapters.torch.parallel import ranks as ranks_module
from tests.runtime.models import Decoder

from . import world
from .world import Failure


def _offload(group: Any, odd: dict[str, Any], **common: Any) -> str:
    """Rank 1 with other options than rank 0; what is refused leaves model and optimizer usable."""
    mine = odd if dist.get_rank(group) == 1 else {}
    torch.manual_seed(0)
    model = Decoder(**{"layers": 2, "width": 32, **mine.pop("model", {})})
    if mine.pop("freeze", False):
        model.head.requires_grad_(False)
    make = mine.pop("optimizer", common.pop("optimizer", torch.optim.AdamW))
    optimizer = make(model.parameters(), lr=mine.pop("lr", 1e-2))
    options = {"device_memory": "1MiB", "device": "emulated", **common, **mine}
    try:
        memferry_rt.offload(model, optimizer, process_group=group, **options)
    except MemFerryError as error:
        assert not list(model._forward_hooks), "it was changed"
        model(torch.zeros(1, 12, dtype=torch.int64)).sum().backward()
        optimizer.step()
        return f"{type(error).__name__}: {error}"
    memferry_rt.restore(model)
    return "not refused"


DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "a layer more": ({"model": {"layers": 3}}, "ranks differ in the number of layers: rank 0 has 5, rank 1 has 6"),
    "wider": ({"model": {"width": 64}}, "ranks differ in parameter position"),
    "tied": ({"model": {"tied": True}}, "ranks differ in"),
    "frozen": ({"freeze": True}, "ranks differ in parameter head.weight"),
    "budget": ({"device_memory": "2MiB"}, "ranks differ in device_memory: rank 0 has 1048576, rank 1 has 2097152"),
    "clipping": ({"max_grad_norm": 1.0}, "ranks differ in max_grad_norm: rank 0 has None, rank 1 has 1.0"),
    "settings": ({"lr": 0.5}, "ranks differ in lr of parameter group 0: rank 0 has 0.01, rank 1 has 0.5"),
    "optimizer": ({"optimizer": torch.optim.Adam}, "ranks differ in the optimizer: rank 0 has AdamW, rank 1 has"),
}


def _all_different(group: Any, cases: list[dict[str, Any]]) -> list[str]:
    return [_offload(group, dict(case)) for case in cases]


def test_ranks_that_differ_are_refused_alike() -> None:
    both = world.succeed(2, _all_different, [odd for odd, _ in DIFFERENT.values()])
    for name, first, second, (_, text) in zip(DIFFERENT, *both, DIFFERENT.values(), strict=True):
        assert first == second, name
        assert first.startswith(f"RankError: {text}"), (name, first)


def test_what_one_rank_refuses_all_refuse() -> None:
    cases = [{"device_memory": "1KiB"}, {"device_memory": "lots"}, {"layers": ("nowhere",)}]
    both = world.succeed(2, _all_different, cases)
    for first, second, kind in zip(*both, ("Budget", "InvalidRequest", "Unsupported"), strict=True):
        assert second.startswith(f"{kind}Error: ")
        assert first == f"RankError: rank 1 refuses, and so do all: {second}"


COMMON: dict[str, tuple[dict[str, Any], str]] = {
    "host memory": ({"host_memory": "64KiB"}, "BudgetError: host_memory: "),
    "spare slabs": ({"spare_slabs": 1}, "UnsupportedError: spare_slabs=1 with process_group"),
    "another optimizer": ({"optimizer": torch.optim.RAdam}, "UnsupportedError: process_group: RAdam updates"),
}


def _all_alike(group: Any, cases: list[dict[str, Any]]) -> list[str]:
    return [_offload(group, {}, **case) for case in cases]


def test_what_ranks_cannot_share_is_refused_alike() -> None:
    both = world.succeed(2, _all_alike, [common for common, _ in COMMON.values()])
    for name, first, second, (_, text) in zip(COMMON, *both, COMMON.values(), strict=True):
        assert first == second, name
        assert first.startswith(text), (name, first)


def _elsewhere(group: Any, hosts: str) -> str:
    os.environ["MEMFERRY_HOST"] = hosts[dist.get_rank(group)]
    return _offload(group, {})


@pytest.mark.parametrize("hosts", ["aab", "aba"])
def test_hosts_of_different_sizes_or_mixed_are_refused_alike(hosts: str) -> None:
    first, *others = world.succeed(3, _elsewhere, hosts)
    names = ", ".join(f"rank {rank} on {name}" for rank, name in enumerate(hosts))
    assert first.startswith("UnsupportedError: process_group: hosts need equal numbers of ranks"), first
    assert names in first
    assert others == [first, first]


def _no_room(group: Any) -> str:
    def create(*_: Any, **__: Any) -> Any:
        raise OutOfMemory("the machine is full", size=1, used=0, limit=0, budget="host memory")

    SharedArena.create = create  # in this process alone
    return _short_of_memory(group)


def _no_words(group: Any) -> str:
    """Rank 1 cannot look at the board."""

    def refuse(_: Any) -> Any:
        raise UnsupportedError("no such words")

    if dist.get_rank(group) == 1:
        ranks_module.SharedWords = refuse  # type: ignore[misc, assignment]
    return _short_of_memory(group)


def _short_of_memory(group: Any) -> str:
    model = Decoder(layers=2)
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        memferry_rt.offload(model, optimizer, process_group=group, device="emulated", device_memory="1MiB")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


@pytest.mark.parametrize(
    ("program", "texts"),
    [
        (_no_words, ["RankError: rank 1 refuses, and so do all: Unsup", "UnsupportedError: no such words"]),
        (
            _no_room,
            ["OutOfMemory: the machine is full", "RankError: rank 0 refuses, and so do all: OutOf"],
        ),
    ],
)
def test_a_machine_that_ranks_cannot_share(program: Callable[[Any], str], texts: list[str]) -> None:
    for result, text in zip(world.succeed(2, program), texts, strict=True):
        assert not isinstance(result, Failure)
        assert result.startswith(text)
