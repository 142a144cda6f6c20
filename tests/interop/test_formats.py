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
from tightfit.facts.job_values import job_of
from tightfit.interop.conversion import convert, plain_keys
from tightfit.interop.documents import Document, document_of
from tightfit.interop.formats import (
    EXPORTS,
    FORMATS,
    WRITABLE,
    format_named_by,
    format_of,
    read_config,
    write_config,
)
from tightfit.interop.translation import Ranks

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
                 "dataset": "rows.jsonl", "attention": "flash", "output_dir": "out"}),
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
    assert format_of(document) == name
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
        convert(reading, {}, data.draw(st.sampled_from(WRITABLE)))
    except InputError as error:
        message = str(error)
    assert message


def test_every_writable_format_is_there_and_back() -> None:
    assert set(SAYABLE) == set(WRITABLE)
    assert set(EXPORTS) == set(WRITABLE) - {"tightfit"}


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
        ("fsdp_config.json", "fsdp"), ("args.json", None), ("accelerate.yaml", "accelerate"),
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


def test_torchtitan_is_not_written() -> None:
    with pytest.raises(ConfigError, match="torchtitan is read, not written; there are accelerate"):
        write_config({}, "torchtitan")


def test_conversion_keeps_flags_over_the_file() -> None:
    document = document_of('{"train_batch_size": 8, "zero_optimization": {"stage": 3}}', "a.json")
    reading = read_config(document, Ranks())
    done = convert(reading, {"per_device_train_batch_size": "4", "precision": "bf16"}, "deepspeed")
    content = json.loads(done.written.text)
    assert content["train_micro_batch_size_per_gpu"] == 4
    assert content["bf16"] == {"enabled": True}
