"""The cases by name, and how one is run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from memferry_allocator import DeviceLostError, InvalidRequestError, MemFerryError, OutOfMemory, UnsupportedError

from .bench import Bench
from .errors import NotRunError
from .result import CaseResult, Matrix


@dataclass(frozen=True)
class Case:
    """Something that can be measured.

    Attributes
    ----------
    name, what, unit : str
    run : callable
        Measures it on a bench.
    higher_is_better : bool
    form : str, optional
        How nvbandwidth describes the case's matrix, for one that it has as well.
    """

    name: str
    what: str
    unit: str
    run: Callable[[Bench], Matrix]
    higher_is_better: bool
    form: str | None


CASES: dict[str, Case] = {}
_Run = Callable[[Bench], Matrix]


def case(
    name: str, what: str, *, unit: str = "GB/s", higher_is_better: bool = True, form: str | None = None
) -> Callable[[_Run], _Run]:
    """A decorator: the function measures the case of this name."""

    def enter(function: _Run) -> _Run:
        CASES[name] = Case(name, what, unit, function, higher_is_better, form)
        return function

    return enter


def find_case(name: str) -> Case:
    """The case of a name.

    Raises
    ------
    InvalidRequestError
        There is none.
    """
    if name not in CASES:
        near = [known for known in CASES if name in known]
        hint = f"; there is {', '.join(near)}" if near else ""
        raise InvalidRequestError(f"case: {name!r} is not known{hint}")
    return CASES[name]


def run_case(bench: Bench, wanted: Case) -> CaseResult:
    """Run one case.  What cannot run here says so in its result.

    Bytes that arrive wrong make it a failure, and so does whatever is refused.  Losing a device ends the run.
    """
    began = time.perf_counter()
    matrix, status, reason = None, "passed", None
    try:
        matrix = wanted.run(bench)
    except (NotRunError, UnsupportedError) as error:
        status, reason = "not run", str(error)
    except OutOfMemory as error:
        status, reason = "not run", f"not enough memory: {error}"
    except DeviceLostError:
        raise  # nothing can be measured any more
    except MemFerryError as error:
        status, reason = "failed", str(error)
    return _result(wanted, status, reason, matrix, time.perf_counter() - began)


def leave_out(wanted: Case, reason: str) -> CaseResult:
    """The result of a case that was not begun."""
    return _result(wanted, "not run", reason, None, 0.0)


def _result(wanted: Case, status: str, reason: str | None, matrix: Matrix | None, seconds: float) -> CaseResult:
    if matrix is not None and not matrix.samples:
        status, reason, matrix = "not run", "no two devices here reach each other's memory", None
    return CaseResult(
        wanted.name, wanted.what, wanted.unit, wanted.higher_is_better, status, reason, matrix, seconds
    )
