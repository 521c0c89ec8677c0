"""CUDA contexts: one for each device in use, none for a device that is looked at, and nobody else's moved."""

from __future__ import annotations

import pytest

from ..allocator.test_open_driver import in_a_process

pytestmark = pytest.mark.gpu

PRELUDE = """
from cuda.bindings import driver as cu
from memferry_allocator import ArenaOptions, HostArena, open_device, open_driver

def active():
    return [int(cu.cuDevicePrimaryCtxGetState(device)[2]) for device in range(driver.device_count)]

def current():
    return int(cu.cuCtxGetCurrent()[1])
"""


def test_looking_at_devices_makes_no_context() -> None:
    said = in_a_process(
        PRELUDE + "driver = open_driver('cuda')\n"
        "for device in range(driver.device_count):\n"
        "    driver.device_info(device)\n"
        "    driver.can_access_peer(0, device)\n"
        "print(sum(active()))\n"
    )
    assert said == "0"


def test_only_the_device_that_is_used_has_a_context() -> None:
    """Host memory is registered under it, and waiting for all devices leaves the others alone."""
    said = in_a_process(
        PRELUDE + "last = open_driver('cuda').device_count - 1\n"
        "driver, device = open_device(f'cuda:{last}')\n"
        "arena = HostArena(driver, 1 << 20, ArenaOptions(touch=False))\n"
        "driver.synchronize_all()\n"
        "arena.close()\n"
        "print(active() == [0] * last + [1])\n"
        "driver.close()\n"
        "print(sum(active()))\n"
    )
    assert said.splitlines() == ["True", "0"]


def test_calls_leave_the_current_context_as_it_was() -> None:
    said = in_a_process(
        PRELUDE + "driver, device = open_device('cuda')\n"
        "stream, ptr = driver.create_stream(0), driver.malloc(0, 4096)\n"
        "for there in (0, int(cu.cuDevicePrimaryCtxRetain(driver.device_count - 1)[1])):\n"
        "    cu.cuCtxSetCurrent(there)\n"
        "    driver.fill(ptr, 1, 4096, stream=stream)\n"
        "    stream.record().synchronize()\n"
        "    try:\n"
        "        driver.free(0, ptr + 512)\n"
        "    except Exception as error:\n"
        "        print(error.code)\n"
        "    print(current() == there)\n"
    )
    assert said.splitlines() == ["CUDA_ERROR_INVALID_VALUE", "True"] * 2
