"""What ``memferry simulate`` says of a row, asked in this process."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import tempfile
from pathlib import Path
from typing import Any

from memferry_allocator import MemFerryError
from memferry_tools.commands import invoke
from memferry_tools.commands.simulate import command as simulate
from memferry_tools.errors import ToolError

from .rows import Job


def simulated(job: Job, topology: dict[str, Any] | None, fixture: str, *, floats: bool = False) -> dict[str, Any]:
    """Seconds of an iteration, and what bounds it; or why there is no prediction.

    Parameters
    ----------
    job : Job
    topology : dict or None
        The machine's, as ``memferry topo --json`` writes it.
    fixture : str
        The machine, where there is none.
    floats : bool
        Whether weights are fp32 in compute.
    """
    known = "system" in inspect.signature(simulate).parameters
    if (job.system != "memferry" and not known) or job.accumulate > 1 or job.adapters:
        return {"refused": "the simulator knows no such system, several micro-batches in a step, or adapters"}
    with tempfile.TemporaryDirectory() as folder:
        out, links = Path(folder, "out.json"), Path(folder, "topology.json")
        words = ["simulate", "--preset", job.preset]
        if job.system == "memferry":
            words += ["--device-memory", job.device_memory, "--auto"]
        else:
            words += ["--system", job.system]
        words += ["--micro-batch", str(job.micro_batch), "--seq", str(job.seq), "--checkpointing", "on"]
        words += ["--dtype", "fp32" if floats else "bf16", "--json", str(out)]
        if topology is None:
            words += ["--fixture", fixture]
        else:
            links.write_text(json.dumps(topology))
            words += ["--topology", str(links)]
        words += ["--ranks", str(job.gpus)] if job.gpus > 1 else []
        words += ["--helpers"] if job.helpers else []
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                invoke(words)
        except (ToolError, MemFerryError) as error:
            return {"refused": str(error)}
        found = json.loads(out.read_text())
    return {
        "predicted_s": found["seconds"],
        "bounds": {each["name"]: each["busy"] for each in found.get("bounds", ())},
    }
