"""The CPU's update kernel against its own memory traffic and against torch.optim.AdamW(fused=True).

    python -m benchmarks.optimizer.kernel [--parameters N] [--threads 1,8,14,16] --json FILE

``traffic`` is the same loads and stores without the arithmetic: what no kernel can beat.  What is compared takes
turns, sample by sample, so that a machine that changes its pace changes it for all.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from memferry_allocator import open_driver
from memferry_rt.native import AdamKernel, AdamOperands, AdamTuning, NativePool, load_adam

from .slabs import BYTES, SETTINGS, Slabs

SCALES = {"normal": 1e-3, "subnormal": 1e-20}  # of gradients; squares of the second are subnormal


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes
    ----------
    work : str
        ``"adam"``, ``"traffic"`` or ``"torch"``, which is fused AdamW in fp32.
    dtype : str
        Of gradients; with a half the rounded weights are written too.
    threads : int
    place : str
        ``"in-place"`` or ``"spare"`` slabs.
    tuning : AdamTuning
    values : str
        ``"normal"``, or ``"subnormal"``: squares of gradients below the smallest normal number.
    launcher : str
        Who hands out pieces: ``"native"`` threads, or a ``"python"`` executor.
    main : str
        What the main thread does meanwhile: it is ``"idle"``, or ``"busy"`` in Python.
    """

    work: str
    dtype: str
    threads: int
    place: str = "in-place"
    tuning: AdamTuning = field(default_factory=AdamTuning)
    values: str = "normal"
    launcher: str = "native"
    main: str = "idle"


def measure(cases: list[Case], slabs: Slabs, samples: int, piece: int) -> list[list[float]]:
    """Seconds of every sample of cases of the same values, which take turns; one before them warms up."""
    slabs.fill(SCALES[cases[0].values])
    seconds: list[list[float]] = [[] for _ in cases]
    with ExitStack() as stack:
        runs = [(_torch if case.work == "torch" else _native)(case, slabs, piece, stack) for case in cases]
        for run in runs:
            run()
        for _ in range(samples):
            for run, mine in zip(runs, seconds, strict=True):
                start = time.perf_counter()
                run()
                mine.append(time.perf_counter() - start)
    return seconds


def _torch(case: Case, slabs: Slabs, piece: int, stack: ExitStack) -> Callable[[], object]:
    stack.callback(torch.set_num_threads, torch.get_num_threads())
    torch.set_num_threads(case.threads)
    parameter = torch.nn.Parameter(slabs.tensor("parameter"))
    parameter.grad = slabs.tensor("gradient float32")
    optimizer = torch.optim.AdamW([parameter], lr=SETTINGS.lr, weight_decay=SETTINGS.weight_decay, fused=True)
    optimizer.state[parameter] = {
        "step": torch.tensor(9.0),
        "exp_avg": slabs.tensor("exp_avg"),
        "exp_avg_sq": slabs.tensor("exp_avg_sq"),
    }
    return optimizer.step


def _native(case: Case, slabs: Slabs, piece: int, stack: ExitStack) -> Callable[[], object]:
    kernel = load_adam(tuning=case.tuning)
    if kernel is None:
        raise SystemExit("the native kernels are not installed")
    operands = slabs.pieces(
        case.dtype, 0, slabs.numel, piece, spare=case.place == "spare", zeros=case.work == "traffic"
    )
    prepared = kernel.prepare(SETTINGS, 10.0, 1.0)
    if case.launcher == "python":
        return _executor(case, kernel, prepared, operands, stack)
    pool = NativePool(case.threads)
    stack.callback(pool.close)

    def run() -> None:
        calls = (
            kernel.traffic(operands) if case.work == "traffic" else kernel.calls([(prepared, o) for o in operands])
        )
        batch = pool.submit(calls)
        while case.main == "busy" and not batch.done():
            _compute()
        batch.wait()

    return run


def _executor(
    case: Case, kernel: AdamKernel, prepared: Any, operands: list[AdamOperands], stack: ExitStack
) -> Callable[[], object]:
    pool = stack.enter_context(ThreadPoolExecutor(case.threads))

    def run() -> None:
        pieces = [pool.submit(kernel.run, prepared, one) for one in operands]
        while case.main == "busy" and not all(piece.done() for piece in reversed(pieces)):
            _compute()
        wait(pieces)

    return run


def _compute() -> int:
    """Python that holds the interpreter's lock for about a millisecond."""
    return sum(number * number for number in range(20_000))


def groups(threads: list[int], dtypes: list[str], blocks: list[int]) -> Iterator[tuple[str, list[Case]]]:
    """What takes turns, by what is compared: every rate by threads, and choices at the most of them."""
    most = max(threads)
    for dtype in dtypes:
        for count in threads:
            yield (
                "rate",
                [Case("traffic", dtype, count), Case("adam", dtype, count), Case("torch", "float32", count)],
            )
    for dtype in dtypes:
        works = [Case("adam", dtype, most), Case("torch", "float32", most)]
        yield "subnormal", [replace(case, values="subnormal") for case in works]
        for stream in (True, False):
            tuning = AdamTuning(stream_out=stream)
            yield "spare", [Case(work, dtype, most, place="spare", tuning=tuning) for work in ("traffic", "adam")]
        tunings = [AdamTuning(block=block) for block in blocks]
        if dtype != "float32":
            tunings.append(AdamTuning(stream_weight=True))
        yield "tuning", [Case("adam", dtype, most, tuning=tuning) for tuning in tunings]
    places = [(launcher, main) for launcher in ("native", "python") for main in ("idle", "busy")]
    yield "launcher", [Case("adam", dtypes[-1], most, launcher=launcher, main=main) for launcher, main in places]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0))
    usual = sorted({1, max(1, cores // 2), max(1, cores - 2), cores})
    parser.add_argument("--parameters", type=int, default=1 << 28)
    parser.add_argument("--threads", default=",".join(map(str, usual)))
    parser.add_argument("--blocks", default="256,1024,4096")
    parser.add_argument("--piece", type=int, default=1 << 20)
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    dtypes = ["float32", "bfloat16"]
    slabs = Slabs(open_driver("emulated"), arguments.parameters, dtypes, spare=True)
    threads, blocks = (
        [int(text) for text in several.split(",")] for several in (arguments.threads, arguments.blocks)
    )
    found = []
    for compared, cases in groups(threads, dtypes, blocks):
        rows = []
        for case, seconds in zip(cases, measure(cases, slabs, arguments.samples, arguments.piece), strict=True):
            rate = arguments.parameters / statistics.median(seconds) / 1e9
            rows.append({**asdict(case), "samples_s": seconds, "gparam_per_s": rate, "gb_per_s": BYTES * rate})
            print(f"{rate:6.2f}  {_described(case)}", flush=True)
        found.append({"compared": compared, "cases": rows})
    kernel = load_adam()
    result = {
        "settings": {
            "parameters": arguments.parameters,
            "piece": arguments.piece,
            "samples": arguments.samples,
            "threads": threads,
            "dtypes": dtypes,
        },
        "torch": torch.__version__,
        "variant": None if kernel is None else kernel.variant,
        "groups": found,
    }
    arguments.json.write_text(json.dumps(result))


def _described(case: Case) -> str:
    usual = asdict(Case(case.work, case.dtype, case.threads))
    other = {key: value for key, value in asdict(case).items() if value != usual[key]}
    return f"{case.work:8} {case.dtype:9} {case.threads:2} threads  {other or ''}"


if __name__ == "__main__":
    main()
