"""Rows and cells of the documentation's tables."""

from __future__ import annotations

from collections.abc import Iterable

Rows = list[tuple[str, ...]]


def under(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Rows:
    """Rows under their head; nothing where there are none."""
    found = list(rows)
    return [head, *found] if found else []


def gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"


def mib(nbytes: int | None) -> float | None:
    return None if nbytes is None else nbytes / 2**20


def number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
