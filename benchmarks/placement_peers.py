"""The peers of placement.py: FSDP2 with CPUOffloadPolicy, DeepSpeed ZeRO-3 on host and on NVMe.

DeepSpeed is no dependency of the project. An environment with it, outside the repository:

    python -m venv PEERS
    PEERS/bin/pip install torch==2.13.0
    PEERS/bin/pip install -c requirements.lock transformers peft safetensors pydantic PyYAML rich \
        jinja2 psutil nvidia-ml-py setuptools ninja
    DS_BUILD_OPS=0 PEERS/bin/pip install --no-build-isolation deepspeed==0.19.8
    PEERS/bin/pip install --no-deps --no-build-isolation -e .
    apt-get install libaio-dev
    PATH=PEERS/bin:$PATH PEERS/bin/python benchmarks/placement_peers.py

The last line compiles DeepSpeed's CPU Adam and its asynchronous I/O once (three minutes; g++ and
ninja have to be there, and libaio for the second), so that no measurement waits for a compiler.

Peers get the settings with which they do what tightfit does: parameters do not stay between forward
and backward, and the optimizer's swapper has subgroups and buffers enough to be a pipeline.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from transformers import PreTrainedModel

from placement_contenders import (
    BETAS,
    DEEPSPEED_CPU,
    DEEPSPEED_NVME,
    EPSILON,
    FSDP,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    Contender,
    TorchTrainer,
    Trainer,
    mark_all,
    mark_gradients,
)
from placement_setting import Setting
from tightfit.engine.layers import decoder_layers
from tightfit.ledger import Ledger, local_part
from tightfit.policies import Tier

SUBGROUP_VALUES = 1 << 22  # 48 MiB of parameter and moments: what the disk is fastest with
SWAP_BUFFERS = 12  # of a subgroup's tensor each: one is read, one updated, one written
AIO = {  # the fastest of twelve tried, with a busy and with an idle machine
    "block_size": 2 << 20,
    "queue_depth": 8,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
}


class FsdpTrainer(TorchTrainer):
    """FSDP2: shards, gradients and states on the host, layers gathered on the device."""

    def __init__(self, model: PreTrainedModel, setting: Setting) -> None:
        offload = CPUOffloadPolicy(pin_memory=False)
        shard(model, setting.ranks, offload_policy=offload, reshard_after_forward=True)
        super().__init__(model)

    def counting(self, counter: Ledger) -> None:
        """What lives between steps is on the host."""
        mark_all(counter, Tier.HOST)
        mark_gradients(counter, self.parameters, Tier.HOST)

    def moved_bytes(self, steps: Callable[[], object]) -> int:
        """By its code: on the CPU a copy to the device is the same tensor."""
        steps()
        return by_design(sum(local_part(p).numel() for p in self.parameters))


def shard(model: PreTrainedModel, ranks: int, **how: Any) -> None:
    """`fully_shard` on each layer and on the model, as FSDP2's tutorial has it."""
    mesh = init_device_mesh("cpu", (ranks,))
    for module in (*decoder_layers(model), model):
        fully_shard(module, mesh=mesh, **how)


def by_design(values: int) -> int:
    """Bytes per step: a shard in fp32 comes in forward and in backward, and its gradient leaves."""
    return 3 * 4 * values


def fsdp(model: PreTrainedModel, setting: Setting, folder: Path) -> Trainer:
    """See `FsdpTrainer`."""
    return FsdpTrainer(model, setting)


class DeepSpeedTrainer:
    """DeepSpeed's engine.

    Args:
        optimizer: the one that `config` names when None.
    """

    loss_scale = 1.0

    def __init__(
        self,
        model: PreTrainedModel,
        config: dict[str, Any],
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        import deepspeed

        self._engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), optimizer=optimizer, config=config
        )

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """See `Trainer`."""
        loss: torch.Tensor = self._engine(input_ids=input_ids, labels=labels).loss
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        """See `Trainer`."""
        self._engine.backward(loss)

    def step(self) -> None:
        """See `Trainer`."""
        self._engine.step()

    def drain(self) -> None:
        """Nothing is left for later."""

    def waited_seconds(self) -> float:
        """The update is over when `step` returns."""
        return 0.0

    def counting(self, counter: Ledger) -> None:
        """What lives between steps is on the host."""
        mark_all(counter, Tier.HOST)

    def moved_bytes(self, steps: Callable[[], object]) -> int:
        """By its code: on the CPU a copy to the device is the same tensor."""
        steps()
        return by_design(sum(p.ds_tensor.numel() for p in self._engine.module.parameters()))


def deepspeed_config(setting: Setting) -> dict[str, Any]:
    """A step in fp32, clipped, of one micro-batch."""
    return {
        "train_micro_batch_size_per_gpu": setting.sequences,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": MAX_GRAD_NORM,
        "steps_per_print": 10**9,
    }


def stage_3(setting: Setting) -> dict[str, Any]:
    """ZeRO-3 that gathers a layer ahead and keeps none from forward to backward."""
    layer = layer_values(setting)
    return {
        "stage": 3,
        "stage3_max_live_parameters": 2 * layer,
        "stage3_max_reuse_distance": layer // 2,
        "stage3_prefetch_bucket_size": layer,
        "reduce_bucket_size": layer,
    }


def layer_values(setting: Setting) -> int:
    """Of a decoder layer's matrices."""
    return 4 * setting.hidden_size**2 + 3 * setting.hidden_size * setting.intermediate_size


def offloading(setting: Setting, tiers: dict[str, Any]) -> dict[str, Any]:
    """ZeRO-3, with CPU Adam where `tiers` say."""
    return {
        **deepspeed_config(setting),
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": LEARNING_RATE,
                "betas": BETAS,
                "eps": EPSILON,
                "weight_decay": 0.0,
                "torch_adam": False,
            },
        },
        "aio": AIO,
        "zero_optimization": {
            **stage_3(setting),
            "sub_group_size": SUBGROUP_VALUES,
            **tiers,
        },
    }


def deepspeed_on_host(model: PreTrainedModel, setting: Setting, folder: Path) -> Trainer:
    """Parameters and optimizer in host memory."""
    host = {"device": "cpu", "pin_memory": False}
    tiers = {"offload_param": host, "offload_optimizer": host}
    return DeepSpeedTrainer(model, offloading(setting, tiers))


def deepspeed_on_disk(model: PreTrainedModel, setting: Setting, folder: Path) -> Trainer:
    """Parameters in host memory, the optimizer on disk through the pipelined swapper."""
    return DeepSpeedTrainer(model, offloading(setting, disk_tiers(folder)))


def disk_tiers(folder: Path) -> dict[str, Any]:
    """Where ZeRO-3 puts what, when the optimizer's states go to `folder`."""
    return {
        "offload_param": {"device": "cpu", "pin_memory": False},
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": str(folder),
            "buffer_count": SWAP_BUFFERS,
            "pipeline_read": True,
            "pipeline_write": True,
            "pin_memory": True,  # the swapper's buffers; without, reads fail
        },
    }


PEERS = (
    Contender(FSDP, fsdp),
    Contender(DEEPSPEED_CPU, deepspeed_on_host),
    Contender(DEEPSPEED_NVME, deepspeed_on_disk),
)


def main() -> int:
    """Compile what DeepSpeed compiles when it is first used."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.accelerator import get_accelerator

    for name in ("CPUAdamBuilder", "ShareMemCommBuilder", "AsyncIOBuilder"):
        print(get_accelerator().create_op_builder(name).load())
    return 0


if __name__ == "__main__":
    sys.exit(main())
