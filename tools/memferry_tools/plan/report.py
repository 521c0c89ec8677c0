"""A plan, or a simulated iteration, as JSON with everything that it was made of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from memferry_rt.plan import Bound, Machine, NextBest, Plan
from memferry_rt.plan.evaluate import Run
from memferry_rt.plan.plan_file import dumps_plan
from memferry_rt.plan.timeline import device_memory, spans

from ..version import version

SCHEMA, VERSION = "memferry.plan_report", 1


def document(
    plan: Plan,
    machine: Machine,
    run: Run,
    *,
    bounds: Sequence[Bound] = (),
    following: Mapping[str, NextBest] | None = None,
    saved: Mapping[str, float] | None = None,
    usage: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """What goes to ``--json``; times are seconds from the beginning of the iteration, sizes bytes."""
    return {
        "schema": SCHEMA,
        "schema_version": VERSION,
        "memferry": version(),
        "machine": {**asdict(machine), "sources": dict(machine.sources)},
        "plan": json.loads(dumps_plan(plan)),
        "seconds": run.seconds,
        "usage": dict(usage or {}),
        "bounds": [asdict(bound) for bound in bounds],
        "next_best": {
            name: {"mode": each.mode.value, "longer_seconds": each.seconds}
            for name, each in (following or {}).items()
        },
        "one_more_gib_saves_seconds": dict(saved or {}),
        "memory": {"device": device_memory(run), "host": [[0.0, plan.host_nbytes]]},
        "timeline": [asdict(span) for span in spans(run)],
    }
