"""A topology as a JSON file: ``{"schema": "memferry.topology", "version": 1, ...}``.

=============== ====================================================================================
name            of the machine; ``source`` and ``date`` (ISO 8601): where the figures come from
numa_nodes      list of their numbers
devices         ``ordinal`` ``name``, and ``pci_address`` ``numa_node`` ``capacity`` ``uuid``
host_links      ``device``, and ``pcie`` ``to_device`` ``from_device`` ``latency_s`` ``duplex`` ``through``
peer_links      ``between`` ``kind``, and ``peer_access`` ``links`` ``version`` ``bytes_per_second``
                ``latency_s`` ``duplex``
uplinks         ``name`` ``kind``, and ``bytes_per_second`` ``pcie`` ``numa_nodes``
fitted          ``direct`` and ``relay``, each ``alpha_s`` ``bytes_per_second``
published       ``device`` ``helpers`` (null: the direct way) ``direction`` ``nbytes`` ``slice_bytes``
                ``bytes_per_second`` ``source`` ``date``
notes           list of text
=============== ====================================================================================

``pcie`` is ``generation`` ``width`` ``max_generation`` ``max_width``.  The fields mean what they mean in
`Topology` and its parts; what is left out or null is not known.  Fields that are not listed are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path as File
from typing import Any, TypeVar

from memferry_allocator import Direction

from ..cost import LinearCost
from ..errors import TopologyError
from ..paths import Path
from .model import Topology
from .parts import (
    Device,
    FittedCosts,
    HostLink,
    Pcie,
    PeerKind,
    PeerLink,
    Published,
    Uplink,
    UplinkKind,
)

SCHEMA, VERSION = "memferry.topology", 1
_NEEDED: Any = object()
T = TypeVar("T")
E = TypeVar("E", bound=Enum)


# -- writing --------------------------------------------------------------------------------------------
def dumps(topology: Topology) -> str:
    """The topology as JSON text; `loads` gives it back."""
    document: dict[str, Any] = {"schema": SCHEMA, "version": VERSION}
    for name in ("name", "source", "date", "numa_nodes", "devices", "host_links", "peer_links", "uplinks"):
        document[name] = _plain(getattr(topology, name))
    document["fitted"] = _plain(topology.fitted)
    document["published"] = [_figure(figure) for figure in topology.published]
    document["notes"] = list(topology.notes)
    return json.dumps({key: value for key, value in document.items() if value not in (None, [], "")}, indent=1)


def dump(topology: Topology, file: File | str) -> None:
    """Write a topology's file."""
    File(file).write_text(dumps(topology) + "\n")


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        entries = {entry.name: _plain(getattr(value, entry.name)) for entry in fields(value)}
        return {name: entry for name, entry in entries.items() if entry not in (None, [])}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value.value if isinstance(value, Enum) else value


def _figure(figure: Published) -> dict[str, Any]:
    paths = {"device": figure.paths[0].device, "helpers": [path.helper for path in figure.paths]}
    return {**paths, **{name: entry for name, entry in _plain(figure).items() if name != "paths"}}


# -- reading --------------------------------------------------------------------------------------------
def load(file: File | str) -> Topology:
    """A topology from its file.

    Raises
    ------
    TopologyError
        The file is not a topology's, or contradicts itself; the error names the field.
    OSError
        It cannot be read.
    """
    try:
        text = File(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TopologyError("file", f"not text: {error}") from None
    return loads(text)


def loads(text: str) -> Topology:
    """A topology from JSON text.  Errors as for `load`."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TopologyError("file", f"not JSON: {error}") from None
    entry = _Entry(document, "")
    if entry.take("schema", str) != SCHEMA:
        raise TopologyError("schema", f"{document['schema']!r} is not {SCHEMA!r}")
    if entry.take("version", int) != VERSION:
        raise TopologyError("version", f"{document['version']} is not {VERSION}, which this release reads")
    values: dict[str, Any] = {
        "devices": entry.each("devices", _device),
        "host_links": entry.each("host_links", _host_link),
        "peer_links": entry.each("peer_links", _peer_link),
        "uplinks": entry.each("uplinks", _uplink),
        "numa_nodes": entry.numbers("numa_nodes"),
        "name": entry.take("name", str, ""),
        "source": entry.take("source", str, ""),
        "date": entry.take("date", str, ""),
        "fitted": entry.one("fitted", _fitted),
        "published": entry.each("published", _published),
        "notes": entry.texts("notes"),
    }
    entry.finish()
    return Topology(**values)


class _Entry:
    """An object of the file: what is taken is checked, what was never asked for is refused."""

    def __init__(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise TopologyError(where or "file", f"{_short(value)} is not an object")
        self.where = where
        self._left = dict(value)

    def name(self, field: str) -> str:
        return f"{self.where}.{field}" if self.where else field

    def take(self, field: str, kind: type[T], default: Any = _NEEDED) -> Any:
        value = self._left.pop(field, None)
        if value is None:
            if default is _NEEDED:
                raise TopologyError(self.name(field), "is missing")
            return default
        accepted: Any = (int, float) if kind is float else kind
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise TopologyError(self.name(field), f"{_short(value)} is not {_WORDS[kind]}")
        try:
            return float(value) if kind is float else value
        except OverflowError:
            raise TopologyError(self.name(field), "is a number beyond all measure") from None

    def kind(self, field: str, kinds: type[E]) -> E:
        value = self.take(field, str)
        try:
            return kinds(value)
        except ValueError:
            known = ", ".join(str(kind.value) for kind in kinds)
            raise TopologyError(self.name(field), f"unknown kind {value!r}; it is one of {known}") from None

    def each(self, field: str, read: Callable[[_Entry], T]) -> tuple[T, ...]:
        values = self.take(field, list, [])
        return tuple(self._read(f"{self.name(field)}[{index}]", value, read) for index, value in enumerate(values))

    def one(self, field: str, read: Callable[[_Entry], T]) -> T | None:
        value = self.take(field, dict, None)
        return None if value is None else self._read(self.name(field), value, read)

    def numbers(self, field: str) -> tuple[int, ...]:
        values = self.take(field, list, [])
        for value in values:
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise TopologyError(self.name(field), f"{_short(value)} is not a number from 0 on")
        return tuple(values)

    def texts(self, field: str) -> tuple[str, ...]:
        values = self.take(field, list, [])
        for value in values:
            if not isinstance(value, str):
                raise TopologyError(self.name(field), f"{_short(value)} is not text")
        return tuple(values)

    def finish(self) -> None:
        if self._left:
            field = next(iter(self._left))
            raise TopologyError(self.name(field), "is no field of this schema")

    @staticmethod
    def _read(where: str, value: Any, read: Callable[[_Entry], T]) -> T:
        entry = _Entry(value, where)
        result = read(entry)
        entry.finish()
        return result


_WORDS: dict[type, str] = {
    str: "text",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


# -- the parts ------------------------------------------------------------------------------------------
def _device(entry: _Entry) -> Device:
    return Device(
        ordinal=entry.take("ordinal", int),
        name=entry.take("name", str),
        pci_address=entry.take("pci_address", str, None),
        numa_node=entry.take("numa_node", int, None),
        capacity=entry.take("capacity", int, None),
        uuid=entry.take("uuid", str, None),
    )


def _pcie(entry: _Entry) -> Pcie:
    return Pcie(**{each.name: entry.take(each.name, int, None) for each in fields(Pcie)})


def _host_link(entry: _Entry) -> HostLink:
    return HostLink(
        device=entry.take("device", int),
        pcie=entry.one("pcie", _pcie),
        to_device=entry.take("to_device", float, None),
        from_device=entry.take("from_device", float, None),
        latency_s=entry.take("latency_s", float, None),
        duplex=entry.take("duplex", float, None),
        through=entry.texts("through"),
    )


def _peer_link(entry: _Entry) -> PeerLink:
    between = entry.numbers("between")
    if len(between) != 2:
        raise TopologyError(entry.name("between"), f"{list(between)} is not two devices")
    return PeerLink(
        between=(between[0], between[1]),
        kind=entry.kind("kind", PeerKind),
        peer_access=entry.take("peer_access", bool, True),
        links=entry.take("links", int, None),
        version=entry.take("version", int, None),
        bytes_per_second=entry.take("bytes_per_second", float, None),
        latency_s=entry.take("latency_s", float, None),
        duplex=entry.take("duplex", float, None),
    )


def _uplink(entry: _Entry) -> Uplink:
    return Uplink(
        name=entry.take("name", str),
        kind=entry.kind("kind", UplinkKind),
        bytes_per_second=entry.take("bytes_per_second", float, None),
        pcie=entry.one("pcie", _pcie),
        numa_nodes=entry.numbers("numa_nodes"),
    )


def _cost(entry: _Entry) -> LinearCost:
    alpha_s, rate = entry.take("alpha_s", float), entry.take("bytes_per_second", float)
    if not 0 <= alpha_s < float("inf"):
        raise TopologyError(entry.name("alpha_s"), f"{alpha_s} is not a time")
    if not 0 < rate < float("inf"):
        raise TopologyError(entry.name("bytes_per_second"), f"{rate} is not a number above zero")
    return LinearCost(alpha_s, rate)


def _fitted(entry: _Entry) -> FittedCosts:
    direct, relay = entry.one("direct", _cost), entry.one("relay", _cost)
    if direct is None or relay is None:
        raise TopologyError(entry.name("direct" if direct is None else "relay"), "is missing")
    return FittedCosts(direct, relay)


def _published(entry: _Entry) -> Published:
    device = entry.take("device", int)
    helpers = entry.take("helpers", list)
    for helper in helpers:
        if helper is not None and (not isinstance(helper, int) or isinstance(helper, bool)):
            raise TopologyError(entry.name("helpers"), f"{_short(helper)} is neither a device nor null")
    return Published(
        paths=tuple(Path(device, helper) for helper in helpers),
        direction=entry.kind("direction", Direction),
        nbytes=entry.take("nbytes", int),
        slice_bytes=entry.take("slice_bytes", int),
        bytes_per_second=entry.take("bytes_per_second", float),
        source=entry.take("source", str),
        date=entry.take("date", str),
    )
