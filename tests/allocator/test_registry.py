"""Drivers from elsewhere: how they are found, what is refused, and that the contract can be put to them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from memferry_allocator import (
    Driver,
    DriverError,
    DriverNotFoundError,
    EmulatedDriver,
    EmulatedOptions,
    InvalidRequestError,
    open_device,
    open_driver,
    register_driver,
)
from memferry_allocator.driver import cuda, registry

from .machine import refused
from .other_driver import Plain, open_broken, open_plain

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def none_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_factories", {})
    monkeypatch.setattr(registry, "_installed", dict)


def _install(monkeypatch: pytest.MonkeyPatch, **places: str) -> None:
    """As a distribution with such entry points would."""
    found = {name: EntryPoint(name, place, registry.GROUP) for name, place in places.items()}
    monkeypatch.setattr(registry, "_installed", lambda: found)


def _no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Driver:
        raise DriverNotFoundError("CUDA_ERROR_NO_DEVICE", "open_driver")

    monkeypatch.setattr(cuda, "cuda_driver", none)


def test_a_registered_driver_is_opened_by_its_name() -> None:
    register_driver("plain", open_plain)
    assert isinstance(open_driver("plain"), Plain)
    for text, ordinal in (("plain", 0), ("plain:0", 0), ("plain:1", 1)):
        driver, found = open_device(text)
        assert (driver.name, found) == ("plain", ordinal)
    with refused("INVALID_DEVICE"):
        open_device("plain:2")
    register_driver("plain", open_plain)  # once more is nothing new
    assert isinstance(open_driver("emulated"), EmulatedDriver)


def test_an_installed_driver_needs_no_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, plain="tests.allocator.other_driver:open_plain", gone="no.such.module:open")
    assert open_device("plain:1")[0].name == "plain"
    with pytest.raises(ModuleNotFoundError):
        open_driver("gone")
    register_driver("plain", lambda: open_plain())
    assert open_driver("plain").name == "plain", "what the program registers goes first"


def test_auto_takes_cuda_then_what_is_registered_then_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    _no_cuda(monkeypatch)
    assert type(open_driver()) is EmulatedDriver

    def absent() -> Driver:
        raise DriverNotFoundError("NPU_NO_DEVICE", "open_npu")

    register_driver("absent", absent)
    assert type(open_driver()) is EmulatedDriver
    register_driver("plain", open_plain)
    assert open_driver().name == "plain"
    assert open_device("auto")[0].name == "plain"
    with pytest.raises(DriverNotFoundError, match="open_npu"):
        open_driver("absent")
    monkeypatch.setattr(cuda, "cuda_driver", lambda: EmulatedDriver(EmulatedOptions(device_count=3)))
    assert open_driver().device_count == 3


def test_one_that_is_broken_is_an_error_and_no_reason_to_emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    _no_cuda(monkeypatch)

    def broken() -> Driver:
        raise DriverError("NPU_TOO_OLD", "open_npu", "firmware")

    register_driver("npu", broken)
    with pytest.raises(DriverError, match="NPU_TOO_OLD"):
        open_driver("auto")


@pytest.mark.parametrize("name", ["cuda", "auto", "emulated", "", "NPU", "npu:0", "1npu", "n" * 40, None, 7])
def test_names_that_cannot_be(name: Any) -> None:
    with pytest.raises(InvalidRequestError, match="is no name for a driver"):
        register_driver(name, open_plain)
    assert registry.registered_names() == ()


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (lambda: "a driver", "gives 'a driver', which is no Driver"),
        (open_broken, "gives the driver 'broken'"),
    ],
)
def test_what_a_factory_gives_is_looked_at(factory: Callable[[], Any], words: str) -> None:
    register_driver("plain", factory)
    with pytest.raises(InvalidRequestError, match=words):
        open_driver("plain")


def test_what_cannot_be_registered_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="cannot be called"):
        register_driver("plain", "plain")  # type: ignore[arg-type]
    register_driver("plain", open_plain)
    with pytest.raises(InvalidRequestError, match="'plain' is taken by"):
        register_driver("plain", open_broken)
    with pytest.raises(InvalidRequestError, match=r"unknown kind 'npu'; there are .*'plain'"):
        open_driver("npu")
    with pytest.raises(InvalidRequestError, match="'plain:0'"):
        open_device("npu:0")


# -- the contract, from outside -----------------------------------------------------------------------------
def _contract(driver: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-q", "-rA"]
    command += ["tests/allocator/test_given_driver.py", "--driver", driver, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False).stdout


def test_the_contract_finds_what_is_wrong_with_a_driver() -> None:
    said = _contract(
        "broken=tests.allocator.other_driver:open_broken", "-k", "test_fill or test_free or who_is_captured"
    )
    lines = [line for line in said.splitlines() if "TestGiven" in line]
    outcomes = {line.split("::")[-1].split(" ")[0]: line.split()[0] for line in lines}
    assert outcomes["test_fill[128]"] == "FAILED"
    assert outcomes["test_free"] == "PASSED"
    assert "refused: graph capture: the broken driver has none" in said


@pytest.mark.slow
def test_the_contract_holds_for_a_driver_from_elsewhere() -> None:
    said = _contract("plain=tests.allocator.other_driver:open_plain")
    assert " failed" not in said.splitlines()[-1]
    assert " passed" in said.splitlines()[-1]
    assert _contract("unwilling=tests.allocator.other_driver:open_unwilling", "-k", "test_free").count("FAILED")


def test_the_driver_of_the_documentation_opens_anew_when_it_is_closed() -> None:
    page = (ROOT / "docs" / "new-accelerator.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "page"}
    exec(page.split("```py\n")[1].split("```")[0], names)
    assert names["ordinal"] == 1
    names["driver"].close()
    again, _ = open_device("npu:1")
    assert again is not names["driver"]
    assert again.device_count == 2
    again.close()


def test_a_driver_that_cannot_be_imported_is_one_line() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/allocator/test_given_driver.py"]
    done = subprocess.run([*command, "--driver", "npu=nowhere:open"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 4
    assert "ERROR: --driver: No module named 'nowhere'" in done.stderr
