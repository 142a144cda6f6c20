"""The real engine on fake tensors: what a job will allocate, without allocating it.

A `FakeTensorMode` gives every tensor a shape and no storage; the ledger counts them as it counts
real ones. Runs at full depth, or on a few layers and a few more and then along a straight line:
every part of a step (a section) allocates a + b x layers at its highest moment, so each section is
extrapolated by itself and the highest is taken afterwards, wherever the peak moves.

`fakes.py` makes tensors fake, `program.py` is what is run, `sections.py` splits it, `depth.py`
chooses the depths, `run.py` brings them together, `cache.py` keeps results. Knows the engine and
the facts, not how a plan is found. Imports torch and transformers only for what is not kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tightfit.bill.runtime import Capability
from tightfit.dry_run.cache import entry_of, read_entry, write_entry
from tightfit.dry_run.result import DryRun, Shape
from tightfit.facts.workload import Workload
from tightfit.policies import Policies

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["DryRun", "Shape", "dry_run"]


def dry_run(
    config: Mapping[str, Any] | PretrainedConfig,
    policies: Policies,
    workload: Workload,
    *,
    full_depth: bool = False,
    card: Capability | None = None,
) -> DryRun:
    """The bill of one job on one rank, without margin.

    Args:
        config: of a causal language model: the content of its config.json, or transformers' own.
        full_depth: run all layers instead of extrapolating from a few.
        card: compute capability of the NVIDIA card that it is priced for: its kernels, and staging
            of what is read and written. None prices it for this CPU.

    Raises:
        InputError: transformers does not accept the config.
        UnsupportedError: it has no such causal language model, or the engine cannot apply a policy
            to it.
    """
    fields = config if isinstance(config, Mapping) else config.to_dict()
    entry = entry_of(fields, policies, workload, full_depth=full_depth, card=card)
    kept = read_entry(entry)
    if kept is not None:
        return kept
    from tightfit.dry_run.config import transformers_config  # it takes seconds to import
    from tightfit.dry_run.run import run

    loaded = transformers_config(config)
    found = run(loaded, policies, workload, full_depth=full_depth, card=card)
    write_entry(entry, found)
    return found
