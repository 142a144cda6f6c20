"""Finds the fastest policies whose bill fits the limits.

Candidates are ordered by predicted step time, near ties by the number of techniques. Each is first
held against lower bounds, then priced by a dry run; the first that fits is priced again at full
depth, so that the plan's bill was really computed. What the model does not support is turned down
like what does not fit, what the engine cannot do yet is left out. Of what leaves the device only as
much leaves as is missing; nothing is taken for faster because it leaves. The disk is tried when
nothing fits without it, and what changes numerics only where the job allows it and when nothing
else fits: optimizers with smaller states before the disk, adapters after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tightfit.engine.supported import check_engine_can
from tightfit.errors import DoesNotFitError
from tightfit.facts.hardware import Hardware
from tightfit.facts.job import Job
from tightfit.facts.machine import machine_of
from tightfit.facts.workload import Workload
from tightfit.planner.agreement import planned_policies
from tightfit.planner.described_rates import rates_notes
from tightfit.planner.explain import bottleneck, reasons_for, without_effect
from tightfit.planner.first_fit import FirstFit
from tightfit.planner.fitting import Fitting, possible
from tightfit.planner.lighter import LighterSearch, adapt_notes
from tightfit.planner.machine import check_nvme
from tightfit.planner.nothing_fits import Instead, Shortage
from tightfit.planner.options import Options, Way
from tightfit.planner.other_jobs import Elsewhere, leanest_allowed, other_jobs
from tightfit.planner.placements import uses_disk
from tightfit.planner.plan import Lighter, Plan
from tightfit.planner.prepared import Prepared, prepare
from tightfit.planner.pricing import Config, Observe, Pricing, nobody
from tightfit.planner.rates import Rates
from tightfit.planner.slower import slower_than
from tightfit.policies import Policies
from tightfit.units import format_bytes


def plan_job(
    job: Job,
    config: Config,
    workload: Workload,
    hardware: Hardware,
    rates: Rates | None = None,
    observe: Observe = nobody,
    *,
    lighter: bool = False,
    threads: int | None = None,
) -> Plan:
    """The plan for a job: the job's plan file if it names one, else the fastest that fits.

    Args:
        rates: of this machine; those of its probe, or measured, when None.
        observe: told of all policies that are about to be priced, which may take long.
        lighter: look for what sends less too, for the monitor of a run.
        threads: of each rank on the CPU; an equal share of this machine's when None.

    Raises:
        DoesNotFitError: nothing fits, or the plan file does not.
        ConfigError: the job or its plan file contradicts the model.
        UnsupportedError: the machine is another one and nobody knows its rates.
    """

    prepared = prepare(job, config, workload, hardware, rates, observe, threads)

    def elsewhere(other: Job, model: Config) -> Prepared:
        known = rates if machine_of(other) is not None else prepared.pricing.rates
        return prepare(other, model, workload, hardware, known, observe, threads)

    search = _Search(prepared, elsewhere)
    if job.plan is not None:
        policies = planned_policies(job, search.options)
        check_engine_can(policies)
        if uses_disk(policies.placement):
            check_nvme(job)
            prepared.measure_disk()
        plan = search.require_fit(search.plan_of(policies))
    else:
        plan = search.best()
    return search.for_a_run(plan) if lighter else plan


@dataclass
class _Search:
    """Looks for the plan of one job.

    Attributes:
        at: the job, and what is known of it.
        elsewhere: prepares another job, with the config of its model.
    """

    at: Prepared
    elsewhere: Elsewhere

    @property
    def options(self) -> Options:
        """Of the job."""
        return self.at.options

    @property
    def pricing(self) -> Pricing:
        """Of the job."""
        return self.at.pricing

    @property
    def fitting(self) -> Fitting:
        """Of the job."""
        return self.at.fitting

    def best(self) -> Plan:
        """The fastest plan that fits.

        Raises:
            DoesNotFitError: there is none.
        """
        found = next(filter(None, self._in_turn()), None)
        if found is None:
            raise self._nothing_fits()
        return replace(self.plan_of(found), slower=tuple(slower_than(self.at, found)))

    def _in_turn(self) -> Iterator[Policies | None]:
        """The fastest that fits of each way to train that the job allows, first without a disk.

        Adapters come last, after what else trains all parameters.
        """
        ways = (self.options.own, *self.options.allowed)
        adapted = [way for way in ways if way.fixed.adapter is not None]
        for group in ([way for way in ways if way not in adapted], adapted):
            for way in group:
                yield self._first_fit(way, on_disk=False)
            for way in group:
                yield self._first_fit(way, on_disk=True)

    def _first_fit(self, way: Way, *, on_disk: bool) -> Policies | None:
        candidates = [
            policies
            for policies in self.options.candidates(way)
            if uses_disk(policies.placement) == on_disk and possible(policies)
        ]
        if not candidates or (on_disk and self.at.no_disk is not None):
            return None
        if way is not self.options.own and not self.fitting.is_counted(candidates[0]):
            return None
        if on_disk:
            self.at.measure_disk()
        return FirstFit(self.options, self.fitting).of(candidates)

    def _nothing_fits(self) -> DoesNotFitError:
        """The error, for what was priced and turned down and for the leanest that needed none."""
        priced = [candidate.policies for candidate in self.fitting.turned_down if candidate.bill]
        lean = leanest_allowed(self.at)
        shortage = Shortage(self.fitting, self.at.machine, self._instead(), self.at.no_disk)
        return shortage.error(dict.fromkeys([*priced, *lean]), self.pricing.plain)

    def _instead(self) -> Iterator[Instead]:
        """Other ways to train, with placements of their own, other models, more RAM and cards."""
        for way in self.options.not_allowed:
            if way.fixed.quantisation is None or self.at.quantises:
                words = ", ".join(way.allow)
                name = f"{way.name} (allow: [{words}])"
                yield Instead(name, self.at.leanest(way), self.fitting)
        yield from other_jobs(self.at, self.elsewhere)

    def require_fit(self, plan: Plan) -> Plan:
        """`plan`, if it fits.

        Raises:
            DoesNotFitError: it does not.
        """
        tightest = plan.limits.tightest(plan.bill)
        if tightest is not None and tightest.missing_bytes > 0:
            missing, advice = tightest.missing_bytes, ["let tightfit plan (leave out --plan)"]
            if self.at.machine.missing_bytes(plan.bill) <= 0:
                advice.append(f"raise {tightest.key}")
            raise DoesNotFitError(
                f"this plan {tightest}: {format_bytes(missing)} more than the limit; "
                f"{', or '.join(advice)}",
                missing,
                {use.name: use.missing_bytes for use in plan.limits.short(plan.bill)},
                advice,
            )
        return plan

    def plan_of(self, policies: Policies, *, explain: bool = True) -> Plan:
        """The plan with exactly these policies.

        Args:
            explain: give its reasons, which may cost dry runs.
        """
        run, plain = self.pricing.run(policies, full_depth=True), self.options.plain()
        limits, time = self.fitting.limits, self.pricing.step_time(policies)
        bill = self.pricing.bill(policies, full_depth=True)
        return Plan(
            policies=policies,
            bill=bill,
            plain=self.pricing.bill(plain, full_depth=policies == plain),
            step_time=time,
            limits=limits,
            trainable_parameters=run.trainable,
            frozen_parameters=run.frozen,
            reasons=tuple(reasons_for(policies, self.pricing, limits)) if explain else (),
            alternatives=tuple(self.fitting.turned_down),
            notes=(*self._machine_notes(policies), *without_effect(self.at.job, policies)),
            offload_folder=self.at.job.disk_folder if uses_disk(policies.placement) else None,
            rates=self.at.rates_note,
            bottleneck=bottleneck(bill, time, limits),
        )

    def _machine_notes(self, policies: Policies) -> list[str]:
        """What is assumed of a machine that is described."""
        machine = machine_of(self.at.job)
        if machine is None:
            return []
        return [*rates_notes(machine, policies.precision.parameters), *machine.notes]

    def for_a_run(self, plan: Plan) -> Plan:
        """`plan` with what sends less between ranks and fits too, and what the job's wish to adapt
        will come to."""
        plan = self._with_lighter(plan)
        notes = adapt_notes(self.at.job, plan) if self.at.job.adapt else ()
        return replace(plan, notes=(*plan.notes, *notes))

    def _with_lighter(self, plan: Plan) -> Plan:
        """A run that may adapt may do so again: each plan sends less than the one before, so that
        none comes twice."""
        adapt = self.at.job.adapt
        found = LighterSearch(self.at.job, self.options, self.fitting).of(plan.policies)
        if found is None:
            return plan
        after = self.plan_of(found.policies, explain=adapt and not found.given)
        after = replace(after, alternatives=plan.alternatives)
        if adapt and not found.given:
            after = self._with_lighter(after)
        return replace(plan, lighter=Lighter(after, found.sent, found.given))
