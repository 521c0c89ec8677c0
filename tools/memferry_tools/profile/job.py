"""One run of ``memferry profile``, from its options to its exit status."""

from __future__ import annotations

import time

import torch

from memferry_rt.adapters.torch.profiling import profile_model
from memferry_rt.plan.profile import Copy, GradientPlace, LayerProfile, Phase, Profile, WeightPlace, dumps_profile

from ..errors import ToolError
from ..files import check_writable, write_whole
from ..machine import describe_machine
from ..screen import Screen
from ..train.device import find_target
from ..train.model import Decoder
from ..train.options import DTYPES
from ..version import version
from .options import ProfileOptions

_WAYS = (
    ("forward", Phase.FORWARD, WeightPlace.DEVICE, GradientPlace.DEVICE),
    ("at home", Phase.FORWARD, WeightPlace.HOST, GradientPlace.DEVICE),
    ("ring", Phase.FORWARD, WeightPlace.RING, GradientPlace.DEVICE),
    ("backward", Phase.BACKWARD, WeightPlace.DEVICE, GradientPlace.DEVICE),
    ("at home", Phase.BACKWARD, WeightPlace.HOST, GradientPlace.DEVICE),
    ("ring", Phase.BACKWARD, WeightPlace.RING, GradientPlace.DEVICE),
    ("gradient home", Phase.BACKWARD, WeightPlace.DEVICE, GradientPlace.HOST),
)


def run(options: ProfileOptions) -> int:
    """Measure, show, and keep where the user says."""
    check_writable(options.json, "--json")
    screen = Screen()
    target = find_target(options.device)
    began = time.perf_counter()
    layers: list[str] = []
    profile = _measure(options, target.emulated, target.text, layers)
    screen.title(f"memferry {version()}: profile{', EMULATED' if profile.emulated else ''}")
    screen.rows(
        [
            ("model", f"{options.model}, {profile.micro_batch} x {profile.sequence} tokens, {profile.dtype}"),
            ("device", f"{profile.device}, torch {profile.torch}"),
            ("measured", _measured(layers, time.perf_counter() - began)),
        ]
    )
    if profile.emulated:
        screen.rows([("times", "the CPU's, and no device's: they try the profiler out")])
    _show(profile, screen)
    if options.json is not None:
        write_whole(options.json, dumps_profile(profile) + "\n", "--json")
        screen.rows([("written", str(options.json))])
    return 0


def _measure(options: ProfileOptions, emulated: bool, device: str, layers: list[str]) -> Profile:
    dtype = ("float32" if emulated else "bfloat16") if options.dtype == "auto" else DTYPES[options.dtype]
    with torch.device("meta"):
        model = Decoder(options.shape, checkpointing=options.checkpointing)
    tokens = torch.randint(model.shape.vocabulary, (options.micro_batch, options.sequence))
    try:
        return profile_model(
            model,
            (tokens, tokens.roll(1, 1)),
            micro_batch=options.micro_batch,
            sequence=options.sequence,
            device=device,
            compute_dtype=getattr(torch, dtype),
            checkpointing=options.checkpointing,
            machine=describe_machine(),
            anew=options.anew,
            told=layers.append,
        )
    except torch.OutOfMemoryError as error:
        raise ToolError(
            f"--micro-batch: one layer of that many tokens does not fit the device: {error}"
        ) from error


def _measured(layers: list[str], seconds: float) -> str:
    if not layers:
        return "before, on this machine; --anew measures again"
    return f"{', '.join(layers)} and those like them, in {seconds:.1f} s"


def _show(profile: Profile, screen: Screen) -> None:
    """Milliseconds of the different layers; those whose results are not the plain bytes have a star."""
    lines, seen = [], set()
    for layer in profile.layers:
        if layer.timings and layer.timings not in seen:
            seen.add(layer.timings)
            lines.append([layer.name, *(_cell(layer, *way[1:]) for way in _WAYS)])
    screen.table(("ms", *(name for name, *_ in _WAYS)), lines)
    if any("*" in cell for line in lines for cell in line):
        screen.lines("* not the bytes that the plain way gives: only with relaxed numerics")


def _cell(layer: LayerProfile, phase: Phase, weights: WeightPlace, gradients: GradientPlace) -> str:
    timing = layer.find(phase, weights, gradients, Copy.NONE)
    if timing is None:
        return ""
    return f"{timing.seconds * 1e3:.2f}{'*' if timing.exact is False else ''}"
