"""A folder that holds a whole checkpoint at every moment.

A save writes files under names of its own beside those of the last one, makes them durable, and then exchanges the
manifest, by one rename.  What the manifest does not name is left over from before, or from a save that was broken
off, and goes with the next save.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from ..errors import CheckpointError
from .manifest import MANIFEST, encode_manifest, read_manifest
from .tensorfile import LONGEST_HEADER, PREFIX, TensorSpec, decode_header, encode_header

PIECE = 8 << 20  # bytes read at a time for the checksum
_OURS = re.compile(r"[a-z]+-[0-9a-f]{16}\.safetensors|\.checkpoint-[0-9a-f]{16}\.json")


@dataclass(frozen=True)
class TensorFile:
    """A file of a checkpoint that is to be written.

    Attributes
    ----------
    kind : str
        Lower-case letters; the file's name begins with it.
    specs : sequence of TensorSpec
    data : callable
        Gives the bytes of all tensors, in this order, in pieces of any size, each alive until the next.
    """

    kind: str
    specs: Sequence[TensorSpec]
    data: Callable[[], Iterator[memoryview]]


def write_checkpoint(folder: Path, files: Sequence[TensorFile], content: dict[str, Any]) -> None:
    """Write a checkpoint whole or not at all; what was in the folder before is loadable until it is replaced.

    Nothing else may save to the folder at the same time.

    Parameters
    ----------
    folder : Path
        Made if it is not there.
    content : dict
        For the manifest; JSON.

    Raises
    ------
    CheckpointError
        It could not be written.
    """
    identity = secrets.token_hex(8)
    try:
        if not folder.is_dir():
            folder.mkdir(parents=True)
            _sync_folder(folder.parent)
        with contextlib.ExitStack() as undo:
            undo.callback(_abandon, folder, identity)
            written = {file.kind: _write_tensors(folder, identity, file) for file in files}
            partial = folder / f".checkpoint-{identity}.json"
            with open(partial, "xb", buffering=0) as out:
                _write(out, memoryview(encode_manifest({"files": written, **content})))
                os.fsync(out.fileno())
            _sync_folder(folder)
            os.replace(partial, folder / MANIFEST)
            undo.pop_all()
        _sync_folder(folder)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint could not be written to {folder}: {error.strerror or error}; the last one that "
            "was saved there is whole"
        ) from error
    current = {entry["name"] for entry in written.values()}
    _remove(folder, lambda name: name not in current)


def _abandon(folder: Path, identity: str) -> None:
    """Remove what a save has written, unless it got so far that its manifest is in force."""
    with contextlib.suppress(OSError):
        manifest = folder / MANIFEST
        if not manifest.exists() or identity not in manifest.read_text():
            _remove(folder, lambda name: identity in name)


def _write_tensors(folder: Path, identity: str, file: TensorFile) -> dict[str, Any]:
    """Write a file and make it durable; its entry in the manifest."""
    header = encode_header(file.specs)
    expected = len(header) + sum(spec.nbytes for spec in file.specs)
    name = f"{file.kind}-{identity}.safetensors"
    with open(folder / name, "xb", buffering=0) as out:
        checksum, nbytes = zlib.crc32(header), len(header)
        _write(out, memoryview(header))
        for piece in file.data():
            checksum, nbytes = zlib.crc32(piece, checksum), nbytes + piece.nbytes
            _write(out, piece)
        os.fsync(out.fileno())
    if nbytes != expected:
        raise CheckpointError(f"{name}: {nbytes} bytes were given for tensors of {expected}")
    return {"name": name, "nbytes": nbytes, "header_crc32": zlib.crc32(header), "crc32": checksum}


def _write(out: Any, data: memoryview) -> None:
    while data.nbytes:
        data = data[out.write(data) :]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(folder: Path, wanted: Callable[[str], bool]) -> None:
    """Remove files of ours; what cannot be removed is left for the next save."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if _OURS.fullmatch(name) and wanted(name):
                os.unlink(folder / name)


class CheckpointReader:
    """A checkpoint opened for reading.  A context manager; a save to its folder meanwhile does not disturb it.

    Attributes
    ----------
    folder : Path
    content : dict
        The manifest.

    Raises
    ------
    CheckpointError
        There is no checkpoint, or it is damaged as far as sizes and headers tell.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.content = read_manifest(folder)
        self._files: dict[str, _OpenFile] = {}
        with contextlib.ExitStack() as closing:
            for kind, entry in self.content["files"].items():
                if not _OURS.fullmatch(entry["name"]):
                    raise CheckpointError(f"{folder / MANIFEST} names no file of a save: {entry['name']!r}")
                file = _OpenFile(folder / entry["name"], entry)
                closing.callback(file.close)
                file.read_header()
                self._files[kind] = file
            self._closing = closing.pop_all()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.close()

    def tensors(self, kind: str) -> dict[str, TensorSpec]:
        """The tensors of a file, by name; none if there is no such file."""
        file = self._files.get(kind)
        return {} if file is None else {name: spec for name, (spec, _) in file.tensors.items()}

    def verify(self) -> None:
        """Read everything once and compare checksums.

        Raises
        ------
        CheckpointError
            A file is not what was saved.
        """
        for file in self._files.values():
            file.verify()

    def read_into(self, kind: str, name: str, offset: int, out: memoryview) -> None:
        """Fill `out`, bytes, from byte `offset` of a tensor on."""
        file = self._files[kind]
        file.read_into(file.data + file.tensors[name][1] + offset, out)


class _OpenFile:
    def __init__(self, path: Path, entry: dict[str, Any]) -> None:
        self._path = path
        self._nbytes: int = entry["nbytes"]
        self._entry = entry
        try:
            self._file: BinaryIO = open(path, "rb", buffering=0)  # noqa: SIM115 - the reader closes it
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint is damaged: its file {path} cannot be read: {error.strerror}"
            ) from None

    def close(self) -> None:
        self._file.close()

    def read_header(self) -> None:
        found = os.fstat(self._file.fileno()).st_size
        if found != self._nbytes:
            raise self._damaged(f"it has {found} bytes, and {self._nbytes} were saved")
        prefix = bytearray(PREFIX)
        self.read_into(0, memoryview(prefix))
        length = int.from_bytes(prefix, "little")
        if length > min(LONGEST_HEADER, self._nbytes - PREFIX):
            raise self._damaged("its header is not one")
        header = bytearray(PREFIX + length)
        self.read_into(0, memoryview(header))
        if zlib.crc32(header) != self._entry["header_crc32"]:
            raise self._damaged("the checksum of its header is not the one that was saved")
        self.data = len(header)
        try:
            self.tensors = decode_header(bytes(header[PREFIX:]), self._nbytes - self.data)
        except ValueError as error:
            raise self._damaged(f"its header does not fit: {error}") from None

    def verify(self) -> None:
        buffer = memoryview(bytearray(min(PIECE, self._nbytes)))
        checksum = 0
        for offset in range(0, self._nbytes, PIECE):
            part = buffer[: min(PIECE, self._nbytes - offset)]
            self.read_into(offset, part)
            checksum = zlib.crc32(part, checksum)
        if checksum != self._entry["crc32"]:
            raise self._damaged("its checksum is not the one that was saved")

    def read_into(self, offset: int, out: memoryview) -> None:
        while out.nbytes:
            try:
                count = os.preadv(self._file.fileno(), [out], offset)
            except OSError as error:
                raise self._damaged(f"reading it failed: {error.strerror}") from error
            if count == 0:
                raise self._damaged(f"it ends at byte {offset}")
            out = out[count:]
            offset += count

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"the checkpoint is damaged: {self._path}: {why}; load another one")
