"""All ranks of a host at once, each with queues and links of its own: slow, and without the symmetry that the
simulator takes for granted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memferry_rt.plan import Machine
from memferry_rt.plan.rates import Flow
from memferry_rt.plan.simulate import Graph


@dataclass
class Open:
    """A flow under way."""

    rank: int
    task: int
    kind: Flow
    left: float
    rate: float = 0.0


Use = Callable[[Open], float]


@dataclass
class Host:
    """What happened: when tasks ended, by rank, and the most that flowed at once of what all share."""

    ends: list[list[float]]
    most_host_memory: float = 0.0
    most_cpu: float = 0.0
    most_link: float = 0.0


def run_host(graph: Graph, machine: Machine) -> Host:
    """The same tasks on every rank, all beginning at once."""
    ranks, count = range(machine.ranks), len(graph)
    host = Host([[-1.0] * count for _ in ranks])
    queues: list[dict[str, list[int]]] = [{} for _ in ranks]
    for rank in ranks:
        for task, queue in enumerate(graph.queues):
            queues[rank].setdefault(queue, []).append(task)
    active: list[Open] = []
    latent: set[tuple[int, int]] = set()
    now = 0.0
    while True:
        if _begin(graph, host, queues, active, latent, now):
            continue
        if not active:
            return host
        _share(machine, active, host)
        step = min(flow.left / flow.rate for flow in active)
        now += step
        for flow in active:
            flow.left -= flow.rate * step
        for over in [flow for flow in active if flow.left <= 1e-9 * (1 + flow.rate)]:
            active.remove(over)
            key = over.rank, over.task
            if any((flow.rank, flow.task) == key for flow in active):
                continue
            if key in latent:
                latent.discard(key)
                active += _flows(graph, *key)
                if any((flow.rank, flow.task) == key for flow in active):
                    continue
            host.ends[over.rank][over.task] = now


def _begin(
    graph: Graph,
    host: Host,
    queues: list[dict[str, list[int]]],
    active: list[Open],
    latent: set[tuple[int, int]],
    now: float,
) -> bool:
    """Start whatever is at the head of its queue and has its causes; whether anything was."""
    begun = False
    for rank, own in enumerate(queues):
        ends = host.ends[rank]
        for tasks in own.values():
            busy = any(flow.rank == rank and graph.queues[flow.task] == graph.queues[tasks[0]] for flow in active)
            while tasks and not busy and all(ends[before] >= 0 for before in graph.after[tasks[0]]):
                task, begun = tasks.pop(0), True
                if graph.latencies[task]:
                    latent.add((rank, task))
                    active.append(Open(rank, task, Flow.TIME, graph.latencies[task]))
                else:
                    active += _flows(graph, rank, task)
                busy = any((flow.rank, flow.task) == (rank, task) for flow in active)
                if not busy:
                    ends[task] = now
        for queue in [name for name, tasks in own.items() if not tasks]:
            del own[queue]
    return begun


def _flows(graph: Graph, rank: int, task: int) -> list[Open]:
    return [Open(rank, task, kind, amount) for kind, amount in graph.flows[task]]


def _share(machine: Machine, active: list[Open], host: Host) -> None:
    """Rates in proportion to what each would have alone, until something is used up: flow by flow."""
    weights = [_weight(machine, flow, active) for flow in active]
    resources = _resources(machine)
    open_ = set(range(len(active)))
    level = 0.0
    while open_:
        limits = []
        for number in open_:
            limit = {Flow.TIME: 1.0, Flow.READ: machine.host_reads, Flow.WRITE: machine.host_writes}.get(
                active[number].kind
            )
            if limit is not None:
                same = sum(1 for f in active if (f.rank, f.kind) == (active[number].rank, active[number].kind))
                limit = limit if active[number].kind is Flow.TIME else limit / same
                limits.append((limit / weights[number], {number}))
        for capacity, use in resources:
            users = {n for n in open_ if use(active[n])}
            if users:
                taken = sum(use(f) * f.rate for n, f in enumerate(active) if n not in open_)
                slope = sum(use(active[n]) * weights[n] for n in users)
                limits.append(((capacity - taken) / slope, users))
        level = max(level, min(limit for limit, _ in limits))
        for number in open_:
            active[number].rate = level * weights[number]
        open_ -= set().union(*(users for limit, users in limits if limit <= level * (1 + 1e-12)))
    copied = (Flow.COPY_IN, Flow.COPY_OUT, Flow.READ, Flow.WRITE, Flow.CPU)
    host.most_host_memory = max(host.most_host_memory, sum(f.rate for f in active if f.kind in copied))
    host.most_cpu = max(host.most_cpu, sum(f.rate for f in active if f.kind is Flow.CPU))
    for rank in range(machine.ranks):
        link = sum(f.rate for f in active if f.rank == rank and f.kind in (Flow.COPY_IN, Flow.READ))
        host.most_link = max(host.most_link, link)


def _weight(machine: Machine, flow: Open, active: list[Open]) -> float:
    counts = {kind: sum(1 for f in active if (f.rank, f.kind) == (flow.rank, kind)) for kind in Flow}
    share, count = machine.kernel_share, counts[flow.kind]
    if flow.kind in (Flow.COPY_IN, Flow.COPY_OUT):
        into = flow.kind is Flow.COPY_IN
        both = counts[Flow.READ if into else Flow.WRITE]
        return (machine.to_device if into else machine.from_device) * (1 - share if both else 1.0) / count
    if flow.kind in (Flow.READ, Flow.WRITE):
        into = flow.kind is Flow.READ
        link, alone = (
            (machine.to_device, machine.host_reads) if into else (machine.from_device, machine.host_writes)
        )
        return (link * share if counts[Flow.COPY_IN if into else Flow.COPY_OUT] else alone) / count
    if flow.kind is Flow.CPU:
        return machine.cpu_update / machine.ranks
    return machine.peers if flow.kind is Flow.PEER else 1.0


def _resources(machine: Machine) -> list[tuple[float, Use]]:
    """Capacities, and how much of each a flow takes for every unit that it moves."""
    into, out = machine.to_device, machine.from_device
    found: list[tuple[float, Use]] = [
        (machine.cpu_update, lambda f: float(f.kind is Flow.CPU)),
        (machine.host_memory, lambda f: float(f.kind not in (Flow.TIME, Flow.PEER))),
    ]
    for rank in range(machine.ranks):

        def own(kinds: dict[Flow, float], rank: int = rank) -> Use:
            return lambda f: kinds.get(f.kind, 0.0) if f.rank == rank else 0.0

        found += [
            (into, own({Flow.COPY_IN: 1.0, Flow.READ: 1.0})),
            (out, own({Flow.COPY_OUT: 1.0, Flow.WRITE: 1.0})),
            (
                2 * machine.both_ways,
                own({Flow.COPY_IN: 1 / into, Flow.READ: 1 / into, Flow.COPY_OUT: 1 / out, Flow.WRITE: 1 / out}),
            ),
            (machine.peers, own({Flow.PEER: 1.0})),
        ]
    return found
