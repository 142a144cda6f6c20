"""The bill of a job exactly as it is typed, whether it fits or not. Finds nothing, times nothing.

`auto` means no technique. A job that says how many cards it uses is priced for cards, also on a
machine that has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tightfit.bill.comparison import ComparisonRow, StateBill, compare_sharding
from tightfit.bill.other_engines import OtherEngine
from tightfit.bill.runtime import Capability, Link
from tightfit.bill.table import Kind, MemoryTable
from tightfit.bill.textbook import Totals, textbook_state_bytes
from tightfit.bill.textbook_activations import (
    Recomputation,
    Transformer,
    first_stage_activation_bytes,
)
from tightfit.dry_run import DryRun, dry_run
from tightfit.errors import UnsupportedError
from tightfit.facts.hardware import Hardware
from tightfit.facts.job import Job
from tightfit.facts.machine import machine_of
from tightfit.facts.workload import Workload
from tightfit.planner.agreement import planned_policies
from tightfit.planner.explain import without_effect
from tightfit.planner.machine import DESCRIBED_CARD, card_of, limits_of, link_of, precision_of
from tightfit.planner.options import model_options
from tightfit.planner.plan import Limits, bill_json
from tightfit.planner.pricing import Config, fields_of, whole_bill
from tightfit.planner.words import techniques
from tightfit.policies import AttentionKernel, Policies, Tier

if TYPE_CHECKING:
    from tightfit.planner.elsewhere import Elsewhere


@dataclass(frozen=True)
class Estimate:
    """A bill and what it is of.

    Attributes:
        bill: of one rank, margin included.
        card: compute capability of the card that it is for; None for a CPU.
        link: between the cards of a machine.
        notes: what of the bill is assumed.
        sequence_length: tokens of the longest sequence.
    """

    policies: Policies
    run: DryRun
    bill: MemoryTable
    limits: Limits
    card: Capability | None
    link: Link
    notes: tuple[str, ...]
    sequence_length: int

    @property
    def totals(self) -> Totals:
        """Parameters by what training does with them, over all ranks."""
        return Totals(self.run.trainable, self.run.frozen, self.run.quantised)

    def textbook(self) -> Mapping[Tier, Mapping[Kind, int]]:
        """Model states and activations of one rank as papers print them, without logits."""
        tiers = {
            tier: dict(kinds)
            for tier, kinds in textbook_state_bytes(self.totals, self.policies).items()
        }
        tier = self.policies.placement.activations
        tiers.setdefault(tier, {})[Kind.ACTIVATIONS] = self._textbook_activations()
        return tiers

    def _textbook_activations(self) -> int:
        """Megatron's formulas for 16 bits (https://arxiv.org/abs/2205.05198): with a kernel that
        keeps no scores a layer counts as with selective recomputation."""
        policies, shape = self.policies, self.run.shape
        batch, sharding = policies.batch.micro_batch_size, policies.sharding
        model = Transformer(
            self.sequence_length, batch, shape.hidden_size, shape.heads, shape.layers
        )
        eager = policies.attention.kernel is AttentionKernel.EAGER
        kept = Recomputation.NONE if eager else Recomputation.SELECTIVE
        if policies.checkpointing.enabled and policies.checkpointing.every == 1:
            kept = Recomputation.FULL
        return round(
            first_stage_activation_bytes(
                model,
                kept,
                tensor_parallel=sharding.tensor_parallel,
                pipeline_parallel=sharding.pipeline_parallel,
            )
        )

    def machine_bytes(self) -> dict[Tier, int]:
        """What all ranks of the machine take together of each tier that they share."""
        ranks = self.limits.ranks
        shared = (Tier.HOST, Tier.PINNED, Tier.NVME)
        return {tier: ranks * self.bill.peak_bytes(tier) for tier in shared}

    def to_json(self) -> dict[str, object]:
        """The object documented in docs/json.md."""
        return {
            **bill_json(self.bill, self.limits),
            "bill": self.bill.to_json(),
            "machine_bytes": {str(tier): count for tier, count in self.machine_bytes().items()},
            "textbook": {
                str(tier): {str(kind): count for kind, count in kinds.items() if count}
                for tier, kinds in self.textbook().items()
                if any(kinds.values())
            },
            "plan": techniques(self.policies),
            "parameters": {
                "trainable": self.run.trainable,
                "frozen": self.run.frozen + self.run.quantised,
                "quantised": self.run.quantised,
            },
            "card": None if self.card is None else "{}.{}".format(*self.card),
            "notes": list(self.notes),
        }


def estimate_job(job: Job, config: Config, workload: Workload, hardware: Hardware) -> Estimate:
    """The bill of `job` on `hardware`.

    Raises:
        ConfigError: the job or its plan file contradicts the model.
        UnsupportedError: the model cannot do what the job asks.
    """
    card = card_of(job, hardware)
    link = link_of(job, card)
    options = model_options(
        job, fields_of(config), precision_of(job, card), on_card=card is not None
    )
    policies = options.plain() if job.plan is None else planned_policies(job, options)
    run = dry_run(config, policies, workload, card=card)
    return Estimate(
        policies=policies,
        run=run,
        bill=whole_bill(run, policies, card, link),
        limits=limits_of(job, hardware, card),
        card=card,
        link=link,
        notes=(
            *run.notes,
            *_job_notes(job, card),
            *without_effect(job, policies),
            *_base_notes(run),
            *_card_notes(job, hardware, card),
        ),
        sequence_length=workload.sequence_length,
    )


def _job_notes(job: Job, card: Capability | None) -> Iterator[str]:
    """Keys that change nothing, and what a limit is compared with."""
    given = job.model_fields_set
    if job.data_parallel_ranks == 1 and job.zero_stage not in ("auto", 0):
        yield f"zero_stage {job.zero_stage} shares nothing out: there is one data-parallel rank"
    others = ("use_rslora", "use_dora", "additional_target")
    lora = sorted(key for key in given if key.startswith("lora_") or key in others)
    if job.finetuning_type == "full" and lora:
        yield f"{', '.join(lora)}: no effect on finetuning_type full; give finetuning_type: lora"
    if card is None and {"memory_limit", "host_memory_limit"} & given:
        yield (
            "priced for the CPU of this machine, in its precision, where device and host share the "
            "RAM; with num_gpus: 1 it is priced for a card"
        )


def _base_notes(run: DryRun) -> tuple[str, ...]:
    """A base of few bits is expected to be small; where most of it is not packed, say why."""
    if not run.quantised or run.frozen < run.quantised:
        return ()
    return (
        f"{run.frozen:,} frozen parameters are not packed: experts of mixture models, which "
        "transformers keeps in three dimensions, and embeddings stay in the job's precision",
    )


def _card_notes(job: Job, hardware: Hardware, card: Capability | None) -> tuple[str, ...]:
    machine = machine_of(job)
    if machine is not None:
        return machine.notes
    ranks = job.num_gpus
    if card is None or hardware.accelerators:
        few = len(hardware.accelerators) < ranks and card is not None
        return (
            (
                f"this machine has {len(hardware.accelerators)} of the {ranks} cards; all are "
                "taken to be like its first, and its host to be theirs",
            )
            if few
            else ()
        )
    return (
        "no card here: kernels and runtime are those of compute capability {}.{} (Ampere)".format(
            *card
        ),
    )


def compare_engines(found: Estimate, config: Config, workload: Workload) -> list[Elsewhere]:
    """What one card would take for the job with other engines; nothing for a CPU."""
    if found.card is None:
        return []
    from tightfit.dry_run.config import transformers_config  # transformers takes seconds to import
    from tightfit.planner.elsewhere import price_elsewhere

    return price_elsewhere(
        transformers_config(config), found.policies, workload.sequence_length, found.card
    )


_DEEPSPEED_STAGES = (OtherEngine.DDP, OtherEngine.ZERO1, OtherEngine.ZERO2, OtherEngine.ZERO3)


def price_tool(
    found: Estimate, config: Config, workload: Workload, engine: str, **details: Any
) -> Elsewhere:
    """What one card would take with the tool that a job's config was written for.

    Args:
        engine: `deepspeed`, `fsdp1`, `fsdp2`, or `ddp` for plain replicas and one process.
        details: fields of `OtherRun` that the config says.
    """
    from tightfit.dry_run.config import transformers_config  # transformers takes seconds to import
    from tightfit.planner.elsewhere import price_with

    sharding = found.policies.sharding
    engines = {
        "deepspeed": _DEEPSPEED_STAGES[sharding.zero_stage],
        "fsdp1": OtherEngine.FSDP1,
        "fsdp2": OtherEngine.FSDP2,
        "ddp": OtherEngine.DDP if sharding.ranks > 1 else OtherEngine.SINGLE,
    }
    return price_with(
        transformers_config(config),
        found.policies,
        workload.sequence_length,
        found.card or DESCRIBED_CARD,
        engines[engine],
        **details,
    )


def compare_ways(
    found: Estimate, config: Config, workload: Workload
) -> tuple[list[ComparisonRow], list[str]]:
    """The ways to share out the model states of an estimate, and why others cannot be taken.

    `textbook` has the states alone, as papers print them, `tightfit` the whole bill of each way at
    the peak of every tier.
    """
    from tightfit.dry_run.assumed import tensors_of  # transformers takes seconds to import
    from tightfit.dry_run.config import transformers_config

    rows: list[ComparisonRow] = []
    refused: list[str] = []
    for row in compare_sharding(
        tensors_of(transformers_config(config), found.policies), found.policies
    ):
        try:
            rows.append(replace(row, tightfit=_whole(found, config, workload, row.policies)))
        except UnsupportedError as error:
            refused.append(f"{row.name}: {error}")
    return rows, refused


def _whole(found: Estimate, config: Config, workload: Workload, policies: Policies) -> StateBill:
    batch = policies.global_batch_size
    run = dry_run(config, policies, replace(workload, global_batch_size=batch), card=found.card)
    bill = whole_bill(run, policies, found.card, found.link)
    return StateBill({tier: bill.kinds_at_peak(tier) for tier in bill.tiers()})
