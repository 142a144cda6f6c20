"""The process group of a rank, from meeting the others to leaving.

Ranks first meet at a store, where they compare what they are (`agreement.py`), so that what would
hang or crash in the libraries is a message. Does not know what ranks do together.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from tightfit.errors import RankError
from tightfit.launch.agreement import Facts, check_agreement
from tightfit.launch.environment import RankPlace
from tightfit.launch.network import interface_towards

Value = TypeVar("Value")


def meet(place: RankPlace, facts: Facts, timeout_seconds: float) -> Store:
    """The store of this attempt, when all ranks are there and are the same.

    Args:
        facts: what must be the same on all ranks.
        timeout_seconds: how long a rank waits for the others.

    Raises:
        RankError: the others did not come in time, or nobody keeps the store.
        ConfigError: they are not the same.
    """
    timeout = timedelta(seconds=timeout_seconds)
    store = _store(place, timeout)
    check_agreement(store, place.rank, place.world_size, facts, timeout)
    return store


@contextmanager
def process_group(
    place: RankPlace, store: Store, device_kind: str, timeout_seconds: float
) -> Iterator[None]:
    """Inside, this process is a rank of a process group, NCCL's on cards and gloo's on CPUs.

    The card of this rank is torch's current device. On an error the group is left without waiting
    for the others, which may be gone.

    Args:
        store: that of `meet`.
        device_kind: `cuda` or `cpu`.
        timeout_seconds: how long a rank waits for the others, here and in each collective.
    """
    device = None
    if device_kind == "cuda":
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
    elif place.machines > 1:
        _show_gloo_the_way(place)
    dist.init_process_group(
        "gloo" if device is None else "nccl",
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=device,
    )
    try:
        yield
    except BaseException:
        # NCCL finishes what it has begun before it lets go, and the others may be gone; the end of
        # the process lets go without waiting.
        if device is None and dist.is_initialized():
            dist.destroy_process_group()
        raise
    gc.collect()  # engines that nobody has any more hold groups, whose threads must end before us
    dist.destroy_process_group()


def _show_gloo_the_way(place: RankPlace) -> None:
    interface = interface_towards(place.master_address, place.master_port)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _store(place: RankPlace, timeout: timedelta) -> Store:
    """The store of this attempt.

    Raises:
        RankError: nobody keeps it, or it cannot be reached.
    """
    keeps_it = place.rank == 0 and not place.joins_store
    address = f"{place.master_address}:{place.master_port}"
    try:
        store = TCPStore(
            place.master_address,
            place.master_port,
            is_master=keeps_it,
            timeout=timeout,
            wait_for_workers=False,
        )
    except dist.DistNetworkError as error:
        said = "is taken" if keeps_it else "cannot be reached"
        raise RankError(
            f"rank {place.rank}: {address}, where ranks meet, {said} ({_first_line(error)}); "
            "see to master_addr and master_port"
        ) from None
    return PrefixStore(f"attempt{place.attempt}", store)


def from_first(value: Value | None) -> Value:
    """What rank 0 has, on every rank; the others give None.

    It travels pickled, between processes of one job that have just compared their versions.
    """
    holder = [value]
    dist.broadcast_object_list(holder, src=0)
    assert holder[0] is not None
    return holder[0]


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
