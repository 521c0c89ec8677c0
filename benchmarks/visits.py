"""One visit to a machine: some of a benchmark's rows, each within a limit, all within another.

What there was no time for is left for another visit: rows take their places in the file as they are measured.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from .records import Records, Row

LEAST = 10.0  # seconds: with less left no row begins


def add_arguments(
    parser: argparse.ArgumentParser, names: Sequence[str], *, limit: float, out: Path | None
) -> None:
    """``--rows``, ``--limit``, ``--limit-total``, ``--list`` and ``--out``."""
    parser.add_argument("--rows", help="names or patterns, with commas between; by default all, in this order")
    parser.add_argument("--list", action="store_true", help="show the rows and end")
    parser.add_argument("--limit", type=float, default=limit, help="seconds that one row may take")
    parser.add_argument("--limit-total", type=float, help="seconds for all; what does not fit is left out")
    parser.add_argument("--out", type=Path, default=out)
    parser.set_defaults(known=list(names))


def chosen(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> list[str]:
    """The rows that are asked for, each once, in the order of the benchmark; those of a pattern none has are an
    error."""
    known: list[str] = arguments.known
    if arguments.list:
        print("\n".join(known))
        parser.exit()
    if arguments.rows is None:
        return known
    wanted = set()
    for pattern in arguments.rows.split(","):
        found = [name for name in known if fnmatchcase(name, pattern)]
        if not found:
            parser.error(f"--rows: there is no {pattern!r}; known are {', '.join(known)}")
        wanted.update(found)
    return [name for name in known if name in wanted]


def visit(
    names: Sequence[str],
    measure: Callable[[str, float], Row],
    file: Records,
    arguments: argparse.Namespace,
    figures: Callable[[dict[str, Row]], Mapping[str, Any]],
) -> None:
    """Measure rows and keep each as soon as it is there; a line on each.

    Parameters
    ----------
    measure : callable
        Of a row's name, and the seconds that it may take.
    figures : callable
        Of all rows: what to say of each, by name.
    """
    end = None if arguments.limit_total is None else time.monotonic() + arguments.limit_total
    for name in names:
        left = float("inf") if end is None else end - time.monotonic()
        if left < LEAST:
            print(f"{name}: left for another visit", flush=True)
            continue
        began = time.monotonic()
        file.put(name, measure(name, min(arguments.limit, left)))
        said = json.dumps(figures(file.rows).get(name))
        print(f"{name} ({time.monotonic() - began:.0f} s): {said}", flush=True)
