"""What is said when nothing fits: what is short of what, and what the user may change.

Looks for the candidate that misses the limits by least, the most promising first, and stops where
lower bounds say that no other comes nearer. Bills of a few layers stand for all here, and nothing
is priced that a bound answers. Knows nothing of how plans are found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from tightfit.bill.table import MemoryTable
from tightfit.errors import DoesNotFitError
from tightfit.planner.fitting import Fitting
from tightfit.planner.plan import Limits, LimitUse
from tightfit.planner.pricing import Pricing
from tightfit.planner.words import describe_policies
from tightfit.policies import Policies, PrecisionPolicy, Tier
from tightfit.units import MIB, format_bytes

_SHORTEST_SEQUENCE = 64


@dataclass(frozen=True)
class Instead:
    """Another job that the user could have, such as one that allows more.

    Attributes:
        name: with the key that says so.
        candidates: its leanest.
        fitting: of that job.
    """

    name: str
    candidates: Sequence[Policies]
    fitting: Fitting


@dataclass
class Shortage:
    """Puts the error together.

    Attributes:
        fitting: that has turned everything down.
        machine: what there is, below which limits may have been set.
        instead: what else could be tried, what changes least first.
        no_disk: why nothing could go to nvme; None where it could.
    """

    fitting: Fitting
    machine: Limits
    instead: Iterable[Instead] = field(default=())
    no_disk: str | None = None

    def error(self, candidates: Iterable[Policies], plain: Policies) -> DoesNotFitError:
        """The error that says how much is missing where, and what would fit.

        Args:
            candidates: those that may be smallest.
            plain: where the model can do none of them.
        """
        policies = self._nearest(candidates) or plain
        bill, limits = self._pricing.bill(policies), self.fitting.limits
        short, advice = limits.short(bill), list(self._would_fit(policies, bill))
        lines = [
            f"nothing fits: the smallest plan ({describe_policies(policies)}) needs {_needs(bill)}",
            *(f"  {_short(use)}" for use in short),
            *([f"  nvme was not tried: {self.no_disk}"] if self.no_disk else []),
            *(f"  would fit: {line}" for line in advice),
        ]
        shortage = {use.name: use.missing_bytes for use in short}
        return DoesNotFitError("\n".join(lines), limits.missing_bytes(bill), shortage, advice)

    @property
    def _pricing(self) -> Pricing:
        return self.fitting.pricing

    def _nearest(self, candidates: Iterable[Policies]) -> Policies | None:
        """The candidate that misses the limits by least, of equal ones that with fewest techniques;
        None where the model can do none."""
        found: Policies | None = None
        least = 0
        for policies in self.fitting.by_promise(candidates):
            if found is not None and self.fitting.missing_at_least(policies) >= least:
                continue
            if self.fitting.refusal(policies) is not None:
                continue
            missing = self.fitting.limits.missing_bytes(self._pricing.bill(policies))
            if found is None or missing < least:
                found, least = policies, missing
        return found

    # What would fit, from what changes least

    def _would_fit(self, policies: Policies, bill: MemoryTable) -> Iterator[str]:
        shorter = self._longest_sequence(policies)
        if shorter is not None:
            yield f"cutoff_len: {shorter} instead of {self._pricing.workload.sequence_length}"
        if policies.precision.parameters == "fp32":
            half = replace(policies, precision=PrecisionPolicy("bf16"))
            if self.fitting.would_fit(half):
                yield f"precision: bf16 instead of fp32: {_on_the_device(self._pricing, half)}"
        for option in self.instead:
            found = option.fitting.first_that_would(option.candidates)
            if found is not None:
                on_device = _on_the_device(option.fitting.pricing, found)
                yield f"{option.name}: {on_device} ({describe_policies(found)})"
        yield from self._raised_limits(bill)

    def _raised_limits(self, bill: MemoryTable) -> Iterator[str]:
        """The limits that are short, where the machine has as much: what is there cannot be
        raised."""
        short = self.fitting.limits.short(bill)
        if self.machine.missing_bytes(bill) <= 0:
            raised = " and ".join(f"{use.key}: {_whole_mib(use.need_bytes)}MiB" for use in short)
            yield f"the same plan with {raised}"

    def _longest_sequence(self, policies: Policies) -> int | None:
        """Of the halves of the job's, by bisection; None if even the shortest does not fit."""
        lengths = []
        length = self._pricing.workload.sequence_length // 2
        while length >= _SHORTEST_SEQUENCE:
            lengths.append(length)
            length //= 2
        found = None
        if not lengths or not self._fits_in(policies, lengths[-1]):
            return found
        found = lengths.pop()
        while lengths:
            middle = len(lengths) // 2
            if self._fits_in(policies, lengths[middle]):
                found, lengths = lengths[middle], lengths[:middle]
            else:
                lengths = lengths[middle + 1 :]
        return found

    def _fits_in(self, policies: Policies, length: int) -> bool:
        """Whether sequences of `length` tokens would do."""
        here = self._pricing
        workload = replace(
            here.workload,
            sequence_length=length,
            evaluation_sequence_length=min(length, here.workload.evaluation_sequence_length),
        )
        if self.fitting.limits.missing_bytes(here.least_whatever_the_batch(policies)) > 0:
            return False
        shorter = Pricing(here.plain, here.config, workload, here.rates, here.card, here.observe)
        return self.fitting.limits.missing_bytes(shorter.bill(policies)) <= 0


def _on_the_device(pricing: Pricing, policies: Policies) -> str:
    return f"{format_bytes(pricing.bill(policies).peak_bytes(Tier.DEVICE))} on the device"


def _short(use: LimitUse) -> str:
    missing, limit = format_bytes(use.missing_bytes), format_bytes(use.limit_bytes)
    return f"{use.name}: {missing} more than the limit of {limit} ({use.key})"


def _needs(bill: MemoryTable) -> str:
    device, host, nvme = (
        bill.peak_bytes(Tier.DEVICE),
        bill.peak_bytes(Tier.HOST) + bill.peak_bytes(Tier.PINNED),
        bill.peak_bytes(Tier.NVME),
    )
    on_disk = f" and {format_bytes(nvme)} on nvme" if nvme else ""
    both = "," if nvme else " and"
    return f"{format_bytes(device)} on the device{both} {format_bytes(host)} on the host{on_disk}"


def _whole_mib(count_bytes: int) -> int:
    return -(-count_bytes // MIB)
