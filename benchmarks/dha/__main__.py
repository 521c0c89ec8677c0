"""Direct host access: rows of operators, and whole iterations of models that do without most of their memory.

    python -m benchmarks.dha [--device cuda|emulated] [--rows NAME,NAME] [--small] [--limit SECONDS] [--out FILE]

A row takes its place in the file when it is measured, with its date and its machine; other rows stay as they were.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ..records import RESULTS, Records, Row, measured_apart
from .operators import ROWS as OPERATORS
from .summary import summarise
from .training import ROWS as MODELS
from .training import SMALL, fits, measure


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dha",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda")
    known = [*OPERATORS, *MODELS]
    parser.add_argument("--rows", help=f"of {', '.join(known)}; by default those that this machine has memory for")
    parser.add_argument("--small", action="store_true", help="sizes that only try the benchmark out")
    parser.add_argument("--limit", type=float, default=240, help="seconds that a process may take")
    parser.add_argument("--out", type=Path, default=RESULTS / "dha.json")
    arguments = parser.parse_args()
    usual = [name for name in known if name not in MODELS or fits(MODELS[name])]
    wanted = usual if arguments.rows is None else arguments.rows.split(",")
    unknown = [name for name in wanted if name not in known]
    if unknown:
        parser.error(f"--rows: there is no {unknown[0]!r}; known are {', '.join(known)}")
    records = Records(arguments.out, "dha", known, summarise)
    _operators([name for name in wanted if name in OPERATORS], records, arguments)
    for name in wanted:
        if name in MODELS:
            job = SMALL if arguments.small else MODELS[name]
            _put(records, name, measure(job, arguments.device, arguments.limit))
    print(json.dumps(summarise(records.rows), indent=1))


def _operators(wanted: list[str], records: Records, arguments: argparse.Namespace) -> None:
    if not wanted:
        return
    command = [sys.executable, "-m", "benchmarks.dha.operators", "--device", arguments.device]
    command += ["--rows", ",".join(wanted), "--budget", str(0.7 * arguments.limit)] + ["--small"] * arguments.small
    done = measured_apart(command, arguments.limit)
    for name in wanted:
        row = (
            {"torch": done["result"]["torch"], **done["result"]["rows"][name]} if done["status"] == "ok" else done
        )
        _put(records, name, row)


def _put(records: Records, name: str, row: Row) -> None:
    records.put(name, row)
    if row["status"] != "ok":
        print(f"{name}: {row['message']}", file=sys.stderr)


if __name__ == "__main__":
    main()
