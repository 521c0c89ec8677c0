"""llama-1b in 6 GiB of device memory, and DeepSpeed ZeRO-2 offload beside it: same model and text.

    python benchmarks/first_light.py [--out FILE] [--steps 12]

Needs a CUDA device.  Writes the result of ``memferry train`` with a block ``peer`` added: the other system's
figures from the same run of this script, and the ratio.  Machines differ; ratios hold better than seconds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SETTINGS = ["--preset", "llama-1b", "--micro-batch", "8", "--seq", "1024", "--checkpointing"]
SETTINGS += ["--max-grad-norm", "1.0", "--device", "cuda:0"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "first-light-llama-1b.json")
    parser.add_argument("--steps", default="12")
    parser.add_argument("--device-memory", default="6GiB")
    arguments = parser.parse_args()
    settings = [*SETTINGS, "--steps", arguments.steps]
    with tempfile.TemporaryDirectory() as folder:
        mine = Path(folder, "memferry.json")
        train = [sys.executable, "-m", "memferry_tools", "train", *settings]
        subprocess.run([*train, "--device-memory", arguments.device_memory, "--json", str(mine)], check=True)
        result = json.loads(mine.read_text())
        result["peer"] = _peer(settings, Path(folder, "peer.json"))
    summary, peer = result["summary"], result["peer"]
    if peer is not None:
        peer["ratio"] = peer["iteration_s"] / summary["iteration_s"]
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"memferry         {summary['iteration_s']:.3f} s   {summary['device_peak_bytes'] / 2**30:.2f} GiB")
    if peer is not None:
        print(
            f"DeepSpeed ZeRO-2 {peer['iteration_s']:.3f} s   {peer['device_peak_bytes'] / 2**30:.2f} GiB reserved"
        )
        print(f"ratio            {peer['ratio']:.2f}")


def _peer(settings: list[str], out: Path) -> dict[str, Any] | None:
    if importlib.util.find_spec("deepspeed") is None:
        print("DeepSpeed is not installed: no comparison")
        return None
    done = subprocess.run([sys.executable, str(HERE / "deepspeed_zero2.py"), *settings, "--json", str(out)])
    if done.returncode != 0:
        print("DeepSpeed did not run: no comparison")
        return None
    found: dict[str, Any] = json.loads(out.read_text())
    return found


if __name__ == "__main__":
    main()
