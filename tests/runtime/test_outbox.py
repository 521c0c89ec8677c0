"""A backward that fails after the first panels of a gradient have left: what follows has the right bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from memferry_rt.adapters.torch import norm
from memferry_rt.adapters.torch.operators import LaneOutbox

from .faults import Fault, FaultError
from .models import next_token_loss
from .twins import Twins


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Fault:
    """Of products, panel by panel: eight of each matrix."""
    monkeypatch.setattr(norm, "PIECE", 512)
    made = Fault()
    made.hit(monkeypatch, LaneOutbox, "panel")
    return made


@pytest.fixture
def twins() -> Iterator[Twins]:
    made = Twins(plan="blocks.*=dha+inplace")
    yield made
    made.runtime.close()


@pytest.mark.parametrize("after", [0, 1, 5, 9])
@pytest.mark.parametrize("then", ["panels", "whole"])
def test_the_next_backward_is_right(fault: Fault, twins: Twins, after: int, then: str) -> None:
    twins.step()
    twins.optimizer.zero_grad()
    fault.arm(after)
    with pytest.raises(FaultError):
        next_token_loss(twins.model, 9).backward()
    assert fault.disarm()
    hooks = []
    if then == "whole":  # somebody wants to see gradients: autograd makes them, and kernels write them home
        hooks = [parameter.register_hook(lambda gradient: gradient) for parameter in twins.model.parameters()]
    twins.step()
    twins.assert_same(after)
    for hook in hooks:
        hook.remove()
    twins.step()
    twins.assert_same(after)
