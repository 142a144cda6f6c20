"""Sizes and times as people read and write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightfit.units import GIB, KIB, MIB, TIB, format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("900MiB", 900 * MIB),
        ("24GB", 24 * 10**9),
        ("1.5 GiB", 3 * GIB // 2),
        (" 7 kib ", 7 * KIB),
        ("1tib", 2**40),
        ("24G", 24 * GIB),
        ("12", 12),
        ("12B", 12),
        (12, 12),
    ],
)
def test_parse_bytes(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1,5GiB", "1 GG", "1e3", "auto", "1GiB2"])
def test_parse_bytes_refuses_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)


@given(st.integers(0, 2**50))
def test_formatted_bytes_read_back_within_their_last_digit(count: int) -> None:
    half_digit = {"B": 0.0, "KiB": 0.05 * KIB, "MiB": 0.05 * MIB, "GiB": 0.005 * GIB}
    half_digit["TiB"] = 0.005 * TIB
    text = format_bytes(count)
    assert abs(parse_bytes(text) - count) <= half_digit[text.split()[1]] + 1


@given(st.integers(0, 10**15), st.sampled_from(["", "B", "KB", "MB", "KiB", "MiB", "GiB"]))
def test_units_do_not_depend_on_case_or_spaces(number: int, unit: str) -> None:
    assert parse_bytes(f" {number} {unit.upper()}") == parse_bytes(f"{number}{unit.lower()}")


@given(st.integers(1, 2**50))
def test_formatted_bytes_grow_with_the_count(count: int) -> None:
    smaller, larger = (parse_bytes(format_bytes(n)) for n in (count, 2 * count))
    assert smaller < larger


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (KIB, "1.0 KiB"), (1536 * MIB, "1.50 GiB"), (-MIB, "-1.0 MiB")],
)
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.83, "830 ms"),
        (4.2, "4.2 s"),
        (200, "3 min 20 s"),
        (3599.9, "1 h 00 min"),
        (18420, "5 h 07 min"),
    ],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@given(st.floats(0, 10**6))
def test_format_seconds_carries_into_the_larger_unit(seconds: float) -> None:
    words = format_seconds(seconds).split()
    for number, unit in zip(words[::2], words[1::2], strict=True):
        assert unit not in ("s", "min") or float(number) <= 60
