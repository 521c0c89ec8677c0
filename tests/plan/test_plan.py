"""Plans as data: written, read, compared, and refused for what they are not for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memferry_rt.errors import PlanError
from memferry_rt.plan import PlanOptions, compare_plans, load_plan, make_plan, parse_modes, save_plan
from memferry_rt.plan.acceptance import DriftWatch, is_faster
from memferry_rt.plan.modes import StateMode, WeightMode, format_modes
from memferry_rt.plan.plan import Plan
from memferry_rt.plan.plan_file import dumps_plan, loads_plan

from .machines import GIB, MIB, TINY, decoder

PLAN = make_plan(decoder(), PlanOptions(256 * MIB, host_memory=GIB)).plan


def test_file_and_back(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_plan(PLAN, path)
    assert load_plan(path) == PLAN
    assert json.loads(path.read_text())["schema"] == "memferry.plan"


def test_a_file_of_the_first_version_is_read() -> None:
    document = json.loads(dumps_plan(PLAN))
    assert document["version"] == 2
    assert "ranks" not in document, "what one process trains by is what the first version said, but for the number"
    assert loads_plan(json.dumps({**document, "version": 1})) == PLAN


def test_a_plan_for_ranks_is_for_so_many() -> None:
    several = replace(PLAN, ranks=4)
    assert loads_plan(dumps_plan(several)).ranks == 4
    assert compare_plans(PLAN, several) == ["ranks: 1 and 4"]
    several.check_ranks(4)
    for plan, ranks, words in (
        (several, 2, "for a group of 4 ranks, and here a group of 2 ranks trains; make one with --ranks 2"),
        (PLAN, 2, "for one rank, and here a group of 2 ranks"),
        (several, 1, "here one rank trains; make one with --ranks 1"),
    ):
        with pytest.raises(PlanError, match=words):
            plan.check_ranks(ranks)


def test_its_modes_are_modes_by_hand() -> None:
    names = [layer.name for layer in PLAN.layers]
    assert parse_modes(PLAN.modes, names) == PLAN.modes
    assert parse_modes(format_modes(PLAN.modes), names) == PLAN.modes
    again = make_plan(decoder(), PlanOptions(256 * MIB, host_memory=GIB, modes=PLAN.modes)).plan
    assert compare_plans(PLAN, again) == []


Change = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(schema="memferry.profile"), "schema: 'memferry.profile' is not 'memferry.plan'"),
        (lambda d: d.update(version=99), "version: 99 is not 1"),
        (lambda d: d.update(version=True), "version: True is not 1 to 2"),
        (lambda d: d.update(version=1, ranks=2), "ranks: it is no field of version 1"),
        (lambda d: d.update(ranks=0), "ranks: 0 is not 1 or more"),
        (lambda d: d.pop("fingerprint"), "fingerprint is missing"),
        (lambda d: d.update(colour="red"), "colour is no field"),
        (lambda d: d.update(layers=[]), "layers: a plan has at least one"),
        (lambda d: d["layers"].append(d["layers"][1]), "layers: .* is there 2 times"),
        (lambda d: d.update(seconds=0.0), "seconds: an iteration takes more than 0"),
        (lambda d: d.update(ring_nbytes=-1), "ring_nbytes: -1 is less than 0"),
        (lambda d: d.update(device_memory=1), "device_peak_nbytes: .* is more than device_memory"),
        (lambda d: d["layers"][1].update(weight="dax"), r"layers\[1\]\.weight: 'dax'.*resident, stream, dha"),
        (lambda d: d["layers"][1].update(weight="stream", state="resident"), r"state of blocks\.0 is resident"),
        (lambda d: d["arms"].update({"x": "fast"}), r"arms\.x: 'fast' is not a number"),
        (lambda d: d.update(notes="slow"), "notes: 'slow' is not a list"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path: Path, change: Change, words: str) -> None:
    document = json.loads(dumps_plan(PLAN))
    change(document)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    with pytest.raises(PlanError, match=words) as caught:
        load_plan(path)
    assert str(path) in str(caught.value)


@given(st.text(max_size=30))
def test_whatever_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanError):
        loads_plan(text)


def test_it_is_for_its_own_model_batch_and_device() -> None:
    PLAN.check(decoder(), device="NVIDIA H200")
    with pytest.raises(PlanError, match=r"is for model .* layer 'blocks\.4' is in the model alone"):
        PLAN.check(decoder(replace(TINY, layers=5)))
    with pytest.raises(PlanError, match=r"2 x 128 tokens, and these have 1 x 128"):
        PLAN.check(decoder(micro_batch=1))
    with pytest.raises(PlanError, match="for NVIDIA H200, and this is Emulated"):
        PLAN.check(device="Emulated accelerator")


def test_a_layer_that_it_has_not_is_named() -> None:
    assert PLAN.layer("blocks.2").name == "blocks.2"
    with pytest.raises(PlanError, match=r"no layer 'blocks\.9'; it has embedding, blocks\.0"):
        PLAN.layer("blocks.9")


def test_what_is_different_is_said_in_words() -> None:
    assert compare_plans(PLAN, replace(PLAN, seconds=1.0, notes=("other",))) == []
    other = replace(PLAN.layers[0], weight=WeightMode.DHA, state=StateMode.CPU)
    changed = replace(PLAN, layers=(other, *PLAN.layers[1:-1]), spare_slabs=7)
    found = compare_plans(PLAN, changed)
    assert found[0] == f"spare_slabs: {PLAN.spare_slabs} and 7"
    assert found[1].startswith("embedding: ")
    assert found[1].endswith("and dha+buffer+cpu")
    assert found[2] == "head is in the first alone"
    assert compare_plans(changed, PLAN)[2] == "head is in the second alone"


def test_a_plan_may_not_promise_more_memory_than_there_is() -> None:
    with pytest.raises(PlanError, match="is more than device_memory"):
        replace(PLAN, device_peak_nbytes=PLAN.device_memory + 1)


def test_it_has_what_it_is_made_of() -> None:
    assert isinstance(PLAN, Plan)
    parts = (PLAN.ring_nbytes, PLAN.stream_nbytes, PLAN.panel_nbytes, PLAN.pinned_nbytes, PLAN.resident_nbytes)
    assert sum(parts) + PLAN.slab_nbytes == PLAN.pool_nbytes


# -- keeping what was promised ----------------------------------------------------------------------------
def test_a_plan_is_accepted_if_its_iterations_are_shorter() -> None:
    assert is_faster([1.0, 1.1, 9.0], [1.2, 1.3, 1.2])
    assert not is_faster([1.2, 1.2], [1.2, 1.2])
    with pytest.raises(ValueError, match="must have been measured"):
        is_faster([], [1.0])


def test_a_new_plan_is_due_after_some_iterations_off_to_one_side() -> None:
    watch = DriftWatch(1.0)
    assert not any(watch.learn(seconds) for seconds in (1.05, 1.2, 1.2, 1.0, 1.2, 1.2))
    assert watch.learn(1.2)
    faster = DriftWatch(1.0)
    assert [faster.learn(seconds) for seconds in (1.2, 0.8, 0.8, 0.8)] == [False, False, False, True]


@given(st.lists(st.floats(0.91, 1.09), max_size=30))
def test_within_a_tenth_nothing_is_due(times: list[float]) -> None:
    watch = DriftWatch(1.0)
    assert not any(watch.learn(seconds) for seconds in times)
