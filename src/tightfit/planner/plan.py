"""What a planner decides: the policies, their bill and time, and what was turned down.

Plain data; `search.py` makes it, `plan_file.py` reads and writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tightfit.bill.table import MemoryTable
from tightfit.planner.words import techniques
from tightfit.policies import Policies, Tier
from tightfit.units import format_bytes


@dataclass(frozen=True)
class Limits:
    """Most bytes per tier; None is no limit.

    Attributes:
        shared_bytes: most bytes of device and host together, where both are the same RAM.
        ranks: processes that share the host and the disk.
        nvme_bytes: of the files of the nvme tier.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None
    shared_bytes: int | None = None
    ranks: int = 1
    nvme_bytes: int | None = None

    def missing_bytes(self, bill: MemoryTable) -> int:
        """How far `bill` is over the limits; zero or less if it fits."""
        tightest = self.tightest(bill)
        return 0 if tightest is None else tightest.missing_bytes

    def tightest(self, bill: MemoryTable) -> LimitUse | None:
        """The limit that `bill` is furthest over, or nearest to; None without limits."""
        return max(self._uses(bill), key=lambda use: use.missing_bytes, default=None)

    def short(self, bill: MemoryTable) -> list[LimitUse]:
        """Every limit that `bill` is over, from the device outwards. Where device or host may have
        all of the RAM that they share, only the RAM is named."""
        return [
            use
            for use in self._uses(bill)
            if use.missing_bytes > 0
            and (use.name in ("RAM", "nvme") or use.limit_bytes != self.shared_bytes)
        ]

    def _uses(self, bill: MemoryTable) -> list[LimitUse]:
        device = bill.peak_bytes(Tier.DEVICE)
        host = self.ranks * (bill.peak_bytes(Tier.HOST) + bill.peak_bytes(Tier.PINNED))
        nvme = self.ranks * bill.peak_bytes(Tier.NVME)
        return [
            LimitUse(name, need, limit)
            for name, need, limit in (
                ("device", device, self.device_bytes),
                ("host", host, self.host_bytes),
                ("RAM", self.ranks * device + host, self.shared_bytes),
                ("nvme", nvme, self.nvme_bytes),
            )
            if limit is not None
        ]


# RAM has no key of its own: `host_memory_limit` says what there is of it.
_KEYS = {
    "device": "memory_limit",
    "host": "host_memory_limit",
    "RAM": "host_memory_limit",
    "nvme": "nvme_limit",
}


@dataclass(frozen=True)
class LimitUse:
    """What a bill takes of one limit: `device`, `host`, `RAM` where they share it, or `nvme`."""

    name: str
    need_bytes: int
    limit_bytes: int

    @property
    def missing_bytes(self) -> int:
        """How far the need is over the limit; zero or less if it fits."""
        return self.need_bytes - self.limit_bytes

    @property
    def key(self) -> str:
        """The job's key that moves the limit."""
        return _KEYS[self.name]

    def __str__(self) -> str:
        need, limit = format_bytes(self.need_bytes), format_bytes(self.limit_bytes)
        return f"needs {need}, {self.name} limit {limit}"


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds of one optimizer step, by what they are spent on.

    Each part is what the others do not hide: copies, disk and updates that go on while something
    is computed count with what is left of them when that is done.
    """

    compute: float
    recompute: float
    optimizer: float
    copies: float
    overhead: float
    disk: float = 0.0
    communication: float = 0.0
    bubble: float = 0.0

    @property
    def total(self) -> float:
        """All parts."""
        parts: dict[str, float] = self.__dict__
        return sum(parts.values())

    def to_json(self) -> dict[str, float]:
        """The parts and their total."""
        return {**self.__dict__, "total": self.total}


RatesSource = Literal["probe", "quick", "published", "given"]


@dataclass(frozen=True)
class RatesNote:
    """Where the rates of a step time come from.

    Attributes:
        source: `probe` of this machine, `quick` measuring while it was planned, `published` of a
            machine that is described, or `given` by whoever asked for the plan.
        said: the same in a sentence or two; empty where there is nothing to say.
    """

    source: RatesSource = "given"
    said: str = ""


@dataclass(frozen=True)
class Candidate:
    """Policies that were priced.

    Attributes:
        bill: None where the closed form alone was already over the limit, or where the model
            does not support the policies.
        verdict: why it was chosen or turned down, with the number that decided.
    """

    policies: Policies
    bill: MemoryTable | None
    step_time: StepTime
    verdict: str


@dataclass(frozen=True)
class Slower:
    """The fastest plan of another kind, by closed forms alone.

    Attributes:
        kind: a way to share the job out, or a technique, that the plan has not.
        policies, seconds: of it, and of a step with it; None where only a dry run would say.
        verdict: why it was not taken.
    """

    kind: str
    policies: Policies | None
    seconds: float | None
    verdict: str

    def to_json(self) -> dict[str, object]:
        """The object documented in docs/json.md."""
        return {
            "kind": self.kind,
            "plan": None if self.policies is None else techniques(self.policies),
            "step_seconds": self.seconds,
            "verdict": self.verdict,
        }


@dataclass(frozen=True)
class Lighter:
    """What fits too and sends less between ranks than another plan, whatever the link's rate.

    Attributes:
        plan: what sends less; its own `lighter` sends still less, where a run may adapt.
        sent: what it sends, as a part of what the other sends, below 1.
        given: keys of the job that say otherwise. Where there are any it is for a person to change
            them.
    """

    plan: Plan
    sent: float
    given: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The chosen policies and everything said about them.

    Attributes:
        bill: of `policies` at full depth, margin included.
        plain: bill of the same job without any technique, margin included.
        reasons: one sentence for each technique: what it saves here and what it costs.
        alternatives: what was turned down, in the order of predicted time.
        slower: what would take longer, the fastest of each kind; empty where nobody has searched.
        notes: keys of the job that have changed nothing, one sentence each.
        offload_folder: of what is on nvme, whose disk was looked at; None where nothing is.
        lighter: for when ranks turn out to wait for each other; None where nothing is known or
            nobody has looked.
        rates: what the step times come from.
        bottleneck: what takes most of a step, and which memory is nearest to its limit.
    """

    policies: Policies
    bill: MemoryTable
    plain: MemoryTable
    step_time: StepTime
    limits: Limits
    trainable_parameters: int
    frozen_parameters: int
    reasons: tuple[str, ...]
    alternatives: tuple[Candidate, ...]
    notes: tuple[str, ...] = ()
    offload_folder: Path | None = None
    lighter: Lighter | None = None
    rates: RatesNote = RatesNote()
    bottleneck: str = ""
    slower: tuple[Slower, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the bill is within the limits."""
        return self.limits.missing_bytes(self.bill) <= 0

    def to_json(self) -> dict[str, object]:
        """The object documented in docs/json.md."""
        return {
            **bill_json(self.bill, self.limits),
            "plan": techniques(self.policies),
            "step_seconds": self.step_time.total,
            "step_seconds_by_part": self.step_time.to_json(),
            "rates": dict(self.rates.__dict__),
            "parameters": {
                "trainable": self.trainable_parameters,
                "frozen": self.frozen_parameters,
            },
            "plain_peak_bytes": {str(tier): self.plain.peak_bytes(tier) for tier in Tier},
            "reasons": list(self.reasons),
            "bottleneck": self.bottleneck,
            "notes": list(self.notes),
            "alternatives": [_alternative_json(candidate) for candidate in self.alternatives],
            "slower": [one.to_json() for one in self.slower],
        }


def bill_json(bill: MemoryTable, limits: Limits) -> dict[str, object]:
    """What plans and estimates say of their bills."""
    return {
        "fits": limits.missing_bytes(bill) <= 0,
        "limits": dict(limits.__dict__),
        "peak_bytes": {str(tier): bill.peak_bytes(tier) for tier in Tier},
        "phases": {
            str(phase): {str(tier): bill.phase_peak_bytes(phase, tier) for tier in Tier}
            for phase in bill.peaks
        },
        "kinds": {
            str(tier): {str(k): n for k, n in bill.kinds_at_peak(tier).items() if n}
            for tier in bill.tiers()
        },
    }


def _alternative_json(candidate: Candidate) -> Mapping[str, object]:
    bill = candidate.bill
    return {
        "plan": techniques(candidate.policies),
        "device_peak_bytes": bill.peak_bytes(Tier.DEVICE) if bill else None,
        "step_seconds": candidate.step_time.total,
        "verdict": candidate.verdict,
    }
