"""A foreign config among a job's other settings: what wins, and what contradicts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tightfit.errors import ConfigError, InputError
from tightfit.facts.machine_keys import with_cards_of_gpu
from tightfit.interop.documents import read_document
from tightfit.interop.entries import shown
from tightfit.interop.formats import read_config
from tightfit.interop.reading import Reading
from tightfit.interop.translation import Ranks

# Keys that only mean something together: who says one of them says what the others' silence means.
_GROUPS = (
    {"train_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps"},
    {"offload_optimizer", "offload_param", "offload_optimizer_fraction", "offload_param_fraction"},
    {"zero_stage", "data_parallel_replicas"},
    {"finetuning_type", "quantization_bit"},
)


def ranks_in(settings: Mapping[str, Any]) -> Ranks:
    """How many ranks settings ask for, under their own or other names, or by the cards of a
    described machine; what is no number is complained about where the job is checked."""
    names = {
        "num_gpus": ("num_gpus", "nproc_per_node", "num_processes", "world_size"),
        "nnodes": ("nnodes",),
        "tensor_parallel_size": ("tensor_parallel_size", "tp", "tp_size"),
        "pipeline_parallel_size": ("pipeline_parallel_size", "pp", "pp_size"),
    }
    settings = with_cards_of_gpu(dict(settings))
    found = {
        own: int(value)
        for own, others in names.items()
        for name in others
        if (value := str(settings.get(name, ""))).isdecimal() and 0 < int(value) <= 2**16
    }
    return Ranks(**found)


def read_config_file(
    value: Any, label: str, settings: Mapping[str, Any], format_name: str | None = None
) -> Reading:
    """The config that a setting names.

    Args:
        label: what the setting is called, like `--deepspeed`.
        settings: the others, which say how many ranks it is for.

    Raises:
        ConfigError: it cannot be read, or contradicts itself.
        UnsupportedError: it asks for what cannot be had here.
    """
    try:
        document = read_document(Path(str(value)).expanduser())
    except InputError as error:
        raise ConfigError(f"{label}: {error}") from None
    return read_config(document, ranks_in(settings), format_name)


def implied_beside(reading: Reading, said: Collection[str]) -> dict[str, Any]:
    """What the config's silence means where others say `said`."""
    said = {*said, *reading.keys}
    silent = {key for group in _GROUPS if group & said for key in group}
    return {key: value for key, value in reading.implied.items() if key not in silent | said}


def check_agree(reading: Reading, settings: Mapping[str, Any], labels: Mapping[str, str]) -> None:
    """See that a job's file and the config beside it say the same; flags win over both.

    Raises:
        ConfigError: they do not.
    """
    for key, value in settings.items():
        if key in reading.keys and str(reading.keys[key]) != str(value) and value != "auto":
            raise ConfigError(
                f"{labels[key]} is {shown(value)}, and {reading.places[key]} makes it "
                f"{shown(reading.keys[key])}; keep one, or give --{key}"
            )
