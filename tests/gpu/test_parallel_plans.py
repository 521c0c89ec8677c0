"""Plans for two ranks on two GPUs: followed with the same bits, and refused for another number.

The twin of ``tests/parallel/test_plans.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import memferry_rt
from memferry_allocator import MemFerryError
from memferry_rt.plan import H200, LayerKind, Plan, PlanOptions, make_plan
from tests.parallel import world
from tests.parallel.test_plans import workload_of
from tests.runtime.models import Decoder

from . import test_parallel as parallel

pytestmark = pytest.mark.gpu
BUDGET = 2 << 30


@pytest.fixture(autouse=True)
def two_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")


def _plan(ranks: int, modes: str = "") -> Plan:
    """Made for little device memory, so that something streams; the budget is the runtime's."""
    kinds = frozenset({LayerKind.EMBEDDING, LayerKind.LINEAR, LayerKind.BLOCK, LayerKind.HEAD})
    device = replace(H200, ranks=ranks, name=torch.cuda.get_device_name())
    workload = workload_of(Decoder(layers=4, width=256).to(torch.bfloat16), "bfloat16")
    options = PlanOptions(128 << 20, host_kinds=kinds, evaluations=20, modes=modes)
    return replace(make_plan(workload, options, device).plan, device_memory=BUDGET)


def _train_all(group: Any, plans: list[Plan | None]) -> list[Any]:
    return [
        parallel._train(group, "plain", {"device_memory": BUDGET, "pool_memory": 16 << 20, "plan": plan})
        for plan in plans
    ]


def test_plans_for_two_ranks_have_the_bits() -> None:
    plans = [None, _plan(2), _plan(2, "blocks.*=stream+streamed, (small)=resident")]
    for results in world.succeed(2, _train_all, plans, cuda=True):
        (_, _, expected), *others = results
        for _, _, parameters in others:
            for name, value in expected.items():
                assert torch.equal(value, parameters[name]), name


def _refusal(group: Any, plan: Plan) -> str:
    model = Decoder(layers=4, width=256).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    try:
        memferry_rt.offload(model, optimizer, device="cuda", device_memory=BUDGET, process_group=group, plan=plan)
    except MemFerryError as error:
        return str(error)
    return "not refused"


def test_a_plan_for_one_is_refused_by_two_alike() -> None:
    first, second = world.succeed(2, _refusal, _plan(1), cuda=True)
    assert first == second
    assert "the plan is for one rank, and here a group of 2 ranks trains" in first
