"""Compiling what the tests of libmemferry need: the stand-in for libcuda, and C programs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from memferry_allocator import native

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SOURCES = Path(native.__file__).parent
need_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc: installed without the library")
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-g"]


def run(command: list[str], **options: object) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return str(done.stdout)


def build_stub(folder: Path, *flags: str) -> Path:
    """The stand-in for libcuda."""
    library = folder / "libcuda_stub.so"
    flags = (*WARNINGS, "-O2", "-ftls-model=initial-exec", "-fPIC", "-shared", *flags)
    run(["gcc", "-std=c11", *flags, str(HERE / "stub_cuda.c"), "-o", str(library), "-pthread"])
    return library
