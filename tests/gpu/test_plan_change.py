"""Changes of plans that fail on a real device: the plan before is in force, and training keeps its bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

import memferry_rt
from memferry_allocator import DevicePool, OutOfMemory
from memferry_rt.adapters.torch.tensors import TensorFactory
from tests.runtime.faults import Fault
from tests.runtime.models import Decoder, tokens

pytestmark = pytest.mark.gpu
PLANS: list[Any] = [{"blocks.*": "dha+inplace", "head": "ring"}, {"*": "resident"}, {}]


def _no_room() -> Exception:
    return OutOfMemory("the pool has no room", size=1, used=1, limit=1, budget="pool")


def _train(fault: Fault | None = None, most: int = 1) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Decoder(layers=3).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    memferry_rt.offload(model, optimizer, device="cuda", device_memory="512MiB")
    runtime = memferry_rt.runtime_of(model)
    for number in range(8):
        ids = tokens(number).cuda()
        F.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        before = runtime.report()
        if fault is not None:
            fault.arm(number % most)
            with pytest.raises((OutOfMemory, torch.OutOfMemoryError)):
                memferry_rt.set_plan(model, PLANS[number % 3])
            assert fault.disarm()
            after = runtime.report()
            assert after.plan_source == before.plan_source
            assert [each.weight_mode for each in after.per_layer] == [
                each.weight_mode for each in before.per_layer
            ]
        memferry_rt.set_plan(model, PLANS[number % 3])
        optimizer.zero_grad()
    found = {name: value.clone() for name, value in runtime.master_parameters().items()}
    memferry_rt.restore(model)
    return found


@pytest.mark.parametrize(
    ("owner", "call", "make", "most"),
    [
        (DevicePool, "__init__", _no_room, 1),
        (TensorFactory, "device", lambda: torch.OutOfMemoryError("CUDA out of memory"), 4),
    ],
    ids=["pool", "torch"],
)
def test_a_failing_call_leaves_the_plan_before(
    monkeypatch: pytest.MonkeyPatch, owner: type, call: str, make: Any, most: int
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        _compare(monkeypatch, owner, call, make, most)
    finally:
        torch.use_deterministic_algorithms(False)


def _compare(monkeypatch: pytest.MonkeyPatch, owner: type, call: str, make: Any, most: int) -> None:
    expected = _train()
    fault = Fault(make)
    fault.hit(monkeypatch, owner, call)
    for name, value in _train(fault, most).items():
        assert torch.equal(value, expected[name]), name
