"""The rest of PyTorch: hooks, compilation, schedulers, mixed precision, the meta device, two models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import memferry_rt
from memferry_rt import UnsupportedError

from .models import SEQUENCE, VOCABULARY, Decoder, next_token_loss, tokens
from .trained import Trained


def test_saved_tensor_hooks_of_the_user_go_on_seeing_the_rest(trained: Trained) -> None:
    packed = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal packed
        packed += 1
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = next_token_loss(trained.model, 0)
    assert packed > 10
    loss.backward()
    trained.optimizer.zero_grad()
    with torch.autograd.graph.save_on_cpu():
        next_token_loss(trained.model, 0).backward()
    next_token_loss(trained.plain, 0).backward()
    for one, other in zip(trained.plain.parameters(), trained.model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.filterwarnings("ignore::UserWarning")  # the compiler's own
@pytest.mark.parametrize("after", [False, True])
def test_compiled_blocks(after: bool) -> None:
    torch.manual_seed(0)
    plain = Decoder()
    model = copy.deepcopy(plain)
    if not after:
        for block in model.blocks:
            block.compile(backend="eager")
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (plain, model)]
    memferry_rt.offload(model, optimizers[1], device="emulated", device_memory="120KiB")
    if after:
        for block in model.blocks:
            block.compile(backend="eager")
    for number in range(3):
        for m, optimizer in zip((plain, model), optimizers, strict=True):
            next_token_loss(m, number).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), model.parameters(), strict=True))
    memferry_rt.restore(model)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::UserWarning")  # the compiler's own
def test_the_compiler_sees_nothing_of_the_runtime() -> None:
    inputs: set[str] = set()

    def backend(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> Any:
        inputs.update(str(node.target) for node in graph.graph.nodes if node.op == "placeholder")
        return graph.forward

    model = Decoder(layers=1)
    optimizer = torch.optim.AdamW(model.parameters())
    memferry_rt.offload(model, optimizer, device="emulated", device_memory="120KiB")
    model.blocks[0].compile(backend=backend)
    next_token_loss(model, 0).backward()
    memferry_rt.restore(model)
    torch._dynamo.reset()
    assert inputs
    assert not any("layout" in name or "geometry" in name or "base" in name for name in inputs)


@pytest.mark.filterwarnings("ignore::UserWarning")  # the compiler's own
@pytest.mark.parametrize("first", [True, False])
def test_what_was_compiled_for_a_plain_model_is_not_used(first: bool) -> None:
    torch.manual_seed(0)
    plain = Decoder(layers=2)
    model = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (plain, model)]
    for block in (*plain.blocks, *model.blocks):
        block.compile(backend="eager")
    if first:
        for m in (plain, model):
            next_token_loss(m, 9)
    memferry_rt.offload(
        model, optimizers[1], device="emulated", device_memory="2MiB", optimizer_split=1.0, async_step=True
    )
    assert memferry_rt.runtime_of(model).memory.residents.layers
    for number in range(3):
        losses = []
        for m, optimizer in zip((plain, model), optimizers, strict=True):
            loss = next_token_loss(m, number)
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert losses[0] == losses[1]
    memferry_rt.restore(model)
    torch._dynamo.reset()


def test_a_compiled_model_is_refused() -> None:
    model = torch.compile(Decoder(), backend="eager")
    with pytest.raises(UnsupportedError, match="compile"):
        memferry_rt.offload(model, torch.optim.AdamW(model.parameters()), device="emulated", device_memory="1MiB")


def test_schedulers_built_before_and_after() -> None:
    for before in (True, False):
        both = Trained.__new__(Trained)
        torch.manual_seed(0)
        both.plain = Decoder()
        both.model = copy.deepcopy(both.plain)
        both.plain_optimizer = torch.optim.AdamW(both.plain.parameters(), lr=1e-2, fused=True)
        both.optimizer = torch.optim.AdamW(both.model.parameters(), lr=1e-2)
        schedulers = [torch.optim.lr_scheduler.StepLR(both.plain_optimizer, 1, 0.5)]
        if before:
            schedulers.append(torch.optim.lr_scheduler.StepLR(both.optimizer, 1, 0.5))
        memferry_rt.offload(both.model, both.optimizer, device="emulated", device_memory="120KiB")
        if not before:
            schedulers.append(torch.optim.lr_scheduler.StepLR(both.optimizer, 1, 0.5))
        for number in range(4):
            both.steps(1, first=number)
            for scheduler in schedulers:
                scheduler.step()
        assert both.optimizer.param_groups[0]["lr"] == 1e-2 * 0.5**4
        assert both.same()
        memferry_rt.restore(both.model)


def test_step_hooks_and_closures(trained: Trained) -> None:
    calls = []
    trained.optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    trained.optimizer.register_step_post_hook(lambda *_: calls.append("post"))

    def closure() -> torch.Tensor:
        trained.optimizer.zero_grad()
        loss = next_token_loss(trained.model, 0)
        loss.backward()
        return loss

    loss = trained.optimizer.step(closure)
    assert loss.item() == next_token_loss(trained.plain, 0).item()
    assert calls == ["pre", "post"]


@pytest.mark.parametrize("before", [False, True], ids=["after offload", "before offload"])
def test_post_accumulate_hooks_see_the_sum(before: bool) -> None:
    def clamp(parameter: nn.Parameter) -> None:
        parameter.grad.clamp_(-1e-3, 1e-3)

    torch.manual_seed(0)
    plain = Decoder()
    model = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (plain, model)]

    def offload() -> None:
        memferry_rt.offload(model, optimizers[1], device="emulated", device_memory="120KiB")

    if not before:
        offload()
    handles = [p.register_post_accumulate_grad_hook(clamp) for m in (plain, model) for p in m.parameters()]
    if before:
        offload()
    for number in range(3):
        for m, optimizer in zip((plain, model), optimizers, strict=True):
            next_token_loss(m, number).backward()
            next_token_loss(m, number + 10).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), model.parameters(), strict=True))
    memferry_rt.restore(model)
    for handle in handles:
        handle.remove()
    assert not model.head.weight._post_accumulate_grad_hooks


def test_settings_changed_between_backward_and_step_take_effect(trained: Trained) -> None:
    for model, optimizer in ((trained.plain, trained.plain_optimizer), (trained.model, trained.optimizer)):
        next_token_loss(model, 0).backward()
        for group in optimizer.param_groups:
            group.update(lr=0.05, betas=(0.5, 0.7), weight_decay=0.3, eps=1e-4)
        optimizer.step()
        optimizer.zero_grad()
    assert trained.same()


def test_what_the_last_step_found_is_on_the_optimizer(trained: Trained) -> None:
    trained.steps(1)
    assert trained.optimizer.grad_norm == trained.runtime.grad_norm > 0
    next_token_loss(trained.model, 0).mul(float("nan")).backward()
    trained.optimizer.step()
    assert trained.optimizer.skipped_steps == 1


WAYS = [
    {"share": 0.6},
    {"share": 0.6, "optimizer_split": 0.5, "spare_slabs": 9},
    {"share": 8.0},
]


@pytest.mark.parametrize("options", WAYS, ids=["cpu", "streamed-early", "resident"])
def test_grad_scaler_without_amp_support_unscales_what_is_at_home(options: dict[str, Any]) -> None:
    both = Trained(**options)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    plain_scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for number in range(3):
        for model, optimizer, scale in (
            (both.plain, both.plain_optimizer, plain_scaler),
            (both.model, both.optimizer, scaler),
        ):
            optimizer._step_supports_amp_scaling = False
            scale.scale(next_token_loss(model, number)).backward()
            scale.step(optimizer)
            scale.update()
            optimizer.zero_grad()
    assert both.same()
    both.runtime.close()


@pytest.mark.parametrize("options", WAYS, ids=["cpu", "streamed-early", "resident"])
@pytest.mark.parametrize("unscale_first", [False, True])
def test_grad_scaler_and_clipping(unscale_first: bool, options: dict[str, Any]) -> None:
    """The norm is that of the unscaled gradients, whoever unscales them; a step that overflowed is skipped."""
    norms = []
    models = []
    for scale in (None, 1024.0):
        both = Trained(max_grad_norm=0.5, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        for number in range(4):
            loss = next_token_loss(both.model, number)
            if number == 2:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if unscale_first:
                scaler.unscale_(both.optimizer)
            scaler.step(both.optimizer)
            scaler.update()
            both.optimizer.zero_grad()
            norms.append(both.runtime.grad_norm)
        assert both.runtime.skipped_steps == 1
        memferry_rt.restore(both.model)
        models.append(both.model)
        if scale:
            assert scaler.get_scale() == scale / 2
    assert norms[:2] == norms[4:6]
    assert 0.5 < norms[0] < 100
    assert norms[3] == norms[7]
    assert all(torch.equal(one, other) for one, other in zip(*(m.parameters() for m in models), strict=True))


def test_autocast(trained: Trained) -> None:
    for number in range(2):
        for model, optimizer in (
            (trained.plain, trained.plain_optimizer),
            (trained.model, trained.optimizer),
        ):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = next_token_loss(model, number)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert trained.same()


def test_models_on_the_meta_device_keep_their_parameters_identity() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(6)))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    torch.manual_seed(3)
    memferry_rt.offload(model, optimizer, device="emulated", device_memory="32KiB")
    torch.manual_seed(3)
    plain = nn.Sequential(*(nn.Linear(24, 24) for _ in range(6)))
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), parameters, strict=True))
    fused = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    for number in range(3):
        x = torch.randn(2, 24, generator=torch.Generator().manual_seed(number))
        for m, o in ((plain, fused), (model, optimizer)):
            m(x).square().sum().backward()
            o.step()
            o.zero_grad()
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), parameters, strict=True))
    memferry_rt.restore(model)


def test_a_meta_model_without_an_initialiser_is_refused_and_one_with_it_is_not() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        with torch.device("meta"):
            model = Decoder()
            model.position = nn.Parameter(torch.empty(SEQUENCE, 32))
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = build()
    with pytest.raises(UnsupportedError, match="param_init_fn"):
        memferry_rt.offload(model, optimizer, device="emulated", device_memory="1MiB")
    assert all(p.is_meta for p in model.parameters())

    def init(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 0.5)

    memferry_rt.offload(model, optimizer, device="emulated", device_memory="1MiB", param_init_fn=init)
    assert torch.equal(model.position, torch.full((SEQUENCE, 32), 0.5))
    assert model(tokens(0)[:, :-1]).shape == (3, SEQUENCE, VOCABULARY)
    memferry_rt.restore(model)


def test_compute_dtype_keeps_the_fp32_values_as_masters() -> None:
    torch.manual_seed(0)
    model = Decoder()
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters())
    memferry_rt.offload(model, optimizer, device="emulated", device_memory="1MiB", compute_dtype=torch.bfloat16)
    runtime = memferry_rt.runtime_of(model)
    masters = runtime.master_parameters()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(masters[name], values[name])
        assert torch.equal(parameter, values[name].bfloat16())
    per_parameter = runtime.report().host_nbytes / runtime.report().parameters
    assert 16 <= per_parameter < 17
    F.cross_entropy(model(tokens(0)[:, :-1]).float().flatten(0, 1), tokens(0)[:, 1:].flatten()).backward()
    optimizer.step()
    memferry_rt.restore(model)


def test_one_offloaded_model_inside_the_forward_of_another() -> None:
    """Saved-tensor hooks nest: each model brings back its own weights, whoever's hooks lie on top."""

    class Wrapping(nn.Linear):
        """A layer of one model that runs the other one while its own weights are in use."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__(VOCABULARY, 48)
            self.borrowed = [inner]  # called, not owned

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(self.borrowed[0](ids))

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.first = Wrapping(inner)
            self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(4))
            self.last = nn.Linear(48, VOCABULARY)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.first(ids)
            for layer in self.layers:
                x = torch.relu(layer(x))
            return self.last(x) + self.first.borrowed[0](ids)

    def models() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        inner = Decoder()
        return inner, Outer(inner)

    results = []
    for offload in (False, True):
        inner, outer = models()
        pairs = [(m, torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True)) for m in (inner, outer)]
        if offload:
            for model, optimizer in pairs:
                weights = sum(p.numel() * 4 for p in model.parameters())
                memferry_rt.offload(model, optimizer, device="emulated", device_memory=int(weights * 0.6))
        for number in range(4):
            next_token_loss(outer, number).backward()
            for _, optimizer in pairs:
                optimizer.step()
                optimizer.zero_grad()
        if offload:
            memferry_rt.restore(inner)
            memferry_rt.restore(outer)
        results.append([p.detach().clone() for model, _ in pairs for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
