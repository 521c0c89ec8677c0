"""A call of the driver fails in the middle of an iteration: that is said, and training can begin again."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch

import memferry_rt
from memferry_allocator import EmulatedDriver

from .faults import Fault, FaultError
from .models import Decoder, next_token_loss


def _steps(model: Decoder, optimizer: torch.optim.Optimizer, *numbers: int) -> None:
    for number in numbers:
        next_token_loss(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("call", ["copy", "event_record", "stream_wait", "launch"])
def test_training_goes_on_after_a_call_has_failed(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    fault = Fault()
    fault.hit(monkeypatch, EmulatedDriver, call)
    torch.manual_seed(0)
    plain = Decoder(layers=2)
    reference = torch.optim.SGD(plain.parameters(), lr=1e-2, momentum=0.9)
    begun = copy.deepcopy(plain.state_dict()), copy.deepcopy(reference.state_dict())
    _steps(plain, reference, 2, 3)
    torch.manual_seed(0)
    model = Decoder(layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    memferry_rt.offload(model, optimizer, device="emulated", device_memory=weights)
    for after in range(1, 100, 2):
        fault.arm(after)
        with contextlib.suppress(FaultError):
            _steps(model, optimizer, 1)
            break  # an iteration makes fewer calls
        optimizer.zero_grad()
        model.load_state_dict(begun[0])
        optimizer.load_state_dict(begun[1])
        _steps(model, optimizer, 2, 3)
        memferry_rt.synchronize(model)
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(one, other), after
    fault.disarm()
    memferry_rt.restore(model)
