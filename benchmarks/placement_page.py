"""The page of placement.py's results: a table per setting, then what was aimed at and whether it
was reached. Times are given as ratios of turns in the same round; milliseconds are for orientation.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from placement_contenders import DEEPSPEED_CPU, DEEPSPEED_NVME, FSDP, OURS, PLAIN
from placement_disk import DEEPSPEED, RAW, TIGHTFIT
from placement_rounds import (
    SAME_LOSS,
    Aim,
    Measured,
    Spread,
    same_losses,
    step_ratio,
    step_seconds,
    typical,
)

MOST_EXPOSED = 0.05  # of a step, where forward is long enough to hide the optimizer
LEAST_DISK_RATE = 0.95  # of the disk's own
PEERS = (FSDP, DEEPSPEED_CPU, DEEPSPEED_NVME)
DISK_LEAD = 1.4  # over DeepSpeed's swapper
NOISE = 0.01  # what two runs of the same program differ by

NOTES = """\
- Ratios are of two contenders' turns in the same round: median (lowest - highest round).
- optimizer exposed: `step` and what forward waits for updates, of the whole step.
- device, host: by tightfit's ledger, of a rank; of peers, what lives between steps and gradients
  that have left count as host. process: anonymous memory of the whole process at its peak, less
  what it had before there was a model, by the kernel.
- moved: between device and host, of a rank and step; disk: by the kernel. On this device, which is
  a CPU, FSDP2's and DeepSpeed's copies between device and host are the same tensor and take no
  time (*: their figure is by their code); tightfit's are real.
- All have the same weights, data, clipping and fp32 AdamW; losses agree to {tolerance:.0e}.
- DeepSpeed has small live and reuse limits, so that parameters do not stay on the device between
  forward and backward, and subgroups and buffers with which its swapper is a pipeline.
- waiting: every layer waits {forward:.0f} ms in forward and {backward:.0f} ms in backward, and has
  16 tokens to compute, which leaves the CPU as idle as an accelerator would. That is long enough
  to hide an update in memory; with states on disk, what is not hidden is shown and no aim.
"""


def page(results: dict[str, Any]) -> str:
    """Markdown."""
    return "\n".join(_lines(results)) + "\n"


def _lines(results: dict[str, Any]) -> Iterator[str]:
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    yield "# Placements beside peers\n"
    yield f"{results['date']}, {versions}, {results['machine']}\n"
    yield "`python benchmarks/placement.py`; what it needs is said in `placement_peers.py`.\n"
    for setting in results["settings"]:
        yield from _setting(setting)
    yield from _disk(results["disk"])
    yield "## Aims\n"
    yield "| what | aim | found | reached |"
    yield "|---|---|---|---|"
    for aim in _aims(results):
        yield f"| {aim.what} | {aim.limit} | {aim.found} | {'yes' if aim.reached else 'NO'} |"
    yield "\n## Notes\n"
    waits = max(setting["waits_seconds"] for setting in results["settings"])
    yield NOTES.format(tolerance=SAME_LOSS, forward=1000 * waits[0], backward=1000 * waits[1])


def _setting(setting: dict[str, Any]) -> Iterator[str]:
    contenders = setting["contenders"]
    yield f"## {setting['name']}\n"
    yield (
        f"Llama {setting['hidden_size']} x {setting['layers']} layers, vocabulary "
        f"{setting['vocabulary']}, {setting['sequences']} x {setting['length']} tokens per rank.\n"
    )
    yield (
        "| | step / plain | ms: forward, backward, step | optimizer exposed | device MiB "
        "| host MiB | process MiB | moved MiB | disk read, written MiB |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, measured in contenders.items():
        if "failed" in measured:
            yield f"| {name} | did not run: {measured['failed'][:300]} | | | | | | | |"
        else:
            yield f"| {name} | {' | '.join(_cells(name, measured, contenders[PLAIN]))} |"
    yield ""


def _cells(name: str, measured: Measured, plain: Measured) -> Iterator[str]:
    yield str(step_ratio(measured, plain))
    phases = ("forward", "backward", "step")
    yield ", ".join(f"{1000 * typical(measured, phase):.0f}" for phase in phases)
    yield f"{_exposed(measured).middle:.1%}"
    ranks = measured["memory"]
    memory = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
    for key in ("device", "host", "process"):
        yield f"{memory[key] / 2**20:.0f}"
    yield f"{memory['moved'] / 2**20:.0f}{'*' if not _is_ours(name) and memory['moved'] else ''}"
    yield f"{memory['disk_read'] / 2**20:.0f}, {memory['disk_written'] / 2**20:.0f}"


def _is_ours(name: str) -> bool:
    return any(contender.name == name for contender in OURS)


def _exposed(measured: Measured) -> Spread:
    """The optimizer's share of a step that nothing hides, by rounds."""
    shares = (
        median(step["step"] + step["waited"] for step in turn) / step_seconds(turn)
        for turn in measured["rounds"]
    )
    return Spread(tuple(shares))


def _disk(disk: dict[str, Any]) -> Iterator[str]:
    yield "## Disk\n"
    yield (
        f"Records of states, {disk['pass_bytes'] / 2**21:.0f} MiB read and as many written in each "
        "pass, nothing computed.\n"
    )
    yield "| | GB/s, read and written | rate / the disk's own |"
    yield "|---|---|---|"
    for name, measured in disk["passes"].items():
        if "failed" in measured:
            yield f"| {name} | did not run: {measured['failed'][:300]} | |"
            continue
        rate = disk["pass_bytes"] / median(measured["seconds"]) / 1e9
        yield f"| {name} | {rate:.2f} | {_rate(disk, name, RAW)} |"
    yield ""


def _rate(disk: dict[str, Any], one: str, other: str) -> Spread:
    """Rate of `one` over that of `other`, by rounds."""
    seconds = [disk["passes"][name]["seconds"] for name in (other, one)]
    return Spread(tuple(theirs / mine for theirs, mine in zip(*seconds, strict=True)))


def _aims(results: dict[str, Any]) -> Iterator[Aim]:
    for setting in results["settings"]:
        ran = {name: m for name, m in setting["contenders"].items() if "failed" not in m}
        yield from _step_aims(setting, ran)
        yield same_losses(setting["name"], ran, PLAIN)
    passes = results["disk"]["passes"]
    for other, least in ((RAW, LEAST_DISK_RATE), (DEEPSPEED, DISK_LEAD)):
        if "failed" not in passes[TIGHTFIT] and "failed" not in passes[other]:
            rate = _rate(results["disk"], TIGHTFIT, other)
            what = f"disk: rate of {TIGHTFIT} / {other}"
            yield Aim(what, f"at least {least}", str(rate), rate.middle >= least)


def _step_aims(setting: dict[str, Any], ran: dict[str, Measured]) -> Iterator[Aim]:
    where = setting["name"]
    for contender in OURS:
        name = contender.name
        if name not in ran:
            continue
        below: list[tuple[str, float]] = [
            (rival, 1 + NOISE * (rival == PLAIN)) for rival in contender.rivals
        ]
        if contender.plain_step:
            below.append((contender.plain_step, 1 + NOISE))
        for other, most in below:
            if other in ran and (other != PLAIN or setting["ranks"] == 1):  # else DDP, not sharded
                ratio = step_ratio(ran[name], ran[other])
                what = f"{where}: step of {name} / {other}"
                yield Aim(what, f"at most {most}", str(ratio), ratio.middle <= most)
        if contender.plain_step and any(setting["waits_seconds"]) and "NVMe" not in name:
            exposed = _exposed(ran[name])
            what = f"{where}: optimizer exposed in {name}"
            found = f"{exposed.middle:.1%}"
            yield Aim(what, f"at most {MOST_EXPOSED:.0%}", found, exposed.middle <= MOST_EXPOSED)
