"""What is compared by sharding.py: tightfit's ranks, DeepSpeed's, and scripts written by hand.

For each mode, which is a ZeRO stage, one contender of each kind. Everything is on the device. All
take the same steps: fp32, torch's fused AdamW, clipped by the global norm, one micro-batch a rank.
Knows nothing of clocks and processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from placement_contenders import ADAMW, Contender, TorchTrainer, Trainer, mark_all, plain, tightfit
from placement_peers import DeepSpeedTrainer, deepspeed_config, layer_values, shard, stage_3
from placement_setting import Setting
from tightfit.ledger import Ledger
from tightfit.policies import Tier


class ResidentDeepSpeed(DeepSpeedTrainer):
    """DeepSpeed's engine without offload."""

    def __init__(self, model: PreTrainedModel, setting: Setting, zero: dict[str, Any]) -> None:
        config = {**deepspeed_config(setting), "zero_optimization": zero}
        super().__init__(model, config, torch.optim.AdamW(model.parameters(), **ADAMW))

    def counting(self, counter: Ledger) -> None:
        """Everything is on the device."""
        mark_all(counter, Tier.DEVICE)

    def moved_bytes(self, steps: Callable[[], object]) -> int:
        """Nothing."""
        steps()
        return 0


def deepspeed(model: PreTrainedModel, setting: Setting, folder: Path, *, stage: int) -> Trainer:
    """Stages 1 and 2 with buckets of a layer: the default of 500 million values would be allocated
    whole. Overlap is left as it is by default: DeepSpeed has no streams on a CPU."""
    layer = layer_values(setting)
    buckets = {"stage": stage, "reduce_bucket_size": layer, "allgather_bucket_size": layer}
    return ResidentDeepSpeed(model, setting, stage_3(setting) if stage == 3 else buckets)


def zero_redundancy(model: PreTrainedModel, setting: Setting, folder: Path) -> Trainer:
    """Every rank has all parameters and gradients, and updates some parameters for everybody."""
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(replica.parameters(), torch.optim.AdamW, **ADAMW)
    return TorchTrainer(replica, optimizer)


def fsdp2(
    model: PreTrainedModel, setting: Setting, folder: Path, *, reshard_after_forward: bool
) -> Trainer:
    """Ranks share parameters, gradients and states out."""
    shard(model, setting.ranks, reshard_after_forward=reshard_after_forward)
    return TorchTrainer(model)


@dataclass(frozen=True)
class Mode:
    """What ranks share out.

    Attributes:
        ours: tightfit's, whose step is to be as fast as that of the faster of `peers`, and whose
            memory is to be less than that of each.
    """

    name: str
    ours: Contender
    peers: tuple[Contender, ...]


def _mode(name: str, stage: int, by_hand: Contender) -> Mode:
    return Mode(
        name,
        Contender(f"tightfit, stage {stage}", partial(tightfit, zero_stage=stage)),
        (Contender(f"DeepSpeed, stage {stage}", partial(deepspeed, stage=stage)), by_hand),
    )


MODES = (
    _mode("replicate", 0, Contender("DDP", plain)),
    _mode("ZeRO-1", 1, Contender("DDP, ZeroRedundancyOptimizer", zero_redundancy)),
    _mode(
        "ZeRO-2",
        2,
        Contender("FSDP2, layers stay whole", partial(fsdp2, reshard_after_forward=False)),
    ),
    _mode("ZeRO-3", 3, Contender("FSDP2", partial(fsdp2, reshard_after_forward=True))),
)
