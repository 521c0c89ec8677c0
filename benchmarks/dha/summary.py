"""The figures of direct host access that the documentation shows, from the rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..records import Row
from .training import ROWS as MODELS

Case = dict[str, Any]


def summarise(rows: dict[str, Row]) -> dict[str, Any]:
    """Figures by row; of one that failed, why."""
    found: dict[str, Any] = {}
    for name, row in rows.items():
        if row["status"] != "ok":
            found[name] = {"failed": row["message"]}
        elif name in MODELS:
            found[name] = _training(row, rows)
        else:
            found[name] = MAKERS[name](row["result"], _link(rows))
    return found


def _link(rows: dict[str, Row]) -> dict[str, float] | None:
    """Bytes a second of the copy engines, each way, in the same run."""
    row = rows.get("link")
    if row is None or row["status"] != "ok":
        return None
    result = row["result"]
    return {way: result["nbytes"] / result[way]["median_s"] for way in ("to_device", "from_device")}


def _link_figures(result: Case, _: Any) -> Case:
    nbytes = result["nbytes"]
    rates = {way: nbytes / result[way]["median_s"] for way in ("to_device", "from_device")}
    for what in ("kernel_reads", "kernel_writes"):
        rates[what] = {
            blocks: result["kernel_nbytes"] / entry["median_s"] for blocks, entry in result[what].items()
        }  # type: ignore[assignment]
    return rates


def _embedding(result: Case, _: Any) -> list[Case]:
    return [
        {
            "tokens": case["tokens"],
            "in_place_s": case["in_place"]["median_s"],
            "copied_s": case["copied"]["median_s"],
            "times_faster": case["copied"]["median_s"] / case["in_place"]["median_s"],
            "bytes_per_second": case["nbytes"] / case["in_place"]["median_s"],
        }
        for case in result["cases"]
    ]


def _rows(result: Case, link: dict[str, float] | None) -> list[Case]:
    found = []
    for case in result["cases"]:
        rates = {
            "rows_and_zeros": case["nbytes"] / case["rows_and_zeros"]["median_s"],
            "whole": case["nbytes"] / case["whole"]["median_s"],
            "index_copy": case["written_nbytes"] / case["index_copy"]["median_s"],
        }
        kernel = {n: case["written_nbytes"] / entry["median_s"] for n, entry in case["kernel"].items()}
        shares = {f"{name}_over_link": rate / link["from_device"] for name, rate in rates.items()} if link else {}
        sizes = {key: case[key] for key in ("tokens", "rows", "zeroed_rows")}
        found.append({**sizes, **rates, **shares, "kernel_by_blocks": kernel})
    return found


def _weight_gradient(result: Case, _: Any) -> list[Case]:
    nbytes, transfer = result["nbytes"], result["transfer"]["median_s"]
    found = []
    for case in result["cases"]:
        best = min(case["panels"], key=_median)
        bound = max(case["compute"]["median_s"], transfer)
        found.append(
            {
                "tokens": case["tokens"],
                "compute_s": case["compute"]["median_s"],
                "transfer_s": transfer,
                "one_kernel_s": case["one_kernel"]["median_s"],
                "one_kernel_bytes_per_second": nbytes / case["one_kernel"]["median_s"],
                "panels_s": best["median_s"],
                "panels_bytes_per_second": nbytes / best["median_s"],
                "panels_of": {key: best[key] for key in ("panel_nbytes", "carrier")},
                "panels_exact": best["exact"],
                "over_bound": min(best["median_s"], case["one_kernel"]["median_s"]) / bound,
            }
        )
    return found


def _ring(result: Case, _: Any) -> list[Case]:
    copy = result["copy"]["median_s"]
    found = []
    for case in result["cases"]:
        figures: Case = {"tokens": case["tokens"], "copy_s": copy}
        for way in ("forward", "input_gradient"):
            best = min(case[way], key=_median)
            compute = case[f"{way}_compute"]["median_s"]
            figures[f"{way}_compute_s"] = compute
            figures[f"{way}_s"] = best["median_s"]
            figures[f"{way}_over_bound"] = best["median_s"] / max(copy, compute)
            figures[f"{way}_panels"] = {key: best.get(key) for key in ("panel_nbytes", "gathered_by")}
            figures[f"{way}_exact"] = best["exact"]
        found.append(figures)
    return found


def _beside(result: Case, _: Any) -> list[Case]:
    return [
        {
            "neighbour": case["neighbour"],
            "slow_down": case["slow_down"],
            "bytes_per_second": sorted(case["bytes_per_second"])[len(case["bytes_per_second"]) // 2],
        }
        for case in result["cases"]
    ]


def _training(row: Row, rows: dict[str, Row]) -> Case:
    """An iteration against what bounds it, each measured in the same run: computing, the link, host memory."""
    report, summary = row["result"]["report"], row["result"]["summary"]
    steps, link, memory = max(1, report["steps"]), _link(rows), rows.get("memory")
    bounds = {"compute": report["times"]["busy"]}
    if link is not None:
        ways = (("to_device", "host_to_device_nbytes"), ("from_device", "device_to_host_nbytes"))
        bounds |= {way: report[moved] / steps / link[way] for way, moved in ways}
    if memory is not None and memory["status"] == "ok":
        bounds["memory"] = report["dram_nbytes"] / steps / memory["result"]["bytes_per_second"]
    return {
        "iteration_s": summary["iteration_s"],
        "device_peak_bytes": summary["device_peak_bytes"],
        "device_memory": report["device_memory"],
        "tokens_per_second": summary["tokens_per_second"],
        "bounds_s": bounds,
        "over_bound": summary["iteration_s"] / max(bounds.values()),
    }


def _median(entry: Case) -> float:
    return float(entry["median_s"])


MAKERS: dict[str, Callable[[Case, Any], Any]] = {
    "link": _link_figures,
    "memory": lambda result, _: {key: result[key] for key in ("threads", "bytes_per_second")},
    "embedding": _embedding,
    "rows": _rows,
    "weight_gradient": _weight_gradient,
    "ring": _ring,
    "beside": _beside,
}
