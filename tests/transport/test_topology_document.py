"""Topology files: what is written is read back, and what is wrong is refused by the name of its field."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memferry_transport import TopologyError
from memferry_transport.topology import dump, dumps, load, loads, machine, machine_names

H20 = json.loads(dumps(machine("h20-x8")))
CLOUD = json.loads(dumps(machine("cloudmatrix384-node")))
Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize("name", machine_names())
def test_written_and_read_back(name: str, tmp_path: Path) -> None:
    topology = machine(name)
    dump(topology, tmp_path / "machine.json")
    again = load(tmp_path / "machine.json")
    assert again == topology
    assert again.notes == topology.notes
    assert again.machine == topology.machine


@pytest.mark.parametrize("name", machine_names())
def test_the_package_s_machines_say_where_they_come_from(name: str) -> None:
    topology = machine(name)
    assert topology.name == name
    assert topology.source
    assert topology.date
    assert all(figure.source and figure.date for figure in topology.published)


def put(*where: Any, to: Any) -> Change:
    def change(document: dict[str, Any]) -> None:
        *parents, last = where
        at: Any = document
        for key in parents:
            at = at[key]
        at[last] = to

    return change


def drop(*where: Any) -> Change:
    return put(*where, to=None)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("schema", drop("schema")),
        ("schema", put("schema", to="other")),
        ("version", put("version", to=2)),
        ("version", put("version", to=True)),
        ("colour", put("colour", to="red")),
        ("devices[2].colour", put("devices", 2, "colour", to="red")),
        ("devices", put("devices", to={})),
        ("devices[0]", put("devices", 0, to=5)),
        ("devices[0].name", drop("devices", 0, "name")),
        ("devices[0].ordinal", put("devices", 0, "ordinal", to="0")),
        ("devices[0].ordinal", put("devices", 0, "ordinal", to=0.0)),
        ("numa_nodes", put("numa_nodes", to=[0, -1])),
        ("host_links", put("host_links", to=H20["host_links"][1:])),
        ("host_links[0].pcie", put("host_links", 0, "pcie", to="x16")),
        ("host_links[0].pcie.width", put("host_links", 0, "pcie", "width", to=-16)),
        ("host_links[0].pcie.lanes", put("host_links", 0, "pcie", "lanes", to=16)),
        ("host_links[0].to_device", put("host_links", 0, "to_device", to="fast")),
        ("host_links[0].to_device", put("host_links", 0, "to_device", to=float("inf"))),
        ("host_links[0].to_device", put("host_links", 0, "to_device", to=10**400)),
        ("host_links[0].through", put("host_links", 0, "through", to=[1])),
        ("peer_links[0].kind", put("peer_links", 0, "kind", to="NVL")),
        ("peer_links[0].between", put("peer_links", 0, "between", to=[0])),
        ("peer_links[0].between", put("peer_links", 0, "between", to=[0, 8])),
        ("peer_links[1].between", put("peer_links", 1, "between", to=[0, 1])),
        ("peer_links[0].peer_access", put("peer_links", 0, "peer_access", to="yes")),
        ("uplinks[0].kind", put("uplinks", 0, "kind", to="cable")),
        ("published[0].direction", put("published", 0, "direction", to="up")),
        ("published[0].helpers", put("published", 0, "helpers", to=[True])),
        ("published[0].helpers", put("published", 0, "helpers", to=[9])),
        ("notes", put("notes", to=[1])),
    ],
)
def test_wrong_files_are_refused(field: str, change: Change) -> None:
    document = json.loads(json.dumps(H20))
    change(document)
    with pytest.raises(TopologyError) as caught:
        loads(json.dumps(document))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("fitted.relay", drop("fitted", "relay")),
        ("fitted.direct.alpha_s", put("fitted", "direct", "alpha_s", to=-1)),
        ("fitted.direct.bytes_per_second", put("fitted", "direct", "bytes_per_second", to=0)),
    ],
)
def test_wrong_fits_are_refused(field: str, change: Change) -> None:
    document = json.loads(json.dumps(CLOUD))
    change(document)
    with pytest.raises(TopologyError) as caught:
        loads(json.dumps(document))
    assert caught.value.field == field


@pytest.mark.parametrize("text", ["", "{", "[]", "5", "[" * 100_000, '"x"'])
def test_what_is_no_document(text: str) -> None:
    with pytest.raises(TopologyError, match="file"):
        loads(text)


def test_what_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "machine.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(TopologyError, match="not text"):
        load(tmp_path / "machine.json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 20) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@given(st.data())
def test_any_value_anywhere_is_taken_or_refused(data: st.DataObject) -> None:
    document = json.loads(json.dumps(data.draw(st.sampled_from([H20, CLOUD]))))
    at: Any = document
    for _ in range(5):
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        if not isinstance(at[key], dict | list) or not at[key] or data.draw(st.booleans()):
            break
        at = at[key]
    at[key] = data.draw(JSON)
    with suppress(TopologyError):
        again = loads(json.dumps(document))
        assert loads(dumps(again)) == again


def test_unknown_machines_are_refused() -> None:
    with pytest.raises(TopologyError, match="h200-x2"):
        machine("h200-x3")
