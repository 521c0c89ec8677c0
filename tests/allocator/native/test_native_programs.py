"""C and C++ programs that use the library: the example, the benchmark, and a stress run under sanitizers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .compiling import ROOT, SOURCES, WARNINGS, build_stub, need_compiler, run

EXAMPLES, BENCHMARKS = ROOT / "examples" / "c", ROOT / "benchmarks" / "c"
pytestmark = need_compiler


def made(folder: Path, target: str, into: Path) -> Path:
    """Build a target of a Makefile from a copy, so that nothing is left in the tree."""
    there = into / folder.name
    shutil.copytree(folder, there, dirs_exist_ok=True)
    (there / target).unlink(missing_ok=True)
    run(["make", "-C", str(there), f"PYTHON={sys.executable}", target])
    return there / target


@pytest.mark.parametrize("target", ["train_cache", "train_cache_cpp"])
def test_the_example(stub: Path, tmp_path: Path, target: str) -> None:
    """As C11 and as C++17, without a warning."""
    program = made(EXAMPLES, target, tmp_path)
    said = run([str(program)], env={**os.environ, "MEMFERRY_LIBCUDA": str(stub)})
    assert said.startswith("wrong bytes 0; allocations 6, peak 1048576 of 3145728 bytes")


def test_the_example_says_what_is_wrong(stub: Path, tmp_path: Path) -> None:
    program = made(EXAMPLES, "train_cache", tmp_path)
    for change, words in (
        ({"MEMFERRY_LIBCUDA": "/nowhere"}, "install the NVIDIA driver"),
        ({"STUB_FAIL": "cuMemAlloc_v2:2"}, "asked device 0 for 3.00 MiB"),
    ):
        environment = {**os.environ, "MEMFERRY_LIBCUDA": str(stub), **change}
        done = subprocess.run([str(program)], env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, words in done.stderr) == (1, True), done.stderr


@pytest.mark.gpu
def test_the_example_on_a_device(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "MEMFERRY_LIBCUDA"}
    for target in ("train_cache", "train_cache_cpp"):
        assert run([str(made(EXAMPLES, target, tmp_path))], env=environment).startswith("wrong bytes 0;")


def test_the_benchmark_prints_json(stub: Path, tmp_path: Path) -> None:
    program = made(BENCHMARKS, "pool_pair", tmp_path)
    result = json.loads(run([str(program)], env={**os.environ, "MEMFERRY_LIBCUDA": str(stub)}))
    assert result["schema"] == 1
    for clock in ("wall", "cpu"):
        samples = result[f"{clock}_samples_s"]
        assert sorted(samples)[len(samples) // 2] == result[f"{clock}_median_s"]


@pytest.mark.slow
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_a_stress_run_under_sanitizers(tmp_path: Path, sanitizers: str) -> None:
    flags = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-O1"]
    probe = tmp_path / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    tried = subprocess.run(["gcc", *flags, str(probe), "-o", str(tmp_path / "probe")], capture_output=True)
    if tried.returncode != 0 or subprocess.run([str(tmp_path / "probe")], capture_output=True).returncode != 0:
        pytest.skip(f"gcc has no -fsanitize={sanitizers} here")
    stub = build_stub(tmp_path, *flags)
    program = tmp_path / "stress"
    sources = [str(path) for path in sorted(SOURCES.glob("*.c"))]
    own = str(Path(__file__).parent / "stress.c")
    run(
        [
            "gcc",
            "-std=c11",
            *WARNINGS,
            *flags,
            f"-I{SOURCES}",
            own,
            *sources,
            "-o",
            str(program),
            "-pthread",
            "-ldl",
        ]
    )
    said = run([str(program)], env={**os.environ, "MEMFERRY_LIBCUDA": str(stub), "ASAN_OPTIONS": "detect_leaks=1"})
    assert said.endswith(" allocations\n")


@pytest.mark.slow
def test_an_installation_without_a_compiler_goes_on(tmp_path: Path) -> None:
    """setuptools leaves the optional libraries out with a warning."""
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", str(tmp_path / "lib")]
    command += ["--build-temp", str(tmp_path / "temp")]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "CC": "/bin/false", "CXX": "/bin/false"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("libmemferry*.so"))
    run(command, cwd=ROOT)
    assert len(list(tmp_path.rglob("libmemferry*.so"))) == 2
