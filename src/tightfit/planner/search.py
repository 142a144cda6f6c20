"""Finds the fastest policies whose bill fits the limits.

Candidates are ordered by predicted step time, ties by the number of techniques. Each is first
held against a closed-form lower bound, then priced by a dry run; the first that fits is priced
again at full depth, so that the plan's bill was really computed. What the model does not support
is turned down like what does not fit. What changes numerics is tried only where the job allows it
and only when nothing else fits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from tightfit.bill.table import MemoryTable
from tightfit.engine.precision import DTYPES
from tightfit.engine.supported import check_engine_can
from tightfit.errors import DoesNotFitError, UnsupportedError
from tightfit.facts.hardware import Hardware
from tightfit.facts.job import Job
from tightfit.facts.workload import Workload
from tightfit.planner.explain import nothing_fits, reasons_for
from tightfit.planner.machine import card_here, limits_of, precision_of
from tightfit.planner.options import Options, model_options, planned_policies
from tightfit.planner.plan import Candidate, Limits, Plan, count_techniques
from tightfit.planner.pricing import Config, Pricing, fields_of
from tightfit.planner.rates import Rates, measure_rates
from tightfit.policies import AdapterPolicy, PlacementPolicy, Policies
from tightfit.units import format_bytes, format_seconds


def plan_job(
    job: Job,
    config: Config,
    workload: Workload,
    hardware: Hardware,
    rates: Rates | None = None,
) -> Plan:
    """The plan for a job: the job's plan file if it names one, else the fastest that fits.

    Args:
        rates: of this machine; measured when None.

    Raises:
        DoesNotFitError: nothing fits, or the plan file does not.
        ConfigError: the job or its plan file contradicts the model.
        UnsupportedError: the machine is another one and nobody knows its rates.
    """
    search = _prepare(job, config, workload, hardware, rates)
    if job.plan is not None:
        return search.require_fit(search.plan_of(planned_policies(job, search.options)))
    return search.best()


def _prepare(
    job: Job,
    config: Config,
    workload: Workload,
    hardware: Hardware,
    rates: Rates | None,
) -> _Search:
    _check_can_be_trained(job)
    card = card_here(hardware)
    precision = precision_of(job, card)
    options = model_options(job, fields_of(config), precision)
    check_engine_can(options.plain())
    device = torch.device("cpu" if card is None else "cuda")
    if rates is None and card is not None and not torch.cuda.is_available():
        raise UnsupportedError(
            "planning for a card that this machine does not have is not available yet; "
            "`tightfit estimate` prices a job for one"
        )
    rates = rates or measure_rates(device, torch.float32 if card is None else DTYPES[precision])
    pricing = Pricing(options.plain(), config, workload, rates, card)
    return _Search(pricing, options, limits_of(job, hardware, card))


def _check_can_be_trained(job: Job) -> None:
    """See that the job needs nothing that the engine does and loading or launching does not yet.

    Raises:
        UnsupportedError: it does.
    """
    if job.num_gpus > 1:
        raise UnsupportedError(
            f"num_gpus: {job.num_gpus} is not available in planning and training yet; "
            "`tightfit estimate` prices it, and `--compare` all ways to share it out"
        )
    if job.quantization_bit is not None or job.precision == "fp16":
        key = "precision: fp16" if job.precision == "fp16" else "quantization_bit"
        raise UnsupportedError(
            f"{key} is not available in planning and training yet; `tightfit estimate` prices it"
        )


@dataclass
class _Search:
    pricing: Pricing
    options: Options
    limits: Limits
    turned_down: list[Candidate] = field(default_factory=list)
    _exceeding: set[tuple[PlacementPolicy, AdapterPolicy | None]] = field(default_factory=set)

    def best(self) -> Plan:
        """The fastest plan that fits.

        Raises:
            DoesNotFitError: there is none.
        """
        found = self._first_fit(self.options.candidates())
        lora = self.options.lora_if_nothing_fits
        if found is None and lora is not None:
            found = self._first_fit(self.options.candidates(lora))
        if found is None:
            raise nothing_fits(self._tried(), self.options.lora, self.pricing, self.limits)
        return self.plan_of(found)

    def _tried(self) -> list[Policies]:
        """What was priced and turned down, and the leanest of those that needed no pricing."""
        priced = [candidate.policies for candidate in self.turned_down if candidate.bill]
        lean = self.options.leanest()
        if self.options.lora_if_nothing_fits is not None:
            lean += self.options.leanest(self.options.lora_if_nothing_fits)
        priced += [policies for policies in lean if self._refusal(policies) is None]
        return priced or [self.options.plain()]

    def require_fit(self, plan: Plan) -> Plan:
        """`plan`, if it fits.

        Raises:
            DoesNotFitError: it does not.
        """
        missing = self.limits.missing_bytes(plan.bill)
        if missing > 0:
            raise DoesNotFitError(
                f"this plan {self.limits.tightest(plan.bill)}: {format_bytes(missing)} more than "
                "the limit. Let tightfit plan (leave out --plan), or raise memory_limit "
                "(host_memory_limit where the host is short)",
                missing,
            )
        return plan

    def plan_of(self, policies: Policies, *, verify: bool = True) -> Plan:
        """The plan with exactly these policies."""
        run = self.pricing.run(policies, full_depth=verify)
        plain = self.options.plain()
        return Plan(
            policies=policies,
            bill=self.pricing.bill(policies, full_depth=verify),
            plain=self.pricing.bill(plain),
            step_time=self.pricing.step_time(policies),
            limits=self.limits,
            trainable_parameters=run.trainable,
            frozen_parameters=run.frozen,
            reasons=tuple(reasons_for(policies, self.pricing, self.limits)),
            alternatives=tuple(self.turned_down),
        )

    def _first_fit(self, candidates: Iterable[Policies]) -> Policies | None:
        priced = [(self.pricing.step_time(p).total, count_techniques(p), p) for p in candidates]
        for _, _, policies in sorted(priced, key=lambda entry: entry[:2]):
            if self._fits(policies):
                return policies
        return None

    def _fits(self, policies: Policies) -> bool:
        """Whether it fits; notes why not."""
        if self._states_alone_exceed(policies):
            return False
        refusal = self._refusal(policies)
        if refusal is not None:
            self._turn_down(policies, None, refusal)
            return False
        for full_depth in (False, True):
            bill = self.pricing.bill(policies, full_depth=full_depth)
            missing = self.limits.missing_bytes(bill)
            if missing > 0:
                said = f"{self.limits.tightest(bill)}: {format_bytes(missing)} too much"
                self._turn_down(policies, bill, said)
                return False
        return True

    def _refusal(self, policies: Policies) -> str | None:
        """Why the engine cannot do it with this model; None where it can."""
        try:
            self.pricing.run(policies)
        except UnsupportedError as error:
            return str(error)
        return None

    def _states_alone_exceed(self, policies: Policies) -> bool:
        """Whether no batch could fit with this placement; noted once for all batches."""
        limit = self.limits.device_bytes
        least = self.pricing.least_device_bytes(policies)
        if limit is None or least <= limit:
            return False
        shape = (policies.placement, policies.adapter)
        if shape not in self._exceeding:
            self._exceeding.add(shape)
            self._turn_down(
                policies, None, f"model states alone put {format_bytes(least)} on the device"
            )
        return True

    def _turn_down(self, policies: Policies, bill: MemoryTable | None, verdict: str) -> None:
        seconds = self.pricing.step_time(policies)
        self.turned_down.append(
            Candidate(policies, bill, seconds, f"{verdict} ({format_seconds(seconds.total)}/step)")
        )
