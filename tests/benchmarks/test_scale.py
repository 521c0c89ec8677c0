from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import records, scale


@pytest.mark.slow
@pytest.mark.slow
def test_two_ranks_on_the_emulated_device(tmp_path: Path) -> None:
    session = scale.Session("emulated", "tiny", 1, limit_s=240)
    file = records.Records(tmp_path / "scale.json", "scale", list(scale.ROWS), scale.summarise)
    for name in ("llama-1b-6GiB-1gpu", "llama-1b-6GiB-2gpu"):
        row = session.measure(scale.ROWS[name])
        assert row["status"] == "ok", row
        file.put(name, row)
    figures = json.loads((tmp_path / "scale.json").read_text())["summary"]["llama-1b-6GiB-2gpu"]
    assert figures["speedup"] > 0
    assert 1 <= figures["host_memory_ratio"] < 1.01


def test_one_gpu_has_half_of_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    session = scale.Session("cuda", None, 8, limit_s=1)
    assert session.command(scale.ROWS["llama-1b-6GiB-1gpu"])[:3] == ["taskset", "-c", "0,1,2,3"]
    both = session.command(scale.ROWS["llama-1b-6GiB-2gpu"])
    assert both[2] == "0,1,2,3,4,5,6,7"
    assert both[both.index("--nproc-per-node") + 1] == "2"
