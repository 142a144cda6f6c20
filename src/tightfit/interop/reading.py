"""What was read from a config of another tool: keys of a job, notes, and the tool it was for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tightfit.interop.documents import Document
from tightfit.interop.translation import Note, Translation


@dataclass(frozen=True)
class Tool:
    """Who would run a config.

    Attributes:
        name: for people.
        engine: `deepspeed`, `fsdp1`, `fsdp2`, or `ddp` for one process or plain replicas.
        buffers: DeepSpeed's sizes, by the fields of `bill.other_engines.DeepSpeedBuckets`.
        keep_layers: whether FSDP gathers a layer once per step.
    """

    name: str
    engine: str
    buffers: Mapping[str, Any] = field(default_factory=dict)
    keep_layers: bool = False


# Other tools divide ranks only where they are told to.
_UNDIVIDED = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_replicas": 1,
}


@dataclass(frozen=True)
class Reading:
    """A config in the words of a job.

    Attributes:
        name: of the file.
        format: one of `formats.FORMATS`.
        keys: of a job, that the config says.
        implied: keys that its silence means; whatever else is said wins over them.
        places: where each of `keys` was written.
        notes: one for each of its keys.
    """

    name: str
    format: str
    keys: Mapping[str, Any]
    implied: Mapping[str, Any]
    places: Mapping[str, str]
    notes: tuple[Note, ...]
    tool: Tool

    @classmethod
    def of(
        cls, translation: Translation, document: Document, format_name: str, tool: Tool
    ) -> Reading:
        """What a translation has collected."""
        return cls(
            name=document.name,
            format=format_name,
            keys=translation.keys,
            implied={**({} if format_name == "tightfit" else _UNDIVIDED), **translation.implied},
            places=translation.places,
            notes=tuple(translation.notes),
            tool=tool,
        )

    @property
    def settings(self) -> dict[str, Any]:
        """What the config means, said or not."""
        return {**self.implied, **self.keys}
