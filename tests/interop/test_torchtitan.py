"""torchtitan's TOML, as its versions with one have it."""

from __future__ import annotations

import pytest

from tightfit.errors import InputError
from tightfit.interop.documents import document_of
from tightfit.interop.reading import Reading
from tightfit.interop.torchtitan import read_torchtitan
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
