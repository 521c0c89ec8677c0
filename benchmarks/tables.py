"""The tables of the documentation, made from the results: ``python -m benchmarks.tables`` writes them anew.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
PAGES = {"docs/allocator.md": "allocator", "docs/interop.md": "interop", "docs/bandwidth.md": "bandwidth"}
FILES = {"bandwidth": "bandwidth-2xh200"}  # where a result has not the table's own name

Rows = list[tuple[str, ...]]


def allocator(summary: dict[str, Any]) -> Rows:
    def figures(form: str, *names: str) -> tuple[str, ...]:
        """Of MemFerry, torch, rmm, cupy and the driver, as far as they are measured."""
        found = [_number(summary[name], form) for name in names]
        return (*found, *[""] * (5 - len(found)))

    pairs = (f"pair_{name}_us" for name in ("pool", "torch", "rmm", "cupy", "driver"))
    growing = (f"fragmentation_{name}" for name in ("virtual", "torch", "rmm"))
    return [
        ("", "MemFerry", "torch", "rmm", "cupy", "driver"),
        ("allocate and free 1 MiB", *figures("{:.2f} µs", *pairs)),
        ("held beyond the live peak of a training log", *figures("{:.1%}", *growing)),
        ("the same, growing by segments", *figures("{:.1%}", "fragmentation_segments")),
        ("the same, in one slab", *figures("{:.1%}", "fragmentation_slab")),
        ("16 GiB of pinned memory ready", *figures("{:.2f} s", "arena_s", "pinned_torch_s")),
        (
            "resident bytes for each byte asked for",
            *figures("{:.2f}", "arena_resident_over_asked", "pinned_torch_resident_over_asked"),
        ),
        ("acquire a valid view", *figures("{:.1f} µs", "acquire_us")),
        ("release it", *figures("{:.1f} µs", "release_us")),
        ("acquire 16 MiB with a copy, beyond the copy", *figures("{:.1f} µs", "acquire_over_copy_us")),
    ]


def interop(summary: dict[str, Any]) -> Rows:
    names = {
        "torch_own_us": "`torch.empty` of 1 MiB and dropping it, torch's own allocator",
        "torch_plugged_us": "the same with our pool as torch's allocator",
        "dlpack_to_numpy_us": "NumPy array of a host view, by DLPack",
        "dlpack_to_torch_us": "torch tensor of a device view, by DLPack",
        "tensor_of_view_us": "torch tensor of a device view, `as_tensor`",
        "dlpack_from_torch_us": "torch tensor taken over, by DLPack",
        "c_pair_us": "allocate and free 1 MiB from C",
    }
    return [("", "median"), *((text, _number(summary[name], "{:.2f} µs")) for name, text in names.items())]


def bandwidth(summary: dict[str, Any]) -> Rows:
    def by_size(direction: str) -> tuple[str, ...]:
        ratios = summary[f"multipath_{direction}_ratio"]
        return tuple(f"{int(size) >> 20} MiB: {ratio:.2f}" for size, ratio in ratios.items() if ratio is not None)

    pays = summary["break_even_bytes"]
    return [
        ("", "host to device", "device to host"),
        ("engine over a direct copy", *(", ".join(by_size(direction)) for direction in ("h2d", "d2h"))),
        ("several ways pay from", *(_number(_mib(pays[direction]), "{:.1f} MiB") for direction in ("h2d", "d2h"))),
        ("both devices pulling: engines over direct copies", _number(summary["both_pulling_ratio"], "{:.2f}"), ""),
        ("engine without helpers over the driver's copy", _number(summary["direct_over_plain"], "{:.3f}"), ""),
        ("engine's part of submitting a small copy", _number(summary["submission_overhead_us"], "{:.1f} µs"), ""),
        ("share of one core during transfers over several ways", _number(summary["cpu_share"], "{:.1%}"), ""),
        ("predicted within 10%", _number(summary["predicted_within_10_percent"], "{:.0%}"), ""),
    ]


TABLES: dict[str, Callable[[dict[str, Any]], Rows]] = {
    "allocator": allocator,
    "interop": interop,
    "bandwidth": bandwidth,
}


def render(name: str) -> str:
    """A table in Markdown."""
    path = RESULTS / f"{FILES.get(name, name)}.json"
    if not path.exists():
        return f"Not measured yet: `make bench-{name}` writes this table.\n"
    rows = TABLES[name](json.loads(path.read_text())["summary"])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|---" * len(rows[0]) + "|")
    return "\n".join(lines) + "\n"


def with_tables(text: str) -> str:
    """A page with its tables as the results have them."""
    return PLACE.sub(lambda found: f"{found[1]}{render(found[2])}{found[3]}", text)


def _mib(nbytes: int | None) -> float | None:
    return None if nbytes is None else nbytes / 2**20


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


if __name__ == "__main__":
    for page in PAGES:
        path = ROOT / page
        path.write_text(with_tables(path.read_text()))
