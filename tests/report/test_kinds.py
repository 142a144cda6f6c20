"""Kinds can be told apart: by letter, and by colour with any kind of eyes."""

from __future__ import annotations

from itertools import combinations

import pytest

from tightfit.bill.table import Kind
from tightfit.report.kinds import LOOKS, luminance

# Linear RGB as seen without one kind of cone: Machado, Oliveira and Fernandes, "A
# Physiologically-based Model for Simulation of Color Vision Deficiency" (2009), severity 1.
VISIONS = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
JUST_NOTICEABLE = 2.3  # CIE 1976, Mahy et al. (1994)
Triple = tuple[float, float, float]


def linear(colour: str) -> list[float]:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]


def lab(colour: str, vision: str) -> Triple:
    """CIE L*a*b* under D65."""
    rgb = linear(colour)
    r, g, b = (
        min(1.0, max(0.0, sum(a * c for a, c in zip(row, rgb, strict=True))))
        for row in VISIONS[vision]
    )
    x = (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505
    y = 0.2126 * r + 0.7152 * g + 0.0722 * b
    z = (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.0888
    fx, fy, fz = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def test_every_kind_has_a_look_of_its_own() -> None:
    assert set(LOOKS) == set(Kind)
    letters = [look.letter for look in LOOKS.values()]
    assert len(set(letters)) == len(Kind)
    assert all(len(letter) == 1 and letter.isascii() and letter not in " |" for letter in letters)
    assert all(look.meaning.isascii() and len(look.meaning) <= 30 for look in LOOKS.values())


@pytest.mark.parametrize("vision", VISIONS)
def test_colours_stay_apart(vision: str) -> None:
    for first, second in combinations(Kind, 2):
        one, other = (lab(LOOKS[kind].colour, vision) for kind in (first, second))
        distance = sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5
        assert distance > 6 * JUST_NOTICEABLE, f"{first} and {second} look alike"


@pytest.mark.parametrize("kind", Kind)
def test_letters_read_well_on_their_colour(kind: Kind) -> None:
    look = LOOKS[kind]
    dark, light = sorted((luminance(look.colour), luminance(look.ink)))
    assert (light + 0.05) / (dark + 0.05) >= 4.5  # WCAG 2, level AA
