"""Shows samples as the model sees them, with the trained tokens coloured.

Where there is no colour (a file, a pipe, NO_COLOR) trained tokens stand in brackets instead.
Does not know how the mask was made: it reads labels only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from tightfit.facts.labels import IGNORED
from tightfit.training.samples import Sample

_TRAINED = "bold black on green"
_GIVEN = "dim"
_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}


class SamplePreview:
    """A rich renderable of some samples: `console.print(SamplePreview(samples, tokenizer))`."""

    def __init__(self, samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase) -> None:
        self.samples = samples
        self.tokenizer = tokenizer

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Title and text of each sample."""
        coloured = console.color_system is not None and not console.no_color
        marks = ("[[", "]]") if options.ascii_only else ("⟦", "⟧")
        for sample in self.samples:
            yield _title(sample, "coloured" if coloured else f"in {marks[0]}{marks[1]}")
            yield _text(sample, self.tokenizer, None if coloured else marks)
            yield Text()


def _title(sample: Sample, how: str) -> Text:
    return Text(
        f"{sample.file}, row {sample.row}: {sample.trained_tokens} of "
        f"{len(sample.input_ids)} tokens are trained ({how})",
        style="bold",
    )


def _text(
    sample: Sample, tokenizer: PreTrainedTokenizerBase, marks: tuple[str, str] | None
) -> Text:
    """The sample's tokens as text; `marks` stand around trained ones, None colours them."""
    text = Text()
    positions = range(len(sample.input_ids))
    for trained, run in groupby(positions, key=lambda i: i > 0 and sample.labels[i] != IGNORED):
        ids = [sample.input_ids[i] for i in run]
        words = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        shown = str(words).translate(_CONTROLS)
        if trained and marks is not None:
            shown = f"{marks[0]}{shown}{marks[1]}"
        text.append(shown, style=_TRAINED if trained else _GIVEN)
    return text
