"""Deterministic kernels, and that asking for them is undone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from memferry_tools.train.determinism import deterministic_kernels
from memferry_tools.train.model import Decoder

from .conftest import Command


def test_it_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with pytest.raises(ValueError, match="stop"), deterministic_kernels():  # noqa: PT012
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        raise ValueError("stop")
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_a_workspace_the_user_has_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with deterministic_kernels():
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.parametrize("asked", [(), ("--deterministic",), ("--verify",)])
def test_a_run_uses_them_where_it_is_asked_to(
    train: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: tuple[str, ...]
) -> None:
    seen = []
    forward = Decoder.forward

    def watched(self: Decoder, *tokens: torch.Tensor) -> torch.Tensor:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return forward(self, *tokens)

    monkeypatch.setattr(Decoder, "forward", watched)
    results = tmp_path / "results.json"
    assert train("--steps", "1", "--json", str(results), *asked).status == 0
    assert set(seen) == {bool(asked)}
    assert json.loads(results.read_text())["settings"]["deterministic"] is bool(asked)
