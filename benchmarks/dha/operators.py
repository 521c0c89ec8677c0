"""The rows that need no model, all in one process: ``python -m benchmarks.dha.operators --json FILE``.

A row that fails says why, and the next one begins.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from memferry_allocator import open_device
from memferry_rt.adapters.torch.profiling import Stand

from . import beside, embedding, link, memory, ring, weight_gradient
from .common import Bench
from .sizes import SMALL, Sizes

ROWS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "link": link.link,
    "embedding": embedding.embedding,
    "rows": embedding.gradient,
    "beside": beside.beside,
    "ring": ring.ring,
    "weight_gradient": weight_gradient.gradient,
    "memory": memory.memory,
}


def measure(name: str, device: str, sizes: Sizes) -> dict[str, Any]:
    """A row, on a stand of its own."""
    driver, ordinal = open_device(device)
    stand = Stand(driver, ordinal)
    began = time.perf_counter()
    try:
        with stand.computing():
            result = ROWS[name](Bench.on(stand, sizes))
    except Exception as error:
        return {"status": "failed", "message": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    stand.close()
    seconds = time.perf_counter() - began
    return {"status": "ok", "emulated": stand.emulated, "seconds": seconds, "result": result}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dha.operators")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=float("inf"), help="begin no row after so many seconds")
    arguments = parser.parse_args()
    began = time.perf_counter()
    rows: dict[str, Any] = {}
    for name in arguments.rows.split(","):
        if time.perf_counter() - began > arguments.budget:
            rows[name] = {"status": "failed", "message": f"not begun within {arguments.budget:g} s"}
        else:
            rows[name] = measure(name, arguments.device, SMALL if arguments.small else Sizes())
            print(f"{name}: {rows[name]['status']}, {time.perf_counter() - began:.1f} s", flush=True)
    arguments.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
