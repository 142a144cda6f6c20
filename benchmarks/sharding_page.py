"""The page of sharding.py's results: what was aimed at and whether it was reached, then a table for
each mode. Times are ratios of turns in the same round; milliseconds are for orientation.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import psutil

from placement_rounds import (
    SAME_LOSS,
    Aim,
    Measured,
    processor_seconds,
    same_losses,
    step_ratio,
    step_seconds,
    typical,
)
from sharding_contenders import MODES, Mode

NOISE = 0.02  # what two runs of the same program differ by where all cores are busy
TIMES = {"step": step_seconds, "processor": processor_seconds}
MEMORY = {"device": "device bytes", "process": "process memory"}

NOTES = """\
- All have the same weights, data, clipping by the global norm and torch's fused fp32 AdamW; losses
  of all steps agree to {tolerance:.0e}. Each rank has one thread and one micro-batch per step.
- Ratios are of two contenders' turns in the same round: median (lowest - highest round). A turn is
  two timed steps after one that is not.
- step: by the clock, what counts on an idle machine. processor: what all threads of a rank have
  computed in a step, which other work on the machine hardly changes; where ranks have no more than
  a core each, a step cannot be shorter.
- device: the highest sum of live storages of a rank in a step, parameters, states and
  communication buffers included, by tightfit's ledger, which watches peers' operations too.
  process: anonymous memory of the whole process at its peak, less what it had before there was a
  model, by the kernel; what gloo and C++ hold is in it. Both are of the rank that has most.
- DeepSpeed: buckets of one layer, as those of the default size would be allocated whole; in stage 3
  a layer is gathered ahead and none stays from forward to backward. `overlap_comm` does nothing on
  a CPU. FSDP2 and DDP: as their tutorials say; gradients of DDP are views of its buckets.
- On gloo every rank copies what it sends, on the cores that compute: what a card would hide behind
  computing is not hidden here.
"""


def machine() -> str:
    """This one, in general words."""
    memory = psutil.virtual_memory().total / 2**30
    return f"{os.cpu_count()} cores, {memory:.0f} GiB of memory"


def page(results: Iterable[dict[str, Any]]) -> str:
    """Markdown.

    Args:
        results: of each mode and number of ranks, in the order of the page.
    """
    return "\n".join(_lines(list(results))) + "\n"


def _lines(results: list[dict[str, Any]]) -> Iterator[str]:
    yield "# ZeRO stages beside DeepSpeed, FSDP2 and DDP\n"
    yield from _made(results)
    yield "\n`python benchmarks/sharding.py`; what it needs is said in `placement_peers.py`.\n"
    yield "| mode | what | aim | found | reached |"
    yield "|---|---|---|---|---|"
    for result in results:
        for aim in aims(mode_of(result), result["contenders"]):
            reached = "yes" if aim.reached else "NO"
            yield f"| {result['name']} | {aim.what} | {aim.limit} | {aim.found} | {reached} |"
    for result in results:
        yield from _table(result)
    yield "\n## Notes\n"
    yield NOTES.format(tolerance=SAME_LOSS)


def _made(results: list[dict[str, Any]]) -> Iterator[str]:
    """When, with what and on what; a line more where a part was measured at another time."""
    made: dict[str, list[str]] = {}
    for result in results:
        versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
        made.setdefault(f"{result['date']}, {versions}, {result['machine']}", []).append(
            result["name"]
        )
    for line, names in made.items():
        yield line if len(made) == 1 else f"- {line}: {'; '.join(names)}"


def mode_of(result: dict[str, Any]) -> Mode:
    """The mode that was measured."""
    return next(mode for mode in MODES if mode.name == result["mode"])


def aims(mode: Mode, contenders: dict[str, Measured]) -> Iterator[Aim]:
    """Whether the same was trained, faster than by the faster of the peers, in less memory."""
    ran = {name: measured for name, measured in contenders.items() if "failed" not in measured}
    ours = mode.ours.name
    peers = [peer.name for peer in mode.peers if peer.name in ran]
    if ours not in ran or not peers:
        return
    for peer in peers:
        for what, seconds in TIMES.items():
            ratio = step_ratio(ran[ours], ran[peer], seconds)
            limit = 1 + NOISE
            yield Aim(f"{what} / {peer}", f"at most {limit}", str(ratio), ratio.middle <= limit)
    for key, name in MEMORY.items():
        for peer in peers:
            share = peak_bytes(ran[ours], key) / peak_bytes(ran[peer], key)
            yield Aim(f"{name} / {peer}", "below 1", f"{share:.3f}", share < 1)
    yield same_losses("all ranks and steps", ran, peers[-1])


def peak_bytes(measured: Measured, key: str) -> int:
    """Of the rank that has most."""
    return max(rank[key] for rank in measured["memory"])


def _table(result: dict[str, Any]) -> Iterator[str]:
    contenders, ours = result["contenders"], mode_of(result).ours.name
    yield f"\n## {result['name']}\n"
    yield (
        f"Llama {result['hidden_size']} x {result['layers']} layers, vocabulary "
        f"{result['vocabulary']}, {result['sequences']} x {result['length']} tokens per rank, "
        f"{len(contenders[ours].get('rounds', ()))} rounds.\n"
    )
    yield (
        "| | step / tightfit's | processor / tightfit's | ms: forward, backward, step "
        "| device MiB | process MiB |"
    )
    yield "|---|---|---|---|---|---|"
    for name, measured in contenders.items():
        if "failed" in measured:
            yield f"| {name} | did not run: {measured['failed'][:300]} | | | | |"
        else:
            yield f"| {name} | {' | '.join(_cells(measured, contenders[ours]))} |"


def _cells(measured: Measured, ours: Measured) -> Iterator[str]:
    for seconds in TIMES.values():
        yield str(step_ratio(measured, ours, seconds)) if "failed" not in ours else ""
    phases = ("forward", "backward", "step")
    yield ", ".join(f"{1000 * typical(measured, phase):.0f}" for phase in phases)
    for key in MEMORY:
        yield f"{peak_bytes(measured, key) / 2**20:.0f}"
