"""What a dry run found, as plain data that can be kept on disk. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tightfit.bill.table import MemoryTable


@dataclass(frozen=True)
class Shape:
    """What the step-time model asks of an architecture; the same at every depth but `layers`."""

    layers: int
    heads: int
    hidden_size: int
    vocab_size: int
    tied: bool


@dataclass(frozen=True)
class DryRun:
    """What a dry run found.

    Attributes:
        table: the exact counts of one rank, without margin.
        trainable: number of parameters that get gradients, over all ranks.
        frozen: number of parameters that do not, over all ranks, kept in the job's precision.
        quantised: number of parameters that do not, over all ranks, kept in few bits.
        trained_tensors: how many tensors the trainable ones are.
        notes: what of the table comes from a closed form, because the engine cannot do it yet.
    """

    table: MemoryTable
    trainable: int
    frozen: int
    quantised: int
    shape: Shape
    notes: tuple[str, ...] = ()
    trained_tensors: int = 0

    def to_json(self) -> dict[str, Any]:
        """Nested plain values."""
        return {
            "table": self.table.to_json(),
            "trainable": self.trainable,
            "frozen": self.frozen,
            "quantised": self.quantised,
            "shape": asdict(self.shape),
            "notes": list(self.notes),
            "trained_tensors": self.trained_tensors,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DryRun:
        """The inverse of `to_json`.

        Raises:
            KeyError, TypeError, ValueError: `data` is not what `to_json` makes.
        """
        return cls(
            MemoryTable.from_json(data["table"]),
            int(data["trainable"]),
            int(data["frozen"]),
            int(data["quantised"]),
            Shape(**data["shape"]),
            tuple(data["notes"]),
            int(data["trained_tensors"]),
        )
