"""Each framework in its own process: right bytes, nothing left behind, a clean end."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run(name: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.interop.programs", name],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "stderr": done.stderr}


def needs(library: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}")


def test_consumers_outlive_everything() -> None:
    assert run("consumers_outlive_everything") == {"kept": 6, "stderr": ""}


@pytest.mark.gpu
def test_cupy_on_our_pool() -> None:
    needs("cupy")
    said = run("cupy_rounds")
    assert (said["wrong"], said["left"], said["refused"], said["after"]) == (0, 0, True, 45)


@pytest.mark.gpu
def test_cupy_shares_memory() -> None:
    needs("cupy")
    said = run("cupy_shares")
    assert (said["wrong"], said["same"]) == (0, True)


@pytest.mark.gpu
def test_numba_on_our_pool() -> None:
    needs("numba")
    said = run("numba_rounds")
    assert (said["wrong"], said["left"], said["info"]) == (0, 0, True)
    if said["unable"]:
        pytest.xfail(f"copies are right, kernels were not tried: {said['unable']}")


@pytest.mark.gpu
def test_rmm_on_our_pool_and_under_it() -> None:
    needs("rmm")
    said = run("rmm_rounds")
    assert (said["left"], said["distinct"]) == (0, True)


@pytest.mark.gpu
def test_jax_shares_memory() -> None:
    needs("jax")
    said = run("jax_shares")
    assert (said["wrong"], said["same"]) == (0, True)


@pytest.mark.gpu
def test_torch_shares_memory() -> None:
    said = run("torch_shares")
    assert (said["wrong"], said["same"]) == (0, True)


@pytest.mark.gpu
def test_torch_begins_with_a_view() -> None:
    assert run("torch_begins_with_a_view")["total"] == 100
