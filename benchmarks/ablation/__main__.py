"""What each of the scheduler's ideas gains: whole iterations of ``memferry train``, by one plan for each of them.

    python -m benchmarks.ablation [--rows PATTERN,PATTERN] [--steps 7] [--profiles FOLDER] [--limit-total SECONDS]

A row is ``MODEL/ARM``.  The arms of the ladder, each with the ideas of those before it, are what the simulator
plans (`memferry_rt.plan.arms`).  ``gradients-50`` and its like may make that share of gradient bytes on the
device; ``default`` is the runtime without a plan, ``by-hand`` the same with the embedding in host memory, and
``planner`` the plan that the planner chooses.  Gradients are not clipped, so that updates may begin in backward.
Plans are by formulas, or by the profile in ``FOLDER`` that is named as the model with its batch
(``llama-1b-8x1024.json``).  A plan that is also another arm's is measured once.
``--device emulated --preset tiny`` tries the benchmark out, and measures nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from .. import records
from ..visits import add_arguments, chosen, visit
from .arms import MODELS, ROWS, WORTH, Bench
from .summary import summarise


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ablation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [f"{model}/{arm}" for arm in WORTH for model in MODELS]
    add_arguments(parser, names, limit=120, out=records.RESULTS / "ablation.json")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--preset", help="another model, in memory to its scale")
    parser.add_argument("--deterministic", action="store_true", help="with kernels of which losses are comparable")
    parser.add_argument("--profiles", type=Path, help="folder of profiles")
    arguments = parser.parse_args(given)
    rows = chosen(parser, arguments)
    file = records.Records(arguments.out, "ablation", ROWS, summarise)
    benches: dict[str, Bench] = {}

    def measure(name: str, limit_s: float) -> records.Row:
        model, arm = name.split("/")
        if model not in benches:
            benches[model] = Bench(MODELS[model], arguments.device, arguments.preset, arguments.profiles)
        return benches[model].measure(arm, arguments.steps, limit_s, deterministic=arguments.deterministic)

    visit(rows, measure, file, arguments, lambda found: summarise(found)["rows"])


if __name__ == "__main__":
    main()
