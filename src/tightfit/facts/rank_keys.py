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
