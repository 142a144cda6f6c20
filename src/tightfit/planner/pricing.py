"""Bills and step times of candidate policies for one job, each worked out once.

Knows how to price; which prices to ask for is the search's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from tightfit.bill.model_states import model_state_bytes
from tightfit.bill.runtime import Capability, likely_link, runtime_bytes
from tightfit.bill.table import Kind, MemoryTable
from tightfit.dry_run import DryRun, dry_run
from tightfit.facts.workload import Workload
from tightfit.planner.plan import StepTime
from tightfit.planner.rates import Rates
from tightfit.planner.step_time import ModelCost, predict_step_time
from tightfit.policies import AdapterPolicy, CheckpointingPolicy, Policies, Tier

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# The content of a config.json, or transformers' own object.
Config: TypeAlias = "Mapping[str, Any] | PretrainedConfig"


def fields_of(config: Config) -> Mapping[str, Any]:
    """The fields of a config as a mapping."""
    return config if isinstance(config, Mapping) else config.to_dict()


def whole_bill(run: DryRun, policies: Policies, card: Capability | None) -> MemoryTable:
    """A dry run's table, what a card holds beside tensors, and the margin."""
    sharding = policies.sharding
    sizes = (sharding.data_parallel, sharding.tensor_parallel, sharding.pipeline_parallel)
    runtime = runtime_bytes(
        card,
        ranks=sharding.ranks,
        communicators=sum(size > 1 for size in sizes),
        link=likely_link(card),
        all_reduces=sharding.zero_stage == 0 or sharding.tensor_parallel > 1,
    )
    table = run.table
    if runtime.total_bytes:
        table = table.plus(Tier.DEVICE, Kind.RUNTIME, runtime.total_bytes)
    return table.with_margin()


@dataclass
class Pricing:
    """Prices of one model and workload on one machine.

    Attributes:
        card: compute capability of the card that is planned for.
        plain: the job without techniques; counts that do not depend on them are taken from it.
    """

    plain: Policies
    config: Config
    workload: Workload
    rates: Rates
    card: Capability | None = None
    _runs: dict[tuple[Policies, bool], DryRun] = field(default_factory=dict)

    def run(self, policies: Policies, *, full_depth: bool = False) -> DryRun:
        """The dry run of `policies`; what the optimizer's numbers are does not matter to it."""
        key = (replace(policies, optimizer=type(policies.optimizer)()), full_depth)
        if key not in self._runs:
            self._runs[key] = dry_run(
                self.config, policies, self.workload, full_depth=full_depth, card=self.card
            )
        return self._runs[key]

    def bill(self, policies: Policies, *, full_depth: bool = False) -> MemoryTable:
        """The dry run's table with the margin added."""
        run = self.run(policies, full_depth=full_depth)
        return whole_bill(run, policies, self.card)

    def least_device_bytes(self, policies: Policies) -> int:
        """What model states alone put on the device, whatever the batch: a lower bound."""
        counts = self._plain_run(policies.adapter)
        states = model_state_bytes(
            counts.trainable, counts.frozen, policies, quantised=counts.quantised
        )[Tier.DEVICE]
        return sum(states.values()) - states.get(Kind.GRADIENTS, 0)

    def step_time(self, policies: Policies) -> StepTime:
        """Predicted seconds of one optimizer step."""
        return predict_step_time(self._cost(policies), policies, self.workload, self.rates)

    def _plain_run(self, adapter: AdapterPolicy | None) -> DryRun:
        return self.run(replace(self.plain, adapter=adapter))

    def _cost(self, policies: Policies) -> ModelCost:
        run = self._plain_run(policies.adapter)
        shape = run.shape
        head = shape.vocab_size * shape.hidden_size
        total = run.trainable + run.frozen + run.quantised
        return ModelCost(
            trainable=run.trainable,
            matmul_parameters=total if shape.tied else total - head,
            head_parameters=head,
            layers=shape.layers,
            hidden_size=shape.hidden_size,
            activation_bytes_per_token=self._activation_bytes_per_token,
        )

    @cached_property
    def _activation_bytes_per_token(self) -> float:
        keeping_all = replace(self.plain, checkpointing=CheckpointingPolicy())
        peaks = self.run(keeping_all).table.peaks
        most = max(kinds[Tier.DEVICE].get(Kind.ACTIVATIONS, 0) for kinds in peaks.values())
        return most / (self.plain.batch.micro_batch_size * self.workload.sequence_length)
