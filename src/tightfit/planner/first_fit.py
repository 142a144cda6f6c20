"""The first of many candidates that fits, in the order of predicted time; of those that take as
long as it, as far as a prediction can tell, the one with fewest techniques.

Of candidates whose fraction is open only as much leaves the device as is missing. That is found
from the bill of those that send all of it away, then priced. Nothing is taken for faster because
something leaves: what fits without comes first. Where a pipeline does not fit, its stages get
other layers, as their bills say, and it takes the place of the time that it then has.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import chain
from math import inf

from tightfit.planner.fitting import Fitting, possible
from tightfit.planner.fractions import fraction_of, layer_bytes, least_leaving, with_fraction
from tightfit.planner.options import Options
from tightfit.planner.stage_bounds import is_uncut
from tightfit.planner.words import count_techniques
from tightfit.policies import PlacementPolicy, Policies, Tier

_MOST_TRIES = 3  # of a fraction, and of other layers for stages; each costs dry runs
# Times this near to each other are equal: predictions are not that good (docs/planning.md), and
# what a technique costs in care is not among them.
EQUAL_TIMES = 1.02
_MORE_TECHNIQUES = f"more techniques for less than {EQUAL_TIMES - 1:.0%} of the time"


@dataclass(order=True)
class _Entry:
    """A candidate on the list.

    Attributes:
        seconds: of a step; never less than with nothing off the device that may stay.
        techniques: how many there are.
        leaving: how much leaves.
        number: of the candidate it comes from.
        whole: that candidate.
        name: the field of its placement that is open; None where nothing is.
        layers: how many leave; 0 where that is still to be found.
        tries: bills that were asked for.
        cuts: the layers of stages that were tried before these.
    """

    seconds: float
    techniques: int
    leaving: float
    number: int
    whole: Policies = field(compare=False)
    name: str | None = field(default=None, compare=False)
    layers: int = field(default=0, compare=False)
    tries: int = field(default=0, compare=False)
    cuts: tuple[tuple[int, ...], ...] = field(default=(), compare=False)


@dataclass
class FirstFit:
    """Looks for the first that fits."""

    options: Options
    fitting: Fitting
    _staying: dict[tuple[object, ...], float] = field(default_factory=dict)

    def of(self, candidates: Iterable[Policies]) -> Policies | None:
        """None where none fits."""
        queue = self._queue(candidates)
        while True:
            fitting, passed = self._by_few_layers(queue)
            if not fitting:
                return None
            *others, found = fitting
            policies = self._policies(found)
            if self.fitting.fits_whole(policies):
                for entry in others:
                    self.fitting.turn_down(self._policies(entry), _MORE_TECHNIQUES)
                return policies
            for entry in (*others, *passed, *self._following(found)):
                heappush(queue, entry)

    def _by_few_layers(self, queue: list[_Entry]) -> tuple[list[_Entry], list[_Entry]]:
        """What fits by bills of a few layers, each with fewer techniques than the one before, so
        the last is the one to take; and what had no fewer. A run of all layers is dear: only the
        one to take has one."""
        latest = inf
        fitting: list[_Entry] = []
        passed: list[_Entry] = []
        while queue and queue[0].seconds <= latest:
            entry = heappop(queue)
            if fitting and entry.techniques >= fitting[-1].techniques:
                passed.append(entry)
                continue
            is_known = entry.name is None or entry.tries
            if is_known and self.fitting.fits_few_layers(self._policies(entry)):
                fitting.append(entry)
                latest = min(latest, entry.seconds * EQUAL_TIMES)
                continue
            for following in self._following(entry):
                heappush(queue, following)
        return fitting, passed

    def first_that_could(self, candidates: Iterable[Policies], seconds: float) -> Policies | None:
        """`first_of_each`, where all are of one kind; None where there is none."""
        kinds = dict.fromkeys(candidates, ("",))
        return self.first_of_each(kinds, seconds).get("")

    def first_of_each(
        self, kinds: Mapping[Policies, Collection[str]], seconds: float
    ) -> dict[str, Policies]:
        """Of each kind the first that was not turned down and of which nothing says that it does
        not fit, if there is one; asks for no bill.

        Args:
            kinds: of each candidate, as many as it is of.
            seconds: of a step; what is faster was looked at before.
        """
        down = {candidate.policies for candidate in self.fitting.turned_down}
        queue, left = self._queue(kinds), set(chain.from_iterable(kinds.values()))
        found: dict[str, Policies] = {}
        while queue and left:
            entry = heappop(queue)
            names = left.intersection(kinds[entry.whole])
            if not names:
                continue
            if entry.name is not None and not entry.layers:
                following = self._at_least(entry)
                if following is not None:
                    heappush(queue, following)
                continue
            policies = self._policies(entry)
            is_new = entry.seconds >= seconds and policies not in down
            if is_new and self.fitting.could_fit(policies):
                found |= dict.fromkeys(names, policies)
                left -= names
        return found

    def _queue(self, candidates: Iterable[Policies]) -> list[_Entry]:
        """A heap of them; those whose fraction is open once with all of it and once with less."""
        queue = [
            self._entry(number, policies, name)
            for number, policies in enumerate(candidates)
            for name in (None, *self._open(policies))
        ]
        heapify(queue)
        return queue

    def _other_layers(self, entry: _Entry) -> Iterator[_Entry]:
        """The candidate with other layers for its stages, once for each way to have less of it
        leave; nothing where they were given, or no other ones are known."""
        if len(entry.cuts) == _MOST_TRIES or not (entry.cuts or is_uncut(entry.whole)):
            return
        layers = self.fitting.layers_that_fit(entry.whole)
        cuts = (*entry.cuts, entry.whole.sharding.stage_layers)
        if layers is None or layers in cuts:
            return
        sharding = replace(entry.whole.sharding, stage_layers=layers)
        whole = replace(entry.whole, sharding=sharding)
        for name in (None, *self._open(whole)):
            other = self._entry(entry.number, whole, name)
            other.cuts = cuts
            yield other

    def _open(self, policies: Policies) -> tuple[str, ...]:
        """The fraction that is open, if one is and the engine can do with less than all."""
        name = self.options.open_fraction(policies)
        if name is None:
            return ()
        least = with_fraction(policies, name, fraction_of(1, self._layers(policies)))
        return (name,) if possible(least) else ()

    def _entry(
        self, number: int, whole: Policies, name: str | None, layers: int = 0, tries: int = 0
    ) -> _Entry:
        """Where the fraction is not known yet, as if nothing left."""
        entry = _Entry(self._seconds_staying(whole), 0, 0.0, number, whole, name, layers, tries)
        entry.techniques = count_techniques(whole)
        if name is None or layers:
            policies = self._policies(entry)
            entry.seconds = max(entry.seconds, self.fitting.pricing.step_time(policies).total)
            entry.leaving = _leaving(policies.placement)
        return entry

    def _seconds_staying(self, whole: Policies) -> float:
        """Of a step with nothing off the device that may stay."""
        decides = (
            whole.sharding, whole.batch, whole.loss, whole.checkpointing,
            whole.adapter, whole.quantisation, whole.optimizer,
        )  # fmt: skip
        if decides not in self._staying:
            nearest = self.options.way_of(whole).placement.all[0]
            staying = replace(whole, placement=nearest)
            self._staying[decides] = self.fitting.pricing.step_time(staying).total
        return self._staying[decides]

    def _policies(self, entry: _Entry) -> Policies:
        if entry.name is None:
            return entry.whole
        fraction = fraction_of(max(1, entry.layers), self._layers(entry.whole))
        return with_fraction(entry.whole, entry.name, fraction)

    def _layers(self, policies: Policies) -> int:
        return self.fitting.pricing.counts(policies).shape.layers

    def _following(self, entry: _Entry) -> Iterator[_Entry]:
        """What is left to try of an entry that did not fit or that is not known yet; a fraction at
        the price of a dry run only where bounds leave it among the fastest."""
        if entry.name is None:
            yield from self._other_layers(entry)
            return
        if not entry.layers:
            following = self._at_least(entry)
        else:
            following = self._more(entry) if entry.tries else self._least(entry)
        if following is not None:
            yield following

    def _at_least(self, entry: _Entry) -> _Entry | None:
        """The entry with the fewest layers of which nothing says yet that the device is too small
        for what stays, or another tier for what leaves; asks for no bill."""
        whole, name, layers = entry.whole, entry.name, self._layers(entry.whole)
        assert name is not None
        if self.fitting.limits.device_bytes is None or not self.fitting.could_fit_the_device(whole):
            return None

        def leaving(count: int) -> Policies:
            return with_fraction(whole, name, fraction_of(count, layers))

        # The more leave the emptier is the device and the fuller is where they go.
        counts = range(1, layers + 1)
        index = bisect_left(
            counts, True, key=lambda count: self.fitting.could_fit_the_device(leaving(count))
        )
        if index == layers or not self.fitting.could_fit(leaving(counts[index])):
            return None
        return self._entry(entry.number, whole, name, counts[index])

    def _least(self, entry: _Entry) -> _Entry | None:
        """The entry with as many layers as the bill of all of them says are missing, or a likely
        one, as its own will be asked for; None where no number of them could do."""
        fitting, whole, name = self.fitting, entry.whole, entry.name
        limit = fitting.limits.device_bytes
        assert name is not None
        assert limit is not None
        # Bounds are closer by now.
        if self._at_least(entry) is None:
            return None
        bill = fitting.pricing.likely_bill(whole)
        if bill is None:
            if fitting.refusal(whole) is not None:
                return None
            bill = fitting.pricing.bill(whole)
        run = fitting.pricing.counts(whole)
        layers = least_leaving(whole, name, bill, run, limit)
        if layers is None:
            return None
        return self._entry(entry.number, whole, name, layers, 1)

    def _more(self, entry: _Entry) -> _Entry | None:
        """The entry with what its own bill, or a bound, has shown to be missing on the device as
        well; None where another tier is short, or all may as well leave."""
        policies, pricing, limits = self._policies(entry), self.fitting.pricing, self.fitting.limits
        assert entry.name is not None
        if pricing.was_run(policies):
            use = limits.tightest(pricing.bill(policies))
            if use is not None and use.missing_bytes <= 0:  # so it is at full depth
                use = limits.tightest(pricing.bill(policies, full_depth=True))
        else:  # a bound was enough to turn it down
            use = limits.tightest(pricing.least_bill(policies))
        if use is None or use.name != "device" or entry.tries == _MOST_TRIES:
            return None
        each = layer_bytes(pricing.counts(policies), entry.whole, entry.name)
        layers = entry.layers + max(1, -(-use.missing_bytes // each))
        if layers > self._layers(policies):
            return None
        return self._entry(entry.number, entry.whole, entry.name, layers, entry.tries + 1)


def _leaving(placement: PlacementPolicy) -> float:
    """How much leaves: of equally fast candidates the one with least comes first."""
    states = placement.optimizer_states is not Tier.DEVICE
    parameters = placement.parameters is not Tier.DEVICE
    return (
        states * placement.optimizer_fraction
        + parameters * placement.parameter_fraction
        + (placement.activations is not Tier.DEVICE)
        + (placement.gradients is Tier.NVME)
    )
