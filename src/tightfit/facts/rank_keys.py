"""Which of a job's keys about ranks contradict each other, in the words of the keys.

A key may be `auto`; then what another one says must leave it a value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import gcd, prod
from typing import Any, Literal

Number = int | Literal["auto"]


def divisors(number: int) -> tuple[int, ...]:
    """All of them, the smallest first."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def possible_widths(ranks: int, tensor: Number, stages: Number) -> tuple[int, ...]:
    """How many ranks may see the same sequences: the products of both that divide the ranks.

    Empty where what is given does not.
    """
    given = (1 if tensor == "auto" else tensor) * (1 if stages == "auto" else stages)
    if "auto" not in (tensor, stages):
        return (given,) if ranks % given == 0 else ()
    return tuple(width for width in divisors(ranks) if width % given == 0)


def rank_contradictions(job: Mapping[str, Any]) -> Iterator[str]:
    """One sentence for each, naming what to change.

    Args:
        job: all keys of a job.
    """
    machines, cards = job["nnodes"], job["num_gpus"]
    tensor, stages = job["tensor_parallel_size"], job["pipeline_parallel_size"]
    widths = possible_widths(machines * cards, tensor, stages)
    if not widths:
        times = f" x nnodes {machines}" if machines > 1 else ""
        given = " x ".join(
            f"{key} {job[key]}"
            for key in ("tensor_parallel_size", "pipeline_parallel_size")
            if job[key] != "auto"
        )
        width = prod(value for value in (tensor, stages) if value != "auto")
        fitting = width // gcd(width, machines)
        yield (
            f"num_gpus {cards}{times} is not a multiple of {given}; give --num_gpus {fitting}, or "
            "a multiple of it"
        )
        return
    replicas, data = job["data_parallel_replicas"], machines * cards // widths[0]
    if replicas != "auto" and data % replicas:
        yield f"data_parallel_replicas {replicas} does not divide the {data} data-parallel ranks"
    interleaved = job["pipeline_schedule"] == "interleaved"
    if interleaved and stages == 1:
        yield "pipeline_schedule interleaved needs pipeline_parallel_size 2 or more"
    if job["virtual_pipeline_stages"] and not interleaved:
        yield (
            f"virtual_pipeline_stages {job['virtual_pipeline_stages']} is for pipeline_schedule "
            f"interleaved, and it is {job['pipeline_schedule']}"
        )
    if job["pipeline_layers"]:
        yield from _layers_of_other_stages(job)
    if job["node_rank"] >= machines:
        yield (
            f"node_rank {job['node_rank']}: machines are counted from 0, and nnodes is {machines}; "
            "give the number of this machine, below nnodes"
        )
    if job["adapt"]:
        yield from _adapts_in_vain(job)


def _layers_of_other_stages(job: Mapping[str, Any]) -> Iterator[str]:
    """Numbers of layers that are not one for each run on each stage."""
    given, stages = job["pipeline_layers"], job["pipeline_parallel_size"]
    said, interleaved = ",".join(map(str, given)), job["pipeline_schedule"] == "interleaved"
    if stages in ("auto", 1):
        yield (
            f"pipeline_layers {said} is for a pipeline; set pipeline_parallel_size to the number "
            "of its stages, 2 or more"
        )
        return
    chunks = (job["virtual_pipeline_stages"] or 2) if interleaved else 1
    if len(given) != stages * chunks:
        times = f" x virtual_pipeline_stages {chunks}" if interleaved else ""
        yield (
            f"pipeline_layers {said} has {len(given)} numbers, and pipeline_parallel_size "
            f"{stages}{times} needs {stages * chunks}"
        )


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


def batch_contradiction(
    total: int, micro: Number, steps: Number, ranks: int, widths: Sequence[int]
) -> str | None:
    """DeepSpeed's identity, global = micro x accumulation x data-parallel ranks, where it breaks.

    Every rank is data-parallel unless a key says otherwise; only where there are fewer sequences
    than ranks may the planner have ranks share them.

    Args:
        total, micro, steps: of the batch.
        widths: how many ranks may see the same sequences.
    """
    most = ranks // min(widths)
    fewer = [ranks // width for width in widths if ranks // width <= total]
    found = [
        _broken_identity(total, micro, steps, data)
        for data in ((most,) if total >= most or not fewer else fewer)
    ]
    return None if None in found else found[0]


def _broken_identity(total: int, micro: Number, steps: Number, data: int) -> str | None:
    times = f" x {data} ranks" if data > 1 else ""
    if micro != "auto" and steps != "auto":
        whole = micro * steps * data
        return None if total == whole else (
            f"train_batch_size {total} != per_device_train_batch_size {micro} x "
            f"gradient_accumulation_steps {steps}{times}, which is {whole}"
        )  # fmt: skip
    unit, of = data, f"the {data} data-parallel ranks"
    if micro != "auto":
        unit, of = micro * data, f"per_device_train_batch_size {micro}{times}"
    elif steps != "auto":
        unit, of = steps * data, f"gradient_accumulation_steps {steps}{times}"
    if total % unit == 0:
        return None
    near = [n for n in (total // unit * unit, -(-total // unit) * unit) if n]
    return (
        f"train_batch_size {total} is not a multiple of {of}; the nearest that "
        f"{'are' if near[1:] else 'is'} {' and '.join(map(str, near))}"
    )
