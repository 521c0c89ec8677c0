from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.records import Records, Row, measured_apart


def names(rows: dict[str, Row]) -> dict[str, str]:
    return {name: row["status"] for name, row in rows.items()}


def test_a_row_takes_its_place_and_leaves_the_others(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    Records(path, "some", ["one", "two"], names).put("two", {"status": "ok", "result": 2})
    before = json.loads(path.read_text())["rows"]["two"]
    Records(path, "some", ["one", "two"], names).put("one", {"status": "failed", "message": "no"})
    found = json.loads(path.read_text())
    assert list(found["rows"]) == ["one", "two"]
    assert found["rows"]["two"] == before
    assert found["summary"] == {"one": "failed", "two": "ok"}
    assert {"date", "cpu", "cores"} <= found["rows"]["one"]["machine"].keys()


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    path.write_text('{"schema": "memferry.train", "schema_version": 1}')
    with pytest.raises(SystemExit, match="name another file"):
        Records(path, "some", ["one"], names)


def test_a_process_gives_its_result() -> None:
    code = "import pathlib, sys; pathlib.Path(sys.argv[2]).write_text('[3]')"
    assert measured_apart([sys.executable, "-c", code], 60) == {"status": "ok", "result": [3]}


def test_a_process_that_fails_gives_its_last_words() -> None:
    row = measured_apart([sys.executable, "-c", "raise SystemExit('out of luck')"], 60)
    assert row == {"status": "failed", "message": "exit status 1: out of luck"}


def test_a_process_that_does_not_end_is_ended() -> None:
    row = measured_apart([sys.executable, "-c", "import threading; threading.Event().wait()"], 0.1)
    assert row["status"] == "failed"
    assert row["message"].startswith("not over after 0.1 s")
