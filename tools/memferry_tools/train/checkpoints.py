"""Saving a run to a folder, and going on from one."""

from __future__ import annotations

import dataclasses
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from memferry_rt import CheckpointError, checkpoint_info

from ..errors import ToolError
from .recipe import Recipe
from .tokens import Tokens

SAVED_BY = "memferry train"


@dataclass(frozen=True)
class Identity:
    """What decides a run's losses, however many steps it has: preset, recipe and text, as JSON."""

    content: dict[str, Any]

    @classmethod
    def of(cls, model: str, recipe: Recipe, tokens: Tokens) -> Identity:
        settings = dataclasses.asdict(recipe)
        del settings["steps"]
        settings["accumulate"] *= settings.pop("ranks")  # whoever sees them: the batch of a step is the same
        shape = settings.pop("shape")
        checksum = zlib.crc32(np.ascontiguousarray(tokens.ids).data)
        text = {"tokens in the data": len(tokens.ids), "checksum of the data": checksum}
        return cls({"preset": model, **shape, **settings, **text})

    def extra(self, step: int) -> dict[str, Any]:
        """What a checkpoint after `step` steps keeps beside the state."""
        return {"saved_by": SAVED_BY, "step": step, "run": self.content}


@dataclass(frozen=True)
class Saved:
    """A run's checkpoint: where it is, after how many steps it was made, and of which run."""

    path: Path
    step: int
    run: dict[str, Any]

    @classmethod
    def find(cls, path: Path | None) -> Saved | None:
        """What `path` says of itself, if it is given.

        Raises
        ------
        ToolError
            There is no checkpoint of a run.
        """
        if path is None:
            return None
        try:
            extra = checkpoint_info(path).extra
        except CheckpointError as error:
            raise ToolError(f"--resume: {error}") from error
        if not isinstance(extra, dict) or extra.get("saved_by") != SAVED_BY:
            raise ToolError(f"--resume: the checkpoint in {path} was not saved by {SAVED_BY}")
        return cls(path, extra["step"], extra["run"])

    def check(self, identity: Identity, steps: int) -> None:
        """Refuse what would not be the run that was saved.

        Raises
        ------
        ToolError
            A setting differs, or there is no step left.
        """
        for name, mine in identity.content.items():
            if self.run.get(name) != mine:
                raise ToolError(
                    f"--resume: the run in {self.path} has {name} {self.run.get(name)}, and this one {mine}; "
                    "give the options that it was started with"
                )
        if self.step >= steps:
            raise ToolError(
                f"--resume: the run in {self.path} has made {self.step} steps; "
                f"write --steps {self.step + 1} or more"
            )


def check_savable(path: Path | None, resume: Path | None) -> None:
    """Find out whether a run can be saved, before time is spent on it.

    Raises
    ------
    ToolError
        It cannot, or another run's checkpoint would be lost.
    """
    if path is None:
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise ToolError(f"--save: {path} cannot be written to: {error.strerror}") from None
    goes_on = resume is not None and resume.exists() and path.samefile(resume)
    if not goes_on and (path / "checkpoint.json").exists():
        raise ToolError(
            f"--save: {path} has the checkpoint of a run already; add --resume {path} to go on with it, or name "
            "another folder"
        )
