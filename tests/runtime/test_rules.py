"""Other optimizers on slab views: the bits of their own class, with settings as they were captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adagrad, Adamax, NAdam, Optimizer, RMSprop

from memferry_rt import UnsupportedError
from memferry_rt.adapters.torch.rules import ParameterUpdate, UpdateRule


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
    rule = UpdateRule(user)
    assert rule.state_keys(user.param_groups[0]) == keys
    masters = [parameter.detach().clone() for parameter in plain]
    rooms = [{key: torch.full_like(master, -9.0) for key in keys} for master in masters]
    updates = [
        ParameterUpdate(rule, master, room, user.state.get(parameter))
        for parameter, master, room in zip(plain, masters, rooms, strict=True)
    ]
    weights = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    for step in range(30):
        user.param_groups[0]["lr"] = 0.1 / (step + 1)
        settings = rule.capture(user.param_groups[0])
        gradients = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        for parameter, gradient in zip(plain, gradients, strict=True):
            parameter.grad = gradient.float() * 0.5
        user.step()
        user.param_groups[0]["lr"] = 77.0  # too late for what was captured
        for update, gradient, weight in zip(updates, gradients, weights, strict=True):
            kept = gradient.clone()
            update.run(gradient, settings, 0.5, weight)
            assert torch.equal(gradient, kept)
    for parameter, master, room, weight in zip(plain, masters, rooms, weights, strict=True):
        assert torch.equal(parameter, master)
        assert torch.equal(weight, master.to(dtype))
        for key in keys:
            assert torch.equal(user.state[parameter][key], room[key]), key


def test_training_goes_on_from_what_the_user_s_optimizer_has() -> None:
    plain = torch.nn.Parameter(torch.ones(3, 5))
    user = RMSprop([plain], momentum=0.5, foreach=False)
    for _ in range(3):
        plain.grad = torch.randn(3, 5)
        user.step()
    rule, group = UpdateRule(user), user.param_groups[0]
    assert rule.state_keys(group) == ("momentum_buffer", "square_avg")
    room = {key: torch.zeros(3, 5) for key in rule.state_keys(group)}
    master = plain.detach().clone()
    update = ParameterUpdate(rule, master, room, user.state[plain])
    plain.grad = torch.randn(3, 5)
    update.run(plain.grad, rule.capture(group), 1.0, None)
    user.step()
    assert torch.equal(plain, master)
    assert torch.equal(user.state[plain]["square_avg"], room["square_avg"])


def test_state_stays_in_its_room() -> None:
    user = SGD([torch.nn.Parameter(torch.ones(4))], lr=0.1, momentum=0.9)
    room = torch.zeros(4)
    update = ParameterUpdate(UpdateRule(user), torch.ones(4), {"momentum_buffer": room})
    for _ in range(3):
        update.run(torch.ones(4), UpdateRule.capture(user.param_groups[0]), 1.0, None)
        assert update.state["momentum_buffer"] is room
    assert user.state == {}


def test_the_user_s_hooks_and_patches_are_not_run() -> None:
    user = SGD([torch.nn.Parameter(torch.ones(4))], lr=0.1)
    user.register_step_pre_hook(lambda *_: pytest.fail("the user's hook ran"))
    user.step = lambda *_: pytest.fail("the user's step ran")  # type: ignore[method-assign]
    UpdateRule(user).state_keys(user.param_groups[0])


def test_what_needs_a_closure_is_refused() -> None:
    user = torch.optim.LBFGS([torch.nn.Parameter(torch.ones(4))])
    with pytest.raises(UnsupportedError, match="LBFGS"):
        UpdateRule(user).state_keys(user.param_groups[0])
    with pytest.raises(UnsupportedError, match="capturable"):
        UpdateRule(NAdam([torch.nn.Parameter(torch.ones(4))], capturable=True))
