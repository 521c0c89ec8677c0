"""The allocator beside other allocators, in one run on one machine.

    python -m benchmarks.allocator [--device cuda|emulated] [--out FILE] [--small]

Every case runs in a process of its own.  Writes JSON with every sample and a summary.  Without a CUDA device the
cases that need none run on the emulated one, whose figures only say what Python costs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from memferry_tools.machine import describe_machine
from memferry_tools.version import version

from .cases import CASES, Settings

RESULTS = Path(__file__).parents[1] / "results" / "allocator.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "emulated"], default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--small", action="store_true", help="sizes for a small machine")
    parser.add_argument("--case", choices=list(CASES), help="run one case here and print it")
    arguments = parser.parse_args()
    settings = Settings(arguments.device, arguments.small)
    if arguments.case:
        print(json.dumps(CASES[arguments.case](settings)))
        return
    found = {name: _case(name, arguments) for name in CASES}
    result = {
        "schema": "memferry.allocator",
        "schema_version": 1,
        "memferry": version(),
        "settings": vars(settings),
        "machine": {**describe_machine(), **(found.pop("machine") or {})},
        "cases": found,
        "summary": summarise(found),
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["summary"], indent=1))


def _case(name: str, arguments: argparse.Namespace) -> Any:
    command = [sys.executable, "-m", "benchmarks.allocator", "--device", arguments.device, "--case", name]
    done = subprocess.run(command + ["--small"] * arguments.small, capture_output=True, text=True)
    if done.returncode != 0:
        print(f"{name} failed:\n{done.stderr[-2000:]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def summarise(found: dict[str, Any]) -> dict[str, Any]:
    """Microseconds, ratios and shares, as the documentation's table has them."""
    summary: dict[str, Any] = {}
    for name in ("pool", "driver", "torch", "cupy", "rmm"):
        timed = found.get(f"pair_{name}")
        summary[f"pair_{name}_us"] = None if timed is None else timed["median_s"] * 1e6
    pool = summary["pair_pool_us"]
    for name in ("driver", "torch"):
        other = summary[f"pair_{name}_us"]
        summary[f"pair_{name}_over_pool"] = None if other is None or pool is None else other / pool
    for name in ("slab", "segments", "virtual", "torch", "rmm"):
        replayed = found.get(f"replay_{name}")
        summary[f"fragmentation_{name}"] = None if replayed is None else replayed["fragmentation"]
    arena, pinned = found.get("arena"), found.get("pinned_torch")
    if arena is not None:
        summary["arena_s"] = arena["seconds"]
        summary["arena_resident_over_asked"] = arena["resident_bytes"] / arena["asked_bytes"]
    if arena is not None and pinned is not None:
        summary["pinned_torch_s"] = pinned["seconds"]
        summary["pinned_torch_over_arena"] = pinned["seconds"] / arena["seconds"]
        summary["pinned_torch_resident_over_asked"] = pinned["resident_bytes"] / pinned["asked_bytes"]
    acquired = found.get("acquire")
    if acquired is not None:
        summary["acquire_us"] = acquired["acquire"]["median_s"] * 1e6
        summary["release_us"] = acquired["release"]["median_s"] * 1e6
        summary["acquire_over_copy_us"] = acquired["over_copy_s"] * 1e6
    return summary


if __name__ == "__main__":
    main()
