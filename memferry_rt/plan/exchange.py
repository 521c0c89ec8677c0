"""What ranks that train together do beside what one does alone: they exchange every layer's gradient.

As the runtime does it: when a layer's gradients are complete, each rank sends the others their pieces and goes on;
behind the next layer's backward it adds up what it got of its own piece, which then goes home over its own link.
An iteration of one rank is simulated; all do the same at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..errors import PlanError
from .machine import Machine
from .model import LayerSpec, Workload
from .modes import GradientMode, StateMode
from .options import PlanOptions
from .rates import Flow
from .simulate import Graph

IN_FLIGHT = 2  # layers whose pieces are under way: what is sent of each, and what is received
PACKED = 3  # times a layer's gradient that filling what is sent moves of device memory
ADDED = 5  # and adding up in fp32 what is received
MEETINGS = 3  # of all ranks, between the last gradient at home and the first update
MEETING = 2e-4  # seconds: who waits looks after pauses that grow to this


def for_ranks(options: PlanOptions, machine: Machine) -> PlanOptions:
    """Options without what several ranks cannot do.

    Raises
    ------
    PlanError
        Just that was asked for.
    """
    if machine.ranks == 1:
        if options.loads != "whole":
            raise PlanError(f"loads: {options.loads!r} is for several ranks, and this is one; leave it out")
        return options
    if options.early or options.spares:
        what = "early" if options.early else "spares"
        raise PlanError(f"{what}: {machine.ranks} ranks make no updates during backward; leave it out")
    return replace(options, spares=0, state_modes=options.state_modes - {StateMode.RESIDENT})


def with_exchange(workload: Workload, ranks: int) -> Workload:
    """With what torch needs for the exchange: buffers of two layers, and one layer's own gradients."""
    if ranks == 1:
        return workload
    largest = max(layer.gradient_nbytes for layer in workload.layers)
    return replace(workload, exchange_nbytes=(2 * IN_FLIGHT + 1) * largest)


class Exchange:
    """The tasks of one backward's exchange.

    Parameters
    ----------
    graph : Graph
    machine : Machine
    """

    def __init__(self, graph: Graph, machine: Machine) -> None:
        self._graph = graph
        self._machine = machine
        self._part = 1 / machine.ranks
        self._flying: tuple[LayerSpec, GradientMode, int] | None = None

    def pack_seconds(self, spec: LayerSpec) -> float:
        """Filling what is sent of a layer."""
        return PACKED * spec.gradient_nbytes / self._machine.device_memory

    def send(self, spec: LayerSpec, mode: GradientMode, kernel: int) -> None:
        """A layer's gradients are complete behind `kernel`."""
        task = self._graph.add(
            "peers",
            f"X {spec.name}",
            [(Flow.PEER, spec.gradient_nbytes * (1 - self._part))],
            after=[kernel],
            latency=self._machine.peer_latency,
            takes=spec.gradient_nbytes,
        )
        self._flying = spec, mode, task

    def land(self, after: Sequence[int]) -> int:
        """Add up the own piece of the layer that was sent last; the task at whose end it is there.

        It is at home by then if it is written there in place; else it is to be copied.
        """
        assert self._flying is not None
        spec, mode, task = self._flying
        self._flying = None
        seconds = ADDED * spec.gradient_nbytes / self._machine.device_memory
        home = spec.gradient_nbytes * self._part if mode is GradientMode.INPLACE else 0.0
        flows = [(Flow.TIME, seconds), (Flow.WRITE, home)]
        gives = 2 * spec.gradient_nbytes
        return self._graph.add("compute", f"S {spec.name}", flows, after=[task, *after], gives=gives)
