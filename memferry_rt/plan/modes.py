"""The modes of a layer: how its weights are read, how its gradient leaves, where its state is updated."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

from ..errors import PlanError, UnknownLayerError


class WeightMode(Enum):
    """Where kernels read a layer's weights."""

    RESIDENT = "resident"  # device memory, where they stay
    STREAM = "stream"  # device memory, copied there for forward and again for backward
    DHA = "dha"  # host memory, in forward and in backward (direct host access)
    DHA_THEN_LOAD = "dha_then_load"  # host memory in forward, a device copy in backward
    RING = "ring"  # device memory, panel by panel through a small ring

    @property
    def reads_host(self) -> bool:
        """Whether a forward kernel reads them over the link."""
        return self in (WeightMode.DHA, WeightMode.DHA_THEN_LOAD)


class GradientMode(Enum):
    """How a layer's gradient leaves."""

    BUFFER = "buffer"  # written to device memory, and copied home from there
    INPLACE = "inplace"  # the kernel that makes it writes it to host memory


class StateMode(Enum):
    """Where a layer's optimizer state is at home and updated."""

    CPU = "cpu"  # host memory, by the CPU
    STREAMED = "streamed"  # host memory, by the device as it streams through
    RESIDENT = "resident"  # device memory, by the device


Mode = WeightMode | GradientMode | StateMode

_KINDS: Mapping[str, type[Enum]] = MappingProxyType(
    {"weight": WeightMode, "gradient": GradientMode, "state": StateMode}
)


@dataclass(frozen=True)
class LayerModes:
    """A layer's modes; None where nothing is said and the planner chooses."""

    weight: WeightMode | None = None
    gradient: GradientMode | None = None
    state: StateMode | None = None

    def __bool__(self) -> bool:
        return any(getattr(self, each.name) is not None for each in fields(self))

    def over(self, other: LayerModes) -> LayerModes:
        """These modes, and `other`'s where these say nothing."""
        said = {each.name: getattr(self, each.name) for each in fields(self)}
        return replace(other, **{name: mode for name, mode in said.items() if mode is not None})

    def __str__(self) -> str:
        return "+".join(
            f"state:{mode.value}" if mode is StateMode.RESIDENT else mode.value
            for mode in (self.weight, self.gradient, self.state)
            if mode is not None
        )


def parse_modes(
    given: str | Mapping[str, str | Mode | LayerModes], layer_names: Iterable[str]
) -> dict[str, LayerModes]:
    """Modes by hand: which layers, and what they shall do.

    Parameters
    ----------
    given : str or mapping
        ``"embed=dha, layers.*=stream+inplace"``: before each ``=`` a layer's name or a pattern of names
        (``*``, ``?``, ``[abc]``), behind it names of modes joined by ``+``.  ``resident`` means the weights;
        ``state:resident`` the state; ``weight:`` and ``gradient:`` may be written too.  A mapping has the same
        as keys and values; its values may also be modes themselves.  Later entries go over earlier ones, for
        each kind of mode by itself.
    layer_names : iterable of str
        Of the whole model, in order.

    Returns
    -------
    dict of str to LayerModes
        For every layer, in the order of `layer_names`; an empty `LayerModes` (false) where no pattern matches.

    Raises
    ------
    UnknownLayerError
        A pattern matches no layer.
    PlanError
        An entry is not understood, or names a mode that there is not.
    """
    result = {name: LayerModes() for name in layer_names}
    for pattern, modes in _entries(given):
        matching = [name for name in result if name == pattern or fnmatchcase(name, pattern)]
        if not matching:
            raise UnknownLayerError(pattern, _close(pattern, result))
        for name in matching:
            result[name] = modes.over(result[name])
    return result


def format_modes(modes: Mapping[str, LayerModes]) -> str:
    """The text that `parse_modes` reads; layers about which nothing is said are left out."""
    return ", ".join(f"{name}={each}" for name, each in modes.items() if each)


def _entries(given: str | Mapping[str, str | Mode | LayerModes]) -> Iterator[tuple[str, LayerModes]]:
    if isinstance(given, str):
        for entry in filter(None, map(str.strip, given.split(","))):
            pattern, equals, words = entry.partition("=")
            if not equals or not pattern.strip():
                raise PlanError(f"modes: {entry!r} is not of the form layer=mode; write for example embed=dha")
            yield pattern.strip(), _read(words, entry)
    elif isinstance(given, Mapping):
        for pattern, value in given.items():
            if not isinstance(pattern, str):
                raise PlanError(f"modes: {pattern!r} is no name of a layer; write for example {{'embed': 'dha'}}")
            yield pattern, value if isinstance(value, LayerModes) else _read(value, f"{pattern}={value}")
    else:
        raise PlanError(f"modes: {given!r} is neither text nor a mapping; write for example 'embed=dha'")


def _read(words: str | Mode, entry: str) -> LayerModes:
    if isinstance(words, Enum):
        kind = next((kind for kind, modes in _KINDS.items() if isinstance(words, modes)), None)
        if kind is None:
            raise PlanError(f"modes: {words!r} in {entry!r} is not a mode")
        return _set(LayerModes(), kind, words)
    if not isinstance(words, str):
        raise PlanError(f"modes: {words!r} in {entry!r} is not a mode")
    result = LayerModes()
    for word in words.split("+"):
        kind, mode = _find(word.strip(), entry)
        if getattr(result, kind) is not None:
            raise PlanError(f"modes: {entry!r} names two modes of one kind ({kind}); name one")
        result = _set(result, kind, mode)
    return result


def _set(modes: LayerModes, kind: str, mode: Enum) -> LayerModes:
    said: dict[str, Any] = {kind: mode}
    return replace(modes, **said)


def _find(word: str, entry: str) -> tuple[str, Enum]:
    prefix, colon, name = word.lower().rpartition(":")
    for kind, modes in _KINDS.items():
        if colon and prefix != kind:
            continue
        for mode in modes:
            if mode.value == name:
                return kind, mode
    known = "; ".join(f"{kind}: {', '.join(mode.value for mode in modes)}" for kind, modes in _KINDS.items())
    raise PlanError(f"modes: {word!r} in {entry!r} is no mode; there are for each {known}")


def _close(pattern: str, names: Iterable[str]) -> tuple[str, ...]:
    """Names to suggest: the most similar ones, else the first."""
    known = list(names)
    return tuple(difflib.get_close_matches(pattern, known, n=4, cutoff=0.4) or known[:4])
