"""An iteration as DeepSpeed's ZeRO-2 makes it with its optimizer on the CPU, by the same simulator.

The rules, as its source and its timeline on one H200 show them:

- weights are whole on every device in half precision, in both passes; blocks recompute as the model says;
- a layer's gradient is reduced to its owners while backward goes on, and each rank's part goes home as fp32;
- when backward is over, and the device idle, the CPU makes one pass after the other over its part: the norm, the
  scaling that clips, Adam, and the rounding to half precision;
- then the new weights go to the device, all of them before the next forward, and ranks gather each other's.

One number is fitted: how much of the rate of MemFerry's own update these passes reach (`REACHED`).
"""

from __future__ import annotations

from dataclasses import dataclass

from .cost import costs
from .exchange import PACKED
from .machine import H200, Machine
from .model import ITEMSIZE, Workload
from .modes import GradientMode, WeightMode
from .profile import Profile
from .rates import Flow, Rates
from .simulate import Graph, simulate

NORM, CLIP, ADAM, ROUND = 4, 8, 28, 6  # bytes of host memory a parameter: what each pass reads and writes
FULL = 4  # bytes of a gradient on its way home
REACHED = 0.78  # fitted to llama-1b on one H200, the mean of both rows of benchmarks/results/pipeline.json


@dataclass(frozen=True)
class ZeroOffload:
    """A simulated iteration, in seconds.

    Attributes
    ----------
    seconds : float
    computing : float
        Forward and backward, with what of the gradients' way home is not hidden behind it.
    updating : float
        The CPU's passes.
    returning : float
        New weights on their way to the device, and between the ranks.
    """

    seconds: float
    computing: float
    updating: float
    returning: float


def zero_offload(
    workload: Workload, machine: Machine = H200, profile: Profile | None = None, *, clip: bool = True
) -> ZeroOffload:
    """Simulate it.

    Parameters
    ----------
    workload : Workload
    machine : Machine
        Of several ranks, one of them: each has its share of the state.
    profile : Profile, optional
        As for `make_plan`.
    clip : bool
        Whether gradients are clipped to a norm.
    """
    graph = Graph()
    begun = graph.add("host", "all is home", [], after=_passes(graph, workload, machine, profile))
    part = workload.parameters / machine.ranks
    nbytes = (ADAM + ROUND + (NORM + CLIP if clip else 0)) * part / REACHED
    updated = graph.add("cpu", "U", [(Flow.CPU, nbytes)], after=[begun])
    itemsize = ITEMSIZE[workload.dtype]
    loaded = graph.add("in", "L", [(Flow.COPY_IN, itemsize * part)], after=[updated], latency=machine.copy_latency)
    others = itemsize * (workload.parameters - part)
    latency = machine.peer_latency if others else 0.0
    ended = graph.add("peers", "gather", [(Flow.PEER, others)], after=[loaded], latency=latency)
    ends = simulate(graph, Rates(machine)).ends
    return ZeroOffload(ends[ended], ends[begun], ends[updated] - ends[begun], ends[ended] - ends[updated])


def _passes(graph: Graph, workload: Workload, machine: Machine, profile: Profile | None) -> list[int]:
    """Forward and backward, and gradients on their way home; the last kernel and the last copies."""
    priced = costs(workload, machine, profile)
    layers = list(zip(workload.layers, priced, strict=True))
    copies: list[int] = []
    for spec, cost in layers:
        kernel = graph.add("compute", f"F {spec.name}", [(Flow.TIME, cost.forward[WeightMode.STREAM].seconds)])
    for spec, cost in reversed(layers):
        seconds = cost.backward[WeightMode.STREAM, GradientMode.BUFFER].seconds
        if spec.recompute:
            seconds += cost.recompute[WeightMode.STREAM].seconds
        seconds += PACKED * spec.gradient_nbytes / machine.device_memory  # into a bucket
        kernel = graph.add("compute", f"B {spec.name}", [(Flow.TIME, seconds)])
        if not spec.parameters:
            continue
        others = spec.gradient_nbytes * (1 - 1 / machine.ranks)
        reduced = graph.add("peers", f"X {spec.name}", [(Flow.PEER, others)], after=[kernel])
        home = [(Flow.COPY_OUT, FULL * spec.parameters / machine.ranks)]
        copies.append(graph.add("out", f"G {spec.name}", home, after=[reduced], latency=machine.copy_latency))
    return [kernel, *copies]
