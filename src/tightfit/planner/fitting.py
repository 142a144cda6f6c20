"""Whether policies fit the limits, with as few dry runs as that takes, and why others do not.

Knows bills and limits; in which order to ask is the search's business.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tightfit.bill.table import MemoryTable
from tightfit.engine.supported import engine_lacks
from tightfit.errors import UnsupportedError
from tightfit.planner.plan import Candidate, Limits
from tightfit.planner.pricing import Pricing
from tightfit.planner.stage_cuts import fullest_stage_bytes, layers_that_fit
from tightfit.planner.words import count_techniques
from tightfit.policies import Policies
from tightfit.units import format_bytes, format_seconds


def possible(policies: Policies) -> bool:
    """Whether the engine can do it at all, whatever the model."""
    return not any(engine_lacks(policies))


@dataclass
class Fitting:
    """Holds candidates against limits.

    Attributes:
        turned_down: what does not fit or is not taken, in the order in which it was asked about.
            What closed forms or the bills of others say of several candidates is noted for the
            first of them.
    """

    pricing: Pricing
    limits: Limits
    turned_down: list[Candidate] = field(default_factory=list)
    _noted: set[tuple[object, ...]] = field(default_factory=set)

    def fits(self, policies: Policies) -> bool:
        """Whether all of it fits, at full depth too."""
        return self.fits_few_layers(policies) and self.fits_whole(policies)

    def fits_few_layers(self, policies: Policies) -> bool:
        """Whether it fits by the bill of a few layers."""
        if self._exceeds_at_least(policies):
            return False
        refusal = self.refusal(policies)
        if refusal is not None:
            self.turn_down(policies, refusal)
            return False
        return self._priced(policies, full_depth=False)

    def fits_whole(self, policies: Policies) -> bool:
        """Whether it fits at full depth; asks for no other bill."""
        return self._priced(policies, full_depth=True)

    def could_fit_the_device(self, policies: Policies) -> bool:
        """Whether nothing says yet that the device is too small for it."""
        device = Limits(device_bytes=self.limits.device_bytes)
        return device.missing_bytes(self.pricing.least_bill(policies)) <= 0

    def could_fit(self, policies: Policies) -> bool:
        """Whether nothing says yet that it does not fit."""
        return self.missing_at_least(policies) <= 0

    def missing_at_least(self, policies: Policies) -> int:
        """What it misses the limits by at least, as far as is known by now; zero or less where it
        may fit."""
        return self.limits.missing_bytes(self.pricing.least_bill(policies))

    def by_promise(self, candidates: Iterable[Policies]) -> list[Policies]:
        """Those first of which least is known to be missing, of equal ones those with fewest
        techniques; without those whose adapter or base the engine cannot do with this model."""
        known = filter(self.is_counted, candidates)
        return sorted(known, key=lambda p: (self.missing_at_least(p), count_techniques(p)))

    def is_counted(self, policies: Policies) -> bool:
        """Whether the engine can do the adapter and the base with this model, whatever else is
        chosen: bounds and times are worked out from a run of them."""
        try:
            self.pricing.counts(policies)
        except UnsupportedError:
            return False
        return True

    def would_fit(self, policies: Policies) -> bool:
        """Whether it would by a bill of a few layers, asked for only where a bound does not say;
        nothing is noted."""
        if self.missing_at_least(policies) > 0 or self.refusal(policies) is not None:
            return False
        return self.limits.missing_bytes(self.pricing.bill(policies)) <= 0

    def first_that_would(self, candidates: Iterable[Policies]) -> Policies | None:
        """The first of them that would fit, the most promising first; None where none does."""
        return next(filter(self.would_fit, self.by_promise(candidates)), None)

    def layers_that_fit(self, policies: Policies) -> tuple[int, ...] | None:
        """How many layers the runs of a pipeline would have so that the device is large enough, by
        the bills of its stages; asks for no other.

        None where no bill says so yet, where it is not the device that is too small, or where they
        are those that it has.
        """
        if not self.pricing.was_run(policies):
            return None
        deep = self.pricing.was_run(policies, full_depth=True)
        run = self.pricing.run(policies, full_depth=deep)
        use = self.limits.tightest(self.pricing.bill(policies, full_depth=deep))
        if use is None or use.name != "device" or use.missing_bytes <= 0:
            return None
        beside = use.need_bytes - fullest_stage_bytes(run)
        found = layers_that_fit(policies, run, use.limit_bytes - beside)
        return None if found == run.stage_layers else found

    def refusal(self, policies: Policies) -> str | None:
        """Why the engine cannot do it with this model; None where it can."""
        try:
            self.pricing.run(policies)
        except UnsupportedError as error:
            return str(error)
        return None

    def _priced(self, policies: Policies, *, full_depth: bool) -> bool:
        bill = self.pricing.bill(policies, full_depth=full_depth)
        missing = self.limits.missing_bytes(bill)
        if missing > 0:
            said = f"{self.limits.tightest(bill)}: {format_bytes(missing)} too much"
            self.turn_down(policies, said, bill)
        return missing <= 0

    def _exceeds_at_least(self, policies: Policies) -> bool:
        """Whether it cannot fit whatever a dry run would say: no batch, or not this one."""
        states = self.limits.tightest(self.pricing.least_states(policies))
        if states is not None and states.missing_bytes > 0:
            need = format_bytes(states.need_bytes)
            self._note(policies, f"model states alone put {need} on the {states.name}")
            return True
        least = self.limits.tightest(self.pricing.least_bill(policies))
        if least is None or least.missing_bytes <= 0:
            return False
        said = f"at least {least}: {format_bytes(least.missing_bytes)} too much"
        self._note(policies, said, policies.loss, policies.checkpointing)
        return True

    def _note(self, policies: Policies, verdict: str, *shape: object) -> None:
        key = (policies.placement, policies.adapter, policies.sharding, *shape)
        if key not in self._noted:
            self._noted.add(key)
            self.turn_down(policies, verdict)

    def turn_down(self, policies: Policies, verdict: str, bill: MemoryTable | None = None) -> None:
        """Note why these are not taken.

        Args:
            bill: where it was asked for and is the reason.
        """
        seconds = self.pricing.step_time(policies)
        self.turned_down.append(
            Candidate(policies, bill, seconds, f"{verdict} ({format_seconds(seconds.total)}/step)")
        )
