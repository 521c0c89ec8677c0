"""``memferry profile``: a profile that is shown, kept, written and read again."""

from __future__ import annotations

from pathlib import Path

import pytest

from memferry_rt.plan.profile import Phase, WeightPlace, load_profile
from memferry_tools.train import presets

from .conftest import Command

SIZES = ("--micro-batch", "1", "--sequence", "8", "--device", "emulated")


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shape = presets.ModelShape(hidden=32, layers=3, ffn=48, heads=2, vocabulary=50)
    monkeypatch.setitem(presets.PRESETS, "tiny", presets.Preset(shape, 2, 16, 1e-3, checkpointing=True))


def test_a_profile_is_shown_and_written(memferry: Command, tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    outcome = memferry("profile", *SIZES, "--json", str(out))
    assert outcome.status == 0
    assert "profile, EMULATED" in outcome.out
    assert "tiny, 1 x 8 tokens, float32" in outcome.out
    profile = load_profile(out)
    assert profile.emulated
    assert profile.checkpointing
    assert [layer.name for layer in profile.layers] == [
        "embedding", "blocks.0", "blocks.1", "blocks.2", "norm", "head",
    ]  # fmt: skip
    for layer in profile.layers[1:4]:
        assert layer.find(Phase.FORWARD, WeightPlace.RING) is not None
        assert layer.tokens == 8


def test_the_second_time_it_is_found(memferry: Command) -> None:
    assert "embedding, blocks.0, norm, head and those like them" in memferry("profile", *SIZES).out
    assert "--anew measures again" in memferry("profile", *SIZES).out
    assert "and those like them" in memferry("profile", *SIZES, "--anew").out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--preset", "none"), "--preset"),
        (("--device", "tpu"), "--device"),
        (("--dtype", "int8"), "--dtype"),
        (("--micro-batch", "0"), "--micro-batch"),
        (("--sequence", "-1"), "--seq: -1"),
        (("--json", ""), "--json"),
        (("--json", "/nowhere/at/all.json"), "--json"),
    ],
)
def test_what_makes_no_sense_is_refused(memferry: Command, arguments: tuple[str, ...], told: str) -> None:
    outcome = memferry("profile", *SIZES, *arguments)
    assert outcome.status == 2
    assert told in outcome.err
