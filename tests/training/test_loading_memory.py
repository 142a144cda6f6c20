"""What loading takes of the memory of a host, over all its ranks: the model and little more."""

from __future__ import annotations

import gc
import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from tightfit.engine.apply import fit
from tightfit.policies import OptimizerName, OptimizerPolicy, Policies, ShardingPolicy
from tightfit.training.model import open_model
from tightfit.units import MIB

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6,
    "num_attention_heads": 12, "num_key_value_heads": 4,
}  # fmt: skip
SMALL = {"hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "head_dim": 64}
MODELS = {
    "dense": {"model_type": "llama", **SIZES},
    "tied": {"model_type": "llama", **SIZES, "tie_word_embeddings": True},
    "experts": {"model_type": "qwen3_moe", **SIZES, **EXPERTS},
}
# The model is shared out and each rank has one tensor in its hands: a matrix, or all experts of a
# layer, as files have them one by one. The rest is what Python and gloo take to work on it.
ALLOWED, EACH_RANK = 1.1, 64 * MIB


def anonymous_bytes() -> int:
    """Of this process: what it has allocated, not what is mapped from files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


@contextmanager
def watched(peaks: list[int]) -> Iterator[None]:
    """The most that was allocated inside, above what there was before."""
    before, over = anonymous_bytes(), threading.Event()
    highest = [before]

    def watch() -> None:
        while not over.wait(0.001):
            highest[0] = max(highest[0], anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        peaks.append(max(highest[0], anonymous_bytes()) - before)


def one_rank(rank: int, ranks: int, folder: Path, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / f"store{ranks}"), ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(minutes=3),
    )
    policies = Policies(
        sharding=ShardingPolicy(ranks, 3 if ranks > 1 else 0),
        optimizer=OptimizerPolicy(OptimizerName.SGD),
    )
    peaks: list[int] = []
    for name in ("small", "model"):  # the first brings what Python has to import for any
        with watched(peaks):
            empty, values = open_model(folder / name, torch.float32)
            engine = fit(empty, policies, values=values)
        assert engine.ranks.data_ranks == ranks
        del empty, engine
        gc.collect()
    results.put(peaks[-1])
    dist.destroy_process_group()


@pytest.mark.parametrize("name", MODELS)
def test_loading_takes_the_model_once_whatever_the_number_of_ranks(
    name: str, tmp_path: Path
) -> None:
    for kind, changes in (("small", SMALL), ("model", {})):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**{**MODELS[name], **changes})
        )
        model_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        model.save_pretrained(tmp_path / kind)
    del model
    context = multiprocessing.get_context("spawn")  # nothing of this process's memory
    for ranks in (1, 2, 4):
        results = context.SimpleQueue()
        processes = [
            context.Process(target=one_rank, args=(rank, ranks, tmp_path, results))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        taken = sum(results.get() for _ in processes)
        for process in processes:
            process.join()
        assert taken <= ALLOWED * model_bytes + ranks * EACH_RANK, (ranks, taken, model_bytes)
