"""What users do around a step goes on working where ranks share a model, on one rank alone too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import memferry_rt
from tests.runtime.models import Decoder, next_token_loss, tokens

from . import world
from .programs import Job, closing, offloaded

JOB = Job(max_grad_norm=None, options={"async_step": True})


def _step(model: Any, optimizer: Any, number: int) -> None:
    next_token_loss(model, number).backward()
    optimizer.step()
    optimizer.zero_grad()


def _parameters(runtime: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in runtime.master_parameters().items()}


def _between_steps(group: Any, something: bool) -> dict[str, torch.Tensor]:
    """Rank 1 evaluates, reads and saves between steps, and after the last one; rank 0 does not."""
    model, optimizer = offloaded(group, JOB)
    rank = dist.get_rank(group)
    with closing(model) as runtime:
        for step in range(3):
            _step(model, optimizer, 2 * step + rank)
            if something and rank == 1:
                with torch.no_grad():
                    model.eval()(tokens(7)[:, :-1])
                model.train()
                assert len(model.state_dict()) == len(list(model.parameters()))
                assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))
                memferry_rt.save("/nowhere", model, optimizer)  # it is rank 0 that writes
                memferry_rt.synchronize(model)
                torch.autograd.grad(next_token_loss(model, 3), [model.head.weight])
        return _parameters(runtime)


def test_one_rank_does_more_between_steps() -> None:
    plain, busy = (world.succeed(2, _between_steps, something) for something in (False, True))
    for name, value in plain[0].items():
        assert torch.equal(value, busy[0][name]), name
        assert torch.equal(value, busy[1][name]), name


def _caught(group: Any) -> dict[str, torch.Tensor]:
    """A forward fails on rank 1 and is tried again."""
    model, optimizer = offloaded(group, JOB)
    rank = dist.get_rank(group)

    def fail(*_: Any) -> None:
        raise ValueError("not this batch")

    with closing(model) as runtime:
        for step in range(3):
            if step == 1 and rank == 1:
                handle = model.blocks[1].register_forward_pre_hook(fail)
                with pytest.raises(ValueError, match="not this batch"):
                    next_token_loss(model, 0)
                handle.remove()
            _step(model, optimizer, 2 * step + rank)
        return _parameters(runtime)


def test_a_forward_that_fails_on_one_rank_is_tried_again() -> None:
    for result in world.succeed(2, _caught):
        for name, value in world.succeed(2, _between_steps, False)[0].items():
            assert torch.equal(value, result[name]), name


def _scaled(group: Any, spoilt: int | None) -> tuple[float, int, dict[str, torch.Tensor]]:
    model, optimizer = offloaded(group, JOB)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    rank = dist.get_rank(group)
    with closing(model) as runtime:
        for step in range(3):
            loss = next_token_loss(model, 2 * step + rank)
            if (step, rank) == (spoilt, 1):
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
        return scaler.get_scale(), runtime.skipped_steps, _parameters(runtime)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_scalers_and_schedulers_agree() -> None:
    first, second = world.succeed(2, _scaled, 1)
    assert first[:2] == second[:2] == (4.0, 1)
    for name, value in first[2].items():
        assert torch.equal(value, second[2][name])
    assert world.succeed(2, _scaled, None)[0][:2] == (8.0, 0)


def _unscaled(group: Any) -> str:
    model, optimizer = offloaded(group, JOB)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(next_token_loss(model, dist.get_rank(group))).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(memferry_rt.UnsupportedError) as found:
        scaler.step(optimizer)
    return str(found.value)


def test_unscaling_what_all_share_is_refused() -> None:
    first, second = world.succeed(2, _unscaled)
    assert first == second
    assert "GradScaler.unscale_() before step() with process_group" in first


def _from_meta(group: Any) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = Decoder(layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    rank = dist.get_rank(group)
    torch.manual_seed(rank)  # weights begin as those of rank 0

    def initialise(module: torch.nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            torch.nn.init.normal_(parameter, std=0.1)

    memferry_rt.offload(
        model,
        optimizer,
        device="emulated",
        device_memory="1MiB",
        process_group=group,
        param_init_fn=initialise,
    )
    with closing(model) as runtime:
        first = _parameters(runtime)
        _step(model, optimizer, rank)
        return {**first, **{f"trained {name}": value for name, value in _parameters(runtime).items()}}


def test_weights_begin_as_those_of_the_first_rank() -> None:
    first, second = world.succeed(2, _from_meta)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
        assert bool(value.any()), name
