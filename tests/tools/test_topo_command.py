"""``memferry topo``: machines as text, JSON and picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from memferry_transport.topology import load, machine, machine_names, render_matrix

from .conftest import Command


def test_emulated_devices_are_shown_as_such(memferry: Command) -> None:
    outcome = memferry("topo", "--device", "emulated")
    assert outcome.status == 0
    assert "topo, EMULATED" in outcome.out
    assert "1 x Emulated accelerator" in outcome.out
    assert "55.4, 55.2 GB/s" in outcome.out


@pytest.mark.parametrize("name", machine_names())
def test_every_machine_that_comes_with_it_is_shown_kept_and_read_again(
    memferry: Command, tmp_path: Path, name: str
) -> None:
    path = tmp_path / "machine.json"
    outcome = memferry("topo", "--fixture", name, "--json", str(path))
    assert outcome.status == 0
    assert "EMULATED" not in outcome.out
    for line in render_matrix(machine(name)).splitlines():
        assert line in outcome.out
    assert load(path) == machine(name)
    again = memferry("topo", "--from", str(path))
    assert again.out.splitlines()[1:] == outcome.out.splitlines()[1:-1], "but for the title and what was written"


@pytest.mark.parametrize("name", ["h200-x1", "a100-x8"])
def test_the_picture_is_a_png(memferry: Command, tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "machine.png"
    assert memferry("topo", "--fixture", name, "--picture", str(path)).status == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--device", "cuda:0"], ["--device", "auto, cuda or emulated"]),
        (["--fixture", "dgx"], ["--fixture", "'dgx'", "h200-x2"]),
        (["--fixture", "h200-x2", "--from", "x.json"], ["--from", "not both"]),
        (["--from", "/nowhere.json"], ["--from", "/nowhere.json cannot be read"]),
        (["--from", ""], ["--from", "empty"]),
        (["--json", "/nowhere/out.json"], ["--json", "no folder /nowhere"]),
        (["--picture", "/"], ["--picture", "folder"]),
    ],
    ids=" ".join,
)
def test_mistakes_are_one_line(memferry: Command, arguments: list[str], parts: list[str]) -> None:
    outcome = memferry("topo", *arguments)
    assert outcome.status == 2
    assert outcome.err.startswith("memferry: error: ")
    assert outcome.err.count("\n") == 1
    for part in parts:
        assert part in outcome.err


def test_a_file_that_is_no_topology_is_named_with_the_field(memferry: Command, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text('{"schema": "memferry.topology", "version": 1, "devices": 3}')
    outcome = memferry("topo", "--from", str(path))
    assert outcome.status == 2
    assert "machine.json" in outcome.err
    assert "devices" in outcome.err
