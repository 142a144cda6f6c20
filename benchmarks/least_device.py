"""How small a device can train SmolLM2, all parameters, AdamW: the bill, the limit, the numbers.

Each way runs three steps on one micro-batch after the other under a limit of exactly what its dry
run says, without a margin, and once more under one byte less, which must run out. Losses and
gradient norms are compared with plain training on the same batches. Prepare the model first
(`make demo`), then

    python benchmarks/least_device.py > benchmarks/results/least_device.md

Takes about five minutes on two cores.
"""

from __future__ import annotations

import argparse
import gc
import platform
import sys
from dataclasses import dataclass, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tightfit import ledger
from tightfit.bill.table import Kind, Phase
from tightfit.dry_run import dry_run
from tightfit.engine.apply import fit
from tightfit.engine.engine import Engine
from tightfit.facts.workload import Workload
from tightfit.ledger import Ledger
from tightfit.policies import (
    BatchPolicy,
    CheckpointingPolicy,
    LossKind,
    LossPolicy,
    OptimizerPolicy,
    PlacementPolicy,
    Policies,
    Tier,
)
from tightfit.units import MIB

MODEL = Path(__file__).parent.parent / "examples" / ".cache" / "smollm2-135m-instruct"
LENGTH, STEPS, ACCUMULATION = 256, 3, 2
# Losses in chunks and slices round other sums than torch's, whose own is 3e-6 off on a CPU, and
# what AdamW makes of it grows with the steps.
TOLERANCE = 1e-4
HOST = Tier.HOST
PLAIN = Policies(batch=BatchPolicy(1, ACCUMULATION), optimizer=OptimizerPolicy(learning_rate=1e-6))
AWAY = PlacementPolicy(HOST, HOST, HOST)
SLICED = LossPolicy(LossKind.SLICED, slice_rows=1024)
WAYS = {
    "plain": PLAIN,
    "gradients and optimizer on host": replace(PLAIN, placement=PlacementPolicy(HOST, HOST)),
    "parameters too, chunked loss, checkpointing": replace(
        PLAIN,
        placement=AWAY,
        loss=LossPolicy(LossKind.CHUNKED),
        checkpointing=CheckpointingPolicy(True),
    ),
    "the same, loss in slices": replace(
        PLAIN, placement=AWAY, loss=SLICED, checkpointing=CheckpointingPolicy(True)
    ),
    "activations too, nothing ahead": replace(
        PLAIN,
        placement=replace(AWAY, activations=HOST, prefetch=0),
        loss=SLICED,
        checkpointing=CheckpointingPolicy(True),
    ),
}


@dataclass(frozen=True)
class Outcome:
    """What one way took and gave."""

    bill_bytes: int
    measured_bytes: int
    host_bytes: int
    runs_out: bool
    numbers: list[float]


def main() -> int:
    """Run every way and print the table; 1 if a bill or a number is wrong."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--model", type=Path, default=MODEL)
    model = arguments.parse_args().model
    outcomes = {}
    for name, policies in WAYS.items():
        outcomes[name] = try_way(model, policies)
        print(name, outcomes[name], file=sys.stderr)
    print_page(outcomes)
    expected = outcomes["plain"].numbers
    return 0 if all(is_right(outcome, expected) for outcome in outcomes.values()) else 1


def try_way(model: Path, policies: Policies) -> Outcome:
    """Its bill, and its runs under that limit and under a byte less."""
    config = AutoConfig.from_pretrained(model).to_dict()
    workload = Workload(sequence_length=LENGTH, global_batch_size=ACCUMULATION)
    table = dry_run(config, policies, workload, full_depth=True).table
    bill = table.peak_bytes(Tier.DEVICE)
    counting, numbers = train(model, policies, bill)
    try:
        train(model, policies, bill - 1)
        runs_out = False
    except torch.OutOfMemoryError:
        runs_out = True
    return Outcome(
        bill, counting.peak_bytes(Tier.DEVICE), counting.peak_bytes(HOST), runs_out, numbers
    )


def train(model: Path, policies: Policies, limit_bytes: int) -> tuple[Ledger, list[float]]:
    """A few steps under a limit; losses and norms."""
    gc.collect()  # the run before; hooks and modules know each other
    with Ledger(limits={Tier.DEVICE: limit_bytes}) as counting:
        engine = fit(load(model, policies), policies)
        numbers = [number for step in range(STEPS) for number in one_step(engine, step)]
    return counting, numbers


def load(path: Path, policies: Policies) -> PreTrainedModel:
    """The model on the tier where its parameters are to live, in fp32."""
    ledger.set_phase(Phase.LOAD)
    tier = HOST if policies.placement.parameters is HOST else Tier.DEVICE
    with ledger.labelled(Kind.PARAMETERS, tier):
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    counting = ledger.active()
    assert counting is not None
    counting.adopt(model, tier)
    return model


def one_step(engine: Engine, step: int) -> list[float]:
    """The losses of its micro-batches and the norm of its gradients."""
    found = []
    for piece in range(ACCUMULATION):
        generator = torch.Generator().manual_seed(STEPS * piece + step)
        with ledger.labelled(Kind.BUFFERS):
            ids = torch.randint(10, 49000, (1, LENGTH), generator=generator)
            labels = ids.clone()
        loss = engine.loss(ids, labels, ACCUMULATION * (LENGTH - 1))
        engine.backward(loss)
        found.append(float(loss.detach()))
        del ids, labels, loss
    return [*found, engine.step()]


def difference(outcome: Outcome, expected: list[float]) -> float:
    """The largest relative one of all numbers."""
    pairs = zip(outcome.numbers, expected, strict=True)
    return max(abs(found - wanted) / wanted for found, wanted in pairs)


def is_right(outcome: Outcome, expected: list[float]) -> bool:
    """Whether the bill is exact and the numbers are those of plain training."""
    exact = outcome.bill_bytes == outcome.measured_bytes and outcome.runs_out
    return exact and difference(outcome, expected) <= TOLERANCE


def print_page(outcomes: dict[str, Outcome]) -> None:
    """The table with what it was made with."""
    print("# The least device that trains SmolLM2-135M, all parameters, AdamW\n")
    print(
        f"Made by `benchmarks/least_device.py` on {date.today()}, Python "
        f"{platform.python_version()}, torch {version('torch')}, transformers "
        f"{version('transformers')}. fp32, {ACCUMULATION} micro-batches of {LENGTH} tokens, "
        f"{STEPS} steps under the ledger's limit: with exactly the bill's bytes each way trains, "
        "with a byte less it runs out. The tied embedding alone is 108 MiB.\n"
    )
    print("| way | device: bill | measured | host | a byte less | from plain |")
    print("|---|---|---|---|---|---|")
    expected = outcomes["plain"].numbers
    for name, outcome in outcomes.items():
        sizes = (outcome.bill_bytes, outcome.measured_bytes, outcome.host_bytes)
        shown = " | ".join(f"{size / MIB:.1f} MiB" for size in sizes)
        ends = "runs out" if outcome.runs_out else "trains"
        print(f"| {name} | {shown} | {ends} | {difference(outcome, expected):.1e} |")
    print("\nThe last column is the largest relative difference of a loss or gradient norm.")


if __name__ == "__main__":
    sys.exit(main())
