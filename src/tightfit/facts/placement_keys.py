"""Which of a job's keys about placement contradict each other, in the words of the keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

SPLIT_MASTERS = ("split", "split_8")  # values of optim_master that need bf16 parameters


def contradictions(job: Mapping[str, Any]) -> Iterator[str]:
    """One sentence for each, naming what to change.

    Args:
        job: all keys of a job.
    """
    yield from _of_fractions(job)
    if job["lazy_step"] == "true" and job["offload_optimizer"] == "none":
        yield (
            "lazy_step: true is for an optimizer off the device, and offload_optimizer is none; "
            "leave the one or the other to auto"
        )
    nothing_travels = job["offload_param"] == "none" and job["offload_activations"] == "false"
    if job["offload_prefetch"] != "auto" and nothing_travels:
        yield (
            f"offload_prefetch: {job['offload_prefetch']} fetches parameters and activations "
            "ahead, and neither may leave the device; leave it out"
        )
    if job["optim_master"] in SPLIT_MASTERS:
        yield from _of_a_split_master(job)


def _of_fractions(job: Mapping[str, Any]) -> Iterator[str]:
    for key, place in (
        ("offload_optimizer_fraction", job["offload_optimizer"]),
        ("offload_param_fraction", job["offload_param"]),
    ):
        if job[key] != "auto" and place == "none":
            yield (
                f"{key}: {job[key]} says how much leaves the device, and "
                f"{key.removesuffix('_fraction')} is none; leave it out"
            )
    if job["offload_param"] not in ("cpu", "nvme") or job["finetuning_type"] != "full":
        return
    fraction = job["offload_optimizer_fraction"]
    if job["offload_optimizer"] == "none":
        yield (
            f"offload_param: {job['offload_param']} while offload_optimizer: none keeps optimizer "
            "states on the device; they take more than parameters: let all of them leave first "
            "(offload_optimizer: cpu)"
        )
    elif fraction not in ("auto", 1):
        yield (
            f"offload_param: {job['offload_param']} while offload_optimizer_fraction: {fraction} "
            "keeps optimizer states on the device; they take more than parameters: let all of them "
            "leave first (leave offload_optimizer_fraction out)"
        )


def _of_a_split_master(job: Mapping[str, Any]) -> Iterator[str]:
    if job["precision"] not in ("auto", "bf16"):
        yield (
            f"optim_master: {job['optim_master']} keeps the bits that bf16 parameters lack, and "
            f"precision is {job['precision']}; set precision: bf16, or optim_master: fp32"
        )
    if job["finetuning_type"] == "lora":
        yield (
            f"optim_master: {job['optim_master']} is for parameters that are trained in bf16; "
            "adapters are fp32 and need no master; leave it out"
        )
    if job["offload_optimizer"] in ("cpu", "nvme") and job["offload_param"] == "none":
        yield (
            f"optim_master: {job['optim_master']} is half in the parameter itself, which "
            "offload_param: none keeps away from its other half; let parameters leave too, or set "
            "optim_master: fp32"
        )
