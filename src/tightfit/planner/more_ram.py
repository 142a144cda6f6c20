"""A machine with more RAM, for what does not fit on the one that a job is for.

The same prices under other limits: how much RAM there is changes no bill and no time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tightfit.facts.machine import machine_of
from tightfit.planner.fitting import Fitting
from tightfit.planner.machine import with_ram
from tightfit.planner.nothing_fits import Instead
from tightfit.planner.prepared import Prepared
from tightfit.policies import Policies
from tightfit.units import GIB

# That machines are sold with; of more nobody is told to buy it.
USUAL_GIB = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)


def more_ram(at: Prepared, lean: Sequence[Policies]) -> Iterator[Instead]:
    """The machine with the least RAM that would do, if more of it helps.

    Args:
        lean: the leanest policies that the job allows.
    """
    if at.ram_bytes is None or at.job.host_memory_limit != "auto":
        return
    for size in USUAL_GIB:
        if size * GIB <= at.ram_bytes:
            continue
        fitting = Fitting(at.pricing, with_ram(at.job, at.fitting.limits, size * GIB))
        if fitting.first_that_would(lean) is not None:
            yield Instead(_name(at, size), lean, fitting)
            return


def _name(at: Prepared, size: int) -> str:
    """With the key that says so, where the machine is described."""
    if machine_of(at.job) is None or at.job.ram is None:
        return f"a machine with {size} GiB of RAM"
    now, _, _ = at.job.ram.partition("@")
    return f"ram: {size}GiB instead of {now}"
