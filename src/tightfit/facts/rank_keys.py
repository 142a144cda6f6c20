"""Which of a job's keys about ranks contradict each other, in the words of the keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def rank_contradictions(job: Mapping[str, Any]) -> Iterator[str]:
    """One sentence for each, naming what to change.

    Args:
        job: all keys of a job.
    """
    machines, cards = job["nnodes"], job["num_gpus"]
    tensor, stages = job["tensor_parallel_size"], job["pipeline_parallel_size"]
    if machines * cards % (tensor * stages):
        times = f" x nnodes {machines}" if machines > 1 else ""
        yield (
            f"num_gpus {cards}{times} is not a multiple of tensor_parallel_size {tensor} x "
            f"pipeline_parallel_size {stages}"
        )
    elif (data := machines * cards // (tensor * stages)) % job["data_parallel_replicas"]:
        yield (
            f"data_parallel_replicas {job['data_parallel_replicas']} does not divide the {data} "
            "data-parallel ranks"
        )
    if job["node_rank"] >= machines:
        yield (
            f"node_rank {job['node_rank']}: machines are counted from 0, and nnodes is {machines}; "
            "give the number of this machine, below nnodes"
        )
    if job["adapt"]:
        yield from _adapts_in_vain(job)


def _adapts_in_vain(job: Mapping[str, Any]) -> Iterator[str]:
    """What leaves `adapt` nothing to go on from, or nothing to change."""
    if job["save_only_model"]:
        yield (
            "adapt goes on from a checkpoint with the optimizer in it, which save_only_model "
            "leaves out; leave one of the two out"
        )
    if job["save_strategy"] == "no":
        yield (
            "adapt changes the plan when a checkpoint is saved, and save_strategy: no saves none "
            "before the end; set save_strategy: steps or epoch"
        )
    if job["plan"] is not None:
        yield "adapt changes the plan, and plan names the one to use; leave one of the two out"
