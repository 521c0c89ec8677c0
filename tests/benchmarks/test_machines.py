"""Machines that were simulated: the file in the repository is what the code gives now."""

from __future__ import annotations

import json

import pytest

from benchmarks import machines, tables

CASES = {case.name: case for case in machines.CASES}
KEPT = json.loads(machines.RESULT.read_text())["summary"]["rows"]


def test_every_case_is_kept() -> None:
    assert list(KEPT) == list(CASES)


@pytest.mark.parametrize("name", list(CASES)[:3] + list(CASES)[7:11])
def test_what_is_kept_is_what_is_simulated_now(name: str) -> None:
    found = machines.by_default(CASES[name])
    kept = {key: KEPT[name]["seconds"][key] for key in found}
    assert kept == pytest.approx(found, rel=1e-5), "run python -m benchmarks.machines, and see what has changed"


@pytest.mark.slow
def test_what_is_kept_is_what_is_planned_now() -> None:
    assert json.loads(json.dumps(machines.document()))["summary"]["rows"] == KEPT


@pytest.mark.parametrize("name", CASES)
def test_plans_and_helpers_never_lose(name: str) -> None:
    seconds = KEPT[name]["seconds"]
    assert seconds["planned"] <= seconds["default"]
    for case in ("default", "planned"):
        for better in ("helped", "gathered"):
            assert seconds.get(f"{case}, {better}", 0.0) <= seconds[case]


def test_the_page_has_the_tables() -> None:
    page = (tables.ROOT / "docs/multi-gpu.md").read_text()
    for name in ("machines", "machine_loads", "machine_hosts", "machine_numbers"):
        assert tables.render(name) in page
