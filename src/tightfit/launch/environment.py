"""Whether this process is one of several ranks, from the variables that its launcher has set.

Three launchers are known: tightfit's own supervisor and torchrun, which use the same variables, and
SLURM's srun. Pure functions over a mapping; starts and joins nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tightfit.errors import ConfigError
from tightfit.facts.job import Job
from tightfit.launch.nodelist import hosts_of, tasks_of

Environment = Mapping[str, str]

# The supervisor's own: what a restarted rank begins from, see `restart.py`.
BEGIN = "TIGHTFIT_BEGIN"
# The supervisor's own: a pipe that closes when it is gone, see `workers.py`.
LIFELINE = "TIGHTFIT_LIFELINE"

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LOWEST_PORT, _PORTS = 20000, 20000  # a job's port by its number, so that two jobs rarely meet


@dataclass(frozen=True)
class RankPlace:
    """Where this rank stands among all.

    Attributes:
        rank, world_size: of all ranks.
        local_rank, local_world_size: of this machine's.
        master_address, master_port: of the store where ranks find each other.
        attempt: how often all ranks were started before.
        joins_store: the launcher keeps the store; else rank 0 does.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_address: str
    master_port: int
    attempt: int = 0
    joins_store: bool = False

    @property
    def machines(self) -> int:
        """How many machines there are."""
        return self.world_size // self.local_world_size

    def counts(self) -> dict[str, int]:
        """The keys of a job that the launcher has decided."""
        return {"num_gpus": self.local_world_size, "nnodes": self.machines}


def place_here(environment: Environment) -> RankPlace | None:
    """This process's place; None where no launcher has started it, or it is alone.

    Raises:
        ConfigError: the launcher's variables cannot be read or contradict each other.
    """
    if all(environment.get(name) for name in _TORCHRUN):
        place = _of_torchrun(environment)
    elif environment.get("SLURM_STEP_ID") and environment.get("SLURM_PROCID"):
        # srun's. The script that calls srun has a SLURM_PROCID too, and is no rank.
        place = _of_slurm(environment)
    else:
        return None
    _check(place)
    return place if place.world_size > 1 else None


def check_counts(job: Job, place: RankPlace) -> None:
    """See that the job is for as many machines and cards as the launcher has started ranks.

    Raises:
        ConfigError: it says another number.
    """
    counts = place.counts()
    wrong = [f"{key}: {getattr(job, key)}" for key in counts if getattr(job, key) != counts[key]]
    if wrong:
        raise ConfigError(
            f"{', '.join(wrong)} contradicts the launcher, which has started "
            f"{place.world_size} ranks, {place.local_world_size} of them on each of "
            f"{place.machines} machines; leave it out, or change what torchrun or srun is told"
        )


def _of_torchrun(environment: Environment) -> RankPlace:
    world_size = _number(environment, "WORLD_SIZE")
    rank = _number(environment, "RANK")
    return RankPlace(
        rank=rank,
        world_size=world_size,
        local_rank=_number(environment, "LOCAL_RANK", rank),
        local_world_size=_number(environment, "LOCAL_WORLD_SIZE", world_size),
        master_address=environment["MASTER_ADDR"],
        master_port=_number(environment, "MASTER_PORT"),
        attempt=_number(environment, "TORCHELASTIC_RESTART_COUNT", 0),
        joins_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _of_slurm(environment: Environment) -> RankPlace:
    names = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    listed = next((environment[name] for name in names if environment.get(name)), "localhost")
    hosts = hosts_of(listed)
    tasks = "SLURM_STEP_NUM_TASKS" if environment.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    world_size = _number(environment, tasks)
    counts = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE")
    here = set(tasks_of(counts)) if counts else {-(-world_size // len(hosts))}
    if len(here) > 1:
        raise ConfigError(
            f"srun has started another number of ranks on each machine ({counts}); give all the "
            "same (--ntasks-per-node)"
        )
    default_port = _LOWEST_PORT + _number(environment, "SLURM_JOB_ID", 0) % _PORTS
    return RankPlace(
        rank=_number(environment, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_number(environment, "SLURM_LOCALID"),
        local_world_size=here.pop(),
        master_address=environment.get("MASTER_ADDR") or hosts[0],
        master_port=_number(environment, "MASTER_PORT", default_port),
    )


def _number(environment: Environment, name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if not text and default is not None:
        return default
    if text is None or not text.isdecimal():
        said = "is missing" if text is None else f"is {text!r}, which is no number"
        raise ConfigError(f"the launcher's variable {name} {said}")
    return int(text)


def _check(place: RankPlace) -> None:
    ranks = place.rank < place.world_size and place.local_rank < place.local_world_size
    if not ranks or place.world_size % place.local_world_size:
        raise ConfigError(
            f"the launcher's variables contradict each other: rank {place.rank} of "
            f"{place.world_size}, on its machine {place.local_rank} of {place.local_world_size}; "
            "every machine must have as many ranks as the others"
        )
