"""The tables of the scheduler: predictions, its own trials, the largest model, and what each idea gains."""

from __future__ import annotations

from typing import Any

from .cells import Rows, gib, number, under


def plan(summary: dict[str, Any]) -> Rows:
    """Iterations predicted and measured."""
    head = ("", "measured", "by formulas", "off by", "by a profile", "off by")
    return under(
        head,
        [
            (
                name,
                number(row["measured_s"], "{:.3f} s"),
                number(row.get("formula_s"), "{:.3f} s"),
                number(row["formula_error"], "{:+.1%}"),
                number(row.get("profile_s"), "{:.3f} s"),
                number(row["profile_error"], "{:+.1%}"),
            )
            for name, row in summary["rows"].items()
            if "failed" not in row
        ],
    )


def plan_auto(summary: dict[str, Any]) -> Rows:
    """``plan="auto"`` beside the default."""
    head = ("", "steps", "all of them, default", "auto", "the last, default", "auto", "auto over default", "plan")
    return under(
        head,
        [
            (
                name,
                str(row["steps"]),
                *(number(row[f"{who}_total_s"], "{:.1f} s") for who in ("default", "auto")),
                *(number(row[f"{who}_settled_s"], "{:.3f} s") for who in ("default", "auto")),
                number(row["settled_ratio"], "{:.3f}"),
                row["plan_source"],
            )
            for name, row in summary.get("auto", {}).items()
            if "failed" not in row
        ],
    )


def plan_largest(summary: dict[str, Any]) -> Rows:
    """The largest model."""
    head = ("", "parameters", "steps", "iteration", "predicted", "device peak", "host memory")
    return under(
        head,
        [
            (
                row["model"],
                f"{row['parameters'] / 1e9:.2f} B",
                str(row["steps"]),
                number(row["measured_s"], "{:.2f} s"),
                number(row["predicted_s"], "{:.2f} s"),
                f"{gib(row['device_peak_bytes'])} of {gib(row['device_memory'])}",
                f"{gib(row['host_bytes'])} of {gib(row['host_memory'])}",
            )
            for row in summary.get("largest", {}).values()
            if "failed" not in row
        ],
    )


def ablation(summary: dict[str, Any]) -> Rows:
    """Every arm of every model."""
    head = ("", "measured", "over the arm before", "predicted", "off by", "same losses")
    return under(
        head,
        [
            (
                name if "same_as" not in row else f"{name} (the plan of {row['same_as']})",
                number(row.get("measured_s"), "{:.3f} s"),
                number(row.get("over_arm_before"), "{:.3f}"),
                number(row["predicted_s"], "{:.3f} s"),
                number(row.get("error"), "{:+.1%}"),
                {True: "yes", False: "no"}.get(row.get("same_losses"), ""),
            )
            for name, row in summary["rows"].items()
            if "failed" not in row
        ],
    )


def planner(summary: dict[str, Any]) -> Rows:
    """Its choice beside the fastest arm."""
    head = ("", "the planner's choice", "the fastest other arm", "choice over it")
    return under(
        head,
        [
            (model, number(row["measured_s"], "{:.3f} s"), row["best_arm"], number(row["over_best"], "{:.3f}"))
            for model, row in summary["planner"].items()
            if row is not None
        ],
    )
