"""FSDP's keys, as `fsdp_config` of accelerate and of transformers has them, and the names of its
sharding strategies.

Version 1 is torch's FullyShardedDataParallel, version 2 `fully_shard`, which this engine uses too.
Names are without the prefix `fsdp_`, which files may have or leave out.
"""

from __future__ import annotations

from typing import Any

from tightfit.errors import ConfigError
from tightfit.interop.documents import Document
from tightfit.interop.entries import Accepts, Entry, Found, entries_in, table_of
from tightfit.interop.reading import Reading, Tool
from tightfit.interop.translation import Ranks, Translation

_SWITCH, _COUNT, _TEXT = Accepts.SWITCH, Accepts.COUNT, Accepts.TEXT
_LAYERS = "every decoder layer is a group of its own, the rest another"
_LOADING = "each rank reads its own parts of the files"

# ZeRO stage, and whether whole copies are kept (one for each machine).
STRATEGIES = {
    "FULL_SHARD": (3, False),
    "SHARD_GRAD_OP": (2, False),
    "NO_SHARD": (0, False),
    "HYBRID_SHARD": (3, True),
    "_HYBRID_SHARD_ZERO2": (2, True),
}
_OTHER_NAMES = {
    "1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD",
    "5": "_HYBRID_SHARD_ZERO2", "HYBRID_SHARD_ZERO2": "_HYBRID_SHARD_ZERO2",
}  # fmt: skip

FSDP_TABLE = table_of(
    (
        Entry("version", _COUNT, here="the engine is version 2's fully_shard", words=("1", "2")),
        Entry("sharding_strategy", _TEXT, "zero_stage, data_parallel_replicas"),
        Entry("reshard_after_forward", _TEXT, "zero_stage"),
        Entry(
            "offload_params",
            _SWITCH,
            "offload_param, offload_optimizer",
            "updates are made where the states are, as there",
        ),
        Entry(
            "cpu_offload",
            _SWITCH,
            "offload_param, offload_optimizer",
            "updates are made where the states are, as there",
        ),
        Entry("activation_checkpointing", _SWITCH, "gradient_checkpointing"),
        Entry("activation_checkpointing_offload", _SWITCH, "offload_activations"),
        Entry("auto_wrap_policy", _TEXT, here=_LAYERS),
        Entry("transformer_layer_cls_to_wrap", Accepts.ANYTHING, here=_LAYERS),
        Entry("transformer_cls_names_to_wrap", Accepts.ANYTHING, here=_LAYERS),
        Entry("min_num_params", Accepts.NUMBER, here=_LAYERS),
        Entry("ignored_modules", _TEXT, here="everything is shared out", refused=True),
        Entry("backward_prefetch", _TEXT, here="the layer to come is gathered ahead"),
        Entry("backward_prefetch_policy", _TEXT, here="the layer to come is gathered ahead"),
        Entry("forward_prefetch", _SWITCH, here="the layer to come is gathered ahead"),
        Entry("limit_all_gathers", _SWITCH, here="one layer ahead, no more"),
        Entry("use_orig_params", _SWITCH, here="parameters are always the model's own"),
        Entry("sync_module_states", _SWITCH, here=_LOADING),
        Entry("cpu_ram_efficient_loading", _SWITCH, here=_LOADING),
        Entry("state_dict_type", _TEXT, here="checkpoints hold whole tensors"),
        Entry("mixed_precision_policy", Accepts.ANYTHING, here="precision says it"),
        Entry("xla", _SWITCH, here="there are no TPUs here", refused=True),
        Entry("xla_fsdp_v2", _SWITCH, here="there are no TPUs here", refused=True),
        Entry("xla_fsdp_settings", Accepts.ANYTHING, here="there are no TPUs here", refused=True),
        Entry("xla_fsdp_grad_ckpt", _SWITCH, here="there are no TPUs here", refused=True),
    )
)

_WITH_PREFIX = {**FSDP_TABLE, **{f"fsdp_{key}": entry for key, entry in FSDP_TABLE.items()}}


def fsdp_entries(document: Document, block: tuple[str, ...]) -> dict[str, Found]:
    """The keys of a block of FSDP's, by their names without prefix.

    Raises:
        ConfigError: a key or value is not FSDP's, or a key is there with and without its prefix.
    """
    content: Any = document.content
    for name in block:
        content = content[name]
    for name in content:
        if f"fsdp_{name}" in content:
            raise ConfigError(f"{document.where(*block, name)} is there twice; keep one")
    return entries_in(document, _WITH_PREFIX, "FSDP", block=block)


def read_fsdp(document: Document, ranks: Ranks) -> Reading:
    """The job's keys that a file for transformers' `fsdp_config` says.

    Raises:
        ConfigError: a key or value is unknown, or two contradict.
        UnsupportedError: it asks for what cannot be had here.
    """
    translation = Translation(fsdp_entries(document, ()), ranks)
    tool = mean_fsdp(translation, default_version=2)
    translation.finish()
    return Reading.of(translation, document, "fsdp", tool)


def mean_fsdp(translation: Translation, default_version: int) -> Tool:
    """Take FSDP's keys and say what they mean; the FSDP that it would be."""
    version = translation.take("version") or default_version
    stage = _stage(translation)
    if stage is None:
        translation.imply("FSDP shares everything out unless told otherwise", zero_stage=3)
        stage = 3
    offloads = _offload(translation)
    if not offloads:
        translation.imply(
            "without offload nothing leaves the device",
            offload_param="none",
            offload_optimizer="none",
        )
    if translation.take("activation_checkpointing"):
        translation.become("activation_checkpointing", gradient_checkpointing="true")
    if translation.take("activation_checkpointing_offload"):
        translation.become("activation_checkpointing_offload", offload_activations="true")
    if stage == 0:
        return Tool("FSDP, NO_SHARD", "ddp")
    return Tool(f"FSDP{version}", f"fsdp{version}", keep_layers=stage == 2)


def _offload(translation: Translation) -> bool:
    on = [key for key in ("offload_params", "cpu_offload") if translation.take(key)]
    for key in on:
        translation.become(key, offload_param="cpu", offload_optimizer="cpu")
    return bool(on)


def _stage(translation: Translation) -> int | None:
    """The ZeRO stage that either of FSDP's two keys for it says.

    Raises:
        ConfigError: there is no such strategy.
    """
    found = None
    for key in ("sharding_strategy", "reshard_after_forward"):
        written = translation.take(key)
        if written is None:
            continue
        if written.casefold() in ("true", "false"):
            found = 3 if written.casefold() == "true" else 2
            translation.become(key, zero_stage=found)
            continue
        found = _become_strategy(translation, key, written)
    return found


def _become_strategy(translation: Translation, key: str, written: str) -> int:
    name = written.upper()
    name = _OTHER_NAMES.get(name, name)
    name = "SHARD_GRAD_OP" if name == "NO_RESHARD" else name
    if name not in STRATEGIES:
        known = ", ".join(STRATEGIES)
        raise ConfigError(
            f"{translation.found[key].place}: {written} is no strategy of FSDP; there are {known}"
        )
    stage, has_copies = STRATEGIES[name]
    copies = translation.ranks.nnodes if has_copies else 1
    if has_copies:
        why = "one whole copy for each machine"
        translation.become(key, why, zero_stage=stage, data_parallel_replicas=copies)
    else:
        translation.become(key, zero_stage=stage)
    return stage
