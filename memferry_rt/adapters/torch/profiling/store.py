"""Profiles in the user's cache directory, found again by what they hold for."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from ....errors import PlanError
from ....plan.profile import SCHEMA, VERSION, Profile, dumps_profile, load_profile

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_OF_MACHINE = ("cpu", "gpu_driver")  # what its times depend on, beside the device


def profile_path(profile: Profile) -> Path:
    """Where a profile of this machine, torch, model and dtype is kept: in ``$XDG_CACHE_HOME``, or ``~/.cache``."""
    told = [
        (SCHEMA, VERSION),
        [str(profile.machine.get(key)) for key in _OF_MACHINE],
        (profile.device, profile.torch, profile.dtype, profile.emulated),
        (profile.micro_batch, profile.sequence, profile.checkpointing),
        [(layer.name, layer.kind.value, layer.shapes, layer.tokens) for layer in profile.layers],
    ]
    key = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]
    return _folder() / f"{_safe(profile.device)}-{profile.dtype}-{key}.json"


def _folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if Path(cache).is_absolute() else Path.home() / ".cache") / "memferry" / "profiles"


def _safe(name: str) -> str:
    return _UNSAFE.sub("-", name).strip("-")


def kept(wanted: Profile, path: Path) -> Profile | None:
    """What was measured of it before; None if nothing was, or the file is damaged or something else."""
    if not path.exists():
        return None
    try:
        found = load_profile(path)
        found.check(
            device=wanted.device,
            torch=wanted.torch,
            dtype=wanted.dtype,
            tokens=wanted.tokens,
            shapes={layer.name: layer.shapes for layer in wanted.layers},
        )
    except PlanError:
        return None
    return found if found.emulated == wanted.emulated else None


def find_profile(
    device: str, dtype: str, tokens: int, shapes: Mapping[str, Iterable[tuple[int, ...]]], *, emulated: bool
) -> Profile | None:
    """The newest profile that is kept of such a model and micro-batch on such a device, with this torch."""
    files = sorted(_folder().glob(f"{_safe(device)}-{dtype}-*.json"), key=lambda file: file.stat().st_mtime)
    for file in reversed(files):
        try:
            found = load_profile(file)
            found.check(device=device, torch=str(torch.__version__), dtype=dtype, tokens=tokens, shapes=shapes)
        except PlanError:
            continue
        if found.emulated == emulated:
            return found
    return None


def keep(profile: Profile, path: Path) -> None:
    """Write a profile, whole or not at all; where the cache cannot be written, it is measured again next time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".partial", delete=False) as partial:
            try:
                partial.write(dumps_profile(profile) + "\n")
                partial.close()
                os.replace(partial.name, path)
            except BaseException:
                Path(partial.name).unlink(missing_ok=True)
                raise
    except OSError:
        return
