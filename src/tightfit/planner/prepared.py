"""What a search needs to know before it looks: choices, prices, limits, and where rates come from.

Also who may be asked for the disk's rates, which are measured when a plan may use it. Knows nothing
of how a plan is found.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from tightfit.engine.precision import DTYPES
from tightfit.engine.supported import check_engine_can
from tightfit.errors import UnsupportedError
from tightfit.facts.disk import nearest_existing
from tightfit.facts.hardware import Hardware
from tightfit.facts.job import Job
from tightfit.facts.machine import machine_of
from tightfit.facts.workload import Workload
from tightfit.planner import measure
from tightfit.planner.described_rates import described_rates
from tightfit.planner.disk_rate import measure_disk
from tightfit.planner.fitting import Fitting, possible
from tightfit.planner.machine import (
    card_to_plan_for,
    check_nvme,
    limits_of,
    link_of,
    machine_limits,
    precision_of,
    ram_of,
    why_no_nvme,
)
from tightfit.planner.options import Options, Way, model_options
from tightfit.planner.placements import uses_disk
from tightfit.planner.plan import Limits, RatesNote
from tightfit.planner.pricing import Config, Observe, Pricing, fields_of
from tightfit.planner.probe.known import RankShare, probed_disk, probed_rates, threads_of_rank
from tightfit.planner.rates import Rates, measure_rates
from tightfit.policies import Policies


@dataclass
class Prepared:
    """One job, ready to be planned.

    Attributes:
        job: what is planned for.
        rates_note: where the rates of `pricing` come from.
        disk_folder: on the disk whose rates are not known yet; None where they are.
        no_disk: why nothing can go to nvme; None where it can.
        quantises: whether a base of few bits can be planned for.
        machine: the limits of the machine itself, below which the job may have set its own.
        ram_bytes: all of the machine's RAM; None where nobody says.
    """

    job: Job
    pricing: Pricing
    options: Options
    fitting: Fitting
    rates_note: RatesNote
    disk_folder: Path | None
    no_disk: str | None
    quantises: bool
    machine: Limits
    ram_bytes: int | None

    def measure_disk(self) -> None:
        """Know the disk's rates from now on."""
        if self.disk_folder is not None:
            self.pricing.rates = self.pricing.rates.with_disk(measure_disk(self.disk_folder))
            self.disk_folder = None

    def leanest(self, way: Way) -> list[Policies]:
        """Those that the engine can do and that need no disk where there is none."""
        return [
            policies
            for policies in self.options.leanest(way)
            if possible(policies) and not (self.no_disk and uses_disk(policies.placement))
        ]


def prepare(
    job: Job,
    config: Config,
    workload: Workload,
    hardware: Hardware,
    rates: Rates | None,
    observe: Observe,
    threads: int | None,
) -> Prepared:
    """See `plan_job`; `config` may be another model's than the job names."""
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
    return Prepared(
        job,
        pricing,
        options,
        Fitting(pricing, limits_of(job, hardware, card)),
        disk_folder=known.disk_folder,
        rates_note=known.note,
        no_disk=why_no_nvme(job),
        quantises=find_spec("bitsandbytes") is not None,
        machine=machine_limits(job, hardware, card),
        ram_bytes=ram_of(job, hardware),
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
