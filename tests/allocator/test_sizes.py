"""Sizes as people write them."""

from __future__ import annotations

import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memferry_allocator import (
    AllocatorError,
    ClosedError,
    DriverError,
    DriverNotFoundError,
    DriverOutOfMemory,
    InvalidRequestError,
    MemFerryError,
    OutOfMemory,
    RaceError,
    format_size,
    parse_size,
)
from memferry_allocator.sizes import align_up

UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


@given(
    number=st.integers(1, 10**12),
    unit=st.sampled_from(sorted(UNITS)),
    case=st.sampled_from(["as", "upper", "lower"]),
)
def test_whole_numbers(number: int, unit: str, case: str) -> None:
    written = {"as": unit, "upper": unit.upper(), "lower": unit.lower()}[case]
    for text in (f"{number}{written}", f" {number} {written} ", f"{number}.0{written}"):
        assert parse_size(text) == number * UNITS[unit]
    assert parse_size(number) == number


@given(
    whole=st.integers(0, 10**9),
    digits=st.text("0123456789", min_size=1, max_size=12),
    unit=st.sampled_from(["KiB", "MiB", "GiB", "TiB"]),
)
def test_fractions_are_exact_and_rounded_down(whole: int, digits: str, unit: str) -> None:
    exact = Fraction(f"{whole}.{digits}") * UNITS[unit]
    if exact < 1:
        with pytest.raises(InvalidRequestError):
            parse_size(f"{whole}.{digits}{unit}")
    else:
        assert parse_size(f"{whole}.{digits}{unit}") == exact.numerator // exact.denominator


def test_numpy_integers() -> None:
    assert parse_size(np.int64(7)) == 7  # type: ignore[arg-type]
    assert type(parse_size(np.int64(7))) is int  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "GiB",
        "1 2",
        "-1",
        "-1GiB",
        "+1",
        "1e9",
        "1,5GiB",
        "0x10",
        "nan",
        "inf",
        "1GiBs",
        "1XiB",
        "1 G iB",
        "1G",
        "24g",
        "1kib2",
        ".5GiB",
        "5.GiB",
        "\N{ARABIC-INDIC DIGIT ONE}GiB",
        "1\xa0GiB GiB",
        "9" * 5000,
        "1PiB",
        None,
        1.0,
        b"1",
        [],
        True,
    ],
)
def test_what_is_no_size(text: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^device_memory: ") as caught:
        parse_size(text, name="device_memory")
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("size", [0, -1, "0", "0GiB", "0.0001KiB"])
def test_sizes_of_nothing(size: Any) -> None:
    with pytest.raises(InvalidRequestError, match="more than zero bytes"):
        parse_size(size)


@pytest.mark.parametrize(
    ("text", "binary", "exact"),
    [
        ("24GB", "24GiB", 24 * 10**9),
        ("24gb", "24GiB", 24 * 10**9),
        ("1.5 MB", "1.5MiB", 1_500_000),
        ("7kb", "7KiB", 7000),
        ("2TB", "2TiB", 2 * 10**12),
    ],
)
def test_decimal_units_are_refused_with_both_ways_out(text: str, binary: str, exact: int) -> None:
    with pytest.raises(InvalidRequestError, match="ambiguous") as caught:
        parse_size(text)
    assert repr(binary) in str(caught.value)
    assert str(exact) in str(caught.value)
    assert parse_size(binary) > parse_size(exact)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (1 << 20, "1.00 MiB"),
        (5 * (1 << 30) + (1 << 29), "5.50 GiB"),
        (1 << 50, "1048576.00 GiB"),
        (-2048, "-2.00 KiB"),
        ((1 << 10) + 5, "1.00 KiB"),
        (1 << 100, f"{1 << 70}.00 GiB"),
        (1 << 1024, "2**1024 B or more"),
    ],
)
def test_format(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


def test_numbers_that_python_does_not_write_out() -> None:
    assert format_size(-(10**5000)) == "-2**16609 B or more"


@given(st.integers(1024, 1 << 53))
def test_two_digits_as_python_rounds_them(nbytes: int) -> None:
    number, unit = format_size(nbytes).split()
    assert number == f"{nbytes / UNITS[unit]:.2f}"


@given(st.integers(1, 1 << 60))
def test_what_is_written_can_be_read_back(nbytes: int) -> None:
    assert parse_size(format_size(nbytes)) == pytest.approx(nbytes, rel=6e-3)


@given(st.integers(0, 1 << 70), st.integers(0, 40))
def test_align_up(value: int, power: int) -> None:
    aligned = align_up(value, 1 << power)
    assert aligned % (1 << power) == 0
    assert value <= aligned < value + (1 << power)


ERRORS = [
    ClosedError("closed"),
    InvalidRequestError("refused"),
    RaceError("race"),
    OutOfMemory("none left", size=3, used=2, limit=1, budget="device pool"),
    DriverError("CUDA_ERROR_INVALID_VALUE", "malloc", "nbytes=0"),
    DriverNotFoundError("CUDA_ERROR_NO_DEVICE", "init"),
    DriverOutOfMemory("CUDA_ERROR_OUT_OF_MEMORY", "malloc", size=3, used=2, limit=1, budget="cuda:0"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_travel_between_processes(error: AllocatorError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.__dict__ == error.__dict__
    assert isinstance(again, MemFerryError)
