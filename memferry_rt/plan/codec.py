"""Frozen dataclasses as JSON and back: every field checked, none ignored."""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from ..errors import PlanError

T = TypeVar("T")


def encode(schema: str, version: int, value: Any) -> str:
    """A dataclass as JSON text, with its schema; `decode` gives it back.  What is its default is left out."""
    return json.dumps({"schema": schema, "version": version, **_plain(value)}, indent=1, allow_nan=False)


def decode(schema: str, version: int, kind: type[T], text: str, *, since: Mapping[str, int] | None = None) -> T:
    """A dataclass from JSON text.

    Parameters
    ----------
    since : mapping of str to int, optional
        Fields that earlier versions had not, with the version that they came with: files of those versions are
        read as well, and lack these fields.

    Raises
    ------
    PlanError
        It is not JSON, of another schema or version, or a field is missing, unknown or makes no sense; the error
        names the field.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"not JSON: {error}") from None
    if not isinstance(document, dict):
        raise PlanError(f"{_short(document)} is not an object of the schema {schema}")
    if document.get("schema") != schema:
        raise PlanError(f"schema: {_short(document.get('schema'))} is not {schema!r}")
    found, oldest = document.get("version"), min((since or {}).values(), default=version + 1) - 1
    if isinstance(found, bool) or not isinstance(found, int) or not oldest <= found <= version:
        known = f"{version}" if oldest == version else f"{oldest} to {version}"
        raise PlanError(f"version: {_short(found)} is not {known}, which this release reads")
    for name, came in (since or {}).items():
        if found < came and name in document:
            raise PlanError(f"{name}: it is no field of version {found}")
    entries = {name: value for name, value in document.items() if name not in ("schema", "version")}
    result: T = _object(kind, entries, "")
    return result


def read_text(file: Path | str) -> str:
    """A file's text.

    Raises
    ------
    PlanError
        It cannot be read, or is not text.
    """
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise PlanError(f"{file} is not text: {error}") from None


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {
            each.name: _plain(getattr(value, each.name))
            for each in fields(value)
            if each.default is MISSING or getattr(value, each.name) != each.default
        }
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    return value.value if isinstance(value, Enum) else value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _object(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise PlanError(f"{where}: {_short(value)} is not an object")
    hints, left, values = _hints(kind), dict(value), {}
    for each in fields(kind):
        name = f"{where}.{each.name}" if where else each.name
        if each.name in left:
            values[each.name] = _value(hints[each.name], left.pop(each.name), name)
        elif each.default is MISSING and each.default_factory is MISSING:
            raise PlanError(f"{name} is missing")
    if left:
        raise PlanError(f"{where + '.' if where else ''}{next(iter(left))} is no field of this schema")
    try:
        return kind(**values)
    except PlanError as error:
        raise PlanError(f"{where}: {error}" if where else str(error)) from None


def _value(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        inner = [each for each in arguments if each is not type(None)]
        return None if value is None and len(inner) < len(arguments) else _value(inner[0], value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise PlanError(f"{where}: {_short(value)} is not a list")
        return tuple(_value(arguments[0], each, f"{where}[{number}]") for number, each in enumerate(value))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise PlanError(f"{where}: {_short(value)} is not an object")
        return {key: _value(arguments[1], each, f"{where}.{key}") for key, each in value.items()}
    if is_dataclass(hint):
        return _object(hint, value, where)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _kind(hint, value, where)
    return value if hint is Any else _scalar(hint, value, where)


def _kind(kinds: type[Enum], value: Any, where: str) -> Enum:
    for each in kinds:
        if each.value == value:
            return each
    known = ", ".join(str(each.value) for each in kinds)
    raise PlanError(f"{where}: {_short(value)} is unknown; it is one of {known}")


def _scalar(hint: type, value: Any, where: str) -> Any:
    accepted: Any = (int, float) if hint is float else hint
    if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
        raise PlanError(f"{where}: {_short(value)} is not {_WORDS[hint]}")
    if hint is float:
        try:
            value = float(value)
        except OverflowError:
            raise PlanError(f"{where}: a number beyond all measure") from None
        if not math.isfinite(value):
            raise PlanError(f"{where}: {value} is not a finite number")
    return value


_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
