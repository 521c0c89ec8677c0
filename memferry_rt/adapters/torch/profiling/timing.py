"""The times of one layer, phase by phase and way by way, alone and beside a copy."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from memferry_allocator import Span, Stream

from ....plan.profile import Copy, GradientPlace, Phase, Timing, WeightPlace
from ..operators import same_bytes
from .kit import Homes, Kit, Way
from .rehearsal import Subject
from .run import Run
from .stand import Home, Stand
from .ways import computed, possible

SECONDS = 0.04  # that samples of one timing may take together, about
FEWEST, MOST = 2, 7
SLOW = 0.05  # seconds: what takes so long is not measured often
LONGER = 2.0  # than the layer: the copy beside it


@dataclass(frozen=True)
class Traced:
    """What a way has computed, to compare bytes."""

    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor]


class LayerTimes:
    """Measures a layer.

    Parameters
    ----------
    stand : Stand
    kit : Kit
    chunk : Home
        Host memory that copies beside the layer read or write, again and again.
    """

    def __init__(self, stand: Stand, kit: Kit, chunk: Home) -> None:
        self._stand = stand
        self._kit = kit
        self._chunk = chunk
        self._near = stand.buffer(tuple(chunk.host.shape), chunk.host.dtype)
        self._other = stand.driver.create_stream(stand.device)

    def measure(self, subject: Subject) -> tuple[Timing, ...]:
        """Every phase, every way that the layer can do, alone and beside a copy in either direction."""
        if not any(calls for _, calls in subject.units):
            return ()
        homes, run = Homes(self._stand, subject), Run(subject)
        try:
            plain = self._reference(subject, homes, run)
            found: list[Timing] = []
            for way in (Way(weights, gradients) for weights in WeightPlace for gradients in GradientPlace):
                if possible(subject, way, self._kit):
                    found += self._in_a_way(subject, way, homes, run, plain)
            return tuple(found)
        finally:
            self._stand.settle()
            for parameter in subject.parameters:
                parameter.grad = None
            homes.close()

    def kept_nbytes(self, subject: Subject) -> int:
        """Bytes that autograd keeps of a forward, the layer's own parameters left out."""
        own = {parameter.untyped_storage().data_ptr() for parameter in subject.parameters}
        run = Run(subject)
        kept = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in run.record()}
        return sum(nbytes for place, nbytes in kept.items() if place not in own)

    def close(self) -> None:
        self._other.close()

    # -- one way ------------------------------------------------------------------------------------------
    def _in_a_way(
        self, subject: Subject, way: Way, homes: Homes, run: Run, plain: Traced | None
    ) -> Iterator[Timing]:
        forward, backward = self._exact(subject, way, homes, run, plain)
        with computed(subject, way, homes, self._kit):
            if way.gradients is GradientPlace.DEVICE:
                yield from self._phase(Phase.FORWARD, way, run.forward, None, forward)
            run.record()
            if run.has_backward:
                yield from self._phase(Phase.BACKWARD, way, run.backward, run.record, backward)

    def _phase(
        self,
        phase: Phase,
        way: Way,
        work: Callable[[], object],
        before: Callable[[], object] | None,
        exact: bool | None,
    ) -> Iterator[Timing]:
        bytes_of = self._counted(work, before)
        pilot = self._stand.seconds(work, samples=1, warm_up=1, before=before)[0]
        fewest = 1 if self._stand.emulated or pilot > SLOW else FEWEST
        count = 1 if self._stand.emulated else min(MOST, max(fewest, int(SECONDS / pilot)))
        for beside in Copy:
            if beside is Copy.NONE:
                samples, rate = self._stand.seconds(work, samples=count, warm_up=1, before=before), None
            else:
                samples, rate = self._beside(work, before, beside, pilot, count)
            yield Timing(
                phase,
                samples,
                way.weights,
                way.gradients,
                beside,
                rate,
                exact,
                *bytes_of,
            )

    def _counted(self, work: Callable[[], object], before: Callable[[], object] | None) -> tuple[int, int, int]:
        """Bytes by copy engines, in place and of rings, of one run."""
        if before is not None:
            before()
        self._stand.settle()
        self._kit.reset()
        work()
        self._stand.settle()
        return self._kit.copied_nbytes, self._kit.in_place_nbytes, self._kit.pool_nbytes

    # -- beside a copy --------------------------------------------------------------------------------------
    def _beside(
        self,
        work: Callable[[], object],
        before: Callable[[], object] | None,
        direction: Copy,
        alone: float,
        count: int,
    ) -> tuple[tuple[float, ...], float]:
        """Samples, and the copy's bytes per second meanwhile."""
        near, far = self._near.span, self._chunk.span
        target, source = (near, far) if direction is Copy.TO_DEVICE else (far, near)
        rate = self._rate(target, source)
        copies = 2 + int(LONGER * alone * rate / near.nbytes)
        pairs = [self._one_beside(work, before, target, source, copies) for _ in range(count)]
        return tuple(seconds for seconds, _ in pairs), min(rate for _, rate in pairs)

    def _rate(self, target: Span, source: Span) -> float:
        stream = self._stand.stream
        seconds = self._stand.seconds(lambda: self._copies(target, source, 4, stream), samples=1, warm_up=1)[0]
        return 4 * target.nbytes / seconds

    def _one_beside(
        self,
        work: Callable[[], object],
        before: Callable[[], object] | None,
        target: Span,
        source: Span,
        copies: int,
    ) -> tuple[float, float]:
        stand, other = self._stand, self._other
        if before is not None:
            before()
        stand.settle()
        if stand.emulated:  # where nothing runs beside anything
            seconds = stand.seconds(work, samples=1, warm_up=0)[0]
            return seconds, self._rate(target, source)
        stand.hold(other)
        begun = other.record(stand.driver.create_event(stand.device, timing=True))
        self._copies(target, source, copies, other)
        over = other.record(stand.driver.create_event(stand.device, timing=True))
        stand.stream.wait(begun)
        for lane in stand.lanes:
            lane.wait(begun)
        start = stand.mark()
        work()
        for lane in stand.lanes:
            stand.stream.wait(lane.record())
        end = stand.mark()
        stand.settle()
        return end.elapsed_since(start), copies * target.nbytes / over.elapsed_since(begun)

    def _copies(self, target: Span, source: Span, count: int, stream: Stream) -> None:
        for _ in range(count):
            self._stand.driver.copy(target.ptr, source.ptr, target.nbytes, stream=stream)

    # -- exactness ------------------------------------------------------------------------------------------
    def _reference(self, subject: Subject, homes: Homes, run: Run) -> Traced | None:
        """What the plain way computes; None where it does not compute the same twice."""
        first, second = (self._trace(subject, Way(), homes, run) for _ in range(2))
        return first if _same(first.outputs + first.gradients, second.outputs + second.gradients) else None

    def _exact(
        self, subject: Subject, way: Way, homes: Homes, run: Run, plain: Traced | None
    ) -> tuple[bool | None, bool | None]:
        """Whether forward and backward give the plain bytes."""
        if plain is None:
            return None, None
        found = self._trace(subject, way, homes, run)
        return _same(found.outputs, plain.outputs), _same(found.gradients, plain.gradients)

    def _trace(self, subject: Subject, way: Way, homes: Homes, run: Run) -> Traced:
        devices = [] if self._stand.emulated else [self._stand.device]
        with torch.random.fork_rng(devices), _deterministic(), computed(subject, way, homes, self._kit):
            torch.manual_seed(0)  # dropout is the same every time
            outputs = [y.clone() for y in run.forward()]
            run.record()
            if run.has_backward:
                run.backward()
            self._stand.settle()
        gradients = [x.grad for x in run.inputs if x.grad is not None]
        for parameter, home in homes.gradients.items():
            if way.gradients is GradientPlace.HOST:
                gradients.append(home.mapped.clone())
            elif parameter.grad is not None:
                gradients.append(parameter.grad)
        self._stand.settle()
        return Traced(outputs, gradients)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Kernels of torch that give the same bits every time, where it has such."""
    before, warns = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warns)


def _same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(same_bytes(a, b) for a, b in zip(some, others, strict=True))
