"""Other optimizers than Adam: offloaded, they have the bits of their own class over fp32 masters on the CPU."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Optimizer, RMSprop

import memferry_rt
from memferry_rt import UnsupportedError

from .harness import Job, assert_same, offloaded, plain
from .models import Decoder, next_token_loss

pytestmark = pytest.mark.filterwarnings("ignore:(Ad|ASGD|Counting|Mine|NAdam|R|Together).*no native update")


class Mine(torch.optim.AdamW):
    """A user's own."""


CASES: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd": (SGD, {}),
    "momentum": (SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "nesterov": (SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
    "adagrad": (Adagrad, {"lr_decay": 0.1, "weight_decay": 0.01}),
    "adagrad-fused": (Adagrad, {"weight_decay": 0.01, "fused": True, "initial_accumulator_value": 0.5}),
    "lion": (memferry_rt.Lion, {"weight_decay": 0.1}),
    "rmsprop": (RMSprop, {"momentum": 0.5, "centered": True}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adamax": (torch.optim.Adamax, {"weight_decay": 0.01}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "asgd": (torch.optim.ASGD, {"t0": 3}),
    "rprop": (torch.optim.Rprop, {}),
    "amsgrad": (Mine, {"amsgrad": True}),
    "adafactor": (torch.optim.Adafactor, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_training_has_the_bits_of_the_class(name: str) -> None:
    kind, settings = CASES[name]
    dtype = torch.bfloat16 if name in ("nesterov", "lion", "nadam") else torch.float32
    job = Job(
        Decoder, next_token_loss, steps=3, accumulate=2, max_grad_norm=0.5, dtype=dtype,
        optimizer=kind, settings=settings,
        schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    )  # fmt: skip
    assert_same(plain(job), offloaded(job, async_step=name in ("momentum", "rmsprop", "lion")))


class Pair:
    """An offloaded model beside a plain one, with the same kind of optimizer."""

    def __init__(self, name: str, **options: Any) -> None:
        kind, self.settings = CASES[name]
        self.kind = kind
        torch.manual_seed(0)
        self.plain = Decoder()
        self.model = copy.deepcopy(self.plain)
        self.plain_optimizer = self.build(self.plain)
        self.optimizer = self.build(self.model)
        self.offload(**options)

    def build(self, model: nn.Module) -> Optimizer:
        return self.kind(model.parameters(), lr=0.01, **self.settings)  # type: ignore[call-arg]

    def offload(self, **options: Any) -> None:
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        memferry_rt.offload(self.model, self.optimizer, device="emulated", device_memory=weights // 3, **options)

    def steps(self, count: int, first: int = 0) -> None:
        for number in range(first, first + count):
            for model, optimizer in ((self.plain, self.plain_optimizer), (self.model, self.optimizer)):
                next_token_loss(model, number).backward()
                optimizer.step()
                optimizer.zero_grad()

    def assert_same(self) -> None:
        if "_memferry_runtime" in self.model.__dict__:
            memferry_rt.synchronize(self.model)
        for one, other in zip(self.plain.parameters(), self.model.parameters(), strict=True):
            assert torch.equal(one, other)
        assert_same_state(self.plain_optimizer.state_dict(), self.optimizer.state_dict())


def assert_same_state(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for number, entry in one["state"].items():
        assert list(entry) == list(other["state"][number])
        for key, value in entry.items():
            mine = other["state"][number][key]
            assert type(mine) is type(value)
            if isinstance(value, torch.Tensor):
                assert mine.dtype is value.dtype
                assert torch.equal(mine, value), key
            else:
                assert mine == value


@pytest.mark.parametrize("name", ["adagrad-fused", "rmsprop", "nadam"])
def test_state_dicts_are_those_of_the_class_and_go_both_ways(name: str) -> None:
    pair = Pair(name, async_step=True)
    pair.steps(2)
    pair.assert_same()
    kept = pair.optimizer.state_dict()
    values = copy.deepcopy(kept)
    pair.steps(1, first=2)
    earlier = copy.deepcopy(values)
    pair.optimizer.load_state_dict(earlier)
    pair.plain_optimizer.load_state_dict(copy.deepcopy(values))
    pair.steps(2, first=3)
    pair.assert_same()
    assert_same_state(earlier, values)
    memferry_rt.restore(pair.model)
    pair.steps(1, first=5)
    pair.assert_same()
    pair.offload()
    pair.steps(1, first=6)
    pair.assert_same()
    memferry_rt.restore(pair.model)


def test_without_momentum_there_is_no_state() -> None:
    pair = Pair("momentum")
    for optimizer in (pair.plain_optimizer, pair.optimizer):
        optimizer.param_groups[0].update(momentum=0, dampening=0)
    pair.steps(2)
    pair.assert_same()
    for optimizer in (pair.plain_optimizer, pair.optimizer):
        optimizer.param_groups[0]["momentum"] = 0.5
    pair.steps(2, first=2)
    pair.assert_same()
    memferry_rt.restore(pair.model)


def test_a_state_dict_kept_over_a_load_keeps_its_values() -> None:
    pair = Pair("momentum")
    pair.steps(2)
    kept = pair.optimizer.state_dict()
    values = copy.deepcopy(kept)
    pair.optimizer.load_state_dict({**kept, "state": {}})
    pair.plain_optimizer.load_state_dict({**kept, "state": {}})
    pair.steps(1, first=2)
    assert_same_state(kept, values)
    pair.assert_same()
    pair.optimizer.load_state_dict(kept)
    pair.plain_optimizer.load_state_dict(copy.deepcopy(kept))
    pair.steps(1, first=3)
    pair.assert_same()
    memferry_rt.restore(pair.model)


@pytest.mark.parametrize(
    ("name", "key"), [("momentum", "momentum_buffer"), ("rmsprop", "momentum_buffer"), ("lion", "exp_avg")]
)
def test_what_users_put_into_the_state_counts(name: str, key: str) -> None:
    pair = Pair(name)
    pair.steps(2)
    for model, optimizer in ((pair.plain, pair.plain_optimizer), (pair.model, pair.optimizer)):
        matrices = [p for p in model.parameters() if p.shape == (128, 32)]
        one, other, third = *matrices[:2], next(p for p in model.parameters() if p.ndim == 1)
        states = [optimizer.state[parameter] for parameter in (one, other, third)]
        first, second = (state[key].detach() for state in states[:2])  # other tensors over the same memory
        states[0][key], states[1][key] = second, first
        states[2][key].mul_(0.5)
        optimizer.state[third] = {k: v.clone() if torch.is_tensor(v) else v for k, v in states[2].items()}
        optimizer.state.pop(model.head.weight)
    pair.steps(2, first=2)
    pair.assert_same()
    memferry_rt.restore(pair.model)
    pair.assert_same()


def test_steps_that_are_not_finite_and_parameters_without_a_gradient() -> None:
    pair = Pair("momentum")
    pair.steps(1)
    next_token_loss(pair.model, 1).backward()
    pair.model.head.weight.grad.fill_(float("inf"))
    pair.optimizer.step()
    pair.optimizer.zero_grad()
    assert pair.optimizer.skipped_steps == 1  # type: ignore[attr-defined]
    pair.assert_same()
    for model, optimizer in ((pair.plain, pair.plain_optimizer), (pair.model, pair.optimizer)):
        next_token_loss(model, 2).backward()
        model.head.weight.grad = None
        optimizer.step()
        optimizer.zero_grad()
    pair.assert_same()
    memferry_rt.restore(pair.model)


@pytest.mark.parametrize("name", ["momentum", "adagrad-fused", "nadam", "amsgrad"])
@pytest.mark.parametrize("into", ["offloaded", "plain"])
def test_a_checkpoint_resumes(name: str, into: str, tmp_path: Path) -> None:
    pair = Pair(name, async_step=True)
    pair.steps(2)
    memferry_rt.save(tmp_path, pair.model, pair.optimizer, extra=2)
    assert memferry_rt.checkpoint_info(tmp_path).optimizer == pair.kind.__name__
    pair.steps(1, first=5)
    if into == "plain":
        memferry_rt.restore(pair.model)
    assert memferry_rt.load(tmp_path, pair.model, pair.optimizer) == 2
    memferry_rt.load(tmp_path, pair.plain, pair.plain_optimizer)
    pair.assert_same()
    pair.steps(2, first=2)
    pair.assert_same()


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    pair = Pair("momentum")
    memferry_rt.save(tmp_path, pair.model, pair.optimizer)
    model = Decoder()
    with pytest.raises(memferry_rt.CheckpointError, match="its optimizer is SGD and this one RMSprop"):
        memferry_rt.load(tmp_path, model, RMSprop(model.parameters()))


def test_gradient_scaling() -> None:
    pair = Pair("rmsprop")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for number in range(3):
        next_token_loss(pair.plain, number).backward()
        pair.plain_optimizer.step()
        pair.plain_optimizer.zero_grad()
        scaler.scale(next_token_loss(pair.model, number)).backward()
        scaler.step(pair.optimizer)
        scaler.update()
        pair.optimizer.zero_grad()
    pair.assert_same()


class Together(Optimizer):
    """Gradients divided by the norm of all of them."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for parameter in parameters:
            parameter.add_(parameter.grad / norm, alpha=-0.1)


class Counting(Optimizer):
    """It counts its steps in a group, not in state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "k": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1


class CountingUnseen(Together):
    """It counts them in place, in a tensor of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.steps = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.steps += 1


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (torch.optim.LBFGS, "LBFGS.*without arguments"),
        (torch.optim.SparseAdam, "SparseAdam.*dense"),
        (lambda p: RMSprop(p, capturable=True), "capturable"),
        (lambda p: SGD(p, lr=0.1, differentiable=True), "differentiable"),
        (Together, "Together.*others"),
        (Counting, "Counting keeps 'k'.*groups"),
        (CountingUnseen, "CountingUnseen keeps 'steps'.*attributes"),
    ],
)
def test_what_cannot_be_honoured_is_refused_and_changes_nothing(build: Any, words: str) -> None:
    model = Decoder()
    before = [p.data_ptr() for p in model.parameters()]
    random, optimizer = torch.get_rng_state(), build(list(model.parameters()))
    with pytest.raises(UnsupportedError, match=words):
        memferry_rt.offload(model, optimizer, device="emulated", device_memory="1MiB")
    assert not getattr(optimizer, "steps", 0)
    assert before == [p.data_ptr() for p in model.parameters()]
    assert torch.equal(random, torch.get_rng_state())


@pytest.mark.parametrize("asked", [{"optimizer_split": 0.5}, {"spare_slabs": 1}])
def test_what_only_adam_can_is_refused(asked: dict[str, Any]) -> None:
    model = Decoder()
    with pytest.raises(UnsupportedError, match="Adam and AdamW only, not for RMSprop"):
        memferry_rt.offload(model, RMSprop(model.parameters()), device="emulated", device_memory="1MiB", **asked)


@pytest.mark.filterwarnings("default")
def test_the_slow_way_is_told() -> None:
    model = Decoder()
    with pytest.warns(RuntimeWarning, match="RMSprop has no native update kernel.*slower") as told:
        memferry_rt.offload(model, RMSprop(model.parameters()), device="emulated", device_memory="1MiB")
    assert told[0].filename == __file__
    memferry_rt.restore(model)


@pytest.mark.parametrize("name", ["lion", "radam"])
def test_a_run_goes_on_in_new_objects_under_another_budget(name: str, tmp_path: Path) -> None:
    pair = Pair(name)
    pair.steps(2)
    memferry_rt.save(tmp_path, pair.model, pair.optimizer)
    pair.steps(2, first=2)
    memferry_rt.restore(pair.model)
    torch.manual_seed(5)
    pair.model = Decoder()
    pair.optimizer = pair.build(pair.model)
    memferry_rt.offload(pair.model, pair.optimizer, device="emulated", device_memory="1MiB", async_step=True)
    memferry_rt.load(tmp_path, pair.model, pair.optimizer)
    for number in (2, 3):
        next_token_loss(pair.model, number).backward()
        pair.optimizer.step()
        pair.optimizer.zero_grad()
    pair.assert_same()


def _grouped(model: nn.Module) -> Any:
    """Two groups of other settings, and what belongs to none."""
    model.head.requires_grad_(False)
    inner = [p for block in model.blocks for p in block.parameters()]
    outer = [p for p in model.parameters() if p.requires_grad and not any(p is other for other in inner)]
    return [{"params": inner, "weight_decay": 0.1}, {"params": outer, "maximize": True}]


class FromNothing(torch.optim.lr_scheduler.LambdaLR):
    """Raises the momentum from 0, when no parameter has a buffer yet."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer, lambda _: 1.0)

    def step(self, *args: Any) -> None:
        super().step(*args)
        for group in self.optimizer.param_groups:
            group["momentum"] = 0.3 * self.last_epoch


@pytest.mark.parametrize(("kind", "schedule"), [(SGD, FromNothing), (RMSprop, None)])
def test_groups_frozen_parameters_and_settings_that_change(kind: type[Optimizer], schedule: Any) -> None:
    job = Job(
        Decoder, next_token_loss, steps=3, dtype=torch.bfloat16, optimizer=kind, groups=_grouped, schedule=schedule
    )
    assert_same(plain(job), offloaded(job, async_step=True))


class Odd(nn.Module):
    """Parameters of all forms: transposed, of no dimension, of no element."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(30, 70).t())
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.deep = nn.Parameter(torch.randn(2, 3, 4, 5, 2))

    def forward(self, number: int) -> torch.Tensor:
        x = torch.randn(70, generator=torch.Generator().manual_seed(number))
        return (x @ self.turned).square().mean() * self.scalar + self.deep.sin().sum() + self.empty.sum()


@pytest.mark.parametrize("name", ["momentum", "adagrad-fused", "lion", "adadelta", "nadam"])
def test_parameters_of_all_forms(name: str) -> None:
    kind, settings = CASES[name]
    job = Job(Odd, lambda model, number: model(number), steps=3, optimizer=kind, settings=settings)
    assert_same(plain(job), offloaded(job, share=3))


@pytest.mark.parametrize("name", ["momentum", "adagrad", "adagrad-fused", "rmsprop"])
def test_a_model_on_meta(name: str) -> None:
    kind, settings = CASES[name]
    results = []
    for device in ("meta", "cpu"):
        torch.manual_seed(0)
        with torch.device(device):
            model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        optimizer = kind(model.parameters(), lr=0.1, **settings)  # type: ignore[call-arg]
        torch.manual_seed(1)
        if device == "cpu":
            for layer in (model[0], model[2]):
                layer.reset_parameters()
        memferry_rt.offload(model, optimizer, device="emulated", device_memory="1MiB")
        for _ in range(3):
            model(torch.ones(2, 16)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.detach().clone() for p in model.parameters()])
        memferry_rt.restore(model)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_without_native_kernels_the_class_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memferry_rt.adapters.torch.rules.trusted_one_state", lambda _: None)
    kind, settings = CASES["momentum"]
    job = Job(Decoder, next_token_loss, steps=3, optimizer=kind, settings=settings, dtype=torch.bfloat16)
    with pytest.warns(RuntimeWarning, match="SGD has no native"):
        result = offloaded(job)
    assert_same(plain(job), result)


def test_state_of_halves_that_there_is_already_is_taken_over() -> None:
    model = Decoder().bfloat16()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    next_token_loss(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = [optimizer.state[p]["momentum_buffer"].clone() for p in model.parameters()]
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    memferry_rt.offload(model, optimizer, device="emulated", device_memory=weights // 2)
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(optimizer.state[parameter]["momentum_buffer"], old.float())
    report = memferry_rt.runtime_of(model).report()
    assert 12 <= report.host_nbytes_per_parameter < 13.5
    memferry_rt.restore(model)
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert optimizer.state[parameter]["momentum_buffer"].dtype is torch.bfloat16
        assert torch.equal(optimizer.state[parameter]["momentum_buffer"], old)


def test_a_load_that_does_not_fit_changes_nothing() -> None:
    pair = Pair("momentum")
    pair.steps(2)
    state = pair.optimizer.state_dict()
    wrong = copy.deepcopy(state)
    wrong["state"][0]["momentum_buffer"] = torch.ones(3)
    with pytest.raises(ValueError, match="momentum_buffer has shape"):
        pair.optimizer.load_state_dict(wrong)
    wrong = copy.deepcopy(state)
    wrong["param_groups"][0]["differentiable"] = True
    with pytest.raises(UnsupportedError, match="differentiable"):
        pair.optimizer.load_state_dict(wrong)
    pair.steps(1, first=2)
    pair.assert_same()
    memferry_rt.restore(pair.model)
