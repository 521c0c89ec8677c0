"""Memory for a model in place of a row's own, to its scale."""

from __future__ import annotations

from memferry_allocator import parse_size
from memferry_tools.train.presets import find_preset


def parameters(preset: str) -> int:
    return find_preset(preset).shape.parameters


def itemsize(device: str) -> int:
    """Of weights in compute on such a device."""
    return 4 if device.startswith("emulated") else 2


def scaled_device(memory: str, preset: str, other: str, device: str) -> int:
    """Device memory for `other`: the multiple of its weights that `memory` is of the preset's in bf16."""
    multiple = parse_size(memory) / (2 * parameters(preset))
    return int(multiple * itemsize(device) * parameters(other))


def scaled_host(memory: str, preset: str, other: str) -> int:
    """Host memory for `other`, to its number of parameters."""
    return int(parse_size(memory) * parameters(other) / parameters(preset))


def mib(nbytes: int) -> str:
    """Whole MiB, as options take them."""
    return f"{nbytes >> 20}MiB"
