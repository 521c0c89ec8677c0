"""The tables of the documentation, made from the results: ``python -m benchmarks.tables`` writes them anew.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->``.  Where no result is kept in
``benchmarks/results``, the page says so instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .cells import Rows, gib, mib, number, under
from .dha import tables as dha
from .plan_tables import ablation, plan, plan_auto, plan_largest, planner
from .scale.tables import iterations, relays
from .tables_of_machines import machine_hosts, machine_loads, machine_numbers, machines

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
PAGES = tuple(
    f"docs/{page}.md"
    for page in ("allocator", "interop", "performance", "bandwidth", "dha", "scheduler", "multi-gpu")
)


@dataclass(frozen=True)
class Table:
    """A table, and the result that it is made from.

    Attributes
    ----------
    result : str
        Name of the file in ``benchmarks/results``.
    rows : callable
        Rows of a summary, the head first; none where the summary lacks what they are made of.
    target : str
        The make target that writes the file; by default ``bench-RESULT``.
    """

    result: str
    rows: Callable[[dict[str, Any]], Rows]
    target: str = ""


def allocator(summary: dict[str, Any]) -> Rows:
    def figures(form: str, *names: str) -> tuple[str, ...]:
        """Of MemFerry, torch, rmm, cupy and the driver, as far as they are measured."""
        found = [number(summary[name], form) for name in names]
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
        "dlpack_given_us": "our part of that",
        "torch_dlpack_floor_us": "torch tensor of torch's own tensor, by DLPack, without us",
        "tensor_of_view_us": "torch tensor of a device view, `as_tensor`",
        "array_interface_to_torch_us": "torch tensor of a device view, by `__cuda_array_interface__`",
        "array_interface_given_us": "our part of that",
        "dlpack_from_torch_us": "torch tensor taken over, by DLPack",
        "c_pair_us": "allocate and free 1 MiB from C",
    }
    known = [(text, number(summary[name], "{:.2f} µs")) for name, text in names.items() if name in summary]
    return [("", "median"), *known]


def kernel(summary: dict[str, Any]) -> Rows:
    head = (
        "gradients",
        "threads",
        "MemFerry",
        "traffic",
        "torch, fp32",
        "over traffic",
        "over torch",
        "MemFerry, GB/s",
    )
    return under(
        head,
        (
            (
                row["dtype"],
                str(row["threads"]),
                *(f"{row[f'{work}_gparams']:.2f}" for work in ("adam", "traffic", "torch")),
                f"{row['over_traffic']:.1%}",
                f"{row['over_torch']:.2f}",
                f"{row['adam_gb_per_s']:.0f}",
            )
            for row in summary.get("kernel_rates", ())
        ),
    )


def choices(summary: dict[str, Any]) -> Rows:
    return under(
        ("", "work", "gradients", "Gparam/s"),
        (
            (_choice(row), row["work"], row["dtype"], f"{row['gparams']:.2f}")
            for row in summary.get("kernel_choices", ())
        ),
    )


def _choice(row: dict[str, Any]) -> str:
    tuning = row["tuning"]
    if row["compared"] == "subnormal":
        return "subnormal moments"
    if row["compared"] == "spare":
        return f"into spare slabs, {'streamed' if tuning['stream_out'] else 'plain'} stores"
    if row["compared"] == "launcher":
        return f"{row['launcher']} threads, main thread {row['main']}"
    return "weights by streamed stores" if tuning["stream_weight"] else f"blocks of {tuning['block']}"


def together(summary: dict[str, Any]) -> Rows:
    who = {"both": "CPU and device", "cpu": "CPU alone", "device": "device alone"}
    found: dict[tuple[int, str], dict[str, dict[str, Any]]] = {}
    for case in summary.get("together_cases", ()):
        found.setdefault((case["threads"], case["who"]), {})[case["work"]] = case
    return under(
        ("", "CPU threads", "update, Gparam/s", "GB/s", "traffic, GB/s", "update over traffic"),
        (
            (
                who[by],
                str(threads),
                f"{work['adam']['gparam_per_s']:.2f}",
                f"{work['adam']['gb_per_s']:.0f}",
                f"{work['traffic']['gb_per_s']:.0f}",
                f"{work['adam']['gb_per_s'] / work['traffic']['gb_per_s']:.1%}",
            )
            for (threads, by), work in found.items()
        ),
    )


def pipeline(summary: dict[str, Any]) -> Rows:
    head = (
        "",
        "iteration",
        "device peak",
        "host bytes a parameter",
        "host traffic",
        "busy",
        "exposed update",
        "exposed copies",
    )
    return under(head, ((name, *_iteration(row)) for name, row in summary.items()))


def _iteration(row: dict[str, Any]) -> tuple[str, ...]:
    if "failed" in row:
        return ("failed", *[""] * 6)
    return (
        f"{row['iteration_s']:.3f} s",
        gib(row["device_peak_bytes"]),
        f"{row['host_bytes_per_parameter']:.2f}",
        f"{row['dram_bytes_per_parameter']:.1f} bytes",
        number(row["busy_share"], "{:.0%}"),
        f"{row['exposed_optimizer_s']:.3f} s",
        f"{row['exposed_copy_s']:.3f} s",
    )


def peers(summary: dict[str, Any]) -> Rows:
    return under(
        ("", "beside it", "its iteration", "its device memory", "its time over MemFerry's"),
        (
            (
                name,
                peer["system"],
                f"{peer['iteration_s']:.3f} s",
                gib(peer["device_peak_bytes"]),
                f"{peer['ratio']:.2f}",
            )
            for name, row in summary.items()
            for peer in row.get("peers", {}).values()
            if "ratio" in peer
        ),
    )


def bandwidth(summary: dict[str, Any]) -> Rows:
    def by_size(direction: str) -> tuple[str, ...]:
        ratios = summary[f"multipath_{direction}_ratio"]
        return tuple(f"{int(size) >> 20} MiB: {ratio:.2f}" for size, ratio in ratios.items() if ratio is not None)

    pays = summary["break_even_bytes"]
    return [
        ("", "host to device", "device to host"),
        ("engine over a direct copy", *(", ".join(by_size(direction)) for direction in ("h2d", "d2h"))),
        ("several ways pay from", *(number(mib(pays[direction]), "{:.1f} MiB") for direction in ("h2d", "d2h"))),
        ("both devices pulling: engines over direct copies", number(summary["both_pulling_ratio"], "{:.2f}"), ""),
        ("engine without helpers over the driver's copy", number(summary["direct_over_plain"], "{:.3f}"), ""),
        ("engine's part of submitting a small copy", number(summary["submission_overhead_us"], "{:.1f} µs"), ""),
        ("share of one core during transfers over several ways", number(summary["cpu_share"], "{:.1%}"), ""),
        ("predicted within 10%", number(summary["predicted_within_10_percent"], "{:.0%}"), ""),
    ]


TABLES = {
    "allocator": Table("allocator", allocator),
    "interop": Table("interop", interop),
    "kernel": Table("optimizer", kernel),
    "choices": Table("optimizer", choices),
    "together": Table("optimizer", together),
    "pipeline": Table("pipeline", pipeline),
    "peers": Table("pipeline", peers),
    "plan": Table("plan", plan),
    "plan_auto": Table("plan", plan_auto),
    "plan_largest": Table("plan", plan_largest),
    "ablation": Table("ablation", ablation),
    "planner": Table("ablation", planner),
    **{
        f"{made.__name__}_{gpus}": Table(f"scale-{gpus}xh200", made, f"bench-scale{'-8' if gpus == 8 else ''}")
        for made in (iterations, relays)
        for gpus in (2, 8)
    },
    "bandwidth": Table("bandwidth-2xh200", bandwidth, "bench-bandwidth"),
    **{
        made.__name__: Table("machines", made)
        for made in (machines, machine_loads, machine_hosts, machine_numbers)
    },
    **{
        f"dha_{made.__name__}": Table("dha", made)
        for made in (dha.link, dha.embedding, dha.rows, dha.gradient, dha.ring, dha.beside, dha.models)
    },
}


def render(name: str) -> str:
    """A table in Markdown."""
    table = TABLES[name]
    path = RESULTS / f"{table.result}.json"
    rows = table.rows(json.loads(path.read_text())["summary"]) if path.exists() else []
    if not rows:
        return f"Not measured yet: `make {table.target or f'bench-{table.result}'}` writes this table.\n"
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|---" * len(rows[0]) + "|")
    return "\n".join(lines) + "\n"


def with_tables(text: str) -> str:
    """A page with its tables as the results have them."""
    return PLACE.sub(lambda found: f"{found[1]}{render(found[2])}{found[3]}", text)


if __name__ == "__main__":
    for page in PAGES:
        path = ROOT / page
        path.write_text(with_tables(path.read_text()))
