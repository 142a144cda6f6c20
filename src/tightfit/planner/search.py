"""Finds the fastest policies whose bill fits the limits.

Candidates are ordered by predicted step time, ties by the number of techniques. Each is first
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
from importlib.util import find_spec
from pathlib import Path

import torch

from tightfit.engine.precision import DTYPES
from tightfit.engine.supported import check_engine_can
from tightfit.errors import DoesNotFitError, UnsupportedError
from tightfit.facts.disk import nearest_existing
from tightfit.facts.hardware import Hardware
from tightfit.facts.job import Job
from tightfit.facts.machine import machine_of
from tightfit.facts.workload import Workload
from tightfit.planner import measure
from tightfit.planner.agreement import planned_policies
from tightfit.planner.described_rates import described_rates, rates_notes
from tightfit.planner.disk_rate import measure_disk
from tightfit.planner.explain import reasons_for, without_effect
from tightfit.planner.first_fit import FirstFit
from tightfit.planner.fitting import Fitting, possible
from tightfit.planner.lighter import LighterSearch, adapt_notes
from tightfit.planner.machine import (
    card_to_plan_for,
    check_nvme,
    limits_of,
    link_of,
    precision_of,
    why_no_nvme,
)
from tightfit.planner.nothing_fits import MayAllow, Shortage
from tightfit.planner.options import Options, Way, model_options
from tightfit.planner.placements import uses_disk
from tightfit.planner.plan import Lighter, Plan, RatesNote
from tightfit.planner.pricing import Config, Observe, Pricing, fields_of, nobody
from tightfit.planner.probe.known import RankShare, probed_disk, probed_rates, threads_of_rank
from tightfit.planner.rates import Rates, measure_rates
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
    search = _prepare(job, config, workload, hardware, rates, observe, threads)
    if job.plan is not None:
        policies = planned_policies(job, search.options)
        check_engine_can(policies)
        if uses_disk(policies.placement):
            check_nvme(job)
            search.measure_disk()
        plan = search.require_fit(search.plan_of(policies))
    else:
        plan = search.best()
    return search.for_a_run(plan) if lighter else plan


def _prepare(
    job: Job,
    config: Config,
    workload: Workload,
    hardware: Hardware,
    rates: Rates | None,
    observe: Observe,
    threads: int | None,
) -> _Search:
    if job.precision == "fp16":
        raise UnsupportedError(
            "precision: fp16 is not available in planning and training yet; `tightfit estimate` "
            "prices it"
        )
    if job.names_disk:
        check_nvme(job)
    card = card_to_plan_for(job, hardware)
    precision = precision_of(job, card)
    options = model_options(job, fields_of(config), precision, on_card=card is not None)
    check_engine_can(options.plain())
    machine = machine_of(job)
    note = RatesNote("given")
    if rates is None and machine is not None:
        rates, note = described_rates(machine, precision), RatesNote("published")
    device = torch.device("cpu" if card is None else "cuda")
    if rates is None and card is not None and not torch.cuda.is_available():
        raise UnsupportedError(
            "planning measures the card, and torch cannot use one here; describe the machine that "
            "is planned for, like gpu: rtx-4090"
        )
    known = (
        _RatesHere(rates, note, None)
        if rates is not None
        else _rates_here(job, hardware, device, precision, threads)
    )
    link = link_of(job, card)
    pricing = Pricing(
        options.plain(), config, workload, known.rates, card, observe, link, job.nnodes
    )
    return _Search(
        job,
        pricing,
        options,
        Fitting(pricing, limits_of(job, hardware, card)),
        disk_folder=known.disk_folder,
        rates_note=known.note,
        no_disk=why_no_nvme(job),
        quantises=find_spec("bitsandbytes") is not None,
    )


@dataclass(frozen=True)
class _RatesHere:
    """Rates of this machine, where they come from, and the folder whose disk nobody knows yet."""

    rates: Rates
    note: RatesNote
    disk_folder: Path | None


def _rates_here(
    job: Job, hardware: Hardware, device: torch.device, precision: str, threads: int | None
) -> _RatesHere:
    """What a probe has found, or what can be measured in a second."""
    computing = "fp32" if device.type == "cpu" else precision
    if threads is None:
        threads = threads_of_rank(job.num_gpus)
    place = RankShare(device, computing, job.num_gpus, threads)
    folder = nearest_existing(job.disk_folder)
    rates, said = probed_rates(hardware, place)
    if rates is None:
        with measure.threads(threads):
            rates = measure_rates(device, DTYPES[computing])
        return _RatesHere(rates, RatesNote("quick", said), folder)
    disk = probed_disk(hardware, folder)
    if disk is not None:
        rates = rates.with_disk(disk)
    return _RatesHere(rates, RatesNote("probe", said), folder if disk is None else None)


@dataclass
class _Search:
    """Looks for the plan of one job.

    Attributes:
        job: what is planned for.
        rates_note: where the rates of `pricing` come from.
        disk_folder: on the disk whose rates are not known yet; None where they are.
        no_disk: why nothing can go to nvme; None where it can.
        quantises: whether a base of few bits can be planned for.
    """

    job: Job
    pricing: Pricing
    options: Options
    fitting: Fitting
    rates_note: RatesNote
    disk_folder: Path | None
    no_disk: str | None
    quantises: bool

    def best(self) -> Plan:
        """The fastest plan that fits.

        Raises:
            DoesNotFitError: there is none.
        """
        found = next(filter(None, self._in_turn()), None)
        if found is None:
            raise self._nothing_fits()
        return self.plan_of(found)

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
        if not candidates or (on_disk and self.no_disk is not None):
            return None
        if on_disk:
            self.measure_disk()
        return FirstFit(self.options, self.fitting).of(candidates)

    def measure_disk(self) -> None:
        """Know the disk's rates from now on."""
        if self.disk_folder is not None:
            self.pricing.rates = self.pricing.rates.with_disk(measure_disk(self.disk_folder))
            self.disk_folder = None

    def _nothing_fits(self) -> DoesNotFitError:
        """The error, for what was priced and turned down and for the leanest that needed none."""
        priced = [candidate.policies for candidate in self.fitting.turned_down if candidate.bill]
        lean = [
            policies
            for way in (self.options.own, *self.options.allowed)
            for policies in self._leanest(way)
        ]
        shortage = Shortage(self.fitting, tuple(self._may_allow()), self.no_disk)
        return shortage.error(dict.fromkeys([*priced, *lean]), self.pricing.plain)

    def _may_allow(self) -> Iterator[MayAllow]:
        """Other ways to train, with placements of their own."""
        for way in self.options.not_allowed:
            if way.fixed.quantisation is None or self.quantises:
                words = ", ".join(way.allow)
                yield MayAllow(f"{way.name} (allow: [{words}])", self._leanest(way))

    def _leanest(self, way: Way) -> list[Policies]:
        """Those that the engine can do and that need no disk where there is none."""
        return [
            policies
            for policies in self.options.leanest(way)
            if possible(policies) and not (self.no_disk and uses_disk(policies.placement))
        ]

    def require_fit(self, plan: Plan) -> Plan:
        """`plan`, if it fits.

        Raises:
            DoesNotFitError: it does not.
        """
        tightest = plan.limits.tightest(plan.bill)
        if tightest is not None and tightest.missing_bytes > 0:
            missing = tightest.missing_bytes
            raise DoesNotFitError(
                f"this plan {tightest}: {format_bytes(missing)} more than the limit. Let tightfit "
                f"plan (leave out --plan), or raise {tightest.key}",
                missing,
            )
        return plan

    def plan_of(self, policies: Policies, *, explain: bool = True) -> Plan:
        """The plan with exactly these policies.

        Args:
            explain: give its reasons, which may cost dry runs.
        """
        run = self.pricing.run(policies, full_depth=True)
        limits = self.fitting.limits
        return Plan(
            policies=policies,
            bill=self.pricing.bill(policies, full_depth=True),
            plain=self.pricing.bill(self.options.plain()),
            step_time=self.pricing.step_time(policies),
            limits=limits,
            trainable_parameters=run.trainable,
            frozen_parameters=run.frozen,
            reasons=tuple(reasons_for(policies, self.pricing, limits)) if explain else (),
            alternatives=tuple(self.fitting.turned_down),
            notes=(*self._machine_notes(policies), *without_effect(self.job, policies)),
            offload_folder=self.job.disk_folder if uses_disk(policies.placement) else None,
            rates=self.rates_note,
        )

    def _machine_notes(self, policies: Policies) -> list[str]:
        """What is assumed of a machine that is described."""
        machine = machine_of(self.job)
        if machine is None:
            return []
        return [*rates_notes(machine, policies.precision.parameters), *machine.notes]

    def for_a_run(self, plan: Plan) -> Plan:
        """`plan` with what sends less between ranks and fits too, and what the job's wish to adapt
        will come to."""
        plan = self._with_lighter(plan)
        notes = adapt_notes(self.job, plan) if self.job.adapt else ()
        return replace(plan, notes=(*plan.notes, *notes))

    def _with_lighter(self, plan: Plan) -> Plan:
        """A run that may adapt may do so again: each plan sends less than the one before, so that
        none comes twice."""
        adapt = self.job.adapt
        found = LighterSearch(self.job, self.options, self.fitting).of(plan.policies)
        if found is None:
            return plan
        after = self.plan_of(found.policies, explain=adapt and not found.given)
        after = replace(after, alternatives=plan.alternatives)
        if adapt and not found.given:
            after = self._with_lighter(after)
        return replace(plan, lighter=Lighter(after, found.sent, found.given))
