"""The examples of the documentation run, page by page, as they stand there.

What is fenced as ``python`` is run, everything of a page in one piece; fragments are fenced as ``py``.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import tables

ROOT = Path(__file__).parents[1]


def examples(page: str) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL))


@pytest.mark.parametrize("page", [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))])
def test_the_examples_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = examples(page)
    if code:
        exec(compile(code, page, "exec"), {"__name__": "example"})


@pytest.mark.parametrize("page", tables.PAGES)
def test_tables_are_those_of_the_results(page: str) -> None:
    text = (ROOT / page).read_text()
    assert tables.with_tables(text) == text


def test_the_tensor_cache_runs() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "tensor_cache.py"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "16 tensors" in done.stdout
