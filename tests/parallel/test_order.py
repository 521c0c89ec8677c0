"""In which order ranks exchange layers: soon after backward has made them, so that it keeps little of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from memferry_rt.adapters.torch.parallel import RankGradients
from tests.runtime.models import checkpointed

from . import world
from .programs import MODELS, Job, build, closing, offloaded

Gradients = dict[str, torch.Tensor]


def _most_kept(group: Any, model: str) -> list[int]:
    """For each of two backwards, how many layers autograd kept gradients of at most, before one was exchanged."""
    job = Job(model=model)
    offload, _ = offloaded(group, job)
    kept: list[int] = []
    take_off = RankGradients._take_off

    def counted(self: RankGradients, layer: Any) -> None:
        kept[-1] = max(kept[-1], len(self._local))
        take_off(self, layer)

    RankGradients._take_off = counted  # type: ignore[method-assign]
    with closing(offload):
        for step in range(2):
            kept.append(0)
            MODELS[model][1](offload, 2 * step + dist.get_rank(group)).backward()
            offload.zero_grad()
    return kept


@pytest.mark.parametrize("model", ["plain", "reentrant"])
def test_layers_leave_while_backward_goes_on(model: str) -> None:
    for first, second in world.succeed(2, _most_kept, model):
        assert first <= 4, (
            "of six"
        )  # the layer that is complete, the next, the embedding, and the small parameters
        assert second <= 2


def _again(group: Any) -> list[Gradients]:
    """Gradients of blocks that are used once, and from the second backward on twice."""
    model, _ = offloaded(group, Job(model="reentrant twice"))
    twice, found = model.run, []
    with closing(model):
        for number, run in enumerate((checkpointed(True), twice, twice)):
            model.run = run
            MODELS["reentrant twice"][1](model, 2 * number + dist.get_rank(group)).backward()
            found.append({name: p.grad.clone() for name, p in model.named_parameters()})
            model.zero_grad()
    return found


def _arrivals(number: int) -> dict[str, list[torch.Tensor]]:
    """What plain autograd gives each parameter of the same model, one after the other."""
    model, _ = build(Job(model="reentrant twice"))
    found: dict[str, list[torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: found.setdefault(name, []).append(gradient.clone()))
    MODELS["reentrant twice"][1](model, number).backward()
    return found


def test_layers_that_get_several_gradients_stay_until_all_are_there() -> None:
    """The sum of each rank is what is averaged, then."""
    for _, *later in world.succeed(2, _again):
        for number, gradients in enumerate(later, start=1):
            ranks = [_arrivals(2 * number), _arrivals(2 * number + 1)]
            for name, value in gradients.items():
                assert len(ranks[0][name]) == (2 if "blocks" in name else 1)
                sums = [sum(rank[name][1:], start=rank[name][0]) for rank in ranks]
                assert torch.equal(value, (sums[0] + sums[1]) / 2), name
