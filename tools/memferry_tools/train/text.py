"""Text to train on: a file, a folder of files, or what is on every machine."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import ToolError

_NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


@dataclass(frozen=True)
class Text:
    """Text as bytes, UTF-8 for the most part, and where it is from, for people."""

    content: bytes
    source: str


def read_text(path: Path | None) -> Text:
    """The text of a file, or of all text files under a folder in the order of their names.

    A file is text if it has no byte 0; other files of a folder are left out.  Bytes that are not UTF-8 stay
    what they are.

    Parameters
    ----------
    path : Path, optional
        By default the source files of Python's own standard library, without its tests.

    Raises
    ------
    ToolError
        Nothing there, nothing that can be read, or no text in it.
    """
    if path is None:
        return _standard_library()
    if path.is_dir():
        files = list(_files_under(path))
        content = b"".join(part for part in map(_read, files) if b"\0" not in part)
        if not content:
            raise ToolError(
                f"--data: there is no text in the {len(files)} files under {path}; name another folder"
            )
        return Text(content, str(path))
    if not path.exists():
        raise ToolError(f"--data: there is no file or folder {path}")
    if not path.is_file():
        raise ToolError(f"--data: {path} is neither a file nor a folder; name one that is")
    content = _read(path)
    if not content:
        raise ToolError(f"--data: {path} is empty; name a file with text")
    if b"\0" in content:
        raise ToolError(f"--data: {path} is not text: it has a byte 0 at {content.index(0)}; name a text file")
    return Text(content, str(path))


def _standard_library() -> Text:
    root = Path(sysconfig.get_path("stdlib"))
    content = b"".join(_read(file) for file in _files_under(root, _NOT_THE_LIBRARY) if file.suffix == ".py")
    if not content:
        raise ToolError(f"--data: this Python has no sources of its library in {root}; name a text file or folder")
    return Text(content, "Python's own standard library")


def _files_under(root: Path, skipped: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Regular files, in one order on every machine; links to folders are not followed."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in skipped)
        for name in sorted(names):
            file = Path(folder, name)
            if file.is_file():
                yield file


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ToolError(f"--data: {path} cannot be read: {error.strerror}") from None
