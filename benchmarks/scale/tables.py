"""The tables of several GPUs."""

from __future__ import annotations

from typing import Any

from ..cells import Rows, gib, mib, number, under
from .rows import LINKS


def iterations(summary: dict[str, Any]) -> Rows:
    """Everything that was trained."""
    head = (
        *("", "iteration", "tokens/s", "efficiency", "of a fixed batch", "over DeepSpeed", "over no helpers"),
        *("host memory", "host traffic", "busy", "bound by", "predicted", "off by"),
    )
    return under(
        head,
        [
            (
                name,
                f"{row['iteration_s']:.3f} s",
                f"{row['tokens_per_second']:,.0f}",
                number(row.get("efficiency"), "{:.0%}"),
                number(row.get("efficiency_fixed_batch"), "{:.0%}"),
                number(row.get("over_deepspeed"), "{:.2f}"),
                number(row.get("over_no_helpers"), "{:.2f}"),
                gib(row["host_bytes"]) if "host_bytes" in row else "",
                number(row.get("host_traffic_bytes_per_s", 0) / 1e9 or None, "{:.0f} GB/s"),
                number(row.get("busy_share"), "{:.0%}"),
                row.get("bound_by", ""),
                number(row.get("predicted_s"), "{:.3f} s"),
                number(row.get("predicted_error"), "{:+.1%}"),
            )
            for name, row in summary.items()
            if "iteration_s" in row
        ],
    )


def relays(summary: dict[str, Any]) -> Rows:
    """GB/s of the first GPU by helpers, direction and size."""
    found = summary.get(LINKS, {}).get("gb_per_s") or []
    if not found:
        return []
    sizes = list(found[0]["h2d"])
    cells = [f"{direction}, {mib(int(size)):.0f} MiB" for direction in ("h2d", "d2h") for size in sizes]
    return under(
        ("GB/s with helpers", *cells),
        [
            (
                str(row["helpers"]),
                *(f"{row[direction][size]:.1f}" for direction in ("h2d", "d2h") for size in sizes),
            )
            for row in found
        ],
    )
