"""accelerate's YAML in its kinds, and the names of FSDP's strategies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tightfit.errors import InputError
from tightfit.interop.accelerate import read_accelerate
from tightfit.interop.documents import document_of
from tightfit.interop.reading import Reading
from tightfit.interop.translation import Ranks

HEAD = {
    "compute_environment": "LOCAL_MACHINE", "debug": False, "downcast_bf16": "no",
    "machine_rank": 0, "main_training_function": "main", "mixed_precision": "bf16",
    "num_machines": 1, "num_processes": 8, "rdzv_backend": "static", "same_network": True,
    "tpu_env": [], "tpu_use_cluster": False, "tpu_use_sudo": False, "use_cpu": False,
}  # fmt: skip


def read(**keys: Any) -> Reading:
    return read_accelerate(document_of(yaml.safe_dump({**HEAD, **keys}), "a.yaml"), Ranks())


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"distributed_type": "MULTI_GPU"}, {"num_gpus": 8, "nnodes": 1, "zero_stage": 0}),
        ({"distributed_type": "NO", "num_processes": 1}, {"num_gpus": 1, "precision": "bf16"}),
        (
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}},
            {"zero_stage": 3, "offload_param": "none"},
        ),
        (
            {"distributed_type": "FSDP", "num_machines": 2, "fsdp_config": {
                "fsdp_sharding_strategy": "HYBRID_SHARD", "fsdp_offload_params": True,
                "fsdp_activation_checkpointing": True}},
            {"zero_stage": 3, "data_parallel_replicas": 2, "num_gpus": 4, "nnodes": 2,
             "offload_param": "cpu", "offload_optimizer": "cpu", "gradient_checkpointing": "true"},
        ),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {
                "zero_stage": 2, "offload_optimizer_device": "cpu", "gradient_clipping": 1.0,
                "gradient_accumulation_steps": 4, "zero3_init_flag": False}},
            {"zero_stage": 2, "offload_optimizer": "cpu", "max_grad_norm": 1.0,
             "gradient_accumulation_steps": 4, "precision": "bf16"},
        ),
        (
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2},
             "parallelism_config": {"parallelism_config_tp_size": 2,
                                    "parallelism_config_dp_replicate_size": 2}},
            {"tensor_parallel_size": 2, "data_parallel_replicas": 2},
        ),
    ],
)  # fmt: skip
def test_what_keys_become(keys: dict[str, Any], expected: dict[str, Any]) -> None:
    settings = read(**keys).settings
    assert {key: settings.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("name", "stage", "copies", "engine"),
    [
        ("FULL_SHARD", 3, None, "fsdp1"),
        ("1", 3, None, "fsdp1"),
        ("SHARD_GRAD_OP", 2, None, "fsdp1"),
        ("NO_SHARD", 0, None, "ddp"),
        ("HYBRID_SHARD", 3, 2, "fsdp1"),
        ("_HYBRID_SHARD_ZERO2", 2, 2, "fsdp1"),
        ("hybrid_shard_zero2", 2, 2, "fsdp1"),
        ("5", 2, 2, "fsdp1"),
    ],
)
def test_strategies_of_fsdp(name: str, stage: int, copies: int | None, engine: str) -> None:
    block = {"fsdp_sharding_strategy": name}
    reading = read(distributed_type="FSDP", num_machines=2, fsdp_config=block)
    assert reading.keys["zero_stage"] == stage
    assert reading.keys.get("data_parallel_replicas") == copies
    assert reading.tool.engine == engine


def test_the_file_of_deepspeed_is_read_with_it(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}'
    )
    keys = {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"deepspeed_config_file": "ds.json"},
    }
    text = yaml.safe_dump({**HEAD, **keys})
    reading = read_accelerate(document_of(text, str(tmp_path / "a.yaml")), Ranks())
    assert reading.keys["zero_stage"] == 3
    assert reading.tool.name == "DeepSpeed"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"distributed_type": "MEGATRON_LM"}, "cannot be had here; say tensor_parallel_size and"),
        ({"distributed_type": "GPU"}, "'GPU' is not accepted; it must be one of NO, MULTI_GPU"),
        ({"num_machines": 3}, "num_processes: 8 is no multiple of num_machines 3"),
        ({"mixed_precision": "fp8"}, "mixed_precision: 'fp8' cannot be had here; take bf16"),
        ({"num_proceses": 1}, "num_proceses is not a key of accelerate. Did you mean num_proc"),
        (
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_shard_strategy": 1}},
            "fsdp_config.fsdp_shard_strategy is not a key of FSDP. Did you mean fsdp_sharding_",
        ),
        (
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "SOME"}},
            "SOME is no strategy of FSDP; there are FULL_SHARD, SHARD_GRAD_OP, NO_SHARD",
        ),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {
                "deepspeed_config_file": "x.json", "zero_stage": 2}},
            "deepspeed_config.zero_stage stands beside",
        ),
        (
            {"distributed_type": "DEEPSPEED", "mixed_precision": "fp16", "deepspeed_config": 3},
            "deepspeed_config: 3 is not a block of keys",
        ),
    ],
)  # fmt: skip
def test_complaints(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        read(**keys)
    assert message in str(caught.value)
