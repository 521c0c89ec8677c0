"""Data parallelism on two GPUs of one host, through NCCL.

The twin of ``tests/parallel``, which has gloo and the emulated device.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

import memferry_rt
from memferry_rt.adapters.torch import runtime as runtime_module
from memferry_rt.parallel import RankArena
from tests.parallel import world
from tests.parallel.test_waits import _delay
from tests.runtime.models import Decoder, checkpointed, tokens

pytestmark = pytest.mark.gpu

STEPS = 4
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # in the ranks too, which import this


@pytest.fixture(autouse=True)
def two_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")


def _model(kind: str) -> Decoder:
    torch.manual_seed(0)
    run = checkpointed(True) if kind == "reentrant" else None
    return Decoder(run, layers=4, width=256, tied=kind == "tied")


Trained = tuple[list[float | None], int, dict[str, torch.Tensor]]  # norms, parameters streamed, parameters


def _train(group: Any, kind: str, options: dict[str, Any]) -> Trained:
    torch.use_deterministic_algorithms(True)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    model = _model(kind).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    memferry_rt.offload(model, optimizer, device="cuda", process_group=group, **options)
    runtime = memferry_rt.runtime_of(model)
    norms = []
    for step in range(STEPS):
        _loss(model, step * size + rank).backward()
        optimizer.step()
        norms.append(runtime.grad_norm)
        optimizer.zero_grad()
    parameters = {name: value.clone() for name, value in runtime.master_parameters().items()}
    streamed = runtime.report().streamed_parameters
    memferry_rt.restore(model)
    assert runtime.driver.registered == 0
    return norms, streamed, parameters


def _loss(model: torch.nn.Module, number: int) -> torch.Tensor:
    batch = tokens(number).cuda()
    return F.cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())


def _expected(group: Any, kind: str) -> dict[str, torch.Tensor]:
    """One GPU and plain PyTorch: each rank's gradient by itself, their mean in fp32, and AdamW on the CPU."""
    torch.use_deterministic_algorithms(True)
    model = _model(kind).to(torch.bfloat16)
    masters = {name: torch.nn.Parameter(p.detach().float()) for name, p in model.named_parameters()}
    update = torch.optim.AdamW(masters.values(), lr=1e-2, fused=True)
    model.cuda()
    for step in range(STEPS):
        sums = {name: torch.zeros(p.shape, device="cuda") for name, p in model.named_parameters()}
        for rank in range(2):
            model.zero_grad()
            _loss(model, step * 2 + rank).backward()
            for name, p in model.named_parameters():
                sums[name] += p.grad.float()
        for name, total in sums.items():
            masters[name].grad = (total / 2).to(torch.bfloat16).float().cpu()
        update.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(masters[name])
    return {name: master.detach() for name, master in masters.items()}


PLANS: list[dict[str, Any]] = [
    {"device_memory": "2GiB"},
    {"device_memory": "2GiB", "pool_memory": "8MiB", "async_step": True},
    {"device_memory": "2GiB", "pool_memory": "64MiB", "optimizer_split": 1.0, "async_step": True},
    {"device_memory": "2GiB", "plan": {"blocks.*": "dha_then_load+inplace"}, "async_step": True},
]


@pytest.mark.parametrize("kind", ["plain", "tied", "reentrant"])
def test_two_gpus_have_the_bits_of_one(kind: str) -> None:
    [expected] = world.succeed(1, _expected, kind, cuda=True)
    for plan in PLANS:
        first, second = world.succeed(2, _train, kind, plan, cuda=True)
        assert first[0] == second[0]
        if plan.get("optimizer_split"):
            assert first[1] > 0
        for name, value in expected.items():
            assert torch.equal(first[2][name].view(torch.int32), value.view(torch.int32)), (plan, name)
            assert torch.equal(first[2][name], second[2][name]), (plan, name)


def _late_first(group: Any, options: dict[str, Any]) -> Trained:
    """The rank that fills the pages is late."""
    if dist.get_rank(group) == 0:
        _delay(runtime_module, "move_in", lambda: 0.5)
    return _train(group, "plain", options)


def test_resident_weights_are_those_of_the_first_rank() -> None:
    [expected] = world.succeed(1, _expected, "plain", cuda=True)
    options = {"device_memory": "2GiB", "pool_memory": "64MiB", "plan": {"*": "resident"}}
    for result in world.succeed(2, _late_first, options, cuda=True):
        for name, value in expected.items():
            assert torch.equal(value.view(torch.int32), result[2][name].view(torch.int32)), name


@pytest.mark.parametrize("kind", ["plain", "tied"])
def test_two_hosts_have_the_bits_of_one_gpu(kind: str) -> None:
    [expected] = world.succeed(1, _expected, kind, cuda=True)
    for plan in PLANS[:3]:
        first, second = world.succeed(2, _train, kind, plan, cuda=True, hosts=2)
        assert first[0] == second[0]
        if plan.get("optimizer_split"):
            assert first[1] > 0
        for name, value in expected.items():
            assert torch.equal(first[2][name].view(torch.int32), value.view(torch.int32)), (plan, name)
            assert torch.equal(first[2][name], second[2][name]), (plan, name)


def _saved(group: Any, folder: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], tuple[int, int]]:
    """What was saved, what is loaded of it after another step, and what of the host's memory is taken and held."""
    model = _model("plain").to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    options: dict[str, Any] = {"device_memory": "2GiB", "optimizer_split": 1.0}
    memferry_rt.offload(model, optimizer, device="cuda", process_group=group, **options)
    runtime = memferry_rt.runtime_of(model)
    found = []
    for step in range(2):
        _loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            memferry_rt.save(folder, model, optimizer)
        else:
            memferry_rt.load(folder, model, optimizer)
        found.append({name: value.clone() for name, value in runtime.master_parameters().items()})
    assert isinstance(runtime.arena, RankArena)
    taken = os.fstat(runtime.arena.address.fd).st_blocks * 512
    held = runtime.arena.nbytes
    memferry_rt.restore(model)
    return found[0], found[1], (taken, held)


def test_two_hosts_save_and_load_and_hold_their_state_alone(tmp_path: Path) -> None:
    first, second = world.succeed(2, _saved, str(tmp_path), cuda=True, hosts=2)
    for saved, loaded, (taken, held) in (first, second):
        assert taken <= held + (4 << 20)  # huge pages
        for name, value in saved.items():
            assert torch.equal(value, loaded[name]), name
            assert torch.equal(value, first[0][name]), name


def _killed(group: Any) -> None:
    model = _model("plain")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    memferry_rt.offload(model, optimizer, device="cuda", device_memory="2GiB", process_group=group)
    for step in range(100):
        if step == 2 and dist.get_rank(group) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        _loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_killed_rank_ends_the_other_with_a_message(hosts: int) -> None:
    before = os.listdir("/dev/shm")
    first, second = world.run(2, _killed, cuda=True, hosts=hosts)
    assert second is None
    assert first.kind == "RankError", first
    assert "rank 1" in first.message or (hosts == 2 and "of other hosts, of 1," in first.message)
    assert set(os.listdir("/dev/shm")) <= set(before)


def _own_device(group: Any) -> str:
    """Ranks may name their device instead of making it the current one."""
    model = _model("plain")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    device = f"cuda:{dist.get_rank(group)}"
    memferry_rt.offload(model, optimizer, device=device, device_memory="2GiB", process_group=group)
    found = memferry_rt.runtime_of(model).report().device
    memferry_rt.restore(model)
    return found


def test_every_rank_has_its_device() -> None:
    assert world.succeed(2, _own_device, cuda=True) == ["cuda:0", "cuda:1"]
