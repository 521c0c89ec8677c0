"""A second GPU that lends its host link to the one that trains.  The twin of ``tests/runtime/test_helpers.py``."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

import memferry_rt
from memferry_allocator import InvalidRequestError, open_device, open_driver
from memferry_rt import Report
from memferry_rt.helpers import find_costs
from memferry_transport.calibration import save_calibration
from tests.runtime.models import Decoder, tokens

pytestmark = pytest.mark.gpu

WIDTH = 1536  # a block has 38 MB of weights in bf16
STEPS = 3
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def two_devices() -> Iterator[None]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # of other tests' streams; they count in this process's budget
    torch.cuda.empty_cache()


@pytest.fixture(scope="module", autouse=True)
def measured_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A calibration of the first device's ways, as ``memferry bandwidth --recalibrate`` would keep one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        if torch.cuda.device_count() >= 2:
            driver, device = open_device("cuda:0")
            save_calibration(find_costs(driver, device, [1]).calibration)
        yield


def _model(*, frozen: bool) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(layers=4, width=WIDTH).to(torch.bfloat16)
    if frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith("bias"))
    return model


def _train(*, frozen: bool = False, **options: Any) -> tuple[dict[str, torch.Tensor], Report]:
    model = _model(frozen=frozen)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True)
    memferry_rt.offload(
        model,
        optimizer,
        device="cuda:0",
        device_memory="2GiB",
        **{"pool_memory": "128MiB", "max_grad_norm": 1.0, **options},
    )
    runtime = memferry_rt.runtime_of(model)
    for number in range(STEPS):
        batch = tokens(number).cuda()
        F.cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    parameters = {name: value.clone() for name, value in runtime.master_parameters().items()}
    report = runtime.report()
    memferry_rt.restore(model)
    assert runtime.driver.registered == 0
    return parameters, report


WAYS: dict[str, dict[str, Any]] = {
    "streamed": {},
    "frozen": {"frozen": True},
    "asynchronous": {"async_step": True, "optimizer_split": "cpu"},
    "state through the device": {"optimizer_split": 1.0, "async_step": True},
    "panels": {"plan": {"blocks.*": "ring+inplace"}},
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_helper_changes_no_bit_and_carries_a_share(way: dict[str, Any]) -> None:
    expected, alone = _train(**way)
    assert alone.helpers == ()
    for helpers in ([1], "auto") if torch.cuda.device_count() == 2 else ([1],):
        found, report = _train(helpers=helpers, **way)
        for name, value in expected.items():
            assert torch.equal(found[name].view(torch.int32), value.view(torch.int32)), name
        assert "costs as calibrated" in report.helpers_note
        print(report.helpers)
        assert report.helpers[0].device == 1
        if "plan" not in way:  # panels may be too short to be worth two ways
            assert report.helpers[0].carried_in > 0


def test_memory_of_the_helper_is_given_back() -> None:
    """All but its context and what the driver keeps for it, which the first use has made."""
    driver = open_driver("cuda")
    _train(helpers=[1])
    free = driver.memory_info(1).free
    for _ in range(3):
        _train(helpers=[1])
    assert driver.memory_info(1).free >= free - (2 << 20)


def test_costs_are_measured_at_set_up_and_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _, report = _train(helpers=[1])
    print(report.helpers_note)
    assert "costs measured at set-up in " in report.helpers_note
    seconds = float(report.helpers_note.partition("set-up in ")[2].split()[0])
    assert seconds < 30


def test_what_cannot_help_is_refused() -> None:
    for helpers, text in (([0], "is the one that trains"), ([99], "there is no device 99")):
        with pytest.raises(InvalidRequestError, match=text):
            _train(helpers=helpers)
    other = _model(frozen=False)
    optimizer = torch.optim.AdamW(other.parameters(), fused=True)
    memferry_rt.offload(other, optimizer, device="cuda:1", device_memory="2GiB")
    with pytest.raises(memferry_rt.UnsupportedError, match="device 1 trains another model of this process"):
        _train(helpers=[1])
    memferry_rt.restore(other)
