"""Rows that are chosen by pattern, and measured as far as there is time."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks import visits
from benchmarks.records import Records, Row

NAMES = ["one/a", "one/b", "two/a"]


def asked(*words: str) -> tuple[list[str], argparse.Namespace]:
    parser = argparse.ArgumentParser()
    visits.add_arguments(parser, NAMES, limit=100, out=None)
    arguments = parser.parse_args(words)
    return visits.chosen(parser, arguments), arguments


def test_rows_are_chosen_by_pattern_and_in_order() -> None:
    assert asked()[0] == NAMES
    assert asked("--rows", "two/a,one/b")[0] == ["one/b", "two/a"]
    assert asked("--rows", "*/a,one/a")[0] == ["one/a", "two/a"]


def test_a_pattern_of_nothing_is_refused_and_rows_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        asked("--rows", "three/*")
    assert "there is no 'three/*'; known are one/a, one/b, two/a" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        asked("--list")
    assert capsys.readouterr().out.split() == NAMES


def test_what_there_is_no_time_for_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now, limits = [0.0], []
    monkeypatch.setattr(visits.time, "monotonic", lambda: now[0])

    def measure(name: str, limit: float) -> Row:
        limits.append(limit)
        now[0] += 70
        return {"status": "ok", "name": name}

    def figures(rows: dict[str, Row]) -> dict[str, str]:
        return dict.fromkeys(rows, "fine")

    wanted, arguments = asked("--limit-total", "145")
    visits.visit(wanted, measure, Records(tmp_path / "x.json", "x", NAMES, figures), arguments, figures)
    assert limits == [100, 75]
    kept = Records(tmp_path / "x.json", "x", NAMES, figures).rows
    assert list(kept) == ["one/a", "one/b"]
    assert capsys.readouterr().out.splitlines()[-1] == "two/a: left for another visit"
