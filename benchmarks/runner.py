"""Running the cases of a benchmark, each in a process of its own, into one JSON file with a summary.

    python -m benchmarks.NAME [--device cuda|emulated] [--small] [--out FILE] [--case CASE]

Without a CUDA device the cases that need none run on the emulated one; its figures only say what Python costs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memferry_tools.machine import describe_machine
from memferry_tools.version import version

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Settings:
    """Where and how much."""

    device: str
    small: bool

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"


Case = Callable[[Settings], Any]


class Benchmark:
    """Cases under one name; each returns what is worth keeping, or None where it cannot run.

    Parameters
    ----------
    name : str
        Of the package, and of the file under ``benchmarks/results``.
    summarise : callable
        Makes the figures of the documentation's table from what the cases returned.
    """

    def __init__(self, name: str, summarise: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.name = name
        self.summarise = summarise
        self.cases: dict[str, Case] = {}

    def case(self, function: Case) -> Case:
        """A decorator: the function is a case of its name.  ``machine`` adds to the description of the machine."""
        self.cases[function.__name__] = function
        return function

    def main(self) -> None:
        """The command line."""
        parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{self.name}")
        parser.add_argument("--device", choices=["cuda", "emulated"], default="cuda")
        parser.add_argument("--out", type=Path, default=RESULTS / f"{self.name}.json")
        parser.add_argument("--small", action="store_true", help="sizes for a small machine")
        parser.add_argument("--case", choices=list(self.cases), help="run one case here and print it")
        arguments = parser.parse_args()
        settings = Settings(arguments.device, arguments.small)
        if arguments.case:
            print(json.dumps(self.cases[arguments.case](settings)))
            return
        found = {name: self._apart(name, settings) for name in self.cases}
        result = {
            "schema": f"memferry.{self.name}",
            "schema_version": 1,
            "memferry": version(),
            "settings": asdict(settings),
            "machine": {**describe_machine(), **(found.pop("machine", None) or {})},
            "cases": found,
            "summary": self.summarise(found),
        }
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps(result["summary"], indent=1))

    def _apart(self, case: str, settings: Settings) -> Any:
        command = [sys.executable, "-m", f"benchmarks.{self.name}", "--device", settings.device, "--case", case]
        done = subprocess.run(command + ["--small"] * settings.small, capture_output=True, text=True)
        if done.returncode != 0:
            print(f"{case} failed:\n{done.stderr[-2000:]}", file=sys.stderr)
            return None
        return json.loads(done.stdout.splitlines()[-1])
