"""What users read and keep of the state that ranks share, and take elsewhere."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import memferry_rt
from memferry_rt.parallel import RankArena

from . import world
from .programs import MODELS, Job, Result, alone, build, closing, losses_of, offloaded, train

JOB = Job(max_grad_norm=None)


def _read_gradients(group: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], bool]:
    """A rank's ``grad`` after backward, read late, and what it has kept of it two backwards later."""
    model, optimizer = offloaded(group, JOB)
    rank = dist.get_rank(group)
    kept: dict[str, torch.Tensor] = {}
    with closing(model):
        for step in range(2):
            MODELS[JOB.model][1](model, step * 2 + rank).backward()
            if step == 0:
                optimizer.step()
                time.sleep(0.2 * rank)  # the other is in its next backward by now, if it may be
                kept = {name: p.grad for name, p in model.named_parameters()}
                read = {name: p.grad.clone() for name, p in model.named_parameters()}
                optimizer.zero_grad()
        untouched = all(torch.equal(kept[name], read[name]) for name in kept)
        same = {name: p.grad.clone() for name, p in model.named_parameters()}
    return read, same, untouched


def test_a_gradient_is_the_whole_mean_on_every_rank() -> None:
    first, second = world.succeed(2, _read_gradients)
    model, _ = build(JOB)
    ranks = []
    for rank in range(2):
        model.zero_grad()
        MODELS[JOB.model][1](model, rank).backward()
        ranks.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, value in first[0].items():
        assert torch.equal(value, (ranks[0][name] + ranks[1][name]) / 2), name
        assert torch.equal(value, second[0][name]), name
        assert torch.equal(first[1][name], second[1][name]), name
    assert first[2]
    assert second[2]


def _restored(group: Any) -> tuple[dict[str, torch.Tensor], dict[int, Any]]:
    model, optimizer = offloaded(group, JOB)
    rank = dist.get_rank(group)
    for step in range(2):
        for loss in losses_of(JOB, model, step, rank, dist.get_world_size(group)):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    memferry_rt.restore(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank)  # of this process alone from now on
    dist.barrier(group)
    weights = {name: value - rank for name, value in model.state_dict().items()}
    return weights, optimizer.state_dict()["state"]


def test_restored_ranks_share_nothing() -> None:
    (first, state), (second, other) = world.succeed(2, _restored)
    expected = alone(replace(JOB, steps=2), 2)
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=0, atol=1e-6)
        torch.testing.assert_close(value, expected.parameters[name], rtol=0, atol=1e-6)
    for number, entry in state.items():
        assert float(entry["step"]) == 2
        assert bool(entry["exp_avg"].any())
        for key, value in entry.items():
            assert torch.equal(value, other[number][key])


def _save(group: Any, folder: str, state_dicts: bool) -> Any:
    model, optimizer = offloaded(group, JOB)
    with closing(model):
        _steps(group, model, optimizer, range(2))
        if state_dicts:
            return model.state_dict(), optimizer.state_dict()
        memferry_rt.save(folder, model, optimizer, extra={"step": 2})
        _steps(group, model, optimizer, range(2, 4))  # goes on
    return None


def _steps(group: Any, model: Any, optimizer: Any, steps: range, share: int | None = None) -> None:
    """Steps on the same batches, whatever the number of ranks: four micro-batches each."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for step in steps:
        for micro in range(4 // size):
            (MODELS[JOB.model][1](model, 4 * step + micro * size + rank) * size / 4).backward()
        optimizer.step()
        optimizer.zero_grad()


def _resume(group: Any, source: Any) -> dict[str, torch.Tensor]:
    model, optimizer = offloaded(group, replace(JOB, share=2.0))
    with closing(model) as runtime:
        if isinstance(source, str):
            assert memferry_rt.load(source, model, optimizer) == {"step": 2}
        else:
            model.load_state_dict(source[0])
            optimizer.load_state_dict(source[1])
        loaded = {name: value.clone() for name, value in runtime.master_parameters().items()}
        _steps(group, model, optimizer, range(2, 4))
        return loaded | {f"trained {name}": value.clone() for name, value in runtime.master_parameters().items()}


def test_what_n_ranks_save_m_ranks_resume(tmp_path: Path) -> None:
    saved = str(tmp_path / "checkpoint")
    world.succeed(2, _save, saved, False)
    same = world.succeed(2, _resume, saved)
    for other in (same[1], *world.succeed(1, _resume, saved), *world.succeed(4, _resume, saved)):
        for name, value in same[0].items():
            if name.startswith("trained"):
                torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-5)
            else:
                assert torch.equal(other[name], value), name


def test_state_dicts_are_whole_on_every_rank() -> None:
    first, second = world.succeed(2, _save, "", True)
    for name, value in first[0].items():
        assert torch.equal(value, second[0][name])
    results = world.succeed(2, _resume, first)
    for name, value in first[0].items():
        assert torch.equal(results[0][name], value)
        assert torch.equal(results[0][f"trained {name}"], results[1][f"trained {name}"])
        assert not torch.equal(results[0][f"trained {name}"], value)


def _host_memory(group: Any) -> int:
    model, _ = offloaded(group, JOB)
    with closing(model) as runtime:
        return runtime.report().host_nbytes


def test_host_memory_of_all_ranks_is_that_of_one() -> None:
    [one] = world.succeed(1, _host_memory)
    for nbytes in world.succeed(4, _host_memory):
        assert one < nbytes <= one + 16384  # the board
    first, second = world.succeed(2, _pages)
    assert first == second
    assert first[1:] == ("0o600", True)


def _pages(group: Any) -> Any:
    """Which pages they are, who may open them, and whether there are no more of them than there is state."""
    model, _ = offloaded(group, JOB)
    with closing(model) as runtime:
        assert isinstance(runtime.arena, RankArena)
        status = os.fstat(runtime.arena.address.fd)
        return status.st_ino, oct(status.st_mode & 0o777), status.st_blocks * 512 <= runtime.arena.nbytes + 4096


def _one_rank(group: Any) -> Result:
    return train(group, JOB)


def test_a_group_of_one_is_no_group() -> None:
    [result] = world.succeed(1, _one_rank)
    for name, value in alone(JOB, 1).parameters.items():
        assert torch.equal(result.parameters[name].view(torch.int32), value.view(torch.int32)), name
