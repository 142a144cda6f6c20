"""Keys of a described machine and of a job agree, or the arithmetic is said."""

from __future__ import annotations

from typing import Any

import pytest

from tightfit.errors import ConfigError
from tightfit.facts.job import Job
from tightfit.facts.job_values import job_of
from tightfit.facts.machine_keys import check_is_for_here


def job(**keys: Any) -> Job:
    values = {"model_name_or_path": "m", **keys}
    return job_of(values, {key: key for key in values})


def test_the_cards_of_a_machine_are_the_ranks() -> None:
    assert job(gpu="2xrtx-4090").ranks == 2
    assert job(gpu="8xh100", nnodes=4).ranks == 32
    assert job(gpu="4090").num_gpus == 1
    assert job(gpu="4090", num_gpus=4).num_gpus == 4
    assert job(gpu="8xh100", num_gpus=2).num_gpus == 2
    assert job(gpu=4090).gpu == "4090", "YAML reads a number"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"gpu": "2x4090", "num_gpus": 4}, "num_gpus 4, but gpu 2x4090 is 2 cards; change the one"),
        ({"gpu": "1x4090", "num_gpus": 2}, "num_gpus 2, but gpu 1x4090 is 1 card;"),
        ({"gpu": "2x4090", "tensor_parallel_size": 4}, "num_gpus 2 is not a multiple of"),
        ({"gpu": "2xfoo"}, "gpu: 'foo' is no card that tightfit knows"),
        ({"gpu": True}, "gpu: true is not accepted"),
        ({"gpu": "2x4090", "interconnect": "nvlink"}, "GeForce RTX 4090 has no such link; its"),
        (
            {"gpu": "4x3090", "interconnect": "nvlink"},
            "nvlink joins 2 of GeForce RTX 3090, and the",
        ),
        ({"gpu": "4090", "memory_limit": "30GiB"}, "memory_limit 30GiB is more than the 23.51 GiB"),
        (
            {"gpu": "4090", "ram": "32GiB", "host_memory_limit": "64GiB"},
            "host_memory_limit 64GiB is more than the 32.00 GiB that there are with ram 32GiB",
        ),
        ({"gpu": "4090", "nvme": "1TB", "nvme_limit": "2TB"}, "nvme_limit 2TB is more than the"),
        ({"gpu": "4090", "network": "25Gb"}, "network: 25Gb is between machines, and nnodes is 1"),
        ({"ram": "64GiB"}, "ram: 64GiB describes a machine, and gpu does not say which card"),
        ({"nvme": "1TB"}, "for this machine give nvme_limit"),
        ({"network": "25Gb", "nnodes": 2}, "network: 25Gb describes a machine"),
    ],
)
def test_contradictions(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        job(**keys)
    assert said in str(error.value)


def test_limits_within_the_machine_are_kept() -> None:
    found = job(gpu="4090", ram="64GiB", memory_limit="20GiB", host_memory_limit="none")
    assert (found.memory_limit, found.host_memory_limit) == ("20GiB", "none")


def test_nobody_trains_on_a_machine_that_is_only_described() -> None:
    check_is_for_here(vars(job(num_gpus=2)))
    with pytest.raises(ConfigError, match="gpu, ram: a described machine can be planned for"):
        check_is_for_here(vars(job(gpu="4090", ram="64GiB")))
