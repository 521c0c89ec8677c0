"""Steps that happen together or not at all."""

from __future__ import annotations

import pytest

from memferry_allocator import DriverError
from memferry_allocator.transaction import Transaction


def test_what_succeeds_stays() -> None:
    undone: list[str] = []
    with Transaction() as undo:
        undo.push(undone.append, "one")
    assert undone == []


def test_a_failure_is_undone_last_first() -> None:
    undone: list[str] = []

    def fail_in_the_middle() -> None:
        with Transaction() as undo:
            undo.push(undone.append, "one")
            forgotten = undo.push(undone.append, "two")
            undo.push(undone.append, "three")
            undo.forget(forgotten)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_the_middle()
    assert undone == ["three", "one"]


def test_an_undo_that_fails_is_told_and_hides_nothing() -> None:
    undone: list[str] = []

    def refuse(call: str) -> None:
        raise DriverError("CUDA_ERROR_INVALID_VALUE", call)

    def fail_twice() -> None:
        with Transaction() as undo:
            undo.push(undone.append, "one")
            undo.push(refuse, "the undo")
            refuse("the step")

    with pytest.raises(DriverError, match=r"the step.*undoing it failed: the undo") as caught:
        fail_twice()
    assert caught.value.call == "the step"
    assert undone == ["one"]
