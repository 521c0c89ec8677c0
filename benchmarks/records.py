"""Results that are measured part by part, maybe on different days: each row has its own date and machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from memferry_tools.machine import describe_machine
from memferry_tools.version import version

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
MESSAGE = 600  # characters of a failed process's last words that are kept

Row = dict[str, Any]


class Records:
    """A file of rows by name; what it had of other rows stays.

    Parameters
    ----------
    path : Path
    schema : str
        What is in the file; one of another schema is refused.
    order : sequence of str
        The names that rows may have, as they are sorted in the file.
    summarise : callable
        Makes the figures of the documentation's tables from all rows.
    """

    def __init__(
        self, path: Path, schema: str, order: Sequence[str], summarise: Callable[[dict[str, Row]], dict[str, Any]]
    ) -> None:
        self._path = path
        self._head = {"schema": f"memferry.{schema}", "schema_version": 1}
        self._order = order
        self._summarise = summarise
        self.rows: dict[str, Row] = {}
        if path.exists():
            found = json.loads(path.read_text())
            if {key: found.get(key) for key in self._head} != self._head:
                raise SystemExit(f"{path} holds something else than {self._head}; name another file")
            self.rows = found["rows"]

    def put(self, name: str, row: Row) -> None:
        """Write the file with a row measured just now, in place of an older one of its name."""
        self.rows[name] = {"memferry": version(), "machine": describe_machine(), **row}
        rows = {known: self.rows[known] for known in self._order if known in self.rows}
        result = {**self._head, "rows": rows, "summary": self._summarise(rows)}
        self._path.write_text(json.dumps(result, indent=1) + "\n")


def measured_apart(command: Sequence[str], limit_s: float) -> Row:
    """What a command writes into the JSON file that ``--json`` names, or why it does not.

    Parameters
    ----------
    command : sequence of str
        Run from the repository's root, in a process group that is ended with it.
    limit_s : float
        Seconds it may take.

    Returns
    -------
    dict
        ``status`` is ``"ok"``, with ``result``; or ``"failed"``, with ``message``.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "result.json")
        message = _failure([*command, "--json", str(out)], limit_s)
        if message is None:
            return {"status": "ok", "result": json.loads(out.read_text())}
        return {"status": "failed", "message": message}


def _failure(command: Sequence[str], limit_s: float) -> str | None:
    with tempfile.TemporaryFile() as said:  # a pipe would stay open as long as some child of the child lives
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status = None
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if status is None:  # not reaped yet, so the group is still its own
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if status == 0:
            return None
        said.seek(0)
        last = said.read().decode(errors="replace").strip()[-MESSAGE:]
        return f"{f'not over after {limit_s:g} s' if status is None else f'exit status {status}'}: {last}"
