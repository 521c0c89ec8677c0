"""The figures of the update that the documentation shows, from what both parts measured."""

from __future__ import annotations

import statistics
from typing import Any

from ..records import Row

PARTS = ("kernel", "together")
Case = dict[str, Any]


def summarise(rows: dict[str, Row]) -> dict[str, Any]:
    """Rates in 1e9 parameters a second, and ratios; a part that failed says so."""
    makers = {"kernel": _kernel, "together": _together}
    summary: dict[str, Any] = {}
    for part, row in rows.items():
        summary |= makers[part](row["result"]) if row["status"] == "ok" else {f"{part}_failed": row["message"]}
    return summary


def _kernel(result: dict[str, Any]) -> dict[str, Any]:
    """The ratios of bf16 with most threads stand for the kernel."""
    rates = [_rates(group["cases"]) for group in result["groups"] if group["compared"] == "rate"]
    most = max(result["settings"]["threads"])
    chosen = next(row for row in rates if row["dtype"] == "bfloat16" and row["threads"] == most)
    return {
        "kernel_gparams": chosen["adam_gparams"],
        "kernel_over_traffic": chosen["over_traffic"],
        "kernel_over_torch": chosen["over_torch"],
        "kernel_rates": rates,
        "kernel_choices": [
            {
                "compared": group["compared"],
                **{key: case[key] for key in ("work", "dtype", "place", "tuning", "launcher", "main")},
                "gparams": case["gparam_per_s"],
            }
            for group in result["groups"]
            if group["compared"] != "rate"
            for case in group["cases"]
        ],
    }


def _rates(cases: list[Case]) -> dict[str, Any]:
    by_work = {case["work"]: case for case in cases}
    adam = by_work["adam"]
    return {
        "dtype": adam["dtype"],
        "threads": adam["threads"],
        **{f"{work}_gparams": case["gparam_per_s"] for work, case in by_work.items()},
        "adam_gb_per_s": adam["gb_per_s"],
        "over_traffic": _times_as_fast(adam, by_work["traffic"]),
        "over_torch": _times_as_fast(adam, by_work["torch"]),
    }


def _times_as_fast(case: Case, other: Case) -> float:
    """The median over samples that took turns."""
    ratios: list[float] = [
        theirs / mine for mine, theirs in zip(case["samples_s"], other["samples_s"], strict=True)
    ]
    return statistics.median(ratios)


def _together(result: dict[str, Any]) -> dict[str, Any]:
    """The best of the update, over the best that memory carried, whatever the threads."""
    both = [case for case in result["cases"] if case["who"] == "both"]
    best = {
        work: max((case for case in both if case["work"] == work), key=lambda case: float(case["gparam_per_s"]))
        for work in ("adam", "traffic")
    }
    return {
        "together_gparams": best["adam"]["gparam_per_s"],
        "together_gb_per_s": best["adam"]["gb_per_s"],
        "together_threads": best["adam"]["threads"],
        "together_device_share": statistics.median(best["adam"]["device_shares"]),
        "dram_gb_per_s": best["traffic"]["gb_per_s"],
        "together_over_dram": best["adam"]["gb_per_s"] / best["traffic"]["gb_per_s"],
        "together_cases": [
            {key: case[key] for key in ("work", "who", "threads", "gparam_per_s", "gb_per_s")}
            for case in result["cases"]
        ],
    }
