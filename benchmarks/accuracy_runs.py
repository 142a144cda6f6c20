"""Runs a row of the grid: its bill, and the real training that the ledger measures.

Each happens in processes of its own, as many as the row has ranks, which share one machine and
talk through gloo. They are forked from a server that has imported the libraries, so that a row
costs no imports and leaves nothing behind.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from accuracy_grid import EVALUATED_SEQUENCES, Row
from tightfit import ledger
from tightfit.bill.table import Kind, MemoryTable, Phase
from tightfit.dry_run import dry_run
from tightfit.dry_run.cache import FOLDER_VARIABLE
from tightfit.engine.adapter import import_library
from tightfit.engine.apply import fit
from tightfit.engine.engine import Engine
from tightfit.engine.precision import DTYPES
from tightfit.engine.regions import Region
from tightfit.ledger import Ledger
from tightfit.policies import Tier

STEPS = 2
GIVEN_UP_AFTER = timedelta(minutes=5)  # without a word from another rank
_IMPORTED_ONCE = ["tightfit.dry_run.run", "peft"]

Result = TypeVar("Result")


# What the engine does. How a model gets to several ranks, and how it is saved, is not its matter.
ENGINE_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.STEP, Phase.EVAL)


@dataclass(frozen=True)
class Outcome:
    """A row's bill beside its measurement, phases that are compared only.

    Attributes:
        exact: the extrapolated bill without margin.
        measured: of the highest rank in each phase and tier.
        predicted_seconds: how long the dry run took, libraries imported and nothing cached.
    """

    exact: MemoryTable
    measured: MemoryTable
    predicted_seconds: float

    @property
    def predicted(self) -> MemoryTable:
        """The bill, with its margin."""
        return self.exact.with_margin()

    def to_json(self) -> dict[str, Any]:
        """Nested plain values."""
        return {
            "exact": self.exact.to_json(),
            "measured": self.measured.to_json(),
            "predicted_seconds": round(self.predicted_seconds, 2),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Outcome:
        """The inverse of `to_json`."""
        return cls(
            MemoryTable.from_json(data["exact"]),
            MemoryTable.from_json(data["measured"]),
            data["predicted_seconds"],
        )


def run_row(row: Row) -> Outcome:
    """Price the row and train it, at the same time.

    Raises:
        Exception: whatever the dry run or a rank has raised.
    """
    phases = compared_phases(row)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as beside:
        pricing = beside.submit(in_processes, 1, partial(_price, row))
        ranks = row.policies.sharding.ranks
        tables = in_processes(ranks, partial(_measure_rank, row, Path(folder) / "store"))
        ((exact, seconds),) = pricing.result()
    return Outcome(_only(phases, exact), _only(phases, highest(tables)), seconds)


def compared_phases(row: Row) -> tuple[Phase, ...]:
    """One rank begins with the model that it is given; several are given it here by each making
    all of it, which no run would do."""
    if row.policies.sharding.ranks > 1:
        return ENGINE_PHASES
    return (Phase.LOAD, Phase.INIT, *ENGINE_PHASES)


def highest(tables: Sequence[MemoryTable]) -> MemoryTable:
    """Each phase and tier from the rank where it is highest."""
    return MemoryTable(
        {
            phase: {
                tier: max(
                    (table.peaks[phase].get(tier, {}) for table in tables),
                    key=lambda kinds: sum(kinds.values()),
                )
                for tier in Tier
            }
            for phase in tables[0].peaks
        }
    )


def _only(phases: Sequence[Phase], table: MemoryTable) -> MemoryTable:
    return MemoryTable({phase: table.peaks[phase] for phase in phases})


def in_processes(count: int, work: Callable[[int], Result]) -> Sequence[Result]:
    """`work(rank)` for every rank at once, each in a process of its own, one thread each."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the server when it starts
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED_ONCE)
    with ProcessPoolExecutor(count, mp_context=context) as pool:
        return list(pool.map(work, range(count)))


def _price(row: Row, rank: int) -> tuple[MemoryTable, float]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER_VARIABLE] = folder  # what was kept before is not made now
        start = perf_counter()
        found = dry_run(row.config, row.policies, row.workload)
        return found.table, perf_counter() - start


def _measure_rank(row: Row, store: Path, rank: int) -> MemoryTable:
    ranks = row.policies.sharding.ranks
    if ranks == 1:
        return measure(row)
    torch.manual_seed(rank)
    dist.init_process_group(
        "gloo",
        init_method=store.as_uri(),
        rank=rank,
        world_size=ranks,
        timeout=GIVEN_UP_AFTER,
    )
    try:
        return measure(row)
    finally:
        dist.destroy_process_group()


def measure(row: Row) -> MemoryTable:
    """Optimizer steps and an evaluation on real tensors."""
    if row.policies.adapter is not None:
        import_library()
    dtype = DTYPES[row.policies.precision.parameters]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(row.config, dtype=dtype)
    with Ledger() as counting:
        engine = fit(model, row.policies, values=random_weights)
        for _ in range(STEPS):
            _one_step(engine, row)
        engine.evaluation_loss(*real_batch(row, EVALUATED_SEQUENCES))
    return counting.table()


def random_weights(name: str, values: torch.Tensor, region: Region) -> None:
    """What fills a model, in the place of a file."""
    if values.ndim > 1:
        values.normal_(std=0.02)
    else:
        values.fill_(1.0)


def _one_step(engine: Engine, row: Row) -> None:
    for _ in range(row.accumulation):
        input_ids, labels = real_batch(row, row.micro_batch)
        loss = engine.loss(input_ids, labels, row.workload.tokens_per_step)
        engine.backward(loss)
        del loss
    norm = engine.step()
    assert 0 < norm < float("inf"), f"nothing was updated: the gradients' norm is {norm}"


def real_batch(row: Row, sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random input ids and labels `[sequences, seq]`, booked as the training loop books them."""
    with ledger.labelled(Kind.BUFFERS):
        input_ids = torch.randint(3, row.config.vocab_size, (sequences, row.sequence))
        labels = input_ids.clone()
    labels[:, :5].fill_(-100)
    return input_ids, labels
