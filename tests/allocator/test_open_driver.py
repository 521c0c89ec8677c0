"""Which driver a program gets: emulation only where there is no accelerator, and never instead of a broken one."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cuda.bindings import driver as cu

from memferry_allocator import (
    DriverError,
    DriverNotFoundError,
    EmulatedDriver,
    EmulatedOptions,
    InvalidRequestError,
    open_device,
    open_driver,
)
from memferry_allocator.driver.cuda import driver as cuda

from .machine import refused

NO_DRIVER = "libcuda.so.1: cannot open shared object file: No such file or directory"


def in_a_process(code: str, **environment: str) -> str:
    """What a fresh interpreter prints."""
    command = [sys.executable, "-W", "error", "-c", code]
    run = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without any NVIDIA driver, whatever this one is."""

    def load(name: str, *_: object) -> None:
        raise OSError(NO_DRIVER)

    def initialise(_: int) -> None:
        raise RuntimeError("no library")

    monkeypatch.setattr(cu, "cuInit", initialise)
    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    monkeypatch.setattr(cuda, "_process_driver", None)


@pytest.mark.usefixtures("bare")
def test_no_driver_at_all() -> None:
    driver = open_driver()
    assert isinstance(driver, EmulatedDriver)
    assert open_driver("auto", emulated=EmulatedOptions(device_count=3)).device_count == 3
    assert isinstance(open_device("auto")[0], EmulatedDriver)
    with refused("NO_DEVICE", DriverNotFoundError):
        open_driver("cuda")
    with pytest.raises(DriverNotFoundError, match="no NVIDIA driver"):
        open_device("cuda:0")


@pytest.mark.usefixtures("bare")
def test_a_driver_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cu, "cuInit", lambda _: (cu.CUresult.CUDA_ERROR_NO_DEVICE,))
    assert isinstance(open_driver("auto"), EmulatedDriver)
    with pytest.raises(DriverNotFoundError, match="CUDA_VISIBLE_DEVICES"):
        open_driver("cuda")
    monkeypatch.setattr(cu, "cuInit", lambda _: (cu.CUresult.CUDA_SUCCESS,))
    monkeypatch.setattr(cu, "cuDeviceGetCount", lambda: (cu.CUresult.CUDA_SUCCESS, 0))
    with refused("NO_DEVICE", DriverNotFoundError):
        open_driver("cuda")


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("kind", ["auto", "cuda"])
@pytest.mark.parametrize(
    "reason",
    [
        "libcuda.so.1: file too short",
        "libcuda.so.1: cannot open shared object file: Permission denied",
        "libnvidia-ptxjitcompiler.so.1: cannot open shared object file: No such file or directory",
    ],
)
def test_a_library_that_does_not_load(monkeypatch: pytest.MonkeyPatch, kind: str, reason: str) -> None:
    def load(name: str, *_: object) -> None:
        raise OSError(reason)

    monkeypatch.setattr(ctypes, "CDLL", load)
    with refused("SHARED_OBJECT_INIT_FAILED"):
        open_driver(kind)
    with pytest.raises(DriverError, match=reason.split(":")[0]) as caught:
        open_driver(kind)
    assert not isinstance(caught.value, DriverNotFoundError)


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("kind", ["auto", "cuda"])
def test_a_kernel_driver_without_its_library(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(os.path, "exists", lambda path: path == "/dev/nvidiactl")
    with refused("SHARED_OBJECT_INIT_FAILED"):
        open_driver(kind)


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("kind", ["auto", "cuda"])
@pytest.mark.parametrize("code", ["SYSTEM_DRIVER_MISMATCH", "UNKNOWN", "SYSTEM_NOT_READY"])
def test_a_driver_that_does_not_start(monkeypatch: pytest.MonkeyPatch, kind: str, code: str) -> None:
    result = getattr(cu.CUresult, f"CUDA_ERROR_{code}")
    monkeypatch.setattr(cu, "cuInit", lambda _: (result,))
    with refused(code):
        open_driver(kind)


@pytest.mark.parametrize("kind", ["auto", "cuda"])
def test_a_library_that_is_rubbish(tmp_path: Path, kind: str) -> None:
    """With the real loader and the real bindings."""
    (tmp_path / "libcuda.so.1").write_bytes(b"this is no library\n" * 100)
    said = in_a_process(
        "import memferry_allocator as m\n"
        f"try:\n    print(m.open_driver({kind!r}))\n"
        "except m.DriverNotFoundError as error:\n    print('not found', error)\n"
        "except m.DriverError as error:\n    print('refused', error.code, error)\n",
        LD_LIBRARY_PATH=str(tmp_path),
    )
    assert said.startswith("refused CUDA_ERROR_SHARED_OBJECT_INIT_FAILED")
    assert "libcuda.so.1" in said
    assert "reinstall the driver" in said


def test_importing_loads_no_framework_and_no_cuda() -> None:
    said = in_a_process(
        "import sys, pathlib\n"
        "import memferry_allocator, memferry_transport\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "print(sorted(loaded & {'torch', 'cuda', 'cupy', 'numba', 'rmm', 'jax', 'transformers', 'pynvml'}))\n"
        "print('libcuda' in pathlib.Path('/proc/self/maps').read_text())\n"
    )
    assert said.splitlines() == ["[]", "False"]


def test_the_emulated_device_needs_no_bindings() -> None:
    said = in_a_process(
        "import sys\n"
        "sys.modules['cuda'] = None\n"
        "from memferry_allocator import open_device\n"
        "driver, ordinal = open_device('emulated')\n"
        "print(driver.name, ordinal, driver.device_count)\n"
    )
    assert said == "emulated 0 1"


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "cpu",
        "cuda:",
        "cuda:-1",
        "cuda:x",
        "cuda:0:1",
        "CUDA",
        " cuda",
        "cuda:1 ",
        "auto:0",
        "emulated:",
        "0",
        "gpu",
        "cuda:٣",
        "cuda:1.0",
        "emulatedx",
        "cuda:" + "9" * 5000,
    ],
)
def test_texts_that_name_no_device(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="device"):
        open_device(text)


@pytest.mark.parametrize("kind", ["", "gpu", "cuda:0", "Emulated"])
def test_kinds_that_are_none(kind: str) -> None:
    with pytest.raises(InvalidRequestError, match="'auto', 'cuda', 'emulated'"):
        open_driver(kind)


def test_devices_by_number() -> None:
    options = EmulatedOptions(device_count=2)
    assert [open_device(f"emulated{end}", emulated=options)[1] for end in ("", ":0", ":1")] == [0, 0, 1]
    for number in (2, 99_999_999):
        with refused("INVALID_DEVICE"):
            open_device(f"emulated:{number}", emulated=options)


@pytest.mark.gpu
def test_cuda_is_shared_by_the_process() -> None:
    driver = open_driver("cuda")
    assert driver is open_driver("cuda")
    assert driver is open_driver("auto")
    assert driver.name == "cuda"
    assert open_device("cuda") == (driver, 0)
    with refused("INVALID_DEVICE"):
        open_device(f"cuda:{driver.device_count}")
    driver.close()
    again = open_driver("cuda")
    assert again is not driver
    again.free(0, again.malloc(0, 256))
