"""Files that commands write: whole or not at all, and found out to be writable before time is spent."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

from .errors import ToolError


def check_writable(path: Path | None, option: str) -> None:
    """Find out whether a result can be written, before time is spent on it.

    Raises
    ------
    ToolError
        It cannot; the message begins with `option`.
    """
    if path is None:
        return
    if path.is_dir():
        raise ToolError(f"{option}: {path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ToolError(f"{option}: there is no folder {path.parent}; make it first")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ToolError(f"{option}: {path.parent} cannot be written to: {error.strerror}") from None


def write_whole(path: Path, content: str | bytes, option: str) -> None:
    """Write a file whole or not at all.

    Raises
    ------
    ToolError
        It could not be written; what was there before still is.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ToolError(f"{option}: {path} could not be written: {error.strerror}") from None


def write_json(path: Path, content: Any, option: str) -> None:
    """Write JSON whole or not at all; NaN and infinity become null."""
    write_whole(path, json.dumps(_finite(content), indent=2, allow_nan=False) + "\n", option)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
