"""Every format: found by its keys, never failing but in words, and back from what was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.interop.any_documents import any_document

from tightfit.errors import ConfigError, InputError
from tightfit.facts.job import Job
from tightfit.facts.job_values import job_of
from tightfit.interop.conversion import convert, plain_keys
from tightfit.interop.documents import Document, document_of
from tightfit.interop.formats import (
    EXPORTS,
    FORMATS,
    format_named_by,
    format_of,
    read_config,
    write_config,
)
from tightfit.interop.translation import Ranks
from tightfit.interop.writing import Written

# Formats whose files hold no other tool's, which may have keys of the same name.
LISTED_ONCE = ("deepspeed", "fsdp", "torchtitan")
RATES = st.floats(1e-8, 0.1)
SWITCHED = st.sampled_from(["true", "false"])
PLACES = st.sampled_from(["none", "cpu", "nvme"])


def batch() -> st.SearchStrategy[dict[str, Any]]:
    sizes = st.tuples(st.integers(1, 64), st.integers(1, 64))
    return sizes.map(
        lambda pair: {
            "train_batch_size": pair[0] * pair[1],
            "per_device_train_batch_size": pair[0],
            "gradient_accumulation_steps": pair[1],
        }
    )


def numbers(*names: str) -> st.SearchStrategy[dict[str, Any]]:
    of = {
        "learning_rate": RATES,
        "weight_decay": st.floats(0, 1),
        "max_grad_norm": st.floats(0, 10),
        "adam_beta1": st.floats(0, 0.99),
        "adam_beta2": st.floats(0, 0.9999),
        "adam_epsilon": RATES,
        "logging_steps": st.integers(1, 1000),
        "max_steps": st.integers(1, 10**6),
        "warmup_steps": st.integers(0, 1000).map(float),
        "seed": st.integers(0, 2**31),
        "cutoff_len": st.integers(1, 2**20),
        "lora_rank": st.integers(1, 512),
        "ddp_timeout": st.integers(1, 10**6),
        "save_steps": st.integers(1, 10**4),
    }
    return st.fixed_dictionaries({name: of[name] for name in names})


def together(*parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.tuples(*parts).map(lambda found: {k: v for part in found for k, v in part.items()})


@st.composite
def placed(draw: st.DrawFn) -> dict[str, Any]:
    """What DeepSpeed can say: parameters leave in stage 3, after their states, to one folder."""
    optimizer = draw(PLACES)
    parameters = draw(PLACES) if optimizer != "none" else "none"
    stage = 3 if parameters != "none" or optimizer == "nvme" else draw(st.integers(1, 3))
    keys = {"zero_stage": stage, "offload_optimizer": optimizer, "offload_param": parameters}
    if "nvme" in (optimizer, parameters):
        keys["offload_folder"] = "/scratch"
    if (optimizer, parameters, stage) == ("cpu", "none", 3) and draw(st.booleans()):
        keys["offload_optimizer_fraction"] = draw(st.floats(0.01, 0.99))
    return keys


PRECISIONS = st.sampled_from(["bf16", "fp16", "fp32"]).map(lambda p: {"precision": p})
SCHEDULES = st.sampled_from(["linear", "cosine", "constant_with_warmup"]).map(
    lambda s: {"lr_scheduler_type": s}
)
WHOLE = st.sampled_from(["none", "cpu"]).map(
    lambda place: {"offload_optimizer": place, "offload_param": place}
)
FSDP_STAGES = st.sampled_from([2, 3]).map(lambda stage: {"zero_stage": stage})
RECOMPUTED = st.just({"gradient_checkpointing": "true"})
TRAINER = (
    "learning_rate", "weight_decay", "max_grad_norm", "adam_beta1", "adam_beta2", "adam_epsilon",
    "logging_steps", "max_steps", "warmup_steps", "seed", "ddp_timeout", "save_steps",
)  # fmt: skip
OPTIMIZERS = st.sampled_from(["adamw", "adamw_8bit", "lion", "lion_8bit", "sgd", "adafactor"]).map(
    lambda name: {"optim": name}
)

# Jobs that a format can say, so that nothing is lost on the way there and back.
SAYABLE: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "deepspeed": together(
        batch(),
        numbers("learning_rate", "weight_decay", "max_grad_norm", "adam_beta1", "adam_beta2",
                "adam_epsilon", "logging_steps", "max_steps", "warmup_steps"),
        st.just({"optim": "adamw"}), SCHEDULES, PRECISIONS, placed(),
    ).map(lambda k: k if k["lr_scheduler_type"] != "constant_with_warmup"
          else {n: v for n, v in k.items() if n != "max_steps"}),
    "accelerate": together(
        PRECISIONS, WHOLE, FSDP_STAGES, RECOMPUTED,
        st.sampled_from([2, 4, 8]).map(lambda n: {"num_gpus": n, "nnodes": 2}),
        st.sampled_from([1, 2]).map(lambda n: {"data_parallel_replicas": n}),
        st.just({"master_addr": "first", "master_port": 29501, "node_rank": 1}),
    ).map(lambda k: k if k["data_parallel_replicas"] > 1
          else {n: v for n, v in k.items() if n != "data_parallel_replicas"}),
    "fsdp": together(WHOLE, FSDP_STAGES, RECOMPUTED),
    "fsdp1": together(
        WHOLE, RECOMPUTED, st.sampled_from([0, 2, 3]).map(lambda stage: {"zero_stage": stage}),
    ),
    "transformers": together(
        numbers(*TRAINER), OPTIMIZERS, PRECISIONS, WHOLE, RECOMPUTED,
        batch().map(lambda k: {n: v for n, v in k.items() if n != "train_batch_size"}),
        st.just({"output_dir": "out", "save_strategy": "steps", "eval_strategy": "no"}),
    ),
    "llamafactory": together(
        numbers(*TRAINER, "cutoff_len", "lora_rank"), OPTIMIZERS, PRECISIONS, WHOLE,
        SWITCHED.map(lambda value: {"gradient_checkpointing": value}),
        batch().map(lambda k: {n: v for n, v in k.items() if n != "train_batch_size"}),
        st.just({"finetuning_type": "lora", "quantization_bit": 4, "lora_target": "q_proj,v_proj",
                 "use_rslora": True, "additional_target": "embed_tokens,norm",
                 "dataset": "rows.jsonl", "attention": "flash", "output_dir": "out"}),
    ),
    "torchtitan": together(
        numbers("learning_rate", "weight_decay", "max_grad_norm", "adam_beta1", "adam_beta2",
                "adam_epsilon", "logging_steps", "max_steps", "warmup_steps", "seed", "cutoff_len"),
        WHOLE, st.sampled_from(["bf16", "fp32"]).map(lambda p: {"precision": p}),
        batch().map(lambda k: {n: v for n, v in k.items() if n != "gradient_accumulation_steps"}),
        st.sampled_from(["linear", "cosine"]).map(lambda s: {"lr_scheduler_type": s}),
        st.sampled_from(["true", "false", "selective"]).map(
            lambda mode: {"gradient_checkpointing": mode}
        ),
        st.sampled_from([0, 2, 3]).map(lambda stage: {"zero_stage": stage}),
        st.just({"optim": "adamw", "save_strategy": "steps", "save_steps": 5}),
    ),
    "tightfit": together(batch(), placed(), PRECISIONS, numbers(*TRAINER), RECOMPUTED),
}  # fmt: skip


@pytest.mark.parametrize("name", SAYABLE)
@given(data=st.data())
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
def test_there_and_back_is_the_same_job(name: str, data: st.DataObject) -> None:
    said = data.draw(SAYABLE[name])
    keys = plain_keys(job_of({"model_name_or_path": "m", **said}, {}), said)
    written = write_config(keys, name)
    assert not [note for note in written.notes if note.key in keys], written.notes
    file = EXPORTS.get(name, "job.yaml")
    document = document_of(written.text, file)
    assert format_of(document) == name.removesuffix("1")
    ranks = Ranks(keys.get("num_gpus", 1), keys.get("nnodes", 1))
    found = read_config(document, ranks).settings
    again = plain_keys(job_of({"model_name_or_path": "m", **found}, {}), found)
    assert {key: again.get(key) for key in keys} == keys


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_nothing_but_a_message_comes_of_any_document(name: str, data: st.DataObject) -> None:
    content = data.draw(any_document(name))
    message = "none"
    try:
        reading = read_config(Document("file", content), Ranks(), name)
        if name in LISTED_ONCE:
            keys = [note.key for note in reading.notes if note.key]
            assert len(keys) == len(set(keys))
        convert(reading, {}, data.draw(st.sampled_from(sorted(FORMATS))))
    except InputError as error:
        message = str(error)
    assert message


# A value for every key of a job that is not its default.
SAID: dict[str, Any] = {
    "model_name_or_path": "m", "finetuning_type": "lora", "quantization_bit": 4, "lora_rank": 3,
    "lora_alpha": 5.0, "lora_dropout": 0.5, "lora_target": "q_proj", "use_rslora": True,
    "use_dora": True, "additional_target": "lm_head", "resize_vocab": True,
    "rope_scaling": "yarn",
    "dataset": "a.jsonl", "eval_dataset": "b.jsonl", "val_size": 0.25, "cutoff_len": 77,
    "overlong": "drop", "preview": 2,
    "sample_prompt": "Why?", "max_new_tokens": 9, "train_batch_size": 8,
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
    "per_device_eval_batch_size": 3, "num_train_epochs": 2.5, "max_steps": 70,
    "learning_rate": 3e-4, "lr_scheduler_type": "cosine", "warmup_steps": 6.0, "optim": "sgd",
    "lr_scheduler_kwargs": {"num_cycles": 0.5},
    "optim_master": "split", "loss_scale": 64.0, "initial_scale_power": 8, "loss_scale_window": 77,
    "hysteresis": 3, "min_loss_scale": 2.0, "weight_decay": 0.125, "adam_beta1": 0.75,
    "adam_beta2": 0.875, "adam_epsilon": 1e-3, "max_grad_norm": 0.5, "seed": 7,
    "memory_limit": "8GiB", "host_memory_limit": "9GiB", "precision": "bf16",
    "gradient_checkpointing": "selective", "attention": "eager", "loss": "chunked",
    "label_smoothing_factor": 0.25, "z_loss": 1e-4, "offload_optimizer": "cpu",
    "offload_optimizer_fraction": 0.5, "offload_param": "cpu", "offload_param_fraction": 0.5,
    "offload_activations": "true", "offload_prefetch": 2, "lazy_step": "true",
    "offload_folder": "/scratch", "nvme_limit": "10GiB", "num_gpus": 8, "zero_stage": 3,
    "data_parallel_replicas": 2, "tensor_parallel_size": 2, "pipeline_parallel_size": 2,
    "pipeline_schedule": "gpipe", "virtual_pipeline_stages": 2, "pipeline_layers": [1, 3],
    "allow": ["lora"], "plan": "plan.yaml", "adapt": True, "gpu": "8xh100", "ram": "64GiB",
    "nvme": "1TB", "interconnect": "pcie4", "network": "25Gb", "nnodes": 2, "node_rank": 1,
    "master_addr": "first", "master_port": 29501, "max_restarts": 4, "ddp_timeout": 60,
    "output_dir": "out", "overwrite_output_dir": True, "resume": True, "logging_steps": 11,
    "eval_strategy": "epoch", "eval_steps": 13, "save_strategy": "epoch", "save_steps": 17,
    "save_total_limit": 2, "save_only_model": True,
}  # fmt: skip
# What decides which words a writer has for the other keys.
BESIDE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a part away": {"offload_optimizer": "cpu", "offload_optimizer_fraction": 0.25},
    "all away": {"offload_optimizer": "cpu", "offload_param": "cpu", "zero_stage": 2},
    "on disk": {"offload_optimizer": "nvme", "offload_param": "nvme"},
    "ranks": {"num_gpus": 4, "zero_stage": 2},
    "copies": {"num_gpus": 4, "zero_stage": 0},
    "ranks away": {"num_gpus": 4, "zero_stage": 0, "offload_optimizer": "cpu",
                   "offload_param": "cpu"},
    "ranks of stage 1": {"num_gpus": 4, "zero_stage": 1, "offload_optimizer": "cpu"},
    "adapters": {"finetuning_type": "lora", "precision": "fp16"},
    "an optimizer of ours": {"optim": "adafactor", "lr_scheduler_type": "polynomial"},
    "lion": {"optim": "lion", "lr_scheduler_type": "constant_with_warmup"},
    "a schedule": {"lr_scheduler_type": "linear", "max_steps": 50},
    "fewer sequences than ranks": {"num_gpus": 4, "train_batch_size": 2},
}  # fmt: skip


def test_every_key_of_a_job_has_a_value_to_try() -> None:
    assert SAID.keys() == Job.model_fields.keys()
    defaults = {
        name: field.get_default(call_default_factory=True)
        for name, field in Job.model_fields.items()
    }
    assert not [name for name, value in SAID.items() if value == defaults[name]]


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("name", FORMATS)
def test_no_key_of_a_job_is_lost_silently(name: str, beside: str) -> None:
    """What a job says changes the file, is what the file means anyway, or is listed."""
    lost = []
    for key, value in SAID.items():
        others = {other: found for other, found in BESIDE[beside].items() if other != key}
        without, written = (write_config(keys, name) for keys in (others, {**others, key: value}))
        listed = {note.key for note in written.notes}
        if (
            without.text == written.text
            and key not in listed
            and means(written, name, key) != value
        ):
            lost.append(key)
    assert not lost


def means(written: Written, name: str, key: str) -> Any:
    """The value of a job's key that a file stands for."""
    document = document_of(written.text, EXPORTS.get(name, "job.yaml"))
    return read_config(document, Ranks(4), name).settings.get(key)


def test_what_is_listed_is_said_in_its_own_words() -> None:
    keys = {"gpu": "rtx-3060", "num_gpus": 2, "memory_limit": "8GiB", "offload_param": "cpu",
            "offload_optimizer": "cpu", "offload_param_fraction": 0.5}  # fmt: skip
    for name in ("accelerate", "deepspeed", "fsdp", "llamafactory", "transformers"):
        said = {note.key: note for note in write_config(keys, name).notes}
        assert "the machine that was planned for" in said["gpu"].why
        assert "what the machine has" in said["memory_limit"].why
        assert said["offload_param_fraction"].why == "all parameters leave the device, or none"
        assert name == "accelerate" or "the launcher says it" in said["num_gpus"].why
        assert "null" not in [note.value for note in said.values()]


def test_every_writable_format_is_there_and_back() -> None:
    assert set(SAYABLE) == set(FORMATS)
    assert set(EXPORTS) == set(FORMATS) - {"tightfit"}


@pytest.mark.parametrize(
    ("content", "file", "expected"),
    [
        ({"zero_optimization": {}}, "a.json", "deepspeed"),
        ({"train_batch_size": 8, "fp16": {"enabled": True}}, "a.json", "deepspeed"),
        ({"distributed_type": "NO"}, "a.yaml", "accelerate"),
        ({"model_name_or_path": "m", "stage": "sft"}, "a.yaml", "llamafactory"),
        ({"model_name_or_path": "m", "template": "qwen"}, "a.yaml", "llamafactory"),
        ({"fsdp_sharding_strategy": "FULL_SHARD"}, "a.yaml", "fsdp"),
        ({"output_dir": "out", "bf16": True}, "a.json", "transformers"),
        ({"model_name_or_path": "m", "bf16": True}, "a.yaml", "tightfit"),
        ({"training": {"steps": 3}}, "a.toml", "torchtitan"),
    ],
)
def test_a_format_is_found_by_its_keys(content: Any, file: str, expected: str) -> None:
    assert format_of(Document(file, content)) == expected


def test_a_file_of_no_format_says_which_there_are() -> None:
    with pytest.raises(ConfigError, match=r"say which it is with --from accelerate\|deepspeed"):
        format_of(Document("a.json", {"cheese": 3}))


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("ds_config.json", "deepspeed"), ("my_deepspeed.json", "deepspeed"),
        ("fsdp_config.json", "fsdp"), ("fsdp1_config.json", "fsdp1"), ("args.json", None),
        ("accelerate.yaml", "accelerate"),
        ("llamafactory.yaml", "llamafactory"), ("job.yaml", None), ("x.toml", "torchtitan"),
    ],
)  # fmt: skip
def test_a_format_is_named_by_its_file(file: str, expected: str | None) -> None:
    assert format_named_by(Path(file)) == expected


def test_what_cannot_be_said_is_in_the_file() -> None:
    keys = {
        "lazy_step": "true", "offload_optimizer": "cpu", "offload_optimizer_fraction": 0.5,
        "loss": "chunked", "zero_stage": 0, "precision": "bf16", "offload_param": "none",
    }  # fmt: skip
    deepspeed = write_config(keys, "deepspeed")
    content = json.loads(deepspeed.text)
    assert content["zero_optimization"]["offload_optimizer"]["ratio"] == 0.5
    assert content["zero_optimization"]["stage"] == 3
    remarks = " ".join(content["_tightfit"])
    for said in ("lazy_step: true", "loss: chunked", "zero_stage: 0"):
        assert said in remarks
    accelerate = write_config(keys, "accelerate")
    assert "# offload_optimizer_fraction: 0.5 is not in this file" in accelerate.text
    assert "distributed_type: DEEPSPEED" in accelerate.text


@pytest.mark.parametrize("name", ["transformers", "llamafactory"])
def test_what_a_trainer_takes_otherwise_is_written(name: str) -> None:
    """Its eval_steps are its logging_steps, and its save_strategy is steps, unless a file says."""
    text = write_config({"eval_strategy": "steps", "val_size": 10}, name).text
    document = document_of(text, EXPORTS[name])
    expected = {"eval_steps": 500, "logging_steps": 1, "save_strategy": "no",
                "per_device_eval_batch_size": 1}  # fmt: skip
    assert {key: document.content[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("keys", "strategy", "listed"),
    [
        ({}, "FULL_SHARD", set()),
        ({"zero_stage": 3}, "FULL_SHARD", set()),
        ({"zero_stage": 2}, "SHARD_GRAD_OP", set()),
        ({"zero_stage": 1}, "SHARD_GRAD_OP", {"zero_stage"}),
        ({"zero_stage": 0}, "NO_SHARD", set()),
        ({"nnodes": 2, "data_parallel_replicas": 2}, "HYBRID_SHARD", {"nnodes"}),
        (
            {"nnodes": 2, "data_parallel_replicas": 2, "zero_stage": 2},
            "_HYBRID_SHARD_ZERO2",
            {"nnodes"},
        ),
        # Of other copies than one for each machine it has no word.
        (
            {"num_gpus": 4, "data_parallel_replicas": 2},
            "FULL_SHARD",
            {"num_gpus", "data_parallel_replicas"},
        ),
    ],
)
def test_fsdp_1_has_names_for_kinds_of_sharding(
    keys: dict[str, Any], strategy: str, listed: set[str]
) -> None:
    written = write_config(keys, "fsdp1")
    content = json.loads(written.text)
    assert (content["version"], content["sharding_strategy"]) == (1, strategy)
    assert {note.key for note in written.notes} == listed
    reading = read_config(document_of(written.text, "a.json"), Ranks(4, keys.get("nnodes", 1)))
    assert reading.tool.engine == ("ddp" if strategy == "NO_SHARD" else "fsdp1")


def test_conversion_keeps_flags_over_the_file() -> None:
    document = document_of('{"train_batch_size": 8, "zero_optimization": {"stage": 3}}', "a.json")
    reading = read_config(document, Ranks())
    done = convert(reading, {"per_device_train_batch_size": "4", "precision": "bf16"}, "deepspeed")
    content = json.loads(done.written.text)
    assert content["train_micro_batch_size_per_gpu"] == 4
    assert content["bf16"] == {"enabled": True}
