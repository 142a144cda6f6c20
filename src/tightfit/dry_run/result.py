"""What a dry run found, as plain data that can be kept on disk. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tightfit.bill.table import MemoryTable


@dataclass(frozen=True)
class Shape:
    """What the planner asks of an architecture; the same at every depth but `layers`.

    Attributes:
        tied: whether the output layer is the embedding.
        alike: whether all layers are of one kind.
    """

    layers: int
    heads: int
    hidden_size: int
    vocab_size: int
    tied: bool
    alike: bool


@dataclass(frozen=True)
class DryRun:
    """What a dry run found.

    Attributes:
        table: the exact counts of one rank, without margin.
        trainable: number of parameters that get gradients, over all ranks.
        frozen: number of parameters that do not, over all ranks, kept in the job's precision.
        quantised: number of parameters that do not, over all ranks, kept in few bits.
        trained_tensors: how many tensors the trainable ones are.
        stages: of a pipeline, by their numbers, the tables of those that were run, as the engine
            allocates; others take no more than an earlier one that is not the first.
        stage_layers: how many layers each run of a pipeline's layers has, in the order of the
            model.
        whole: whether all layers were run, as they are where a few would be no less work.
        notes: what of the table comes from a closed form, because the engine cannot do it yet.
    """

    table: MemoryTable
    trainable: int
    frozen: int
    quantised: int
    shape: Shape
    notes: tuple[str, ...] = ()
    trained_tensors: int = 0
    stages: Mapping[int, MemoryTable] = field(default_factory=dict)
    stage_layers: tuple[int, ...] = ()
    whole: bool = field(default=False, compare=False)

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
            "stages": {str(number): table.to_json() for number, table in self.stages.items()},
            "stage_layers": list(self.stage_layers),
            "whole": self.whole,
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
            {int(k): MemoryTable.from_json(table) for k, table in data["stages"].items()},
            tuple(map(int, data["stage_layers"])),
            bool(data["whole"]),
        )
