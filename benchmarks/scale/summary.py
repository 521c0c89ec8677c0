"""The figures of every row: rates, efficiency against one GPU, what binds, and how far the prediction is off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..records import Row
from .rows import LINKS, MEMORY, TOPOLOGY, Job

PLENTY = 0.8  # in use: a resource that binds


def summarise(rows: dict[str, Row]) -> dict[str, Any]:
    """By the rows' names."""
    own: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        TOPOLOGY: _topology,
        LINKS: _links,
        MEMORY: lambda result: result,
    }
    figures: dict[str, Any] = {}
    for name, row in rows.items():
        if row["status"] != "ok":
            figures[name] = {row["status"]: row["message"], **row.get("predicted", {})}
        elif name in own:
            figures[name] = own[name](row["result"])
        else:
            figures[name] = _trained(row, rows.get(MEMORY))
    for name, row in rows.items():
        if "job" in row and "iteration_s" in figures[name]:
            figures[name] |= _against_one(_job(row), rows, figures)
    return figures


def _job(row: Row) -> Job:
    return Job(**{name: value for name, value in row["job"].items() if name != "steps"})


def _topology(result: dict[str, Any]) -> dict[str, Any]:
    return {"name": result["name"], "devices": [device["name"] for device in result["devices"]]}


def _links(result: dict[str, Any]) -> dict[str, Any]:
    """Rates by helpers, those over the direct link's, and the values of the cases."""
    relays = result["relays"] or []
    ratios = [
        {
            "helpers": row["helpers"],
            **{
                direction: {size: rate / relays[0][direction][size] for size, rate in row[direction].items()}
                for direction in ("h2d", "d2h")
            },
        }
        for row in relays
    ]
    found = {"break_even_bytes": result["break_even_bytes"], "gb_per_s": relays, "over_direct": ratios}
    pulling, processors, predicted = (
        result[name] and result[name]["values"]
        for name in ("both_pulling", "cpu_share", "predicted_over_measured")
    )
    found["all_pulling_gb_per_s"] = pulling and {"direct": pulling[0][0], "engine": pulling[1][0]}
    found["all_pulling_ratio"] = pulling and pulling[1][0] / pulling[0][0]
    found["cpu_share"] = processors and max(value for line in processors for value in line if value is not None)
    hits = [abs(value - 1) <= 0.1 for line in predicted or [] for value in line if value is not None]
    found["predicted_within_10_percent"] = sum(hits) / len(hits) if hits else None
    return found


def _trained(row: Row, memory: Row | None) -> dict[str, Any]:
    job, result = _job(row), row["result"]
    cores = row["processor_s"] / row["wall_s"] / row["processors"]
    if job.system == "deepspeed":
        iteration_s = result["iteration_s"]
        return {
            "iteration_s": iteration_s,
            "tokens_per_second": job.tokens / iteration_s,
            "device_peak_bytes": result["device_peak_bytes"],
            "processors_in_use": cores,
            **_predicted(row, iteration_s),
        }
    summary, report = result["summary"], result["report"]
    times, iteration_s = report["times"], summary["iteration_s"]
    total = times["total"] or 1.0
    traffic = job.gpus * report["dram_nbytes"] / report["steps"] / iteration_s
    found = {
        "iteration_s": iteration_s,
        "tokens_per_second": summary["tokens_per_second"],
        "host_bytes": report["host_nbytes"],
        "device_peak_bytes": summary["device_peak_bytes"],
        "busy_share": times["busy"] / total,
        "exposed_optimizer_share": (times["update"] + times["step"]) / total,
        "exposed_copy_share": times["copy"] / total,
        "host_traffic_bytes_per_s": traffic,
        "host_traffic_share": None,
        "processors_in_use": cores,
    }
    if memory is not None and memory["status"] == "ok":
        found["host_traffic_share"] = traffic / memory["result"]["bytes_per_second"]
    carried = sum(each["carried_in"] + each["carried_out"] for each in report.get("helpers", ()))
    found["helper_bytes_per_step"] = carried // report["steps"]
    return {**found, **_predicted(row, iteration_s), "bound_by": _bound(found)}


def _predicted(row: Row, iteration_s: float) -> dict[str, Any]:
    predicted = row["predicted"].get("predicted_s")
    return {
        "predicted_s": predicted,
        "predicted_error": None if predicted is None else predicted / iteration_s - 1,
    }


def _bound(found: dict[str, Any]) -> str:
    """In words, by what was measured; host memory by what it carries, where that was measured too."""
    if (found["host_traffic_share"] or 0) >= PLENTY:
        return "host memory"
    if found["busy_share"] >= PLENTY:
        return "the device"
    waits = {"updates": found["exposed_optimizer_share"], "copies": found["exposed_copy_share"]}
    return f"waiting for {max(waits, key=waits.__getitem__)}"


def _against_one(job: Job, rows: dict[str, Row], figures: dict[str, Any]) -> dict[str, Any]:
    """Against the same work on one GPU, DeepSpeed on as many, and as many GPUs without helpers."""
    mine, found = figures[job.name]["tokens_per_second"], {}
    whole = job.gpus * job.accumulate
    others = {
        "efficiency": replace(job, gpus=1),
        "efficiency_fixed_batch": replace(job, gpus=1, accumulate=whole),
        "over_deepspeed": replace(job, helpers=0, system="deepspeed"),
        "over_no_helpers": replace(job, helpers=0),
    }
    unlike = set() if job.accumulate == 1 else {"efficiency", "over_no_helpers", "over_deepspeed"}
    unlike |= {"over_no_helpers"} if not job.helpers else {"efficiency", "efficiency_fixed_batch"}
    unlike |= {"over_deepspeed"} if job.system == "deepspeed" else set()
    for name, other in others.items():
        theirs = figures.get(other.name, {}).get("tokens_per_second")
        if name in unlike or theirs is None or other == job:
            continue
        share = job.gpus if name.startswith("efficiency") else 1
        found[name] = mine / theirs / share
    return found
