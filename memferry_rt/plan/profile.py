"""What was measured of a model's layers on a device: ``{"schema": "memferry.profile", "version": 1, ...}``.

Whoever measures makes a `Profile`; the planner reads it.  The fields of the file are the attributes of these
classes, by name; sizes are bytes, times seconds, rates bytes per second, phases and places those of the enums.
Fields that are not listed are refused, those with a default may be left out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from ..errors import PlanError
from .codec import decode, encode, read_text

SCHEMA, VERSION = "memferry.profile", 1


class LayerKind(Enum):
    """What a layer computes, as far as its cost by formula depends on it."""

    EMBEDDING = "embedding"  # looks up rows of a table
    LINEAR = "linear"  # matrix products alone
    BLOCK = "block"  # a transformer's block, or anything else that has matrix products and more
    NORM = "norm"  # elementwise work with small weights, read again for every row
    HEAD = "head"  # matrix product with the vocabulary, and the loss
    OTHER = "other"


class Phase(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"  # without recomputing the forward
    RECOMPUTE = "recompute"  # the forward again, inside of backward, where it differs from FORWARD


class WeightPlace(Enum):
    """Where the weights were that kernels read."""

    DEVICE = "device"
    HOST = "host"
    RING = "ring"  # panels in device memory, copied there while the others compute


class GradientPlace(Enum):
    """Where the gradients were that kernels wrote."""

    DEVICE = "device"
    HOST = "host"


class Copy(Enum):
    """A copy engine that was busy meanwhile."""

    NONE = "none"
    TO_DEVICE = "h2d"
    FROM_DEVICE = "d2h"


@dataclass(frozen=True)
class Timing:
    """One phase of one layer in one way.

    Attributes
    ----------
    weights : WeightPlace
    gradients : GradientPlace
        Of a backward; of other phases it says nothing.
    beside : Copy
        The copy that ran all the while; `copy_rate` is what it reached meanwhile.
    samples : tuple of float
        Seconds by device events, after warm-up; every one.
    exact : bool or None
        Whether the results were, to the bit, those with everything on the device; None where nobody looked.
    copied_nbytes, in_place_nbytes : int or None
        What copy engines carried for it, and what kernels were given in host memory, as often as they were.
    pool_nbytes : int or None
        Of rings in device memory that it needs.
    """

    phase: Phase
    samples: tuple[float, ...]
    weights: WeightPlace = WeightPlace.DEVICE
    gradients: GradientPlace = GradientPlace.DEVICE
    beside: Copy = Copy.NONE
    copy_rate: float | None = None
    exact: bool | None = None
    copied_nbytes: int | None = None
    in_place_nbytes: int | None = None
    pool_nbytes: int | None = None

    def __post_init__(self) -> None:
        if not self.samples or min(self.samples) <= 0:
            raise PlanError("samples: a timing has at least one, and all are more than 0 seconds")
        if self.copy_rate is not None and self.copy_rate <= 0:
            raise PlanError(f"copy_rate: {self.copy_rate} is not more than 0 bytes per second")

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(self.samples)


@dataclass(frozen=True)
class LayerProfile:
    """A layer and its timings.

    Attributes
    ----------
    weight_nbytes, gradient_nbytes, state_nbytes : int
        Of its slabs, as `memferry_rt.layout` lays them out.
    shapes : tuple of tuple of int
        Of its parameters, in order.
    tokens : int
        Rows that it computes in a micro-batch.
    activation_nbytes : int or None
        Device memory that it keeps from forward to backward, if it does not recompute.
    """

    name: str
    kind: LayerKind
    parameters: int
    weight_nbytes: int
    gradient_nbytes: int
    state_nbytes: int
    shapes: tuple[tuple[int, ...], ...]
    tokens: int
    timings: tuple[Timing, ...]
    activation_nbytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("parameters", "weight_nbytes", "gradient_nbytes", "state_nbytes", "tokens"):
            if getattr(self, name) < 0:
                raise PlanError(f"{name}: {getattr(self, name)} is less than 0")

    def find(
        self,
        phase: Phase,
        weights: WeightPlace = WeightPlace.DEVICE,
        gradients: GradientPlace = GradientPlace.DEVICE,
        beside: Copy = Copy.NONE,
    ) -> Timing | None:
        """The timing of this way, if it was measured."""
        wanted = (phase, weights, gradients, beside)
        return next((t for t in self.timings if (t.phase, t.weights, t.gradients, t.beside) == wanted), None)


@dataclass(frozen=True)
class CopySample:
    """Copies of one size between registered host memory and the device: seconds of each."""

    nbytes: int
    samples: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.nbytes <= 0 or not self.samples or min(self.samples) <= 0:
            raise PlanError("a copy has more than 0 bytes, and at least one sample of more than 0 seconds")

    @property
    def seconds(self) -> float:
        return statistics.median(self.samples)


@dataclass(frozen=True)
class Profile:
    """A model's layers, measured on a device.

    Attributes
    ----------
    device, torch, dtype : str
        The device's name, torch's version, the compute dtype: times hold for these only.
    machine : mapping
        Anything else that says what the machine is: processor, cores, memory, driver, date.
    emulated : bool
        Whether the times are those of the emulated device, and say nothing of a real one.
    micro_batch, sequence : int
    checkpointing : bool
        Whether blocks were recomputed in backward.
    to_device, from_device : tuple of CopySample
        Copies alone, by size.
    both_ways : float or None
        Both directions at once, each as a share of its rate alone.
    torch_nbytes : int or None
        The most that torch reserved in a step, beside weights and finished gradients.
    cpu_update_rate, stream_update_rate : float or None
        Parameters per second that the CPU updates alone, and that the device updates with state streamed through.
    host_memory_rate : float or None
        Bytes per second that host memory carries for the CPU's update and copies together.
    """

    device: str
    torch: str
    dtype: str
    micro_batch: int
    sequence: int
    checkpointing: bool
    layers: tuple[LayerProfile, ...]
    machine: Mapping[str, Any] = field(default_factory=dict)
    emulated: bool = False
    to_device: tuple[CopySample, ...] = ()
    from_device: tuple[CopySample, ...] = ()
    both_ways: float | None = None
    torch_nbytes: int | None = None
    cpu_update_rate: float | None = None
    stream_update_rate: float | None = None
    host_memory_rate: float | None = None

    def __post_init__(self) -> None:
        names = [layer.name for layer in self.layers]
        if not names:
            raise PlanError("layers: a profile has at least one")
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise PlanError(f"layers: {twice!r} is there twice")
        for name in ("cpu_update_rate", "stream_update_rate", "host_memory_rate", "both_ways"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise PlanError(f"{name}: {value} is not more than 0")

    @property
    def tokens(self) -> int:
        return self.micro_batch * self.sequence

    def layer(self, name: str) -> LayerProfile | None:
        return next((layer for layer in self.layers if layer.name == name), None)

    def check(
        self,
        *,
        device: str | None = None,
        torch: str | None = None,
        dtype: str | None = None,
        tokens: int | None = None,
        shapes: Mapping[str, Iterable[tuple[int, ...]]] | None = None,
    ) -> None:
        """Refuse it for anything other than what it was measured on; what is None is not compared.

        Parameters
        ----------
        shapes : mapping
            The shapes of every layer's parameters, by the layers' names; their sizes count, not how they lie.

        Raises
        ------
        PlanError
            It was measured on another device, with another torch or dtype, or of another model.
        """
        for what, mine, wanted in (
            ("device", self.device, device),
            ("torch", self.torch, torch),
            ("dtype", self.dtype, dtype),
            ("number of tokens", self.tokens, tokens),
        ):
            if wanted is not None and mine != wanted:
                raise PlanError(
                    f"the profile is of another {what}: {mine!r}, and this is {wanted!r}; "
                    "profile again, or leave the profile out: formulas do without"
                )
        for name, expected in (shapes or {}).items():
            layer = self.layer(name)
            if layer is None:
                raise PlanError(f"the profile has no layer {name!r}: it is of another model; profile again")
            if sorted(map(math.prod, layer.shapes)) != sorted(map(math.prod, expected)):
                raise PlanError(f"the profile's {name!r} has other sizes: it is of another model; profile again")


def dumps_profile(profile: Profile) -> str:
    """As JSON text."""
    return encode(SCHEMA, VERSION, profile)


def loads_profile(text: str) -> Profile:
    """From JSON text; errors as for `load_profile`."""
    return decode(SCHEMA, VERSION, Profile, text)


def load_profile(file: Path | str) -> Profile:
    """A profile from its file.

    Raises
    ------
    PlanError
        The file cannot be read, is no profile, or a field makes no sense; the error names the file and the field.
    """
    try:
        return loads_profile(read_text(file))
    except PlanError as error:
        raise PlanError(f"profile {file}: {error}") from None


def save_profile(profile: Profile, file: Path | str) -> None:
    """Write a profile's file."""
    Path(file).write_text(dumps_profile(profile) + "\n", encoding="utf-8")
