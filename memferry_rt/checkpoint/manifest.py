"""The JSON file that makes files of tensors a checkpoint."""

from __future__ import annotations

import json
import zlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

MANIFEST = "checkpoint.json"
FORMAT = "memferry.checkpoint"
FORMAT_VERSION = 1
CONTENT = frozenset({"memferry", "torch", "files", "optimizer", "extra"})


def runtime_version() -> str:
    """The version of the installed distribution, or ``"unknown"`` in a source tree that was never installed."""
    try:
        return version("memferry-rt")
    except PackageNotFoundError:
        return "unknown"


def check_json(value: Any, where: str) -> None:
    """Refuse what JSON would not give back: other types, and keys that are not text.

    Raises
    ------
    CheckpointError
        It names the place in `value`.
    """
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{where}: the key {key!r} is not a str, as JSON needs; write it as one")
            check_json(inner, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            check_json(inner, f"{where}[{number}]")
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        raise CheckpointError(
            f"{where} is a {type(value).__name__}; a checkpoint takes numbers, text, None, lists and dicts: "
            "convert it, for example with .tolist() or .item()"
        )


def encode_manifest(content: dict[str, Any]) -> bytes:
    """`content` with the format's name and version, and a checksum."""
    whole = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "crc32": _checksum(content),
        "content": content,
    }
    return (json.dumps(whole, indent=1) + "\n").encode()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The content of a folder's manifest.

    Raises
    ------
    CheckpointError
        There is none, it is damaged, or of a later version.
    """
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"there is no checkpoint in {folder}: it has no {MANIFEST}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    try:
        whole = json.loads(text)
        known = whole["format"] == FORMAT
        number = whole["format_version"]
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{path} is damaged: it is not the JSON that was saved") from None
    if not known:
        raise CheckpointError(f"{path} is not of a checkpoint: its format is {whole['format']!r}")
    if number != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {number!r}, and this MemFerry reads {FORMAT_VERSION}; install a newer one"
        )
    content = whole.get("content")
    if not isinstance(content, dict) or whole.get("crc32") != _checksum(content):
        raise CheckpointError(f"{path} is damaged: its checksum is not the one that was saved")
    if not CONTENT.issubset(content):
        raise CheckpointError(f"{path} is damaged: it lacks {', '.join(sorted(CONTENT.difference(content)))}")
    return content


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
