"""The timeline: intervals of every mode in their order, and a picture of them."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import timeline


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return timeline.record("emulated", small=True)


def of(mode: dict[str, Any], lane: str) -> list[tuple[str, float, float]]:
    return [(each["label"], each["begin_s"], each["end_s"]) for each in mode["intervals"] if each["lane"] == lane]


def test_copies_follow_one_another(recorded: dict[str, Any]) -> None:
    for mode in recorded["modes"]:
        copies = of(mode, timeline.COPY)
        assert bool(copies) == (mode["mode"] != "weights DHA")
        for earlier, later in itertools.pairwise(copies):
            assert earlier[2] <= later[1]
        for lane in (copies, of(mode, timeline.COMPUTE)):
            assert [label for label, *_ in lane] == sorted(label for label, *_ in lane)
            assert len({label for label, *_ in lane}) in (0, timeline.LAYERS)


def test_what_is_computed_has_arrived_and_what_leaves_is_made(recorded: dict[str, Any]) -> None:
    for mode in recorded["modes"]:
        copies, computed = of(mode, timeline.COPY), of(mode, timeline.COMPUTE)
        for copy, compute in zip(copies, computed, strict=bool(copies)):
            if mode["mode"].startswith("weights"):
                assert copy[2] <= compute[1]
            else:
                assert compute[2] <= copy[1]


def test_the_picture_is_drawn_from_what_was_recorded(
    recorded: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "timeline.json").write_text(json.dumps(recorded))
    arguments = ["timeline", "--from", str(tmp_path / "timeline.json"), "--plot", str(tmp_path / "timeline.png")]
    monkeypatch.setattr(sys, "argv", arguments)
    timeline.main()
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
