"""What a checkpoint says of itself, read without its tensors."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .folder import CheckpointReader


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint says of itself.

    Attributes
    ----------
    memferry, torch : str
        Versions that saved it.
    optimizer : str
        ``"AdamW"``, ``"Adam"``, or another class's name.
    nbytes : int
        Of its files of tensors.
    extra
        What `save` was given.
    """

    memferry: str
    torch: str
    optimizer: str
    nbytes: int
    extra: Any


def checkpoint_info(path: str | os.PathLike[str]) -> CheckpointInfo:
    """What the checkpoint in a folder says of itself.  Needs no torch, and reads no tensors.

    Raises
    ------
    CheckpointError
        There is none, or it is damaged as far as sizes and headers tell.
    """
    with CheckpointReader(Path(path)) as reader:
        content = reader.content
    return CheckpointInfo(
        memferry=content["memferry"],
        torch=content["torch"],
        optimizer=content["optimizer"]["type"],
        nbytes=sum(entry["nbytes"] for entry in content["files"].values()),
        extra=content["extra"],
    )
