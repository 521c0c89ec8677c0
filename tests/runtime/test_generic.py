"""Other optimizers on slab views: the bits of their own class, with settings as they were captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adagrad, Adamax, NAdam, Optimizer, RMSprop
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memferry_rt.adapters.torch.generic import ParameterUpdate, capture, state_keys


class Lion(Optimizer):
    """Chen et al., 2023: the sign of an interpolation, decoupled decay; not in torch."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for parameter in group["params"]:
                mean = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.add_(mean.lerp(parameter.grad, 1 - beta1).sign_(), alpha=-lr)
                mean.lerp_(parameter.grad, 1 - beta2)


Build = Callable[[Any], Optimizer]
OPTIMIZERS: dict[str, tuple[Build, tuple[str, ...]]] = {
    "sgd": (lambda p: SGD(p, lr=0.1, foreach=False), ()),
    "momentum": (lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.1), ("momentum_buffer",)),
    "nesterov": (
        lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True),
        ("momentum_buffer",),
    ),
    "adagrad": (lambda p: Adagrad(p, lr=0.1, lr_decay=0.01, initial_accumulator_value=0.5), ("sum",)),
    "rmsprop": (lambda p: RMSprop(p, momentum=0.5, centered=True), ("grad_avg", "momentum_buffer", "square_avg")),
    "nadam": (lambda p: NAdam(p, decoupled_weight_decay=True, weight_decay=0.1), ("exp_avg", "exp_avg_sq")),
    "adamax": (lambda p: Adamax(p), ("exp_avg", "exp_inf")),
    "lion": (lambda p: Lion(p, 1e-2, (0.9, 0.99), 0.1), ("exp_avg",)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_has_the_bits_of_the_class(name: str, dtype: torch.dtype) -> None:
    build, keys = OPTIMIZERS[name]
    generator = torch.Generator().manual_seed(3)
    shapes = [(1,), (13,), (40, 25), (3, 67, 5)]
    plain = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    user = build(plain)
    user.param_groups[0]["foreach"] = False
    assert state_keys(user, user.param_groups[0], 2) == keys
    masters = [parameter.detach().clone() for parameter in plain]
    rooms = [{key: torch.full_like(master, -9.0) for key in keys} for master in masters]
    updates = [ParameterUpdate(user, master) for master in masters]
    states = [{key: value.clone() for key, value in user.state.get(parameter, {}).items()} for parameter in plain]
    weights = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    for step in range(30):
        user.param_groups[0]["lr"] = 0.1 / (step + 1)
        settings = capture(user.param_groups[0])
        gradients = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        for parameter, gradient in zip(plain, gradients, strict=True):
            parameter.grad = gradient.float() * 0.5
        user.step()
        user.param_groups[0]["lr"] = 77.0  # too late for what was captured
        for update, gradient, weight, state, room in zip(updates, gradients, weights, states, rooms, strict=True):
            kept = gradient.clone()
            update.run(gradient, settings, 0.5, weight, state, room)
            assert torch.equal(gradient, kept)
            assert all(state[key] is room[key] for key in keys)
    for parameter, master, room, weight in zip(plain, masters, rooms, weights, strict=True):
        assert torch.equal(parameter, master)
        assert torch.equal(weight, master.to(dtype))
        for key in keys:
            assert torch.equal(user.state[parameter][key], room[key]), key


def test_state_without_room_has_memory_of_its_own() -> None:
    user = SGD([torch.nn.Parameter(torch.ones(4))], lr=0.1, momentum=0.9)
    state: dict[str, Any] = {}
    ParameterUpdate(user, torch.ones(4)).run(torch.ones(4), capture(user.param_groups[0]), 1.0, None, state, {})
    assert torch.equal(state["momentum_buffer"], torch.ones(4))
    assert user.state == {}


def test_keys_are_found_from_the_state_that_there_is() -> None:
    parameter = torch.nn.Parameter(torch.ones(3, 5))
    user = RMSprop([parameter], momentum=0.5)
    parameter.grad = torch.ones(3, 5)
    user.step()
    assert state_keys(user, user.param_groups[0], 2) == ("momentum_buffer", "square_avg")


def test_nobody_s_hooks_and_patches_are_run() -> None:
    user = SGD([torch.nn.Parameter(torch.ones(4))], lr=0.1)
    user.register_step_pre_hook(lambda *_: pytest.fail("the user's hook ran"))
    user.step = lambda *_: pytest.fail("the user's step ran")  # type: ignore[method-assign]
    everybody = register_optimizer_step_pre_hook(lambda *_: pytest.fail("a hook for all optimizers ran"))
    try:
        state_keys(user, user.param_groups[0], 1)
    finally:
        everybody.remove()
