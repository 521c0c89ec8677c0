"""The CPU's update kernel against its own memory traffic and against torch.optim.AdamW(fused=True).

    python benchmarks/optimizer.py [--parameters 1261529088] [--threads 1,8,15,16] [--out FILE]

Every case updates the same state in host memory, in huge pages where the system has them.  ``traffic`` is the same
loads and stores without the arithmetic: what no kernel can beat.  Rates are in 1e9 parameters a second.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from memferry_allocator import ArenaOptions, HostArena, Span, open_driver
from memferry_rt.native import AdamKernel, AdamOperands, AdamSettings, AdamTuning, NativePool, load_adam
from memferry_tools.machine import describe_machine

SCHEMA = {"schema": "memferry.bench.optimizer", "schema_version": 1}
SETTINGS = AdamSettings(1e-4, 0.9, 0.999, 1e-8, 0.01, decoupled=True, maximize=False)
PATTERN = 1 << 20  # elements of random state, repeated
ALIGNMENT = 1 << 21


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


class Slabs:
    """State in host memory: three fp32 arrays twice, a gradient, a weight."""

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.nbytes = -(-numel * 4 // ALIGNMENT) * ALIGNMENT
        self.arena = HostArena(open_driver("emulated"), 8 * self.nbytes, ArenaOptions())
        self.parts = [self.arena.cut(self.nbytes) for _ in range(8)]

    def tensor(self, number: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        span = Span(self.parts[number].ptr, self.numel * dtype.itemsize)
        return torch.frombuffer(self.arena.array(span), dtype=dtype)

    def fill(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(1)
        gradient = torch.randn(PATTERN, generator=generator) * (1e-3 if case.values == "normal" else 1e-20)
        square = gradient.square()
        for number, values in enumerate((torch.randn(PATTERN, generator=generator), gradient, square)):
            _repeat(self.tensor(number), values)
        _repeat(self.tensor(6, getattr(torch, case.dtype)), gradient.to(getattr(torch, case.dtype)))

    def operands(self, case: Case, piece: int) -> list[AdamOperands]:
        old = [part.ptr for part in self.parts[:3]]
        new = [part.ptr for part in self.parts[3:6]] if case.place == "spare" else old
        gradient, weight = self.parts[6].ptr, self.parts[7].ptr
        itemsize = getattr(torch, case.dtype).itemsize
        half = case.dtype != "float32"
        return [
            AdamOperands(
                parameter=old[0] + 4 * start,
                exp_avg=old[1] + 4 * start,
                exp_avg_sq=old[2] + 4 * start,
                out_parameter=new[0] + 4 * start,
                out_exp_avg=new[1] + 4 * start,
                out_exp_avg_sq=new[2] + 4 * start,
                gradient=gradient + itemsize * start,
                gradient_dtype=case.dtype,
                weight=weight + itemsize * start if half else 0,
                weight_dtype=case.dtype if half else "bfloat16",
                count=min(piece, self.numel - start),
            )
            for start in range(0, self.numel, piece)
        ]


def _repeat(target: torch.Tensor, values: torch.Tensor) -> None:
    whole = target.numel() // PATTERN * PATTERN
    target[:whole].view(-1, PATTERN).copy_(values.expand(whole // PATTERN, PATTERN))
    target[whole:].copy_(values[: target.numel() - whole])


def measure(case: Case, slabs: Slabs, samples: int, piece: int) -> list[float]:
    """Seconds of every sample; one before them warms up."""
    slabs.fill(case)
    run, close = _torch(case, slabs) if case.work == "torch" else _native(case, slabs, piece)
    try:
        run()
        seconds = []
        for _ in range(samples):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        return seconds
    finally:
        close()


def _torch(case: Case, slabs: Slabs) -> tuple[Callable[[], object], Callable[[], None]]:
    before = torch.get_num_threads()
    torch.set_num_threads(case.threads)
    parameter = torch.nn.Parameter(slabs.tensor(0))
    parameter.grad = slabs.tensor(6)
    optimizer = torch.optim.AdamW([parameter], lr=SETTINGS.lr, weight_decay=SETTINGS.weight_decay, fused=True)
    optimizer.state[parameter] = {
        "step": torch.tensor(9.0),
        "exp_avg": slabs.tensor(1),
        "exp_avg_sq": slabs.tensor(2),
    }
    return optimizer.step, lambda: torch.set_num_threads(before)


def _native(case: Case, slabs: Slabs, piece: int) -> tuple[Callable[[], object], Callable[[], None]]:
    kernel = load_adam(tuning=case.tuning)
    if kernel is None:
        raise SystemExit("the native kernels are not installed")
    operands = slabs.operands(case, piece)
    prepared = kernel.prepare(SETTINGS, 10.0, 1.0)
    if case.launcher == "python":
        return _executor(case, kernel, prepared, operands)
    pool = NativePool(case.threads)

    def run() -> None:
        calls = (
            kernel.traffic(operands) if case.work == "traffic" else kernel.calls([(prepared, o) for o in operands])
        )
        batch = pool.submit(calls)
        while case.main == "busy" and not batch.done():
            _compute()
        batch.wait()

    return run, pool.close


def _executor(
    case: Case, kernel: AdamKernel, prepared: Any, operands: list[AdamOperands]
) -> tuple[Callable[[], object], Callable[[], None]]:
    pool = ThreadPoolExecutor(case.threads)

    def run() -> None:
        pieces = [pool.submit(kernel.run, prepared, one) for one in operands]
        while case.main == "busy" and not all(piece.done() for piece in reversed(pieces)):
            _compute()
        wait(pieces)

    return run, pool.shutdown


def _compute() -> int:
    """Python that holds the interpreter's lock for about a millisecond."""
    return sum(number * number for number in range(20_000))


def cases(threads: list[int], dtypes: list[str], blocks: list[int]) -> Iterator[Case]:
    """What is measured: every rate by threads, and the choices of memory access at the most of them."""
    most = max(threads)
    for count in threads:
        yield Case("torch", "float32", count)
        for dtype in dtypes:
            for work in ("traffic", "adam"):
                yield Case(work, dtype, count)
    for dtype in dtypes:
        for work in ("traffic", "adam"):
            for stream in (True, False):
                tuning = AdamTuning(stream_out=stream)
                yield Case(work, dtype, most, place="spare", tuning=tuning)
        half = dtype != "float32"
        for block in blocks:
            yield Case("adam", dtype, most, tuning=AdamTuning(block=block))
        if half:
            yield Case("adam", dtype, most, tuning=AdamTuning(stream_weight=True))
        yield Case("adam", dtype, most, values="subnormal")
    yield Case("torch", "float32", most, values="subnormal")
    for launcher in ("native", "python"):
        for main in ("idle", "busy"):
            yield Case("adam", dtypes[-1], most, launcher=launcher, main=main)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--parameters", type=int, default=1 << 25)
    parser.add_argument("--threads", default=",".join(map(str, sorted({1, max(1, cores - 1), cores}))))
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--blocks", default="256,512,1024,2048,4096")
    parser.add_argument("--piece", type=int, default=1 << 20)
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    slabs = Slabs(arguments.parameters)
    results = []
    chosen = cases(
        [int(text) for text in arguments.threads.split(",")],
        arguments.dtypes.split(","),
        [int(text) for text in arguments.blocks.split(",")],
    )
    for case in chosen:
        seconds = measure(case, slabs, arguments.samples, arguments.piece)
        rate = arguments.parameters / statistics.median(seconds) / 1e9
        results.append({**asdict(case), "samples_s": seconds, "gparam_per_s": rate})
        print(f"{rate:6.2f}  {_described(case)}", flush=True)
    document = {
        **SCHEMA,
        "machine": {**describe_machine(), "torch": torch.__version__},
        "settings": {"parameters": arguments.parameters, "piece": arguments.piece, "samples": arguments.samples},
        "variant": _variant(),
        "results": results,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(document, indent=2) + "\n")


def _variant() -> str | None:
    kernel = load_adam()
    return None if kernel is None else kernel.variant


def _described(case: Case) -> str:
    usual = asdict(Case(case.work, case.dtype, case.threads))
    other = {key: value for key, value in asdict(case).items() if value != usual[key]}
    return f"{case.work:8} {case.dtype:9} {case.threads:2} threads  {other or ''}"


if __name__ == "__main__":
    main()
