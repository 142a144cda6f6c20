"""The formats: which one a file is in, how it is read, how another is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightfit.errors import ConfigError
from tightfit.facts.job import Job
from tightfit.interop.accelerate import ACCELERATE_TABLE, read_accelerate
from tightfit.interop.accelerate_writer import write_accelerate
from tightfit.interop.deepspeed import read_deepspeed
from tightfit.interop.deepspeed_keys import DEEPSPEED_TABLE
from tightfit.interop.deepspeed_writer import write_deepspeed
from tightfit.interop.documents import Document
from tightfit.interop.entries import Table
from tightfit.interop.fsdp import FSDP_TABLE, read_fsdp
from tightfit.interop.fsdp_writer import write_fsdp, write_fsdp1
from tightfit.interop.huggingface import read_llamafactory, read_transformers
from tightfit.interop.huggingface_writer import write_llamafactory, write_transformers
from tightfit.interop.llamafactory_keys import LLAMAFACTORY_TABLE
from tightfit.interop.own import read_own, write_own
from tightfit.interop.reading import Reading
from tightfit.interop.torchtitan import TORCHTITAN_TABLE, read_torchtitan
from tightfit.interop.torchtitan_writer import write_torchtitan
from tightfit.interop.transformers_keys import TRANSFORMERS_TABLE
from tightfit.interop.translation import Ranks
from tightfit.interop.writing import Written


@dataclass(frozen=True)
class Format:
    """A kind of file.

    Attributes:
        title: of the tool, for people.
        table: what becomes of its keys.
        marks: keys at the top that only its files have.
    """

    title: str
    table: Table
    marks: frozenset[str]
    read: Callable[[Document, Ranks], Reading]
    write: Callable[[Mapping[str, Any]], Written]


def _marks(*keys: str) -> frozenset[str]:
    return frozenset(keys)


# In the order in which a file is held against them.
FORMATS: dict[str, Format] = {
    "accelerate": Format(
        "accelerate",
        ACCELERATE_TABLE,
        _marks("distributed_type", "compute_environment", "main_training_function"),
        read_accelerate,
        write_accelerate,
    ),
    "deepspeed": Format(
        "DeepSpeed",
        DEEPSPEED_TABLE,
        _marks(
            "zero_optimization", "train_micro_batch_size_per_gpu", "aio", "steps_per_print",
            "zero_allow_untested_optimizer", "wall_clock_breakdown", "scheduler",
            "communication_data_type", "prescale_gradients", "torch_autocast",
        ),
        read_deepspeed,
        write_deepspeed,
    ),
    "llamafactory": Format(
        "LLaMA-Factory",
        LLAMAFACTORY_TABLE,
        _marks("stage", "template", "dataset_dir", "flash_attn", "pure_bf16",
               "disable_gradient_checkpointing", "overwrite_cache", "preprocessing_num_workers"),
        read_llamafactory,
        write_llamafactory,
    ),
    "torchtitan": Format(
        "torchtitan",
        TORCHTITAN_TABLE,
        _marks("parallelism", "training", "activation_checkpoint", "lr_scheduler"),
        read_torchtitan,
        write_torchtitan,
    ),
    "fsdp": Format(
        "FSDP",
        FSDP_TABLE,
        _marks(*FSDP_TABLE, *(f"fsdp_{key}" for key in FSDP_TABLE)) - {"offload_param"},
        read_fsdp,
        write_fsdp,
    ),
    "fsdp1": Format("FSDP 1", FSDP_TABLE, _marks(), read_fsdp, write_fsdp1),
    "transformers": Format(
        "transformers",
        TRANSFORMERS_TABLE,
        _marks(*TRANSFORMERS_TABLE) - Job.model_fields.keys(),
        read_transformers,
        write_transformers,
    ),
    "tightfit": Format("tightfit", {}, frozenset(), read_own, write_own),
}  # fmt: skip
# What a plan can be written as, with the file that it goes to where none is named.
EXPORTS = {
    "deepspeed": "ds_config.json",
    "accelerate": "accelerate.yaml",
    "llamafactory": "llamafactory.yaml",
    "transformers": "training_arguments.json",
    "fsdp": "fsdp_config.json",
    "fsdp1": "fsdp1_config.json",
    "torchtitan": "torchtitan.toml",
}
_JOB_MARKS = ("model_name_or_path", "model", "base_model")


def format_of(document: Document) -> str:
    """The format of a file, by its keys.

    Raises:
        ConfigError: they are of none.
    """
    keys = document.content.keys()
    if document.name.endswith(".toml"):
        return "torchtitan"
    for name in ("accelerate", "deepspeed"):
        if keys & FORMATS[name].marks or _has_blocks_of_deepspeed(document, name):
            return name
    if keys & FORMATS["llamafactory"].marks and keys & {"stage", "template", *_JOB_MARKS}:
        return "llamafactory"
    if keys and keys <= FORMATS["fsdp"].marks:
        return "fsdp"
    # YAML of a job may have names of TrainingArguments; JSON is how those are written.
    if keys & set(Job.model_fields) or keys & FORMATS["transformers"].marks:
        return "transformers" if document.name.endswith(".json") else "tightfit"
    raise ConfigError(
        f"{document.name}: its keys are of no format that is known; say which it is with --from "
        f"{'|'.join(FORMATS)}"
    )


def _has_blocks_of_deepspeed(document: Document, name: str) -> bool:
    blocks = ("fp16", "bf16", "optimizer")
    return name == "deepspeed" and any(
        isinstance(document.content.get(key), dict) for key in blocks
    )


def read_config(document: Document, ranks: Ranks, name: str | None = None) -> Reading:
    """What a file says in the words of a job.

    Args:
        ranks: that it is for, where it does not say.
        name: of the format, where it is not to be found out.

    Raises:
        ConfigError: the format, a key or a value is unknown, or two contradict.
        UnsupportedError: it asks for what makes another run and cannot be had here.
    """
    return FORMATS[name or format_of(document)].read(document, ranks)


def write_config(keys: Mapping[str, Any], name: str) -> Written:
    """A job in another format."""
    return FORMATS[name].write(keys)


def format_named_by(path: Path) -> str | None:
    """The format that a file's name speaks of, None where it speaks of none."""
    name = path.name.casefold()
    if path.suffix == ".json":
        if "ds_" in name or "deepspeed" in name or "zero" in name:
            return "deepspeed"
        return next((form for form in ("fsdp1", "fsdp") if form in name), None)
    if "accelerate" in name:
        return "accelerate"
    if "llamafactory" in name or "llama_factory" in name or "llama-factory" in name:
        return "llamafactory"
    return "torchtitan" if path.suffix == ".toml" else None
