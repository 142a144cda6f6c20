"""Makes the training and held-out samples of a job, and counts everything that happened to them.

No row disappears silently: whatever is dropped, cut or left without trained tokens is in the
report. Does not know batches or models.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from tightfit.errors import DataError
from tightfit.facts.job import Job
from tightfit.facts.labels import IGNORED
from tightfit.training.chat import RowEncoder
from tightfit.training.rows import read_rows

_NAMED_ROWS = 5  # how many row numbers a message lists
_QUANTILES = (50, 90, 99)


@dataclass(frozen=True)
class Sample:
    """One encoded row.

    Attributes:
        input_ids: its tokens.
        labels: the same tokens, -100 where nothing is learned.
        file: where it comes from.
        row: its number in that file.
    """

    input_ids: tuple[int, ...]
    labels: tuple[int, ...]
    file: str
    row: int

    @property
    def trained_tokens(self) -> int:
        """Positions that carry loss; the first token is never predicted."""
        return len(self.labels) - 1 - self.labels[1:].count(IGNORED)


@dataclass(frozen=True)
class RowCount:
    """How many rows something happened to, and the file and number of the first of them."""

    total: int = 0
    first: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        places = [
            f"{file} row {', '.join(str(number) for _, number in group)}"
            for file, group in groupby(self.first, key=lambda place: place[0])
        ]
        more = ", ..." if self.total > len(self.first) else ""
        return f"{self.total} ({'; '.join(places)}{more})" if self.total else "0"


@dataclass(frozen=True)
class DataReport:
    """What became of the rows. Lengths and tokens are those of all samples kept.

    Attributes:
        rows: rows read, by kind.
        cutoff_len: the longest sample allowed.
        dropped: rows left out because they are longer.
        truncated: rows kept, but cut to `cutoff_len`.
        cut_away: rows left out because the cut took all their trained tokens.
        train_samples: samples to train on.
        held_out_samples: samples to evaluate on.
        tokens: tokens of all samples.
        trained_tokens: those that carry loss.
        longest: tokens of the longest sample.
        length_quantiles: percent -> length that so many percent of the samples do not exceed.
    """

    rows: Mapping[str, int]
    cutoff_len: int
    dropped: RowCount
    truncated: RowCount
    cut_away: RowCount
    train_samples: int
    held_out_samples: int
    tokens: int
    trained_tokens: int
    longest: int
    length_quantiles: Mapping[int, int]

    def lines(self) -> list[str]:
        """The report as a person reads it; what did not happen is left out."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.rows.items()))
        quantiles = ", ".join(f"{p}%: {length}" for p, length in self.length_quantiles.items())
        lines = [
            f"rows: {sum(self.rows.values())} ({kinds})",
            f"samples: {self.train_samples} to train, {self.held_out_samples} held out",
            f"tokens: {self.tokens}, of which {self.trained_tokens} are trained "
            f"({self.trained_tokens / self.tokens:.0%})",
            f"length: {quantiles}, longest {self.longest}",
        ]
        limit = f"cutoff_len {self.cutoff_len}"
        for count, text in (
            (self.dropped, f"dropped, longer than {limit}"),
            (self.truncated, f"truncated to {limit}"),
            (self.cut_away, f"dropped, {limit} cuts all trained tokens away"),
        ):
            if count.total:
                lines.append(f"{text}: {count}")
        return lines


@dataclass(frozen=True)
class PreparedData:
    """The samples of a job, in file order, and the report on how they came about."""

    train: list[Sample]
    held_out: list[Sample]
    report: DataReport


@dataclass
class _Overlong:
    """Rows that met the limit, as file and number."""

    dropped: list[tuple[str, int]] = field(default_factory=list)
    truncated: list[tuple[str, int]] = field(default_factory=list)
    cut_away: list[tuple[str, int]] = field(default_factory=list)


def prepare_data(job: Job, tokenizer: PreTrainedTokenizerBase) -> PreparedData:
    """Reads, encodes, cuts and splits the data of `job`.

    Raises:
        DataError: a file or row is unusable, nothing is left to train on, or the data is smaller
            than one global batch.
    """
    if job.dataset is None:
        raise DataError("no training data: set dataset to a .jsonl or .json file")
    encoder = RowEncoder(tokenizer)
    rows: Counter[str] = Counter()
    overlong = _Overlong()
    train = _load(job.dataset, job, encoder, rows, overlong)
    if job.eval_dataset is not None:
        held_out = _load(job.eval_dataset, job, encoder, rows, overlong)
    else:
        train, held_out = _split(train, job)
    _check_enough(train, job)
    return PreparedData(train, held_out, _report(train, held_out, job, rows, overlong))


def _load(
    file: str, job: Job, encoder: RowEncoder, rows: Counter[str], overlong: _Overlong
) -> list[Sample]:
    """The samples of one file that fit into `cutoff_len`."""
    encoded = []
    for row in read_rows(file):
        rows[row.kind] += 1
        ids, labels = encoder.encode(row)
        encoded.append(Sample(tuple(ids), tuple(labels), row.file, row.number))
    if job.overlong == "error":
        _refuse_overlong(file, encoded, job.cutoff_len)
    kept = [
        fitting for sample in encoded if (fitting := _fitted(sample, job, overlong)) is not None
    ]
    if not kept:
        raise DataError(
            f"{file}: no rows left: all {len(encoded)} are longer than cutoff_len "
            f"{job.cutoff_len} (overlong: {job.overlong}); raise cutoff_len"
        )
    return kept


def _fitted(sample: Sample, job: Job, overlong: _Overlong) -> Sample | None:
    """The sample within `cutoff_len`, None if that leaves nothing of it."""
    limit = job.cutoff_len
    if len(sample.input_ids) <= limit:
        return sample
    place = (sample.file, sample.row)
    if job.overlong == "drop":
        overlong.dropped.append(place)
        return None
    cut = Sample(sample.input_ids[:limit], sample.labels[:limit], sample.file, sample.row)
    (overlong.truncated if cut.trained_tokens else overlong.cut_away).append(place)
    return cut if cut.trained_tokens else None


def _refuse_overlong(file: str, samples: Sequence[Sample], cutoff_len: int) -> None:
    long = [sample for sample in samples if len(sample.input_ids) > cutoff_len]
    if long:
        places = _count([(sample.file, sample.row) for sample in long])
        longest = max(len(sample.input_ids) for sample in long)
        raise DataError(
            f"{file}: of {len(samples)} rows, these are longer than cutoff_len {cutoff_len}: "
            f"{places}; the longest has {longest} tokens; raise cutoff_len, or set overlong to "
            "truncate or drop"
        )


def _split(samples: list[Sample], job: Job) -> tuple[list[Sample], list[Sample]]:
    """Training and held-out samples, both in file order.

    The rows held out are those with the smallest hashes of seed and place: the same on every
    machine and with every version of the libraries.
    """
    count = _held_out_count(len(samples), job.val_size)
    if count >= len(samples):
        raise DataError(
            f"val_size {job.val_size:g} holds out {count} of {len(samples)} samples and leaves "
            "nothing to train; lower val_size"
        )
    by_hash = sorted(range(len(samples)), key=lambda index: _hash(job.seed, index))
    held_out = set(by_hash[:count])
    train = [sample for index, sample in enumerate(samples) if index not in held_out]
    return train, [samples[index] for index in sorted(held_out)]


def _held_out_count(samples: int, val_size: float) -> int:
    """A share below 1 is rounded, but never to nothing."""
    if val_size == 0:
        return 0
    if val_size < 1:
        return max(1, round(samples * val_size))
    if val_size != int(val_size):
        raise DataError(f"val_size {val_size:g} is neither a share below 1 nor a number of rows")
    return int(val_size)


def _hash(seed: int, index: int) -> bytes:
    return hashlib.sha256(f"{seed}/{index}".encode()).digest()


def _check_enough(train: Sequence[Sample], job: Job) -> None:
    if len(train) < job.global_batch_size:
        raise DataError(
            f"{job.dataset}: {len(train)} samples to train on are fewer than one global batch of "
            f"{job.global_batch_size}; lower train_batch_size or val_size, or add rows"
        )


def _report(
    train: Sequence[Sample],
    held_out: Sequence[Sample],
    job: Job,
    rows: Mapping[str, int],
    overlong: _Overlong,
) -> DataReport:
    samples = [*train, *held_out]
    lengths = sorted(len(sample.input_ids) for sample in samples)
    return DataReport(
        rows=dict(rows),
        cutoff_len=job.cutoff_len,
        dropped=_count(overlong.dropped),
        truncated=_count(overlong.truncated),
        cut_away=_count(overlong.cut_away),
        train_samples=len(train),
        held_out_samples=len(held_out),
        tokens=sum(lengths),
        trained_tokens=sum(sample.trained_tokens for sample in samples),
        longest=lengths[-1],
        length_quantiles={p: lengths[math.ceil(len(lengths) * p / 100) - 1] for p in _QUANTILES},
    )


def _count(places: Sequence[tuple[str, int]]) -> RowCount:
    return RowCount(len(places), tuple(places[:_NAMED_ROWS]))
