"""What writers of formats share: the job on its way, and remarks for what a format cannot say.

A writer takes the keys that a job says and those that a plan has decided. It asks for a key (`get`)
only where it writes it, or notes that it cannot; one that it never asked for is one that its format
has no word for, and is listed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from tightfit.facts.job import Job
from tightfit.interop.entries import shown
from tightfit.interop.translation import Note

# What another tool does instead of a technique of ours, where it cannot have it.
_INSTEAD = {
    "lazy_step": "updates finish before the next forward: the same numbers, later",
    "offload_prefetch": "how far ahead things are fetched is the tool's own",
    "loss": "all logits are there at once",
    "attention": "attention is chosen where the model is loaded (attn_implementation)",
    "offload_optimizer_fraction": "all states leave the device, or none",
    "offload_param_fraction": "all parameters leave the device, or none",
    "offload_activations": "activations stay on the device",
    "optim_master": "the fp32 copy is whole",
    "offload_folder": "there is no disk tier",
    "zero_stage": "nothing is shared out",
    "data_parallel_replicas": "states are shared out over all ranks (no HSDP)",
    "tensor_parallel_size": "ranks do not share a layer's matrices",
    "pipeline_parallel_size": "there are no stages",
    **dict.fromkeys(
        ("num_gpus", "nnodes", "node_rank", "master_addr", "master_port", "max_restarts"),
        "the launcher says it",
    ),
    **dict.fromkeys(
        ("gpu", "ram", "nvme", "interconnect", "network"),
        "it describes the machine that was planned for; the tool takes the one that it runs on",
    ),
    **dict.fromkeys(
        ("memory_limit", "host_memory_limit", "nvme_limit"),
        "tightfit's own: the tool takes what the machine has",
    ),
    **dict.fromkeys(("plan", "allow", "adapt"), "tightfit's own: the tool has no planner"),
    **dict.fromkeys(("preview", "sample_prompt", "max_new_tokens"), "tightfit's own"),
}
# What every tool does anyway.
_USUAL = {
    "lazy_step": "false",
    "optim_master": "fp32",
    "loss": "full",
    "gradient_checkpointing": "false",
    "offload_activations": "false",
    "offload_optimizer": "none",
    "offload_param": "none",
    "offload_optimizer_fraction": 1,
    "offload_param_fraction": 1,
    "zero_stage": 0,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_replicas": 1,
}
_SCRIPT = "said in the training script, or on its command line"


@dataclass
class Sheet:
    """A job's keys on their way into a file.

    Attributes:
        keys: what the job says, by a job's own names.
        notes: what could not be said.
    """

    keys: Mapping[str, Any]
    notes: list[Note] = field(default_factory=list)
    _asked: set[str] = field(default_factory=set)

    def get(self, name: str) -> Any:
        """A job's value for a key that is written; its default where the job does not say."""
        self._asked.add(name)
        return self.look_at(name)

    def look_at(self, name: str) -> Any:
        """The same for one that only decides how others are written: `finish` still lists it."""
        value = self.keys.get(name)
        return Job.model_fields[name].get_default() if value is None else value

    def size(self, name: str) -> int:
        """Of a group of ranks, looked at; 1 where the planner would find it."""
        value = self.look_at(name)
        return 1 if value == "auto" else int(value)

    def says(self, name: str) -> bool:
        """Whether the job says something other than `auto` for a key that the format has."""
        self._asked.add(name)
        return self.keys.get(name) not in (None, "auto")

    def missing(self, name: str, why: str) -> None:
        """The format cannot say what the job says for `name`."""
        self._asked.add(name)
        self.notes.append(Note(name, shown(self.look_at(name)).strip("'"), "", why))

    def with_keys(self, **keys: Any) -> Sheet:
        """A part of the same file for which the job says these instead."""
        return Sheet({**self.keys, **keys}, self.notes, self._asked)

    def finish(self) -> list[Note]:
        """All notes, with one for every key that nobody asked for."""
        for name, value in self.keys.items():
            default = Job.model_fields[name].get_default(call_default_factory=True)
            usual = ("auto", default, _USUAL.get(name, "auto"))
            if name in self._asked or value in usual:
                continue
            self.notes.append(Note(name, shown(value).strip("'"), "", _INSTEAD.get(name, _SCRIPT)))
        return self.notes

    @property
    def ranks(self) -> int:
        """Processes on all machines."""
        return int(self.look_at("num_gpus")) * int(self.look_at("nnodes"))

    @property
    def data_parallel(self) -> int:
        """Ranks that see different sequences."""
        width = self.size("tensor_parallel_size") * self.size("pipeline_parallel_size")
        return max(1, self.ranks // width)


@dataclass(frozen=True)
class Written:
    """A config for another tool.

    Attributes:
        text: of the file.
        notes: what it could not say.
    """

    text: str
    notes: tuple[Note, ...]


def batch_sizes(sheet: Sheet) -> tuple[int, int]:
    """Sequences of a micro-batch and micro-batches of a step; 1 where nobody says."""
    micro, steps, total = (
        sheet.get(name)
        for name in (
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "train_batch_size",
        )
    )
    if total != "auto":
        share = max(1, total // sheet.data_parallel)
        if micro == "auto":
            micro = 1 if steps == "auto" else max(1, share // steps)
        if steps == "auto":
            steps = max(1, share // micro)
    micro, steps = (1 if size == "auto" else size for size in (micro, steps))
    whole = micro * steps * sheet.data_parallel
    if total not in ("auto", whole):
        sheet.missing("train_batch_size", f"every rank has its own sequences: it is {whole}")
    return micro, steps


def leave_ranks_to(sheet: Sheet, launcher: str) -> None:
    """Note the ranks of a job, which the tool's launcher has to be told."""
    for name in ("num_gpus", "nnodes"):
        if sheet.look_at(name) != 1:
            sheet.missing(name, f"the launcher says it: {launcher}")


def remarks(notes: list[Note]) -> Iterator[str]:
    """The notes as lines for the file itself."""
    for note in notes:
        yield f"{note.key}: {note.value} is not in this file: {note.why}"


def as_json(content: Mapping[str, Any]) -> str:
    """Indented, as people write it."""
    return json.dumps(content, indent=2) + "\n"


def as_yaml(content: Mapping[str, Any], lines: list[str]) -> str:
    """With `lines` as comments at the top."""
    head = "".join(f"# {line}\n" for line in lines)
    return head + yaml.safe_dump(dict(content), sort_keys=False, width=100, allow_unicode=True)
