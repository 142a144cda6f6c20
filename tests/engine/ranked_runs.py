"""A program: every placement on two ranks, beside resident training on two and on one.

    python ranked_runs.py FOLDER MICRO_BATCHES CASE...

Starts two processes on gloo that train each case in turn, so many micro-batches on each rank, and
meanwhile does the same alone. Copies between tiers arrive as late as they may and are NaN until
then (`postponed.py`). FOLDER gets `CASE.json`: whether both ranks have found the losses, norms and
parameters of the case to be, bit for bit, those of resident training on the same ranks; and how far
the case is from one rank that takes the same micro-batches one after the other.

A case is `placement-optimizer-accumulation-adapter-stage`.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tests.engine.postponed import PostponedTransfer
from tests.engine.sharded_runs import whole_batch, whole_parameters
from transformers import LlamaConfig, LlamaForCausalLM

from tightfit.engine import activations, apply
from tightfit.engine.adapter import import_library
from tightfit.policies import (
    AdapterPolicy,
    BatchPolicy,
    OptimizerName,
    OptimizerPolicy,
    PlacementPolicy,
    Policies,
    ShardingPolicy,
    Tier,
)

RANKS = 2
MICRO_BATCH = 2
TRAINED_TOKENS = 40  # any number does, as long as all ranks divide by the same
SIZES: dict[str, Any] = {
    "vocab_size": 61,  # not a multiple of the ranks: shards are padded
    "hidden_size": 64,
    "intermediate_size": 128,  # half of a matrix is 4096 values: shards have 8-bit states
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
DEVICE, HOST, NVME = Tier.DEVICE, Tier.HOST, Tier.NVME
RESIDENT = "resident"
PLACEMENTS = {
    RESIDENT: PlacementPolicy(),
    "states": PlacementPolicy(HOST, HOST),
    "all on host": PlacementPolicy(HOST, HOST, HOST, HOST, lazy_step=True),
    "all on nvme": PlacementPolicy(NVME, NVME, NVME, lazy_step=True),
    "only parameters on nvme": PlacementPolicy(DEVICE, HOST, NVME, lazy_step=True),
}
OPTIMIZERS = (
    OptimizerName.ADAMW,
    OptimizerName.LION,
    OptimizerName.SGD,
    OptimizerName.ADAMW_8BIT,
)
ADAPTERS = {"full": None, "lora": AdapterPolicy(rank=2)}
ACCUMULATIONS = (1, 4)
STAGES = (0, 1, 2, 3)
LEARNING_RATE = 3e-3


@dataclass(frozen=True)
class Case:
    """One of the runs."""

    placement: str
    optimizer: OptimizerName
    accumulation: int
    adapter: str
    stage: int

    @classmethod
    def of(cls, name: str) -> Case:
        placement, optimizer, accumulation, adapter, stage = name.split("-")
        return cls(placement, OptimizerName(optimizer), int(accumulation), adapter, int(stage))

    def __str__(self) -> str:
        return f"{self.placement}-{self.optimizer}-{self.accumulation}-{self.adapter}-{self.stage}"

    @property
    def resident(self) -> Case:
        """The same with everything on the device."""
        return replace(self, placement=RESIDENT)

    @property
    def adds_up_elsewhere(self) -> bool:
        """Whether gradients are added up in another order than in resident training: replicas whose
        gradients leave the device add those of each micro-batch up over ranks first."""
        leave = PLACEMENTS[self.placement].gradients is not DEVICE
        return self.stage == 0 and self.accumulation > 1 and leave

    @property
    def alone(self) -> str:
        """A name for the same on one rank."""
        return f"alone-{self.optimizer}-{self.accumulation}-{self.adapter}"

    def policies(self, ranks: int) -> Policies:
        """Of so many ranks; one alone has nothing placed and takes all micro-batches."""
        placement = PLACEMENTS[self.placement if ranks > 1 else RESIDENT]
        micro_batches = self.accumulation * RANKS // ranks
        return Policies(
            batch=BatchPolicy(MICRO_BATCH, micro_batches),
            placement=placement,
            optimizer=OptimizerPolicy(
                self.optimizer, LEARNING_RATE, weight_decay=0.1, max_grad_norm=0.7
            ),
            adapter=ADAPTERS[self.adapter],
            sharding=ShardingPolicy(ranks, self.stage) if ranks > 1 else ShardingPolicy(),
        )


@dataclass(frozen=True)
class Trained:
    """What a run has to show: `[losses..., norm]` of each step, and whole parameters at the end."""

    steps: list[list[float]]
    parameters: dict[str, torch.Tensor]

    def equals(self, other: Trained) -> bool:
        """Bit for bit."""
        mine, its = self.parameters, other.parameters
        same = mine.keys() == its.keys() and all(torch.equal(mine[n], its[n]) for n in mine)
        return same and self.steps == other.steps

    @property
    def norms(self) -> list[float]:
        """Of each step."""
        return [step[-1] for step in self.steps]


def main(folder: Path, micro_batches: int, cases: list[Case]) -> None:
    """Run everything and write it to `folder`."""
    torch.set_num_threads(1)
    import_library()
    apply.Transfer = PostponedTransfer  # type: ignore[misc]
    activations.SMALLEST_LEAVING_BYTES = 1  # else nothing of a tiny model leaves
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=one_rank, args=(rank, folder, micro_batches, cases))
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    alone = {case.alone: case for case in cases}
    for name, case in alone.items():
        keep(folder / name, run(case, 1, micro_batches, folder))
    while running := [process for process in processes if process.exitcode is None]:
        wait([process.sentinel for process in running])
        if any(process.exitcode for process in processes):
            for process in processes:
                process.terminate()
            sys.exit("a rank failed; its message stands above")
    for case in cases:
        compare(case, folder)


def one_rank(rank: int, folder: Path, micro_batches: int, cases: list[Case]) -> None:
    """All cases on one of the ranks, those of one resident run after another."""
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(minutes=3)
    )
    together: dict[Case, list[Case]] = {}
    for case in cases:
        together.setdefault(case.resident, []).append(case)
    for resident, placed in together.items():
        expected = run(resident, RANKS, micro_batches, folder)
        for case in placed:
            found = expected if case == resident else run(case, RANKS, micro_batches, folder)
            equal = found.equals(expected)
            (folder / f"{case} of {rank}.json").write_text(json.dumps(equal))
            if rank == 0:
                keep(folder / str(case), found)
    dist.destroy_process_group()


def run(case: Case, ranks: int, micro_batches: int, folder: Path) -> Trained:
    """Train; on several ranks this one's part of each global batch."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    policies = case.policies(ranks)
    engine = apply.fit(model, policies, offload_folder=folder / "disk")
    rank = dist.get_rank() if ranks > 1 else 0
    seen = []
    for step in range(micro_batches // case.accumulation):
        losses = []
        ids, labels = whole_batch(step, MICRO_BATCH * RANKS * case.accumulation)
        for piece in range(policies.batch.accumulation_steps):
            first = (piece * ranks + rank) * MICRO_BATCH
            mine = slice(first, first + MICRO_BATCH)
            loss = engine.loss(ids[mine], labels[mine], TRAINED_TOKENS * case.accumulation)
            engine.backward(loss)
            losses.append(float(loss.detach()))
        seen.append([*losses, engine.step()])
    return Trained(seen, whole_parameters(engine))


def keep(path: Path, trained: Trained) -> None:
    path.with_name(f"{path.name}.norms.json").write_text(json.dumps(trained.norms))
    save_file(trained.parameters, path.with_name(f"{path.name}.safetensors"))


def kept(path: Path) -> Trained:
    norms = json.loads(path.with_name(f"{path.name}.norms.json").read_text())
    parameters = load_file(path.with_name(f"{path.name}.safetensors"))
    return Trained([[norm] for norm in norms], parameters)


def compare(case: Case, folder: Path) -> None:
    """Write what both ranks say, and how far they are from one."""
    ranks, alone = kept(folder / str(case)), kept(folder / case.alone)
    differences = torch.cat(
        [
            (ranks.parameters[name].double() - value.double()).abs().view(-1)
            for name, value in alone.parameters.items()
        ]
    )
    found = {
        "equal": all(
            json.loads((folder / f"{case} of {rank}.json").read_text()) for rank in range(RANKS)
        ),
        "norms": max(
            abs(one - other) / other for one, other in zip(ranks.norms, alone.norms, strict=True)
        ),
        "largest": float(differences.max()),
        "mean": float(differences.mean()),
    }
    (folder / f"{case}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), [Case.of(name) for name in sys.argv[3:]])
