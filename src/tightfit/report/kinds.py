"""How each kind of bytes looks and what it is, for every bar, legend and table.

Colours are those of Okabe and Ito (Color Universal Design, 2008), and for the kinds beyond
their eight, others that stay apart from all of them; `tests/report/test_kinds.py` holds the
distances as people without one kind of cone see them. Letters say the same without colour.
Knows nothing of what is drawn with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tightfit.bill.table import Kind


@dataclass(frozen=True)
class KindLook:
    """A kind in pictures and tables.

    Attributes:
        letter: one ASCII character, of no other kind.
        colour: `#rrggbb`.
        meaning: what the bytes are, in few words for somebody new to bills.
    """

    letter: str
    colour: str
    meaning: str

    @property
    def ink(self) -> str:
        """Black or white as `#rrggbb`, whichever reads better on `colour` (WCAG 2 contrast)."""
        # Black has the higher contrast from the luminance on where (L + .05)**2 == 1.05 * .05.
        return "#000000" if luminance(self.colour) > 0.179 else "#ffffff"


def luminance(colour: str) -> float:
    """Relative luminance of `#rrggbb` in sRGB, 0 for black to 1 for white (WCAG 2)."""
    red, green, blue = (_linear(int(colour[i : i + 2], 16) / 255) for i in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _linear(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4


LOOKS: Mapping[Kind, KindLook] = {
    Kind.PARAMETERS: KindLook("P", "#0072B2", "the model's weights"),
    Kind.GRADIENTS: KindLook("G", "#E69F00", "one value per trained weight"),
    Kind.MASTER_WEIGHTS: KindLook("M", "#56B4E9", "fp32 copy of 16-bit weights"),
    Kind.OPTIMIZER_STATES: KindLook("O", "#009E73", "running averages of gradients"),
    Kind.ACTIVATIONS: KindLook("A", "#F0E442", "kept by forward for backward"),
    Kind.LOGITS: KindLook("L", "#CC79A7", "scores over the vocabulary"),
    Kind.TEMPORARIES: KindLook("T", "#D55E00", "live within one operation"),
    Kind.COLLECTIVES: KindLook("C", "#882255", "whole weights between shards"),
    Kind.BUFFERS: KindLook("B", "#663300", "batches, the model's constants"),
    Kind.TRANSFER: KindLook("I", "#332288", "landing places of copies"),
    Kind.RUNTIME: KindLook("R", "#000000", "context, libraries, workspaces"),
    Kind.ALLOCATOR: KindLook("~", "#BBBBBB", "rounded up or not usable"),
    Kind.MARGIN: KindLook("+", "#EEEEEE", "so that no bill is too low"),
}
