"""Places among ranks, from the variables of each launcher."""

from __future__ import annotations

from typing import Any

import pytest

from tightfit.errors import ConfigError
from tightfit.facts.job import Job
from tightfit.launch.environment import RankPlace, check_counts, place_here
from tightfit.launch.workers import rank_variables

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "first",
    "MASTER_PORT": "29400",
}
SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "70123",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODELIST": "gpu[07-08]",
}
PLACE = RankPlace(5, 8, 1, 4, "first", 29400)


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        (TORCHRUN, PLACE),
        (
            TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"},
            RankPlace(5, 8, 1, 4, "first", 29400, attempt=2, joins_store=True),
        ),
        (
            {key: value for key, value in TORCHRUN.items() if not key.startswith("LOCAL")},
            RankPlace(5, 8, 5, 8, "first", 29400),
        ),
        (TORCHRUN | {"MASTER_ADDR": ""}, None),
        (
            TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
            None,
        ),
        (SLURM, RankPlace(5, 8, 1, 4, "gpu07", 30123)),
        (
            SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "MASTER_PORT": "1234"},
            RankPlace(5, 8, 1, 4, "gpu07", 1234),
        ),
        (SLURM | TORCHRUN, PLACE),
        # The script that calls srun, which is no rank itself.
        ({key: value for key, value in SLURM.items() if key != "SLURM_STEP_ID"}, None),
    ],
)
def test_place(environment: dict[str, str], place: RankPlace | None) -> None:
    assert place_here(environment) == place


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (TORCHRUN | {"RANK": "8"}, "rank 8 of 8"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "on its machine 4 of 4"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "3"}, "as many ranks as the others"),
        (TORCHRUN | {"WORLD_SIZE": "many"}, "WORLD_SIZE is 'many'"),
        (
            {key: v for key, v in SLURM.items() if key != "SLURM_LOCALID"},
            "SLURM_LOCALID is missing",
        ),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4,3"}, r"\(4,3\)"),
        (SLURM | {"SLURM_NODELIST": "gpu["}, "node list"),
    ],
)
def test_what_contradicts_itself_is_said(environment: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        place_here(environment)


@pytest.mark.parametrize("place", [PLACE, RankPlace(3, 6, 0, 3, "::1", 1, 4, True)])
def test_what_the_supervisor_sets_is_read_back(place: RankPlace) -> None:
    assert place_here(rank_variables(place)) == place


def job(**keys: Any) -> Job:
    return Job(model_name_or_path="a-model", **keys)


def test_a_job_for_as_many_ranks_agrees() -> None:
    check_counts(job(**PLACE.counts()), PLACE)
    assert job(**PLACE.counts()).ranks == PLACE.world_size


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"num_gpus": 8, "nnodes": 2}, "num_gpus: 8 contradicts the launcher, which has started 8"),
        ({"nnodes": 3, "num_gpus": 4}, "nnodes: 3 contradicts"),
        ({}, "num_gpus: 1, nnodes: 1 contradicts"),
    ],
)
def test_a_job_that_says_something_else_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_counts(job(**keys), PLACE)
