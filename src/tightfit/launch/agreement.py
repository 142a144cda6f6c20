"""What must be the same on all ranks, compared before they do anything together.

Two versions of a library, or two values of a key, would show as a hang, a crash or a wrong loss
later. Compared over the store that ranks meet at, which any version can read. Knows no tensors.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections import defaultdict
from collections.abc import Mapping
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from tightfit.errors import ConfigError, ModelNotFoundError, RankError
from tightfit.facts.job import Job
from tightfit.facts.model_files import model_folder

# Each by the name under which a person knows it.
Facts: TypeAlias = Mapping[str, str]

_PACKAGES = ("tightfit", "torch", "transformers", "peft", "safetensors")
_OF_THE_MACHINE = ("node_rank", "master_addr", "master_port")
_SAMPLE_BYTES = 2**16
_LONGEST = 60  # of a value in a message
_VERDICT = "verdict"
_TO_HEAR = timedelta(seconds=5)  # that the ranks are not the same


def facts_of(job: Job, config: Mapping[str, Any]) -> Facts:
    """Versions, all keys of the job, the model's config and weights, and the sizes of the job's
    data files.

    Args:
        config: of the model.
    """
    keys = {key: value for key, value in dict(job).items() if key not in _OF_THE_MACHINE}
    files = {f"bytes of {name}": _size(name) for name in (job.dataset, job.eval_dataset) if name}
    return {
        "python": platform.python_version(),
        **{package: version(package) for package in _PACKAGES},
        "CUDA of torch": str(torch.version.cuda),
        **{key: str(value) for key, value in keys.items()},
        "the model's config": _digest(config),
        "the model's weights": _weights(job.model_name_or_path),
        **files,
    }


def check_agreement(
    store: Store, rank: int, world_size: int, facts: Facts, timeout: timedelta
) -> None:
    """Wait for all ranks and see that their facts are the same.

    Raises:
        ConfigError: they are not; the same message on every rank.
        RankError: some did not come in time.
    """
    store.set(f"facts{rank}", json.dumps(dict(facts)))
    if rank == 0:
        verdict = differences(_gather(store, world_size, timeout))
        store.set(_VERDICT, verdict)
        if verdict:
            _until_heard(store, world_size)
    else:
        _wait(store, [_VERDICT], "rank 0 did not come, or could not compare", timeout)
        verdict = store.get(_VERDICT).decode()
        store.set(f"heard{rank}", "")
    if verdict:
        raise ConfigError(verdict)


def differences(facts: list[Facts]) -> str:
    """What is not the same, with the ranks that have each value; empty where nothing is.

    Args:
        facts: by rank.
    """
    names = dict.fromkeys(name for each in facts for name in each)
    lines = []
    for name in names:
        ranks: dict[str, list[int]] = defaultdict(list)
        for rank, each in enumerate(facts):
            ranks[each.get(name, "nothing")].append(rank)
        if len(ranks) > 1:
            said = ", ".join(f"{_short(value)} on {_named(who)}" for value, who in ranks.items())
            lines.append(f"{name}: {said}")
    if not lines:
        return ""
    return "the ranks are not the same; make them so:\n" + "\n".join(f"  {line}" for line in lines)


def _gather(store: Store, world_size: int, timeout: timedelta) -> list[Facts]:
    names = [f"facts{rank}" for rank in range(world_size)]
    said = f"not all {world_size} ranks came"
    try:
        store.wait(names, timeout)
    except dist.DistStoreError:
        missing = [rank for rank, name in enumerate(names) if not store.check([name])]
        raise RankError(_late(f"{said}; missing: {_named(missing)}", timeout)) from None
    return [json.loads(store.get(name)) for name in names]


def _until_heard(store: Store, world_size: int) -> None:
    """Rank 0 may be about to end, and the store with it."""
    try:
        store.wait([f"heard{rank}" for rank in range(1, world_size)], _TO_HEAR)
    except dist.DistStoreError:
        return  # they are gone, or lose touch


def _wait(store: Store, names: list[str], said: str, timeout: timedelta) -> None:
    try:
        store.wait(names, timeout)
    except dist.DistStoreError:
        raise RankError(_late(said, timeout)) from None


def _late(said: str, timeout: timedelta) -> str:
    return f"{said} within {timeout.total_seconds():.0f} s (ddp_timeout)"


def _named(ranks: list[int]) -> str:
    """Ranks in few words: `ranks 0-2, 5`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(
        "-".join(map(str, span)) for span in spans
    )


def _short(value: str) -> str:
    return value if len(value) <= _LONGEST else f"{value[:_LONGEST]}..."


def _digest(config: Mapping[str, Any]) -> str:
    text = json.dumps(config, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _weights(name: str) -> str:
    """Of its files' sizes and headers and of some values of each: those of another training are
    known by them, and reading all would take as long as loading."""
    digest = hashlib.sha256()
    try:
        folder = model_folder(name)
    except ModelNotFoundError:
        return "no folder"
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        with path.open("rb") as file:
            for begin in (0, size // 3, 2 * size // 3, max(0, size - _SAMPLE_BYTES)):
                file.seek(begin)
                digest.update(file.read(_SAMPLE_BYTES))
        digest.update(f"{path.name} {size}".encode())
    return digest.hexdigest()[:12]


def _size(name: str) -> str:
    path = Path(name).expanduser()
    return str(path.stat().st_size) if path.is_file() else "no file"
