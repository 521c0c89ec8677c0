from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import tables
from benchmarks.optimizer import kernel, slabs, together
from benchmarks.optimizer.slabs import STATE, Slabs
from benchmarks.optimizer.summary import summarise
from memferry_allocator import DevicePool, open_device
from memferry_rt.native import load_adam
from memferry_rt.streaming import BYTES, SLOTS, UNIT

pytestmark = pytest.mark.skipif(load_adam() is None, reason="no native kernel")
DTYPE = "bfloat16"


def bits(home: Slabs) -> list[torch.Tensor]:
    state = [home.tensor(name).view(torch.int32).clone() for name in STATE]
    return [*state, home.tensor(f"weight {DTYPE}", DTYPE).view(torch.int16).clone()]


@pytest.mark.parametrize("device", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_sharing_has_the_bits_of_the_cpu_alone_and_traffic_changes_no_state(device: str) -> None:
    (driver, _), adam = open_device(device), load_adam()
    assert adam is not None
    home = Slabs(driver, 40 * UNIT, [DTYPE])
    layers, carried = (
        [home.operands(DTYPE, at * UNIT, 10 * UNIT, zeros=zeros) for at in (0, 10, 20, 30)]
        for zeros in (False, True)
    )
    ring = 4 * SLOTS * BYTES * UNIT
    pool = DevicePool(driver, 0, 1 << 20)
    update = together.Update(driver, 0, adam, layers, pool, ring)
    traffic = together.Traffic(driver, 0, adam, carried, pool)
    sharing = together.Sharing(driver, 2)
    found = []
    for share in (0.0, 0.5, 1.0):
        home.fill()
        before = bits(home)
        sharing.run(traffic, share)
        assert all(torch.equal(one, other) for one, other in zip(before[:3], bits(home)[:3], strict=True))
        sharing.run(update, share)
        found.append(bits(home))
    assert not torch.equal(found[0][0], before[0])
    for other in found[1:]:
        assert all(torch.equal(one, mine) for one, mine in zip(found[0], other, strict=True))
    sharing.close()
    stream = driver.create_stream(0)
    update.close(stream)
    traffic.close(stream)
    assert pool.used == 0


def run(main: Any, arguments: list[str], out: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments, "--json", str(out)])
    main()
    return {"status": "ok", "result": json.loads(out.read_text())}


def test_both_parts_give_the_figures_of_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "PATTERN", 1 << 12)
    small = ["--parameters", "20000", "--threads", "1,2", "--samples", "2"]
    rows = {
        "kernel": run(kernel.main, [*small, "--blocks", "256"], tmp_path / "kernel.json", monkeypatch),
        "together": run(
            together.main,
            [*small, "--device", "emulated", "--layers", "4"],
            tmp_path / "together.json",
            monkeypatch,
        ),
    }
    summary = summarise(rows)
    for name in ("kernel_over_traffic", "kernel_over_torch", "together_gparams", "together_over_dram"):
        assert summary[name] > 0
    for table in (tables.kernel, tables.choices, tables.together):
        head, *lines = table(summary)
        assert lines
        assert all(len(line) == len(head) for line in lines)


def test_a_part_that_failed_leaves_the_other_and_its_tables() -> None:
    summary = summarise({"together": {"status": "failed", "message": "no device"}})
    assert summary == {"together_failed": "no device"}
    assert tables.together(summary) == tables.kernel(summary) == []


def test_a_table_without_a_result_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    text = "<!-- table: kernel -->\nold\n<!-- end of table -->"
    assert "Not measured yet" in tables.with_tables(text)
    assert "old" not in tables.with_tables(text)
