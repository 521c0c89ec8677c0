"""What host memory carries with all processors at it: the update's loads and stores without its arithmetic.

python -m benchmarks.scale.memory [--parameters N] --json FILE
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path

from memferry_allocator import open_driver

from ..optimizer.kernel import Case, measure
from ..optimizer.slabs import BYTES, Slabs

DTYPE = "bfloat16"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=1 << 28)
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    slabs = Slabs(open_driver("emulated"), arguments.parameters, [DTYPE])
    (seconds,) = measure([Case("traffic", DTYPE, threads)], slabs, arguments.samples, 1 << 20)
    rates = [BYTES * arguments.parameters / sample for sample in seconds]
    result = {"threads": threads, "samples_s": seconds, "bytes_per_second": statistics.median(rates)}
    arguments.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
