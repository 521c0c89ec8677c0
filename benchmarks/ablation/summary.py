"""The figures of the arms: each beside the one before it and its prediction, and the planner's choice."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from ..records import Row
from .arms import ALONE, ARMS, LADDER, MODELS, PLANNER


def summarise(rows: dict[str, Row]) -> dict[str, Any]:
    """Each row's figures, and how the planner's choice compares with the best of the others."""
    figures = {name: _figures(rows, name) for name in rows}
    for model in MODELS:
        ladder = [f"{model}/{arm}" for arm in LADDER if arm not in ALONE]
        measured = [(name, figures[name]["measured_s"]) for name in ladder if _is_measured(figures, name)]
        for (_, before), (name, after) in pairwise(measured):
            figures[name]["over_arm_before"] = after / before
    return {"rows": figures, "planner": {model: _planner(figures, model) for model in MODELS}}


def _is_measured(figures: dict[str, Any], name: str) -> bool:
    return "measured_s" in figures.get(name, {})


def _figures(rows: dict[str, Row], name: str) -> dict[str, Any]:
    row, model = rows[name], name.split("/")[0]
    found: dict[str, Any] = {"predicted_s": row.get("predicted_s"), "source": row["source"]}
    if row["status"] == "same":
        found["same_as"] = row["as"]
        row = rows.get(f"{model}/{row['as']}", row)
    if row["status"] != "ok":
        return {**found, row["status"]: row.get("message", "the other is not measured yet")}
    measured = row["result"]["summary"]["iteration_s"]
    found["measured_s"] = measured
    if found["predicted_s"]:
        found["error"] = found["predicted_s"] / measured - 1
    found["device_peak_bytes"] = row["result"]["summary"]["device_peak_bytes"]
    found["plan_notes"] = row["result"]["report"]["plan_notes"]
    first = _first(rows, model)
    if _comparable(row) and _comparable(first):
        found["same_losses"] = _losses(row) == _losses(first)
    return found


def _first(rows: dict[str, Row], model: str) -> Row:
    """The first arm of the model that was measured."""
    return next(rows[f"{model}/{arm}"] for arm in ARMS if rows.get(f"{model}/{arm}", {}).get("status") == "ok")


def _comparable(row: Row) -> bool:
    """Whether its kernels give the same losses every time."""
    result = row["result"]
    return bool(result["settings"]["deterministic"] or result["machine"]["emulated"])


def _losses(row: Row) -> list[float]:
    return [sample["loss"] for sample in row["result"]["samples"]]


def _planner(figures: dict[str, Any], model: str) -> dict[str, Any] | None:
    """Its choice beside the fastest arm; None where one of them is missing."""
    mine = figures.get(f"{model}/{PLANNER}", {}).get("measured_s")
    others = {
        arm: figures[f"{model}/{arm}"]["measured_s"]
        for arm in ARMS
        if arm != PLANNER and _is_measured(figures, f"{model}/{arm}")
    }
    if mine is None or not others:
        return None
    best = min(others, key=others.__getitem__)
    return {"measured_s": mine, "best_arm": best, "over_best": mine / others[best]}
