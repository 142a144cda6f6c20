"""DeepSpeed's ds_config.json: what keys become, and what is said where they become nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tightfit.errors import InputError
from tightfit.interop.deepspeed import read_deepspeed
from tightfit.interop.documents import Document, document_of, read_document
from tightfit.interop.reading import Reading
from tightfit.interop.translation import SAME, Ranks

CASE = Path(__file__).parent.parent / "cases" / "ds_zero3_offload.json"


def read(content: dict[str, Any], ranks: int = 1) -> Reading:
    text = json.dumps({"train_micro_batch_size_per_gpu": 1, **content}, indent=1)
    return read_deepspeed(document_of(text, "ds_config.json"), Ranks(ranks))


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, **keys}}


def test_the_usual_config_of_stage_3_with_offload() -> None:
    reading = read_deepspeed(read_document(CASE), Ranks())
    assert reading.keys == {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "optim": "adamw",
        "learning_rate": 2e-5,
        "zero_stage": 3,
        "offload_optimizer": "cpu",
        "offload_param": "cpu",
    }
    undivided = {
        "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_replicas": 1,
    }  # fmt: skip
    assert reading.implied == {"max_grad_norm": 0, "precision": "fp32", **undivided}
    notes = {note.key: note for note in reading.notes}
    threshold = notes["zero_optimization.stage3_param_persistence_threshold"]
    assert threshold.here == ""
    assert "a whole layer is gathered at once, so small tensors ride along" in threshold.why
    assert notes["zero_optimization.overlap_comm"].here == SAME
    written = json.loads(CASE.read_text())
    assert {key.split(".")[0] for key in notes if key} == written.keys()
    assert reading.tool.buffers == {
        "reduce": 5e8, "prefetch": 5e8, "live": 1e9, "overlap": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"bf16": {"enabled": True}}, {"precision": "bf16"}),
        ({"bfloat16": {"enabled": True}}, {"precision": "bf16"}),
        ({"fp16": {"enabled": True, "loss_scale": 0}}, {"precision": "fp16", "loss_scale": 0}),
        (
            {"fp16": {"enabled": True, "loss_scale_window": 100, "min_loss_scale": 2}},
            {"precision": "fp16", "loss_scale_window": 100, "min_loss_scale": 2},
        ),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, {"precision": "fp16"}),
        ({"gradient_clipping": 1}, {"max_grad_norm": 1}),
        ({"zero_optimization": True}, {"zero_stage": 1}),
        ({"steps_per_print": 10}, {"logging_steps": 10}),
        ({"tensor_parallel": {"autotp_size": 2}}, {"tensor_parallel_size": 2}),
        ({"pipeline": {"stages": 2}}, {"pipeline_parallel_size": 2}),
        (
            {"activation_checkpointing": {"cpu_checkpointing": True}},
            {"gradient_checkpointing": "true", "offload_activations": "true"},
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"betas": [0.8, 0.9], "eps": "1e-6"}}},
            {"optim": "adamw", "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-6,
             "learning_rate": 1e-3},
        ),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {
                "warmup_max_lr": 1e-4, "warmup_num_steps": 5, "total_num_steps": 50}}},
            {"lr_scheduler_type": "linear", "learning_rate": 1e-4, "warmup_steps": 5,
             "max_steps": 50},
        ),
        ({"scheduler": {"type": "WarmupCosineLR"}}, {"lr_scheduler_type": "cosine"}),
        (zero(cpu_offload=True), {"offload_optimizer": "cpu", "offload_param": "none"}),
        (
            zero(offload_optimizer={"device": "nvme", "nvme_path": "/scratch"}),
            {"offload_optimizer": "nvme", "offload_folder": "/scratch"},
        ),
        (
            zero(offload_optimizer={"device": "cpu", "ratio": 0.25}),
            {"offload_optimizer": "cpu", "offload_optimizer_fraction": 0.25},
        ),
        (zero(offload_optimizer={"device": "cpu", "ratio": 0}), {"offload_optimizer": "none"}),
        # What is trained is updated where its states are.
        (
            zero(offload_param={"device": "cpu"}),
            {"offload_param": "cpu", "offload_optimizer": "cpu"},
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            {"offload_param": "none", "offload_optimizer": "none"},
        ),
    ],
)  # fmt: skip
def test_what_keys_become(content: dict[str, Any], expected: dict[str, Any]) -> None:
    settings = read(content).settings
    assert {key: settings.get(key) for key in expected} == expected


def test_auto_is_left_open() -> None:
    content = {
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        **zero(reduce_bucket_size="auto"),
    }
    reading = read(content)
    listed = [note.key for note in reading.notes if note.key]
    assert len(listed) == len(set(listed))  # each key once
    settings = reading.settings
    assert "precision" not in settings
    assert "max_grad_norm" not in settings
    assert settings["optim"] == "adamw"
    assert settings["zero_stage"] == 3
    assert settings["learning_rate"] == 1e-3  # WarmupLR's own


def test_mics_keeps_whole_copies() -> None:
    settings = read(zero(mics_shard_size=4), ranks=8).settings
    assert settings["data_parallel_replicas"] == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"train_batch_size": 16, "gradient_accumulation_steps": 8},
            "ds_config.json, line 3: train_batch_size 16 != 1 x 8 x 1 "
            "(train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks); it holds for "
            "2 ranks (num_gpus: 2)",
        ),
        (
            {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
            "contradict: parameters have one type; keep one",
        ),
        ({"zero_optimisation": {}}, "is not a key of DeepSpeed. Did you mean zero_optimization?"),
        # Blocks of keys have names too.
        (
            zero(offlod_param={"device": "cpu"}),
            "zero_optimization.offlod_param is not a key of DeepSpeed. Did you mean "
            "zero_optimization.offload_param",
        ),
        ({"optimzer": {"type": "AdamW"}}, "optimzer is not a key of DeepSpeed. Did you mean optim"),
        ({"optimizer": {"parms": {"lr": 1}}}, "Did you mean optimizer.params?"),
        (
            zero(stage3_max_live_paramters=1),
            "line 5: zero_optimization.stage3_max_live_paramters is not a key of DeepSpeed. Did "
            "you mean zero_optimization.stage3_max_live_parameters",
        ),
        ({"zero_optimization": {"stage": 4}}, "4 is not accepted; it must be one of 0, 1, 2, 3"),
        (zero(offload_param={"device": "gpu"}), "'gpu' is not accepted; it must be one of none,"),
        (zero(overlap_comm="yes"), "'yes' is not accepted; it must be true or false"),
        (zero(reduce_bucket_size=-1), "-1 is not accepted; it must be a whole number of at least"),
        (zero(offload_optimizer={"device": "cpu", "ratio": 2}), "2 is not accepted; it is from 0"),
        ({"train_batch_size": 0}, "0 is not accepted; 1 or more is"),
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type: 'Lamb' cannot be had here; take one of"),
        ({"optimizer": {"params": {"betas": [1]}}}, "[1] is not accepted; it must be two numbers"),
        (
            {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}},
            "goes through the gradient with these settings (L2)",
        ),
        ({"scheduler": {"type": "OneCycle"}}, "scheduler.type: 'OneCycle' cannot be had here"),
        ({"gradient_allreduce_op": "sum"}, "'sum' cannot be had here; gradients are those of"),
        ({"compression_training": {"x": 1}}, "cannot be had here"),
        (zero(mics_shard_size=3), "1 data-parallel ranks are no multiple of 3"),
        ({"optimizer": 3}, "3 is not accepted; it is a block of keys"),
    ],
)
def test_complaints(content: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        read(content)
    assert message in str(caught.value)


def test_what_asks_for_nothing_is_no_reason_to_refuse() -> None:
    content = {
        "sparse_attention": {}, "curriculum_learning": {"enabled": False}, "amp": {},
        "gradient_allreduce_op": "mean", "flops_profiler": {"enabled": True},
    }  # fmt: skip
    notes = {note.key: note for note in read(content).notes}
    assert notes["gradient_allreduce_op"].here == SAME
    assert notes["flops_profiler"].here == ""
    assert notes["flops_profiler"].why


def test_a_document_without_lines_is_read_too() -> None:
    reading = read_deepspeed(Document("block", {"zero_optimization": {"stage": 1}}), Ranks())
    assert reading.keys["zero_stage"] == 1
