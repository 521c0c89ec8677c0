"""The profile of a model: every different layer measured once, copies of several sizes, and where it is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memferry_allocator import open_device
from memferry_allocator.driver.emulated import EmulatedOptions

from ....errors import UnsupportedError
from ....layout import MOMENTS
from ....plan.profile import CopySample, LayerKind, LayerProfile, Profile, Timing
from ..convert import plan_layouts
from .kit import Kit
from .rehearsal import Subject, rehearse
from .stand import Home, Stand
from .store import keep, kept, profile_path
from .timing import LayerTimes

CHUNK = 16 << 20  # bytes of a copy beside a layer
SIZES = (1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20)
SAMPLES = 5
EMULATED_CHUNK = 1 << 16
EMULATED_SIZES = (1 << 12, 1 << 16)


def profile_model(
    model: nn.Module,
    inputs: Sequence[Any],
    *,
    micro_batch: int,
    sequence: int,
    device: str = "auto",
    compute_dtype: torch.dtype | None = None,
    layers: Sequence[str] | None = None,
    checkpointing: bool = False,
    machine: Mapping[str, Any] | None = None,
    anew: bool = False,
    emulated: EmulatedOptions | None = None,
    told: Callable[[str], None] = lambda layer: None,
) -> Profile:
    """Measure a model's layers in every mode, or find what was measured of its like on this machine before.

    The model is not changed and its weights are not read: layers that are alike share random ones.  About a third
    of a minute for a model of some billion parameters; device memory as for its largest layer, its activations and
    gradients.

    Parameters
    ----------
    model : nn.Module
        On any device, or on ``meta``.
    inputs : sequence
        Of its forward, in the sizes of a micro-batch.
    device : str
        ``"auto"``, ``"cuda:N"`` or ``"emulated"``, whose times are the CPU's and are marked as such.
    compute_dtype : torch.dtype, optional
        Of weights and gradients; by default what the parameters have.
    layers : sequence of str, optional
        As `memferry_rt.offload` takes it.
    checkpointing : bool
        Whether blocks are recomputed in backward; noted, not measured.
    machine : mapping, optional
        What else is known of the machine: it is kept with the times, and only its ``"cpu"`` and ``"gpu_driver"``
        decide whether times of before still hold.
    anew : bool
        Measure, whatever is kept.
    told : callable, optional
        Is given the name of each layer before it is measured.

    Raises
    ------
    UnsupportedError
        The model cannot be copied or called.
    DriverError
        No such device.
    """
    driver, ordinal = open_device(device, emulated=emulated)
    about = dict(machine or {})
    stand = Stand(driver, ordinal)
    try:
        with stand.computing():
            subjects = _rehearsed(model, inputs, stand, compute_dtype, layers)
            profile = Profile(
                device=driver.device_info(ordinal).name,
                torch=str(torch.__version__),
                dtype=_dtype_of(subjects),
                micro_batch=micro_batch,
                sequence=sequence,
                checkpointing=checkpointing,
                layers=tuple(_described(subjects, micro_batch * sequence)),
                machine=about,
                emulated=stand.emulated,
            )
            path = profile_path(profile)
            found = None if anew else kept(profile, path)
            return found or _measured(profile, subjects, stand, path, told)
    finally:
        stand.close()


def _measured(
    profile: Profile, subjects: list[Subject], stand: Stand, path: Path, told: Callable[[str], None]
) -> Profile:
    """Every different layer's times into its description and into those of its likes."""
    chunk = stand.home((EMULATED_CHUNK if stand.emulated else CHUNK,), torch.uint8)
    chunk.host.zero_()
    kit = Kit(stand)
    times = LayerTimes(stand, kit, chunk)
    measured: dict[str, tuple[tuple[Timing, ...], int | None]] = {}
    try:
        for subject in subjects:
            if subject.cut.name == subject.like:
                told(subject.cut.name)
                found = times.measure(subject)
                measured[subject.like] = found, times.kept_nbytes(subject) if found else None
        copies = _copies(stand)
        both = _both_ways(stand, chunk)
    finally:
        stand.settle()
        times.close()
        kit.close()
        chunk.close()
    layers = tuple(
        replace(layer, timings=measured[subject.like][0], activation_nbytes=measured[subject.like][1])
        for layer, subject in zip(profile.layers, subjects, strict=True)
    )
    result = replace(profile, layers=layers, to_device=copies[0], from_device=copies[1], both_ways=both)
    keep(result, path)
    return result


def _rehearsed(
    model: nn.Module,
    inputs: Sequence[Any],
    stand: Stand,
    dtype: torch.dtype | None,
    layers: Sequence[str] | None,
) -> list[Subject]:
    try:
        return rehearse(model, inputs, stand.torch_device, dtype, layers)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise UnsupportedError(
            f"profile: the model cannot be copied and called with these inputs: {error}; give it the inputs of a "
            "forward, and a model that is not offloaded"
        ) from error


def _dtype_of(subjects: Sequence[Subject]) -> str:
    """The dtype that most parameters have."""
    counts: dict[torch.dtype, int] = {}
    for subject in subjects:
        for parameter in subject.parameters:
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return str(max(counts, key=lambda dtype: counts[dtype])).removeprefix("torch.")


def _described(subjects: Sequence[Subject], tokens: int) -> list[LayerProfile]:
    """What is known of each layer without measuring."""
    cuts = [subject.cut for subject in subjects]
    updated = {p: MOMENTS for cut in cuts for _, p in cut.parameters if p.requires_grad}
    layouts, _ = plan_layouts(cuts, updated, None, None)
    calls = {subject.cut.name: _rows(subject) for subject in subjects}
    last = max((index for index, subject in enumerate(subjects) if _kind(subject) is LayerKind.LINEAR), default=-1)
    return [
        LayerProfile(
            name=subject.cut.name,
            kind=LayerKind.HEAD if index == last else _kind(subject),
            parameters=sum(parameter.numel() for parameter in subject.parameters),
            weight_nbytes=layout.weight_nbytes,
            gradient_nbytes=layout.gradient_nbytes,
            state_nbytes=layout.state_nbytes,
            shapes=subject.shapes,
            tokens=calls[subject.like] or tokens,
            timings=(),
        )
        for index, (subject, layout) in enumerate(zip(subjects, layouts, strict=True))
    ]


def _kind(subject: Subject) -> LayerKind:
    units = [unit for unit, _ in subject.units]
    if all(parameter.dim() <= 1 for parameter in subject.parameters):
        return LayerKind.NORM
    if len(units) != 1:
        return LayerKind.OTHER
    if isinstance(units[0], nn.Embedding):
        return LayerKind.EMBEDDING
    if isinstance(units[0], nn.Linear):
        return LayerKind.LINEAR
    return LayerKind.BLOCK if any(True for _ in units[0].children()) else LayerKind.OTHER


def _rows(subject: Subject) -> int:
    """Rows that the first unit computes in all its calls."""
    if not subject.units:
        return 0
    rows = 0
    for call in subject.units[0][1]:
        first = next((x for x in (*call.args, *call.kwargs.values()) if isinstance(x, torch.Tensor)), None)
        if first is not None:
            rows += first.numel() // (first.shape[-1] if first.is_floating_point() and first.dim() else 1)
    return rows


def _copies(stand: Stand) -> list[tuple[CopySample, ...]]:
    """Copies into the device and out of it, alone, by size."""
    sizes = EMULATED_SIZES if stand.emulated else SIZES
    home, buffer = stand.home((sizes[-1],), torch.uint8), stand.buffer((sizes[-1],), torch.uint8)
    home.host.zero_()
    found = []
    for target, source in ((buffer.span, home.span), (home.span, buffer.span)):
        samples = []
        for size in sizes:

            def copy(target: int = target.ptr, source: int = source.ptr, size: int = size) -> None:
                stand.driver.copy(target, source, size, stream=stand.stream)

            samples.append(CopySample(size, stand.seconds(copy, samples=SAMPLES)))
        found.append(tuple(samples))
    stand.settle()
    home.close()
    return found


def _both_ways(stand: Stand, chunk: Home) -> float:
    """Copies in both directions at once: each one's share of its rate alone."""
    other = stand.home(tuple(chunk.host.shape), chunk.host.dtype)
    buffers = [stand.buffer(tuple(chunk.host.shape), chunk.host.dtype) for _ in range(2)]
    inward, outward = stand.lanes
    count = 8

    def copies(into: bool, out: bool) -> Callable[[], None]:
        def enqueue() -> None:
            for _ in range(count):
                if into:
                    stand.driver.copy(buffers[0].span.ptr, chunk.span.ptr, chunk.span.nbytes, stream=inward)
                if out:
                    stand.driver.copy(other.span.ptr, buffers[1].span.ptr, chunk.span.nbytes, stream=outward)

        return enqueue

    alone = max(min(stand.seconds(copies(into, not into), samples=SAMPLES)) for into in (True, False))
    together = min(stand.seconds(copies(True, True), samples=SAMPLES))
    stand.settle()
    other.close()
    return min(1.0, alone / together)
