"""Modes that are given by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memferry_rt.errors import PlanError, UnknownLayerError
from memferry_rt.plan import GradientMode, LayerModes, StateMode, WeightMode, format_modes, parse_modes

NAMES = ["embed", "layers.0", "layers.1", "layers.10", "(small)", "head"]

modes = st.builds(
    LayerModes,
    st.none() | st.sampled_from(WeightMode),
    st.none() | st.sampled_from(GradientMode),
    st.none() | st.sampled_from(StateMode),
)


def test_patterns_and_names() -> None:
    found = parse_modes("embed=dha, layers.*=stream+inplace", NAMES)
    assert list(found) == NAMES
    assert found["embed"] == LayerModes(WeightMode.DHA)
    for name in ("layers.0", "layers.1", "layers.10"):
        assert found[name] == LayerModes(WeightMode.STREAM, GradientMode.INPLACE)
    assert not found["(small)"]
    assert not found["head"]


def test_later_entries_go_over_earlier_ones_kind_by_kind() -> None:
    found = parse_modes("*=stream+buffer+cpu, layers.1=ring, layers.10=state:resident", NAMES)
    assert found["layers.0"] == LayerModes(WeightMode.STREAM, GradientMode.BUFFER, StateMode.CPU)
    assert found["layers.1"] == LayerModes(WeightMode.RING, GradientMode.BUFFER, StateMode.CPU)
    assert found["layers.10"] == LayerModes(WeightMode.STREAM, GradientMode.BUFFER, StateMode.RESIDENT)


def test_resident_is_of_the_weights_unless_it_says_state() -> None:
    found = parse_modes("head=resident", NAMES)["head"]
    assert found == LayerModes(weight=WeightMode.RESIDENT)
    assert parse_modes("head=weight:resident+state:resident", NAMES)["head"].state is StateMode.RESIDENT


def test_a_mapping_takes_modes_as_they_are() -> None:
    given = {"embed": WeightMode.DHA, "layers.?": LayerModes(gradient=GradientMode.INPLACE), "head": "ring"}
    found = parse_modes(given, NAMES)
    assert found["embed"].weight is WeightMode.DHA
    assert found["layers.1"].gradient is GradientMode.INPLACE
    assert not found["layers.10"]
    assert found["head"].weight is WeightMode.RING


def test_a_name_with_special_characters_matches_itself() -> None:
    assert parse_modes("blocks[0]=dha", ["blocks[0]", "blocks[1]"])["blocks[0]"].weight is WeightMode.DHA


def test_nothing_said_is_nothing() -> None:
    assert not any(parse_modes("", NAMES).values())
    assert not any(parse_modes({}, NAMES).values())


@given(st.lists(modes, min_size=len(NAMES), max_size=len(NAMES)))
def test_text_and_back(each: list[LayerModes]) -> None:
    asked = dict(zip(NAMES, each, strict=True))
    assert parse_modes(format_modes(asked), NAMES) == asked


def test_a_name_that_no_layer_has_is_refused_with_some_that_layers_have() -> None:
    with pytest.raises(UnknownLayerError, match=r"no layer is called 'layer\.1'.*layers\.1") as caught:
        parse_modes("embed=dha, layer.1=stream", NAMES)
    assert caught.value.pattern == "layer.1"
    assert "layers.1" in caught.value.close
    with pytest.raises(UnknownLayerError, match="has no layers"):
        parse_modes("embed=dha", [])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("embed", "'embed' is not of the form"),
        ("=dha", "'=dha' is not of the form"),
        ("embed=direct", "'direct'.*dha_then_load"),
        ("embed=", "'' in 'embed='"),
        ("embed=dha+ring", "two modes of one kind"),
        ("embed=gradient:dha", "'gradient:dha'"),
        ({"embed": 3}, "3.*not a mode"),
        (["embed=dha"], "neither text nor a mapping"),
    ],
)
def test_what_is_not_understood_is_refused_with_what_is(given: object, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        parse_modes(given, NAMES)  # type: ignore[arg-type]
