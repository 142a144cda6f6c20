"""Bills and step times of candidate policies for one job, each worked out once.

Knows how to price; which prices to ask for is the search's business.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from transformers import PretrainedConfig

from tightfit.bill.model_states import model_state_bytes
from tightfit.bill.table import Kind, MemoryTable
from tightfit.dry_run import DryRun, dry_run
from tightfit.facts.workload import Workload
from tightfit.planner.plan import StepTime
from tightfit.planner.rates import Rates
from tightfit.planner.step_time import ModelCost, predict_step_time
from tightfit.policies import AdapterPolicy, CheckpointingPolicy, Policies, Tier


@dataclass
class Pricing:
    """Prices of one model and workload on one machine.

    Attributes:
        plain: the job without techniques; counts that do not depend on them are taken from it.
    """

    plain: Policies
    config: PretrainedConfig
    workload: Workload
    rates: Rates
    _runs: dict[tuple[Policies, bool], DryRun] = field(default_factory=dict)

    def run(self, policies: Policies, *, full_depth: bool = False) -> DryRun:
        """The dry run of `policies`; what the optimizer's numbers are does not matter to it."""
        key = (replace(policies, optimizer=type(policies.optimizer)()), full_depth)
        if key not in self._runs:
            self._runs[key] = dry_run(self.config, policies, self.workload, full_depth=full_depth)
        return self._runs[key]

    def bill(self, policies: Policies, *, full_depth: bool = False) -> MemoryTable:
        """The dry run's table with the margin added."""
        return self.run(policies, full_depth=full_depth).table.with_margin()

    def least_device_bytes(self, policies: Policies) -> int:
        """What model states alone put on the device, whatever the batch: a lower bound."""
        counts = self._plain_run(policies.adapter)
        states = model_state_bytes(counts.trainable, counts.frozen, policies)[Tier.DEVICE]
        return sum(states.values()) - states.get(Kind.GRADIENTS, 0)

    def step_time(self, policies: Policies) -> StepTime:
        """Predicted seconds of one optimizer step."""
        return predict_step_time(self._cost(policies), policies, self.workload, self.rates)

    def _plain_run(self, adapter: AdapterPolicy | None) -> DryRun:
        return self.run(replace(self.plain, adapter=adapter))

    def _cost(self, policies: Policies) -> ModelCost:
        run = self._plain_run(policies.adapter)
        config = self.config
        head = config.vocab_size * config.hidden_size
        total = run.trainable + run.frozen
        return ModelCost(
            trainable=run.trainable,
            matmul_parameters=total if config.tie_word_embeddings else total - head,
            head_parameters=head,
            layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            activation_bytes_per_token=self._activation_bytes_per_token,
        )

    @cached_property
    def _activation_bytes_per_token(self) -> float:
        keeping_all = replace(self.plain, checkpointing=CheckpointingPolicy())
        peaks = self.run(keeping_all).table.peaks
        most = max(kinds[Tier.DEVICE].get(Kind.ACTIVATIONS, 0) for kinds in peaks.values())
        return most / (self.plain.batch.micro_batch_size * self.workload.sequence_length)
