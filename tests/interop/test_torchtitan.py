"""torchtitan's TOML, as its versions with one have it."""

from __future__ import annotations

from typing import Any

import pytest

from tightfit.errors import InputError
from tightfit.interop.documents import document_of
from tightfit.interop.reading import Reading
from tightfit.interop.torchtitan import read_torchtitan
from tightfit.interop.torchtitan_writer import write_torchtitan
from tightfit.interop.translation import Ranks

# As its train_configs/llama3_8b.toml.
LLAMA = """\
[job]
dump_folder = "./outputs"
description = "Llama 3 8B training"

[profiling]
enable_profiling = true

[metrics]
log_freq = 10
enable_tensorboard = true

[model]
name = "llama3"
flavor = "8B"

[optimizer]
name = "AdamW"
lr = 3e-4
eps = 1e-8

[lr_scheduler]
warmup_steps = 200  # lr scheduler warm up

[training]
local_batch_size = 1
seq_len = 8192
max_norm = 1.0  # grad norm clipping
steps = 1000
compile = false
dataset = "c4"

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
pipeline_parallel_degree = 1
context_parallel_degree = 1

[checkpoint]
enable_checkpoint = false
folder = "checkpoint"
interval = 500

[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"

[float8]
enable_fsdp_float8_all_gather = false
"""


def read(text: str) -> Reading:
    return read_torchtitan(document_of(text, "a.toml"), Ranks(8))


def test_a_usual_file() -> None:
    with pytest.raises(InputError, match="float8"):
        read(LLAMA)
    settings = read(LLAMA.partition("[float8]")[0]).settings
    expected = {
        "learning_rate": 3e-4, "cutoff_len": 8192, "max_steps": 1000, "precision": "bf16",
        "per_device_train_batch_size": 1, "zero_stage": 3, "gradient_checkpointing": "selective",
        "adam_beta2": 0.95, "weight_decay": 0.1, "save_strategy": "no", "offload_param": "none",
    }  # fmt: skip
    assert {key: settings.get(key) for key in expected} == expected


def test_what_is_left_out_has_torchtitans_defaults() -> None:
    expected = {
        "per_device_train_batch_size": 8, "max_steps": 10000, "learning_rate": 8e-4,
        "weight_decay": 0.1, "warmup_steps": 200, "logging_steps": 10, "precision": "bf16",
        "gradient_checkpointing": "selective", "zero_stage": 3,
    }  # fmt: skip
    settings = read("[training]\nseq_len = 64\n").settings
    assert {key: settings.get(key) for key in expected} == expected
    off = read('[activation_checkpoint]\nmode = "none"\n').settings
    assert off["gradient_checkpointing"] == "false"


def test_replicas_and_stages() -> None:
    reading = read("[parallelism]\ndata_parallel_replicate_degree = 2\n"
                   'fsdp_reshard_after_forward = "never"\n')  # fmt: skip
    assert reading.keys["data_parallel_replicas"] == 2
    assert reading.keys["zero_stage"] == 2
    assert reading.tool.keep_layers
    assert read("[parallelism]\ndata_parallel_shard_degree = 1\n").keys["zero_stage"] == 0


def test_a_pipeline_cuts_the_local_batch_into_micro_batches() -> None:
    text = "[parallelism]\npipeline_parallel_degree = 2\n{}[training]\nlocal_batch_size = 6\n{}"
    two = "pipeline_parallel_microbatch_size = 2\n"
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "train_batch_size")
    for extra, batch, expected in (
        ("", "", (1, 6, None)),
        (two, "", (2, 3, None)),
        (two, "global_batch_size = 48\n", (2, None, 48)),
        (two, "global_batch_size = -1\n", (2, 3, None)),
    ):
        settings = read(text.format(extra, batch)).settings
        assert tuple(settings.get(name) for name in names) == expected
    left_out = read("[parallelism]\npipeline_parallel_degree = 2\n").settings
    assert tuple(left_out.get(name) for name in names) == (1, 8, None)
    with pytest.raises(InputError, match=r"take a multiple of .*_size, 4"):
        read(text.format(two.replace("2", "4"), ""))


@pytest.mark.parametrize(
    ("sharding", "rest"),
    [
        ({"zero_stage": 0}, {}),
        ({"zero_stage": 2, "tensor_parallel_size": 2}, {}),
        ({"zero_stage": 3, "data_parallel_replicas": 2, "tensor_parallel_size": 2}, {}),
        (
            {"zero_stage": 3, "pipeline_parallel_size": 2, "pipeline_schedule": "interleaved"},
            {"per_device_train_batch_size": 2, "train_batch_size": 32},
        ),
        (
            {"zero_stage": 0, "pipeline_parallel_size": 4, "pipeline_schedule": "gpipe"},
            {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3},
        ),
    ],
)
def test_what_ranks_do_is_written_as_it_is_read(
    sharding: dict[str, Any], rest: dict[str, Any]
) -> None:
    keys = {**sharding, **rest}
    written = write_torchtitan({"num_gpus": 8, **keys})
    assert [note.key for note in written.notes] == ["num_gpus"]
    settings = read(written.text).settings
    asked = {key: value for key, value in keys.items() if key != "gradient_accumulation_steps"}
    assert {key: settings.get(key) for key in asked} == asked
    if "gradient_accumulation_steps" in keys:
        assert settings["train_batch_size"] == 2 * 3 * 2


def test_what_torchtitan_cannot_say_is_in_the_file() -> None:
    keys = {"optim": "lion", "precision": "fp16", "zero_stage": 1, "num_train_epochs": 3.0,
            "warmup_steps": 0.1, "lr_scheduler_type": "polynomial", "finetuning_type": "lora",
            "save_strategy": "epoch", "offload_optimizer": "cpu"}  # fmt: skip
    written = write_torchtitan(keys)
    listed = {note.key for note in written.notes}
    assert listed == {*keys} - {"offload_optimizer"} | {"offload_param"}
    assert all(f"# {key}: " in written.text for key in listed)
    tenth = write_torchtitan({"warmup_steps": 0.1, "max_steps": 25})
    assert read(tenth.text).settings["warmup_steps"] == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[parallelism]\ncontext_parallel_degree = 2", "a.toml, line 2: parallelism.context_"),
        ("[training]\nseq_length = 3", "is not a key of torchtitan. Did you mean training.seq_len"),
        ('[optimizer]\nname = "Muon"', "must be one of AdamW, Adam"),
    ],
)
def test_complaints(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read(text)
    assert message in str(caught.value)
