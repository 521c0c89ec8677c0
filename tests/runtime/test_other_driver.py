"""A driver from elsewhere: what knows CUDA's and the emulated device takes a third one for neither."""

from __future__ import annotations

import pytest
import torch

import memferry_rt
from memferry_allocator import Place, UnsupportedError
from memferry_allocator.driver import registry
from memferry_allocator.interop import as_device, as_host
from memferry_rt.device_kernels import open_device_adam, open_device_gradients, open_device_moves
from memferry_rt.errors import DeviceKernelError
from memferry_transport.topology import discover
from tests.allocator.other_driver import open_plain
from tests.interop.conftest import bench_on


def test_kernels_are_not_emulated_for_it() -> None:
    driver = open_plain()
    for opening in (open_device_adam, open_device_gradients, open_device_moves):
        with pytest.raises(DeviceKernelError, match="no kernels for devices of the plain driver"):
            opening(driver, 0)


def test_its_memory_is_no_array_of_another_device() -> None:
    for bench in bench_on(open_plain()):
        with (
            bench.view(Place.DEVICE) as view,
            pytest.raises(UnsupportedError, match="which device the plain driver's memory is"),
        ):
            as_device(view, "uint8")
        with bench.view(Place.HOST) as view:
            assert as_host(view, "uint8").numpy().any()


def test_its_topology_is_made_of_what_it_says() -> None:
    assert len(discover(open_plain(), nvml=None).devices) == 2


def test_torch_does_not_train_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_factories", {"plain": open_plain})
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.warns(RuntimeWarning, match="no kernels"), pytest.raises(UnsupportedError, match="cannot be made"):
        memferry_rt.offload(model, optimizer, device="plain", device_memory="1MiB")
    model(torch.zeros(1, 4)).sum().backward()
    optimizer.step()
