"""Whole training runs on real ranks, for test_ranks.py.

Processes on gloo are forked and run all cases of so many ranks one after the other, in pairs that
go on from one another; a case's results are written to its folder by rank 0.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tightfit.engine.adapter import import_library
from tightfit.facts.job import Job
from tightfit.planner.plan import Plan
from tightfit.policies import BatchPolicy, OptimizerName, ShardingPolicy
from tightfit.training import run as runs

RESULTS = "results.json"
# Every layer costs each step some milliseconds, whatever its size: two are enough to share out.
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
# Half of one of its matrices is 4096 values, a block of 8-bit moments.
LLAMA: dict[str, Any] = SIZES | {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "tie_word_embeddings": True,
}  # fmt: skip
_IDS = ("bos", "eos", "pad")


def save_model(fields: dict[str, Any], tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """A random model of these fields, and the tokenizer."""
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in _IDS}
    config = AutoConfig.for_model(**fields, **ids, vocab_size=len(tokenizer))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@dataclass(frozen=True)
class Leg:
    """A run, or a part of one.

    Attributes:
        ranks: 1, or several real ones.
        sharding: how they share the run.
        until: its last step.
    """

    ranks: int
    sharding: ShardingPolicy
    until: int


def run_leg(leg: Leg, plan: Plan, job: Mapping[str, Any], folder: Path, *, resume: bool) -> None:
    """Run it where this process stands, and append what it gave to the folder's results."""
    made = Job(**{**job, "max_steps": leg.until, "output_dir": str(folder)})
    prepared = runs.prepare(made.model_copy(update={"resume": resume}))
    micro = 1 if leg.ranks > 1 else 2
    sharding = leg.sharding
    batch = BatchPolicy(micro, made.global_batch_size // micro // sharding.data_parallel)
    policies = replace(
        plan.policies,
        sharding=sharding,
        batch=batch,
        optimizer=replace(plan.policies.optimizer, name=OptimizerName(made.optim)),
    )
    result = runs.train(prepared, replace(plan, policies=policies), [])
    if leg.ranks == 1 or dist.get_rank() == 0:
        path = folder / RESULTS
        before = json.loads(path.read_text()) if resume else {"steps": [], "evaluations": []}
        before["steps"] += [record.to_json() for record in result.records]
        before["evaluations"] += [record.loss for record in result.evaluations]
        before["answers"] = result.answers
        path.write_text(json.dumps(before))


def on_ranks(
    ranks: int,
    work: Sequence[tuple[Any, ...]],
    folder: Path,
    call: Callable[..., None] | None = None,
) -> None:
    """Call `run_leg`, or another function, with each of `work` on so many ranks."""
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_rank, args=(number, ranks, work, folder, call))
        for number in range(ranks)
    ]
    for process in processes:
        process.start()
    left = list(processes)
    while left:
        wait([process.sentinel for process in left])
        if any(process.exitcode for process in left):
            for process in left:
                process.terminate()
            raise RuntimeError("a rank failed; its message stands above")
        left = [process for process in left if process.exitcode is None]


def _rank(
    rank: int,
    ranks: int,
    work: Sequence[tuple[Any, ...]],
    folder: Path,
    call: Callable[..., None] | None,
) -> None:
    gc.freeze()  # what was forked is not looked through whenever a leg gives its memory back
    torch.set_num_threads(1)
    import_library()
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(minutes=3)
    )
    for arguments in work:
        if call is not None:
            call(*arguments)
            continue
        leg, plan, job, its_folder, resume = arguments
        run_leg(leg, plan, job, its_folder, resume=resume)
    dist.destroy_process_group()
