"""Several hosts, made of one machine: arenas of their own, and the network between them."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import memferry_rt
from memferry_rt.adapters.torch.parallel.exchange import Flight, PieceExchange
from memferry_rt.adapters.torch.parallel.new_weights import NewWeights
from memferry_rt.adapters.torch.step import StepUpdates
from memferry_rt.parallel import Board, RankArena

from . import world
from .programs import MODELS, Job, Result, alone, build, closing, offloaded, together, train
from .test_same_parameters import BITS, HARDER, PLANS, _assert_bits, _assert_ranks_agree
from .test_shared_state import _read_gradients
from .test_users import _from_meta, _scaled
from .test_waits import _delay

HALF = replace(BITS, dtype=torch.bfloat16, steps=2)
QUICK = [
    replace(HALF, accumulate=2, absent=frozenset({(1, 1)}), options={"async_step": True}),
    replace(BITS, model="narrow", optimizer="SGD"),
    replace(HALF, share=9.0, options={"optimizer_split": 1.0}),
]


def _whole_life(group: Any, folder: str) -> dict[str, Any]:
    """A training that is saved, looked at and begun again, and what of the host's memory it takes."""
    found: dict[str, Any] = {"results": together(group, QUICK)}
    model, optimizer = offloaded(group, HALF)
    with closing(model) as runtime:
        _steps(group, model, optimizer, range(2))
        memferry_rt.save(folder, model, optimizer, extra="two steps")
        found["saved"] = _copies(runtime.master_parameters())
        found["state"] = optimizer.state_dict()["state"]
        _steps(group, model, optimizer, range(2, 3))
        found["went on"] = _copies(runtime.master_parameters())
        with pytest.raises(memferry_rt.OffloadError) as refused:
            memferry_rt.load(folder if dist.get_rank(group) == 0 else "/nowhere", model, optimizer)
        found["refused"] = str(refused.value)
        assert memferry_rt.load(folder, model, optimizer) == "two steps"
        found["loaded"] = _copies(runtime.master_parameters())
        _steps(group, model, optimizer, range(2, 3))
        found["again"] = _copies(runtime.master_parameters())
        assert isinstance(runtime.arena, RankArena)
        taken = os.fstat(runtime.arena.address.fd).st_blocks * 512
        found["pages"] = taken, runtime.arena.nbytes, runtime.arena.address.nbytes
    found["restored"] = _copies(optimizer.state[model.head.weight])
    return found


def _copies(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in tensors.items()}


def _steps(group: Any, model: Any, optimizer: Any, steps: range) -> None:
    """Steps on the same batches, whatever the number of ranks: four micro-batches each."""
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    for step in steps:
        for micro in range(4 // size):
            (MODELS[HALF.model][1](model, 4 * step + micro * size + rank) * size / 4).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_two_hosts_train_save_and_go_on(tmp_path: Path) -> None:
    folder = str(tmp_path)
    first, second = world.succeed(2, _whole_life, folder, hosts=2)
    _assert_ranks_agree([first["results"], second["results"]])
    for job, result in zip(QUICK, first["results"], strict=True):
        _assert_as_expected(result, alone(job, 2, hosts=2), job)
    assert first["results"][2].streamed > 0
    assert first["refused"].startswith("rank 1 has refused load(), and so do all")
    assert "/nowhere" in second["refused"]
    for name in ("saved", "went on", "loaded", "again"):
        _assert_same(first[name], second[name])
    _assert_same(first["saved"], first["loaded"])
    _assert_same(first["went on"], first["again"])
    for number, entry in first["state"].items():
        _assert_same(entry, second["state"][number])
    _assert_same(first["restored"], second["restored"])
    assert bool(first["restored"]["exp_avg"].any())
    taken, held, whole = first["pages"]
    assert taken == held, "pages of the other host's state were touched"
    assert held < 0.75 * whole
    _load_alone(folder, first)


def _load_alone(folder: str, found: dict[str, Any]) -> None:
    """One process goes on with what the hosts have saved."""
    model, optimizer = offloaded(None, HALF)
    with closing(model) as runtime:
        memferry_rt.load(folder, model, optimizer)
        _assert_same(runtime.master_parameters(), found["saved"])
        for number, entry in optimizer.state_dict()["state"].items():
            _assert_same(entry, found["state"][number])


def _assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.slow
@pytest.mark.parametrize(("size", "hosts"), [(2, 2), (3, 3), (4, 2)])
def test_hosts_have_the_bits_of_one_process(size: int, hosts: int) -> None:
    jobs = [*[replace(BITS, model=model) for model in MODELS], *HARDER.values()]
    results = world.succeed(size, together, jobs, hosts=hosts)
    _assert_ranks_agree(results)
    for job, result in zip(jobs, results[0], strict=True):
        expected = alone(job, size, hosts)
        assert result.skipped == expected.skipped, job
        _assert_as_expected(result, expected, job)


def _assert_as_expected(result: Result, expected: Result, job: Job) -> None:
    """All bits, but for the last place of norms."""
    _assert_bits(result, expected, job)
    torch.testing.assert_close(result.norms, expected.norms, rtol=1e-12, atol=0, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_every_plan_and_every_run_has_the_same_bits_on_hosts(size: int) -> None:
    job = Job(dtype=torch.bfloat16, max_grad_norm=0.82)  # bites in some of the steps
    jobs = [job, job, *[replace(job, **plan) for plan in PLANS]]
    results = world.succeed(size, together, jobs, hosts=2)
    _assert_ranks_agree(results)
    expected = alone(job, size, hosts=2)
    torch.testing.assert_close(results[0][0].norms, expected.norms, rtol=1e-4, atol=0)
    for other in results[0][1:]:
        assert other.losses == results[0][0].losses
        _assert_bits(other, results[0][0])
    _assert_ranks_agree([results[0], world.succeed(size, together, jobs, hosts=2)[0]])


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_gradients_are_whole_on_every_host(size: int) -> None:
    model, _ = build(Job())
    ranks = []
    for rank in range(size):
        model.zero_grad()
        MODELS["plain"][1](model, rank).backward()
        ranks.append({name: p.grad.clone() for name, p in model.named_parameters()})
    half = size // 2
    for read, _, untouched in world.succeed(size, _read_gradients, hosts=2):
        assert untouched
        for name, value in read.items():
            sums = [sum(each[name] for each in host) for host in (ranks[:half], ranks[half:])]
            assert torch.equal(value, (sums[0] + sums[1]) / size), name


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_hosts_begin_alike_and_scale_alike(size: int) -> None:
    begun = world.succeed(size, _from_meta, hosts=2)
    scaled = world.succeed(size, _scaled, 1, hosts=2)
    for found, (scale, skipped, parameters) in zip(begun, scaled, strict=True):
        _assert_same(found, begun[0])
        _assert_same(parameters, scaled[0][2])
        assert (scale, skipped) == (4.0, 1)


# -- waits ------------------------------------------------------------------------------------------------------
def _arrive_at_once(self: NewWeights, journey: Any) -> None:
    self._arrived(journey.layer.index, journey.number)


PLACES: list[tuple[type, str]] = [
    (StepUpdates, "submit"),
    (NewWeights, "_land"),
    (Flight, "go_on"),
    (PieceExchange, "send"),
    (Board, "gather"),
]


def _late_somewhere(group: Any, kept: bool) -> Result:
    if not kept:
        NewWeights._land = _arrive_at_once  # type: ignore[method-assign]
    rank = dist.get_rank(group)
    for number, (owner, name) in enumerate(PLACES):
        _delay(owner, name, lambda number=number: 0.01 * ((number + rank) % 3))
    return train(group, replace(HALF, options={"async_step": True}))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kept", [True, False])
def test_new_weights_of_other_hosts_are_waited_for(size: int, kept: bool) -> None:
    expected = alone(HALF, size, hosts=2)
    for result in world.succeed(size, _late_somewhere, kept, hosts=2):
        same = all(torch.equal(value, expected.parameters[name]) for name, value in result.parameters.items())
        assert same is kept


# -- checkpoints ------------------------------------------------------------------------------------------------
def _save(group: Any, folder: str) -> dict[str, torch.Tensor]:
    model, optimizer = offloaded(group, HALF)
    with closing(model) as runtime:
        _steps(group, model, optimizer, range(2))
        memferry_rt.save(folder, model, optimizer)
        return _copies(runtime.master_parameters())


def _resume(group: Any, folder: str, state: Any) -> dict[str, dict[str, torch.Tensor]]:
    model, optimizer = offloaded(group, HALF)
    with closing(model) as runtime:
        memferry_rt.load(folder, model, optimizer)
        loaded = _copies(runtime.master_parameters())
        if state is not None:
            optimizer.load_state_dict(state)
        state = copy.deepcopy(optimizer.state_dict())
        _steps(group, model, optimizer, range(2, 3))
        return {"loaded": loaded, "trained": _copies(runtime.master_parameters()), "state": state}


@pytest.mark.slow
@pytest.mark.parametrize("saved_by", [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_any_hosts_resume_what_any_have_saved(saved_by: tuple[int, int], tmp_path: Path) -> None:
    folder = str(tmp_path)
    saved = world.succeed(saved_by[0], _save, folder, hosts=saved_by[1])[0]
    reference = world.succeed(1, _resume, folder, None)[0]
    for size, hosts in [(2, 1), (2, 2), (4, 2)]:
        for state in (None, reference["state"]):
            for found in world.succeed(size, _resume, folder, state, hosts=hosts):
                _assert_same(found["loaded"], saved)
                for number, entry in found["state"]["state"].items():
                    _assert_same(entry, reference["state"]["state"][number])
                for name, value in found["trained"].items():
                    torch.testing.assert_close(value, reference["trained"][name], rtol=0.02, atol=0.02)
