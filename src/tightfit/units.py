"""Bytes, seconds and counts as people write and read them. Binary units: 1 GiB is 2**30 bytes."""

from __future__ import annotations

import re

KIB = 2**10
MIB = 2**20
GIB = 2**30
TIB = 2**40

_FACTORS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "K": KIB,
    "M": MIB,
    "G": GIB,
    "T": TIB,
    "KIB": KIB,
    "MIB": MIB,
    "GIB": GIB,
    "TIB": TIB,
}
_MOST_BYTES = 2**80
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_bytes(text: str | int) -> int:
    """Bytes of `"900MiB"`, `"24GB"`, `"1.5 GiB"`, `"24G"` (binary) or a plain number.

    Raises:
        ValueError: the text is not a size.
    """
    if isinstance(text, int):
        return text
    match = _PATTERN.fullmatch(text.strip())
    if match is None or match[2].upper() not in _FACTORS:
        raise ValueError(f"{text!r} is not a size; write it like 900MiB, 24GB or 1.5GiB")
    count = float(match[1]) * _FACTORS[match[2].upper()]
    if count > _MOST_BYTES:
        raise ValueError(f"{text!r} is more than there is anywhere")
    return int(count)


def format_bytes(count: float) -> str:
    """`count` bytes in the largest binary unit that keeps at least one digit before the point."""
    for factor, unit, digits in (
        (TIB, "TiB", 2),
        (GIB, "GiB", 2),
        (MIB, "MiB", 1),
        (KIB, "KiB", 1),
    ):
        if abs(count) >= factor:
            return f"{count / factor:.{digits}f} {unit}"
    return f"{count:.0f} B"


def format_seconds(seconds: float) -> str:
    """`seconds` as `830 ms`, `4.2 s`, `3 min 20 s` or `5 h 07 min`."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"
