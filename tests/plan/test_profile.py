"""Profiles as files: what is written is read again, and anything else is refused by the name of its field."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memferry_rt.errors import PlanError
from memferry_rt.plan import (
    Copy,
    CopySample,
    GradientPlace,
    LayerKind,
    LayerProfile,
    Phase,
    Profile,
    Timing,
    WeightPlace,
    load_profile,
    save_profile,
)
from memferry_rt.plan.profile import dumps_profile, loads_profile

EMBED = LayerProfile(
    name="embed",
    kind=LayerKind.EMBEDDING,
    parameters=256 * 64,
    weight_nbytes=256 * 64 * 2,
    gradient_nbytes=256 * 64 * 2,
    state_nbytes=256 * 64 * 12,
    shapes=((256, 64),),
    tokens=32,
    timings=(
        Timing(Phase.FORWARD, (1e-5, 3e-5, 2e-5)),
        Timing(Phase.FORWARD, (4e-5,), WeightPlace.HOST, beside=Copy.TO_DEVICE, copy_rate=3e10, exact=True),
        Timing(Phase.BACKWARD, (5e-5,), gradients=GradientPlace.HOST, exact=False),
    ),
)
PROFILE = Profile(
    device="Example device",
    torch="2.11.0",
    dtype="bfloat16",
    micro_batch=2,
    sequence=16,
    checkpointing=False,
    layers=(EMBED,),
    machine={"cores": 16, "date": "2026-11-30"},
    to_device=(CopySample(1 << 20, (2e-5, 4e-5)),),
)


def test_file_and_back(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_profile(PROFILE, path)
    assert load_profile(path) == PROFILE


def test_the_file_says_what_it_is() -> None:
    document = json.loads(dumps_profile(PROFILE))
    assert (document["schema"], document["version"]) == ("memferry.profile", 1)
    assert document["layers"][0]["timings"][1] == {
        "phase": "forward",
        "samples": [4e-5],
        "weights": "host",
        "beside": "h2d",
        "copy_rate": 3e10,
        "exact": True,
    }


def test_the_time_of_a_way_is_the_median_of_its_samples() -> None:
    alone, beside = EMBED.find(Phase.FORWARD), EMBED.find(Phase.FORWARD, WeightPlace.HOST, beside=Copy.TO_DEVICE)
    assert alone is not None
    assert beside is not None
    assert (alone.seconds, beside.seconds) == (2e-5, 4e-5)
    assert EMBED.find(Phase.FORWARD, WeightPlace.HOST) is None
    assert PROFILE.to_device[0].seconds == pytest.approx(3e-5)


Change = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(schema="memferry.topology"), "schema: 'memferry.topology' is not 'memferry.profile'"),
        (lambda d: d.update(version=2), "version: 2 is not 1"),
        (lambda d: d.pop("torch"), "torch is missing"),
        (lambda d: d.update(speed=3), "speed is no field"),
        (lambda d: d.update(layers=[]), "layers: a profile has at least one"),
        (lambda d: d.update(layers={}), "layers: {} is not a list"),
        (lambda d: d["layers"].append(d["layers"][0]), "'embed' is there twice"),
        (lambda d: d["layers"][0].update(kind="attention"), r"layers\[0\]\.kind: 'attention'.*embedding, linear"),
        (lambda d: d["layers"][0].update(parameters=-1), r"layers\[0\]: parameters: -1 is less than 0"),
        (lambda d: d["layers"][0].update(parameters=1.5), r"layers\[0\]\.parameters: 1\.5 is not a whole number"),
        (lambda d: d["layers"][0].update(tokens=True), r"layers\[0\]\.tokens: True is not a whole number"),
        (lambda d: d["layers"][0]["timings"][0].update(samples=[]), r"timings\[0\]: samples: .*at least one"),
        (lambda d: d["layers"][0]["timings"][0].update(samples=[0]), r"timings\[0\]: samples: .*more than 0"),
        (lambda d: d["layers"][0]["timings"][0].update(samples=["1"]), r"samples\[0\]: '1' is not a number"),
        (lambda d: d["layers"][0]["timings"][1].update(copy_rate=0), "copy_rate: 0.0 is not more than 0"),
        (lambda d: d["to_device"][0].update(nbytes=0), r"to_device\[0\]: a copy has more than 0 bytes"),
        (lambda d: d.update(both_ways=0), "both_ways: 0.0 is not more than 0"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_by_the_name_of_the_field(
    tmp_path: Path, change: Change, words: str
) -> None:
    document = json.loads(dumps_profile(PROFILE))
    change(document)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(document))
    with pytest.raises(PlanError, match=words) as caught:
        load_profile(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"schema": NaN}', "[" * 100_000])
def test_what_is_no_profile_at_all_is_refused(text: str) -> None:
    with pytest.raises(PlanError):
        loads_profile(text)


def test_a_number_that_is_none_is_refused() -> None:
    with pytest.raises(PlanError, match=r"copy_rate.*finite"):
        loads_profile(dumps_profile(PROFILE).replace("30000000000.0", "NaN"))


def test_a_file_that_is_not_there_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"nowhere\.json cannot be read"):
        load_profile(tmp_path / "nowhere.json")
    path = tmp_path / "bytes"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="is not text"):
        load_profile(path)


def test_it_holds_for_its_own_device_model_and_batch() -> None:
    PROFILE.check(
        device="Example device", torch="2.11.0", dtype="bfloat16", tokens=32, shapes={"embed": [(256, 64)]}
    )
    PROFILE.check(shapes={"embed": [(64, 256)]})
    PROFILE.check()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"device": "NVIDIA H200"}, "another device: 'Example device', and this is 'NVIDIA H200'"),
        ({"torch": "2.12.0"}, "another torch"),
        ({"dtype": "float32"}, "another dtype"),
        ({"tokens": 64}, "another number of tokens: 32, and this is 64"),
        ({"shapes": {"head": [(256, 64)]}}, "no layer 'head'"),
        ({"shapes": {"embed": [(512, 64)]}}, "'embed' has other sizes"),
    ],
)
def test_for_anything_else_it_is_refused(other: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        PROFILE.check(**other)
