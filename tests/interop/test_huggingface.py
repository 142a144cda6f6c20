"""Files of transformers and LLaMA-Factory, and the configs of DeepSpeed and FSDP that they name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

import pytest
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from tightfit.errors import InputError
from tightfit.facts.job import Job, Optim
from tightfit.interop.documents import Document, document_of
from tightfit.interop.huggingface import read_llamafactory, read_transformers
from tightfit.interop.huggingface_writer import write_transformers
from tightfit.interop.other_names import RENAMED, translate
from tightfit.interop.reading import Reading
from tightfit.interop.transformers_keys import SAME
from tightfit.interop.translation import Ranks

# As in LLaMA-Factory's examples/train_lora.
FACTORY = """\
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: identity,alpaca_en_demo
template: llama3
cutoff_len: 2048
overwrite_cache: true
preprocessing_num_workers: 16
dataloader_num_workers: 4
output_dir: saves/llama3-8b/lora/sft
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: none
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
"""


def transformers(content: dict[str, Any], ranks: int = 1) -> Reading:
    document = document_of(json.dumps(content, indent=1), "arguments.json")
    return read_transformers(document, Ranks(ranks))


def factory(content: dict[str, Any]) -> Reading:
    return read_llamafactory(Document("job.yaml", {"stage": "sft", **content}), Ranks())


def test_a_file_of_llamafactorys_examples() -> None:
    reading = read_llamafactory(document_of(FACTORY, "sft.yaml"), Ranks())
    settings = reading.settings
    assert settings["finetuning_type"] == "lora"
    assert settings["precision"] == "bf16"
    assert settings["warmup_steps"] == 0.1
    assert settings["gradient_checkpointing"] == "true"  # unless told otherwise
    assert (settings["per_device_train_batch_size"], settings["cutoff_len"]) == (1, 2048)
    notes = {note.key: note for note in reading.notes}
    assert "dataset_info.json" in notes["dataset"].why
    assert reading.places["learning_rate"] == "sft.yaml, line 23: learning_rate"
    # `save_steps: 500` alone saves there, as TrainingArguments' default of save_strategy is steps.
    assert (settings["save_strategy"], settings["save_steps"]) == ("steps", 500)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, {"per_device_train_batch_size": 8, "precision": "fp32", "offload_param": "none"}),
        ({"optim": "adamw_bnb_8bit"}, {"optim": "adamw_8bit"}),
        ({"optim": "lion_32bit"}, {"optim": "lion"}),
        (
            {"evaluation_strategy": "steps"},
            {"eval_strategy": "steps", "eval_steps": 500, "per_device_eval_batch_size": 8},
        ),
        ({"eval_strategy": "steps", "logging_steps": 20}, {"eval_steps": 20}),
        ({"eval_strategy": "steps", "logging_steps": 20, "eval_steps": 7}, {"eval_steps": 7}),
        ({"save_strategy": "no"}, {"save_strategy": "no", "logging_steps": 500}),
        (
            {"fsdp": True, "fsdp_config": {"activation_checkpointing": True}},
            {"gradient_checkpointing": "true"},
        ),
        ({"bf16": True, "fp16": False}, {"precision": "bf16"}),
        ({"activation_checkpointing": True}, {"gradient_checkpointing": True}),
        ({"fsdp": "full_shard auto_wrap offload"}, {"zero_stage": 3, "offload_param": "cpu"}),
        ({"fsdp": ["shard_grad_op"]}, {"zero_stage": 2, "offload_param": "none"}),
        (
            {"fsdp": True, "fsdp_config": {"fsdp_reshard_after_forward": False}},
            {"zero_stage": 2},
        ),
        (
            {"deepspeed": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"},
                           "train_batch_size": 8, "gradient_accumulation_steps": 4}},
            {"zero_stage": 2, "train_batch_size": 8, "gradient_accumulation_steps": 4},
        ),
    ],
)  # fmt: skip
def test_what_training_arguments_become(content: Any, expected: dict[str, Any]) -> None:
    settings = transformers(content).settings
    assert {key: settings.get(key) for key in expected} == expected


# What a field of TrainingArguments says in the words of a job, where those are others.
AS_A_JOB_SAYS_IT: dict[tuple[str, Any], Any] = {
    ("lr_scheduler_kwargs", None): {},
    ("gradient_checkpointing", None): "false",
    ("optim", "adamw_torch"): "adamw",
    ("optim", "adamw_torch_fused"): "adamw",
    ("resume_from_checkpoint", None): False,
    ("eval_steps", None): 500,  # those of logging_steps
}


def test_silence_means_what_training_arguments_take_for_it() -> None:
    """Field by field of the version that is installed."""
    settings = {**Job(model_name_or_path="m").model_dump(), **transformers({}).settings}
    fields = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    shared = fields.keys() & (set(SAME) - {"activation_checkpointing", "bf16", "fp16"})
    assert len(shared) > 20
    theirs = {name: AS_A_JOB_SAYS_IT.get((name, fields[name]), fields[name]) for name in shared}
    own = {name: RENAMED.get(name, name) for name in shared} | {"resume_from_checkpoint": "resume"}
    assert {name: settings[own[name]] for name in shared} == theirs


def test_a_config_of_deepspeed_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    document = Document(str(tmp_path / "a.json"), {"deepspeed": "ds.json", "bf16": True})
    reading = read_transformers(document, Ranks())
    assert reading.settings["zero_stage"] == 3
    assert reading.settings["precision"] == "bf16"  # said, while the other file is silent
    assert reading.tool.engine == "deepspeed"


def test_replicas_where_nothing_is_shared_out() -> None:
    reading = transformers({}, ranks=4)
    assert reading.settings["zero_stage"] == 0
    assert reading.tool.engine == "ddp"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"lerning_rate": 1}, "lerning_rate is not a key of transformers. Did you mean learning_"),
        ({"bf16": True, "fp16": True}, "contradict: they make precision"),
        ({"neftune_noise_alpha": 5}, "neftune_noise_alpha: 5 cannot be had here; leave it out"),
        ({"deepspeed": "nowhere.json"}, "deepspeed: there is no file nowhere.json"),
        ({"deepspeed": 3}, "3 is no file and no block of keys"),
        ({"fsdp": "half_shard"}, "'half_shard' is none of: full_shard"),
        ({"learning_rate": 1e-4, "deepspeed": {"optimizer": {"type": "Adam", "params": {
            "lr": 1e-3}}}}, "contradict: they make learning_rate 0.0001 and 0.001; keep one"),
    ],
)  # fmt: skip
def test_complaints_about_training_arguments(content: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        transformers(content)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"stage": "dpo"}, "stage: 'dpo' cannot be had here; only supervised fine-tuning (sft) is"),
        ({"stage": "pt"}, "stage: 'pt' cannot be had here"),
        ({"use_galore": True}, "use_galore: true cannot be had here"),
        ({"finetuning_type": "freeze"}, "finetuning_type: freeze is not available yet"),
        ({"lora_rnk": 8}, "lora_rnk is not a key of LLaMA-Factory. Did you mean lora_rank"),
        ({"quantization_type": "fp4"}, "'fp4' cannot be had here; 4 bits are NF4"),
        (
            {"max_samples": 1000},
            "max_samples: 1000 cannot be had here; all rows of the file are taken: give dataset a "
            "file of that many rows",
        ),
    ],
)
def test_complaints_about_llamafactory(content: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        factory(content)
    assert message in str(caught.value)


def test_methods_that_are_off_are_no_reason_to_refuse() -> None:
    off = {"use_galore": False, "galore_rank": 16, "packing": False, "pref_beta": 0.1}
    assert "finetuning_type" in factory(off).implied


# What transformers' Trainer makes beside ours: other optimizers, or other states of theirs.
NOT_HERE = (
    "ademamix", "apollo", "galore", "rmsprop", "schedule_free", "adagrad", "lomo", "adalomo",
    "grokadamw", "stable_adamw", "adamw_anyprecision", "adamw_torch_4bit", "adamw_torch_8bit",
    "paged_ademamix",
)  # fmt: skip


@pytest.mark.parametrize("name", [str(name.value) for name in OptimizerNames])
def test_optimizers_of_transformers_are_ours_or_refused_by_name(name: str) -> None:
    known = set(get_args(Optim))
    assert (translate({"optim": name}, "--")["optim"] in known) != name.startswith(NOT_HERE)


def test_an_optimizer_that_transformers_does_not_have_becomes_the_nearest() -> None:
    written = write_transformers({"optim": "adamw_compact"})
    assert '"optim": "adamw_8bit"' in written.text
    assert any("transformers has no adamw_compact" in note.why for note in written.notes)
