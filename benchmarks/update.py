"""Time of the optimizer's update in chunks, against torch's fused fp32 AdamW on the same values.

Every case takes turns with the baseline in rounds of random order, and what counts is the ratio of
neighbours, its median and quartiles over the rounds: a machine with other work to do spoils the
times, hardly their ratios. One thread is timed by its processor time, several by the clock. Prints,
and writes to benchmarks/results/update.md. DeepSpeed's CPUAdam is among the cases where it can be
imported, also from another Python:

    python benchmarks/update.py --python /path/to/deepspeed/bin/python
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from tightfit.engine.arithmetic import Numbers
from tightfit.engine.rule_of import rule_of
from tightfit.engine.rules import Piece
from tightfit.policies import Master, OptimizerName, OptimizerPolicy

HERE = Path(__file__).parent
RESULT = HERE / "results" / "update.md"
NUMBERS = Numbers(1e-4, 0.1, (0.9, 0.999), 1e-8)
BF16 = torch.bfloat16
CHUNKS = (2**16, 2**17, 2**18, 2**19, 2**20)
Update = Callable[[], object]


@dataclass
class Case:
    """One way to update, and its times as ratios to the baseline beside it."""

    name: str
    update: Update
    ratios: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def fused_adamw(values: int) -> Update:
    """The baseline: fp32 throughout, in place, all values at once."""
    weight, gradient, first, second = (torch.rand(values) * 1e-3 for _ in range(4))
    step = torch.tensor(3.0)
    near, far = NUMBERS.betas

    def update() -> None:
        torch._fused_adamw_(
            [weight],
            [gradient],
            [first],
            [second],
            [],
            [step],
            lr=NUMBERS.learning_rate,
            beta1=near,
            beta2=far,
            weight_decay=NUMBERS.weight_decay,
            eps=NUMBERS.epsilon,
            amsgrad=False,
            maximize=False,
        )

    return update


def chunked(
    name: OptimizerName, values: int, chunk_values: int, *, split: bool = False, clip: bool = False
) -> Update:
    """Ours: bf16 gradients in, bf16 parameters out, through the memory of the gradients."""
    rule = rule_of(OptimizerPolicy(name=name, master=Master.SPLIT if split else Master.FP32))
    states = {
        name: torch.empty(count, dtype=dtype)
        for name, (count, dtype) in rule.states((values,)).items()
    }
    rule.initialise(states)
    gradient = (torch.rand(values) * 1e-3).to(BF16)
    narrow = torch.rand(values).to(BF16) if split else gradient
    weight = None if split else torch.rand(values)
    step = torch.tensor(3.0) if rule.counts_steps else None
    piece = Piece(weight, gradient, states, step, narrow)
    scratch = rule.scratch(torch.zeros(rule.scratch_values(values, BF16, chunk_values)), BF16)
    factor = torch.tensor(0.5) if clip else None
    return lambda: rule.update([piece], NUMBERS, factor, scratch)


def deepspeed_cpu_adam(values: int, *, casts: bool) -> Update:
    """DeepSpeed's, alone or between the casts of a 16-bit run, in buffers made once."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # compiles a kernel, takes minutes once

    weight = torch.nn.Parameter(torch.rand(values))
    weight.grad = torch.rand(values) * 1e-3
    narrow = weight.grad.to(BF16)
    optimizer = DeepSpeedCPUAdam(
        [weight], lr=NUMBERS.learning_rate, weight_decay=NUMBERS.weight_decay, adamw_mode=True
    )

    @torch.no_grad()
    def update() -> None:
        if casts:
            assert weight.grad is not None
            weight.grad.copy_(narrow)
        optimizer.step()
        if casts:
            narrow.copy_(weight)

    return update


def cases(values: int) -> Iterator[Case]:
    """All of them, the baseline once more against itself first: the noise of the machine."""
    yield Case("fused fp32 AdamW again", fused_adamw(values))
    for size in CHUNKS:
        update = chunked(OptimizerName.ADAMW, values, size)
        yield Case(f"AdamW, bf16 in and out, chunks of {size >> 10}K", update)
    size = 2**18
    clipped = chunked(OptimizerName.ADAMW, values, size, clip=True)
    yield Case("AdamW, clipped too", clipped)
    yield Case("AdamW, split master", chunked(OptimizerName.ADAMW, values, size, split=True))
    for name in OptimizerName:
        if name not in (OptimizerName.ADAMW, OptimizerName.ADAFACTOR):
            yield Case(f"{name}", chunked(name, values, size))
    if find_spec("deepspeed"):
        yield Case("DeepSpeedCPUAdam, fp32", deepspeed_cpu_adam(values, casts=False))
        yield Case("DeepSpeedCPUAdam with its casts", deepspeed_cpu_adam(values, casts=True))


def measure(values: int, threads: int, rounds: int) -> list[Case]:
    """Every case `rounds` times, each time right after the baseline."""
    torch.set_num_threads(threads)
    baseline = fused_adamw(values)
    found = list(cases(values))
    for case in found:
        case.update()
    order = random.Random(0)
    for _ in range(rounds):
        for case in order.sample(found, len(found)):
            before = _seconds(baseline, threads)
            after = _seconds(case.update, threads)
            case.ratios.append(after / before)
            case.seconds.append(after)
    return found


def _seconds(update: Update, threads: int) -> float:
    """Processor time of one thread, which leaves out when others ran; of several, the clock's."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    begin = clock()
    update()
    return clock() - begin


def _rows(found: list[Case], values: int, threads: int) -> Iterator[str]:
    for case in found:
        low, middle, high = statistics.quantiles(case.ratios, n=4)
        rate = values / statistics.median(case.seconds) / 1e6
        yield f"| {case.name} | {threads} | {middle:.2f} | {low:.2f} to {high:.2f} | {rate:.0f} |"


def _page(rows: list[str], values: int, rounds: int) -> str:
    names = ["torch", *(["deepspeed"] if find_spec("deepspeed") else [])]
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    head = [
        "# The update in chunks against fused fp32 AdamW",
        "",
        f"Made by `benchmarks/update.py` on {date.today()}, Python {platform.python_version()}, "
        f"{versions}, {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}.",
        "",
        f"{values >> 20}M values, {rounds} rounds; each time is divided by that of torch's fused "
        "fp32 AdamW run right before it. One thread is timed by its processor time, several by the "
        "clock. Where no chunk is named it is 256K.",
        "",
        "| update | threads | median ratio | quartiles | million values per second |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*head, *rows]) + "\n"


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=int, default=32, help="values, in units of 2**20")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--python", help="another Python, to run this with the packages it has")
    given = parser.parse_args()
    if given.python and Path(given.python) != Path(sys.executable):
        os.environ["PYTHONPATH"] = str(HERE.parent / "src")
        os.execv(given.python, [given.python, *sys.argv])
    values = given.millions << 20
    rows: list[str] = []
    for threads in given.threads:
        found = list(_rows(measure(values, threads, given.rounds), values, threads))
        print(*found, sep="\n", flush=True)
        rows += found
    RESULT.write_text(_page(rows, values, given.rounds))


if __name__ == "__main__":
    main()
