"""Direct host access: rows of operators, and whole iterations of models that do without most of their memory.

    python -m benchmarks.dha [--device cuda|emulated] [--rows NAME,NAME] [--small] [--limit SECONDS] [--out FILE]

A row takes its place in the file when it is measured, with its date and its machine; other rows stay as they were.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ..records import RESULTS, Records, measured_apart
from .operators import ROWS as OPERATORS
from .summary import summarise


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dha",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", default=",".join(OPERATORS), help=f"of {', '.join(OPERATORS)}")
    parser.add_argument("--small", action="store_true", help="sizes that only try the benchmark out")
    parser.add_argument("--limit", type=float, default=240, help="seconds that a process may take")
    parser.add_argument("--out", type=Path, default=RESULTS / "dha.json")
    arguments = parser.parse_args()
    wanted = arguments.rows.split(",")
    unknown = [name for name in wanted if name not in OPERATORS]
    if unknown:
        parser.error(f"--rows: there is no {unknown[0]!r}; known are {', '.join(OPERATORS)}")
    records = Records(arguments.out, "dha", list(OPERATORS), summarise)
    command = [sys.executable, "-m", "benchmarks.dha.operators", "--device", arguments.device]
    command += ["--rows", ",".join(wanted)] + ["--small"] * arguments.small
    done = measured_apart(command, arguments.limit)
    for name in wanted:
        row = (
            {"torch": done["result"]["torch"], **done["result"]["rows"][name]} if done["status"] == "ok" else done
        )
        records.put(name, row)
        if row["status"] != "ok":
            print(f"{name}: {row['message']}", file=sys.stderr)
    print(json.dumps(summarise(records.rows), indent=1))


if __name__ == "__main__":
    main()
