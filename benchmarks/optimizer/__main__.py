"""The update on the CPU alone, and on CPU and device together, against what memory carries.

    python -m benchmarks.optimizer [--part kernel|together] [--limit SECONDS] [--out FILE] [-- OPTIONS OF THE PART]

Each part runs in a process of its own and takes its place in the file; the other stays there as it was.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from ..records import RESULTS, Records, measured_apart
from .summary import PARTS, summarise


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.optimizer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--part", choices=PARTS, help="only this one; the options after -- are its own")
    parser.add_argument("--limit", type=float, default=240, help="seconds that a part may take")
    parser.add_argument("--out", type=Path, default=RESULTS / "optimizer.json")
    parser.add_argument("options", nargs="*")
    arguments = parser.parse_args()
    if arguments.options and not arguments.part:
        parser.error("options after -- are those of one part; name it with --part")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin would take cores from what is measured
    records = Records(arguments.out, "optimizer", PARTS, summarise)
    for part in [arguments.part] if arguments.part else PARTS:
        command = [sys.executable, "-m", f"benchmarks.optimizer.{part}", *arguments.options]
        row = measured_apart(command, arguments.limit)
        records.put(part, row)
        if row["status"] != "ok":
            print(f"{part}: {row['message']}", file=sys.stderr)
    print(json.dumps(summarise(records.rows), indent=1))


if __name__ == "__main__":
    main()
