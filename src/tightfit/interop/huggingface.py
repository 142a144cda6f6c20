"""Reads transformers' TrainingArguments (JSON) and LLaMA-Factory's files (YAML or JSON).

Both have the keys of TrainingArguments, from which a job has most of its own; both may point to a
config of DeepSpeed or FSDP, which is read with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tightfit.errors import ConfigError, InputError
from tightfit.facts.job import Job
from tightfit.interop.deepspeed import read_deepspeed
from tightfit.interop.documents import Document, read_document
from tightfit.interop.entries import Accepts, Entry, Found, entries_in, shown
from tightfit.interop.fsdp import STRATEGIES, fsdp_entries, mean_fsdp
from tightfit.interop.joined import joined
from tightfit.interop.llamafactory_keys import LLAMAFACTORY_TABLE
from tightfit.interop.other_names import translate
from tightfit.interop.reading import Reading, Tool
from tightfit.interop.transformers_keys import DEFAULTS, TRANSFORMERS_TABLE
from tightfit.interop.translation import SAME, Ranks, Translation

_OWN = {name: Entry(name, Accepts.ANYTHING, name) for name in Job.model_fields}
# Keys whose meaning is not that of one key of a job.
SPECIAL_KEYS = (
    "deepspeed",
    "fsdp",
    "fsdp_config",
    "pure_bf16",
    "disable_gradient_checkpointing",
)
_IN_FSDP = ("offload", "auto_wrap", "")


def read_transformers(document: Document, ranks: Ranks) -> Reading:
    """The job's keys that a file of TrainingArguments says; beside them it may have a job's own.

    Raises:
        ConfigError: a key or value is unknown, or two contradict.
        UnsupportedError: it asks for what makes another run and cannot be had here.
    """
    table = {**_OWN, **TRANSFORMERS_TABLE}
    translation = Translation(entries_in(document, table, "transformers"), ranks)
    _same_names(translation, document)
    _defaults(translation)
    if "gradient_checkpointing" not in translation.keys:
        translation.imply("off where it is left out", gradient_checkpointing="false")
    return _finished(translation, document, "transformers")


def read_llamafactory(document: Document, ranks: Ranks) -> Reading:
    """The job's keys that a file for `llamafactory-cli train` says; raises as the other."""
    table = {**_OWN, **TRANSFORMERS_TABLE, **LLAMAFACTORY_TABLE}
    translation = Translation(entries_in(document, table, "LLaMA-Factory"), ranks)
    if translation.take("disable_gradient_checkpointing"):
        translation.become("disable_gradient_checkpointing", gradient_checkpointing="false")
    elif "gradient_checkpointing" not in translation.found:
        translation.imply(
            "LLaMA-Factory checkpoints every layer unless told otherwise",
            gradient_checkpointing="true",
        )
    if translation.take("pure_bf16"):
        translation.become("pure_bf16", precision="bf16")
    _same_names(translation, document)
    _defaults(translation)
    if not translation.has("finetuning_type"):
        translation.imply("lora where it is left out", finetuning_type="lora")
    return _finished(translation, document, "llamafactory")


def _same_names(translation: Translation, document: Document) -> None:
    """Keys that a job has too, under this name or one that `other_names` knows."""
    block = {
        key: found.value
        for key, found in translation.found.items()
        if found.entry.becomes
        and key not in SPECIAL_KEYS
        and (found.value != "auto" or key in Job.model_fields)
    }
    for key, value in block.items():
        own = translate({key: value}, f"{document.where(key).removesuffix(key)}")
        if own:
            translation.become(key, **{name: _own_value(part) for name, part in own.items()})
        else:
            translation.say(key, SAME, "")
    _say_precision(translation)


def _own_value(value: Any) -> Any:
    return ",".join(map(str, value)) if isinstance(value, list) else value


def _say_precision(translation: Translation) -> None:
    if "precision" not in translation.keys and not any(
        translation.has(key) for key in ("bf16", "fp16", "precision")
    ):
        translation.imply("without bf16 or fp16 it trains in fp32", precision="fp32")


def _defaults(translation: Translation) -> None:
    """What TrainingArguments take for fields that are left out, where a job takes another value."""
    _batch_of_8(translation)
    for name, value in DEFAULTS.items():
        if name not in translation.keys:
            translation.imply("where it is left out", **{name: value})
    said = translation.keys
    if said.get("eval_strategy") == "steps" and "eval_steps" not in said:
        steps = said.get("logging_steps", DEFAULTS["logging_steps"])
        translation.imply("as logging_steps where it is left out", eval_steps=steps)


def _batch_of_8(translation: Translation) -> None:
    named = {"per_device_train_batch_size", "train_batch_size"} & translation.keys.keys()
    if not named:
        translation.imply("8 where it is left out", per_device_train_batch_size=8)
    if "gradient_accumulation_steps" not in translation.keys and not named & {"train_batch_size"}:
        translation.imply("1 where it is left out", gradient_accumulation_steps=1)


def _finished(translation: Translation, document: Document, format_name: str) -> Reading:
    inner = _deepspeed(translation, document) or _fsdp(translation, document)
    translation.finish()
    ranks = translation.ranks.data_parallel
    tool = Tool("DDP" if ranks > 1 else "the Trainer on one card", "ddp")
    own = Reading.of(translation, document, format_name, tool)
    if inner is not None:
        return joined(own, inner)
    placed = {"offload_optimizer": "none", "offload_param": "none"}
    if ranks > 1:
        placed["zero_stage"] = 0  # type: ignore[assignment]  # a number among words
    return replace(own, implied={**placed, **own.implied})


def _deepspeed(translation: Translation, document: Document) -> Reading | None:
    found = translation.found.get("deepspeed")
    if found is None or found.value in ("", "none", False):
        return None
    translation.say("deepspeed", "", "")
    return read_deepspeed(_inner(document, found), translation.ranks)


def _inner(document: Document, found: Found) -> Document:
    """The block that a key holds, or the file that it names."""
    if isinstance(found.value, dict):
        depth = len((found.written,))
        lines = {path[depth:]: n for path, n in document.lines.items() if path[0] == found.written}
        return Document(f"{document.name}, {found.written}", found.value, lines)
    if not isinstance(found.value, str):
        raise ConfigError(f"{found.place}: {shown(found.value)} is no file and no block of keys")
    path = Path(found.value).expanduser()
    if not path.is_absolute() and not path.exists():
        path = Path(document.name).parent / path
    try:
        return read_document(path)
    except InputError as error:
        raise ConfigError(f"{found.place}: {error}") from None


def _fsdp(translation: Translation, document: Document) -> Reading | None:
    found, config = (translation.found.get(key) for key in ("fsdp", "fsdp_config"))
    words = _fsdp_words(found)
    if words is None:
        return None
    if config is not None:
        translation.say("fsdp_config", "", "")
    inner = Document(document.name, {}, {}) if config is None else _inner(document, config)
    assert found is not None
    translation.say("fsdp", "", "")
    plain = {name.removeprefix("fsdp_"): value for name, value in inner.content.items()}
    content = {**_meant(words, found), **plain}
    inner = Document(inner.name, content, inner.lines)
    part = Translation(fsdp_entries(inner, ()), translation.ranks)
    tool = mean_fsdp(part, default_version=2)
    part.finish()
    return Reading.of(part, inner, "fsdp", tool)


def _fsdp_words(found: Found | None) -> list[str] | None:
    """What `fsdp` says, None where it is off: true, or strategies and options as text or list."""
    if found is None or found.value in (False, "", [], "false"):
        return None
    value = found.value
    if value is True or value == "true":
        return []
    words = value.replace(",", " ").split() if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ConfigError(f"{found.place}: {shown(value)} is no list of options")
    return words


def _meant(words: list[str], found: Found) -> Mapping[str, Any]:
    meant: dict[str, Any] = {}
    for word in words:
        if word.upper() in STRATEGIES or word.upper() == "HYBRID_SHARD_ZERO2":
            meant["sharding_strategy"] = word
        elif word == "offload":
            meant["cpu_offload"] = True
        elif word not in _IN_FSDP:
            known = " ".join((*(name.lower() for name in STRATEGIES), "offload", "auto_wrap"))
            raise ConfigError(f"{found.place}: {word!r} is none of: {known}")
    return meant
