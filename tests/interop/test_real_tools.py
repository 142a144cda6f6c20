"""What is written is loaded by the tools themselves, with the values that were meant.

accelerate and transformers are there wherever this is tested. DeepSpeed is not: an environment with
it is in the first lines of benchmarks/placement_peers.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.interop.test_tables import names_in
from transformers import HfArgumentParser, TrainingArguments

from tightfit.interop.formats import EXPORTS, write_config

STEP = Path(__file__).parent / "deepspeed_step.py"
ALL_AWAY = {
    "train_batch_size": 8, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4,
    "precision": "fp32", "learning_rate": 1e-3, "max_grad_norm": 1.0, "zero_stage": 3,
    "offload_optimizer": "cpu", "offload_param": "cpu", "gradient_checkpointing": "true",
    "lr_scheduler_type": "linear", "max_steps": 10, "warmup_steps": 2.0, "optim": "adamw",
}  # fmt: skip
STATES_AWAY = {**ALL_AWAY, "zero_stage": 2, "offload_param": "none"}
A_PART_AWAY = {**STATES_AWAY, "zero_stage": 3, "offload_optimizer_fraction": 0.5}
RANKS = {**ALL_AWAY, "num_gpus": 4, "nnodes": 2, "train_batch_size": 64, "master_addr": "first",
         "data_parallel_replicas": 2, "master_port": 29500}  # fmt: skip
RESIDENT = {**ALL_AWAY, "offload_optimizer": "none", "offload_param": "none", "zero_stage": 0}
JOBS = {
    "all away": ALL_AWAY,
    "states away": STATES_AWAY,
    "a part away": A_PART_AWAY,
    "ranks": RANKS,
    "resident": RESIDENT,
}

# transformers 5.24 has another name for it, which versions before do not know.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.gradient_checkpointing. is deprecated:FutureWarning"
)
needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="deepspeed is not installed"
)


@pytest.fixture(params=JOBS)
def job(request: pytest.FixtureRequest) -> dict[str, Any]:
    return JOBS[request.param]


def written(job: dict[str, Any], name: str, folder: Path) -> Path:
    path = folder / EXPORTS[name]
    path.write_text(write_config(job, name).text, encoding="utf-8")
    return path


def test_accelerate_loads_its_file(job: dict[str, Any], tmp_path: Path) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    launch = pytest.importorskip("accelerate.commands.launch")
    path = written(job, "accelerate", tmp_path)
    loaded = config_args.load_config_from_file(str(path))
    assert loaded.num_processes == job.get("num_gpus", 1) * job.get("nnodes", 1)
    # Flags are made of the file's blocks, and those that nobody knows would be passed on.
    parser = launch.launch_command_parser()
    known = {name for action in parser._actions for name in [action.dest]}
    blocks = {**loaded.deepspeed_config, **loaded.fsdp_config, **loaded.parallelism_config}
    assert blocks.keys() <= known
    if job is STATES_AWAY:
        assert loaded.deepspeed_config["offload_optimizer_device"] == "cpu"
    if job is RANKS:
        assert loaded.fsdp_config["fsdp_offload_params"] is True
        assert loaded.parallelism_config["parallelism_config_dp_replicate_size"] == 2


def arguments(content: dict[str, Any], folder: Path) -> TrainingArguments:
    """As transformers makes them, on this machine."""
    content = {**content, "output_dir": str(folder / "out"), "use_cpu": True, "report_to": "none"}
    (found,) = HfArgumentParser([TrainingArguments]).parse_dict(content)  # type: ignore[arg-type]
    assert isinstance(found, TrainingArguments)
    return found


def without_deepspeed(content: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key != "deepspeed"}


def test_transformers_loads_its_file(job: dict[str, Any], tmp_path: Path) -> None:
    content = json.loads(written(job, "transformers", tmp_path).read_text())
    if find_spec("deepspeed") is None:
        content = without_deepspeed(content)
    found = arguments(content, tmp_path)
    assert found.per_device_train_batch_size == 2
    assert found.gradient_accumulation_steps == 4
    assert (found.learning_rate, found.max_steps, found.warmup_steps) == (1e-3, 10, 2)
    assert found.gradient_checkpointing
    if job is ALL_AWAY:
        assert found.fsdp_plugin_args["cpu_offload"]
        assert found.fsdp_plugin_args["reshard_after_forward"]


def test_transformers_loads_a_file_for_fsdp(job: dict[str, Any], tmp_path: Path) -> None:
    path = written(job, "fsdp", tmp_path)
    found = arguments({"fsdp": True, "fsdp_config": str(path)}, tmp_path)
    assert found.fsdp_plugin_args["fsdp_version"] == 2
    assert found.fsdp_plugin_args["activation_checkpointing"]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_file_for_fsdp_1_is_loaded(stage: int, tmp_path: Path) -> None:
    """By transformers, and by the plugin of accelerate that makes torch's own strategy of it."""
    plugins = pytest.importorskip("accelerate.utils.dataclasses")
    path = written({**ALL_AWAY, "zero_stage": stage}, "fsdp1", tmp_path)
    found = arguments({"fsdp": True, "fsdp_config": str(path)}, tmp_path)
    name = {0: "NO_SHARD", 2: "SHARD_GRAD_OP", 3: "FULL_SHARD"}[stage]
    assert found.fsdp_plugin_args["fsdp_version"] == 1
    assert found.fsdp_plugin_args["reshard_after_forward"].upper() == name
    content = json.loads(path.read_text())
    plugin = plugins.FullyShardedDataParallelPlugin(
        fsdp_version=content["version"],
        sharding_strategy=content["sharding_strategy"],
        reshard_after_forward=content["reshard_after_forward"],
        cpu_offload=content["cpu_offload"],
        cpu_ram_efficient_loading=False,  # asks for a card where the model is made
    )
    assert content["sync_module_states"]  # or it warns where only one rank reads the model
    assert plugin.sharding_strategy.name == name
    assert plugin.reshard_after_forward.name == name


def test_llamafactory_knows_every_argument_of_its_file(job: dict[str, Any], tmp_path: Path) -> None:
    """Its own names by the list of its sources, the others by transformers' parser."""
    lora = {"finetuning_type": "lora", "quantization_bit": 4, "lora_rank": 8, "val_size": 0.1}
    text = written({**job, **lora, "dataset": "rows"}, "llamafactory", tmp_path).read_text()
    content = yaml.safe_load(text)
    own = set(names_in("llamafactory_names.txt"))
    others = {key: value for key, value in content.items() if key not in own}
    if find_spec("deepspeed") is None:
        others = without_deepspeed(others)
    found = arguments(others, tmp_path)
    assert found.gradient_accumulation_steps == 4
    assert {"stage", "finetuning_type", "quantization_bit", "cutoff_len"} <= own & content.keys()


@pytest.mark.slow
@needs_deepspeed
def test_deepspeed_loads_its_file(job: dict[str, Any], tmp_path: Path) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    content = json.loads(written({**job, "num_gpus": 1, "nnodes": 1}, "deepspeed", tmp_path)
                         .read_text())  # fmt: skip
    content.pop("train_batch_size")  # of several ranks
    found = DeepSpeedConfig(content)
    assert found.train_micro_batch_size_per_gpu == 2
    assert found.gradient_accumulation_steps == 4
    assert found.gradient_clipping == 1.0
    zero = found.zero_config
    assert zero.stage == job["zero_stage"]
    if job is A_PART_AWAY:
        assert zero.offload_optimizer.ratio == 0.5
    assert found.scheduler_name == "WarmupDecayLR"


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("name", ["all away", "states away", "resident"])
def test_deepspeed_makes_a_step_with_its_file(
    name: str, tmp_path: Path, tiny_model_folder: Path
) -> None:
    path = written(JOBS[name], "deepspeed", tmp_path)
    environment = {
        **os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29731", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    result = subprocess.run(
        [sys.executable, str(STEP), str(path), str(tiny_model_folder)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    before, after = map(float, result.stdout.splitlines()[-1].split())
    assert after < before
