"""Bills and step times of candidate policies for one job, each worked out once.

Knows how to price; which prices to ask for is the search's business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from tightfit.bill.optimizers import FP32_BYTES
from tightfit.bill.runtime import Capability, Link, likely_link, runtime_bytes
from tightfit.bill.table import Kind, MemoryTable
from tightfit.dry_run import DryRun, dry_run
from tightfit.errors import UnsupportedError
from tightfit.facts.model_spec import ModelSpec
from tightfit.facts.workload import Workload
from tightfit.planner.bounds import LowerBounds
from tightfit.planner.collectives import Exchange, ModelSizes, exchanges
from tightfit.planner.computing import ModelCost
from tightfit.planner.plan import StepTime
from tightfit.planner.rates import Rates
from tightfit.planner.step_time import predict_step_time
from tightfit.planner.traffic import Traffic, traffic_of
from tightfit.policies import (
    AdapterPolicy,
    CheckpointingPolicy,
    LossKind,
    Master,
    OptimizerPolicy,
    PlacementPolicy,
    Policies,
    QuantisationPolicy,
    Tier,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# The content of a config.json, or transformers' own object.
Config: TypeAlias = "Mapping[str, Any] | PretrainedConfig"


# What decides how many parameters there are of which kind.
_Weights: TypeAlias = tuple[AdapterPolicy | None, QuantisationPolicy | None]
Observe: TypeAlias = Callable[[Policies], None]


def nobody(policies: Policies) -> None:
    """Nobody watches."""


def fields_of(config: Config) -> Mapping[str, Any]:
    """The fields of a config as a mapping."""
    return config if isinstance(config, Mapping) else config.to_dict()


def whole_bill(
    run: DryRun, policies: Policies, card: Capability | None, link: Link | None = None
) -> MemoryTable:
    """A dry run's table, what a card holds beside tensors, and the margin.

    Args:
        link: between the cards of a machine; as in most machines with such a card when None.
    """
    return _whole(run.table, policies, card, link)


def _whole(
    table: MemoryTable, policies: Policies, card: Capability | None, link: Link | None
) -> MemoryTable:
    sharding = policies.sharding
    sizes = (
        sharding.data_parallel // sharding.shards,
        sharding.shards,
        sharding.tensor_parallel,
        sharding.pipeline_parallel,
    )
    runtime = runtime_bytes(
        card,
        ranks=sharding.ranks,
        communicators=sum(size > 1 for size in sizes),
        link=link or likely_link(card),
        all_reduces=sharding.data_parallel > sharding.shards
        or max(sharding.tensor_parallel, sharding.pipeline_parallel) > 1,
    )
    if runtime.total_bytes:
        table = table.plus(Tier.DEVICE, Kind.RUNTIME, runtime.total_bytes)
    return table.with_margin()


def _without_numbers(policies: Policies, *, full_depth: bool) -> tuple[Policies, bool]:
    """All that a dry run depends on."""
    optimizer = policies.optimizer
    states = OptimizerPolicy(optimizer.name, master=optimizer.master)
    return replace(policies, optimizer=states), full_depth


def _sizes(run: DryRun) -> ModelSizes:
    shape = run.shape
    return ModelSizes(
        trainable=run.trainable,
        frozen=run.frozen,
        quantised=run.quantised,
        trained_tensors=run.trained_tensors,
        layers=shape.layers,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        tied=shape.tied,
    )


@dataclass
class Pricing:
    """Prices of one model and workload on one machine.

    Attributes:
        card: compute capability of the card that is planned for.
        link: between cards of a machine; as in most machines when None.
        machines: that the ranks are on.
        observe: told what is worked out, before each dry run.
        plain: the job without techniques; counts that do not depend on them are taken from it.
    """

    plain: Policies
    config: Config
    workload: Workload
    rates: Rates
    card: Capability | None = None
    observe: Observe = nobody
    link: Link | None = None
    machines: int = 1
    _runs: dict[tuple[Policies, bool], DryRun] = field(default_factory=dict)
    _refused: dict[tuple[Policies, bool], str] = field(default_factory=dict)
    _least: LowerBounds = field(init=False)
    _times: dict[Policies, StepTime] = field(init=False, default_factory=dict)
    _timed_with: Rates | None = field(init=False, default=None)
    _counted: dict[_Weights, DryRun] = field(init=False, default_factory=dict)
    _costs: dict[_Weights, ModelCost] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._least = LowerBounds(self.workload.sequence_length)

    def run(self, policies: Policies, *, full_depth: bool = False) -> DryRun:
        """The dry run of `policies`; what the optimizer's numbers are does not matter to it.

        Raises:
            UnsupportedError: the engine cannot do them with this model.
        """
        key = _without_numbers(policies, full_depth=full_depth)
        if key in self._refused:
            raise UnsupportedError(self._refused[key])
        few = self._runs.get((key[0], False))
        if few is not None and few.whole:  # it is the same at full depth
            return few
        if key not in self._runs:
            self.observe(policies)
            try:
                self._runs[key] = dry_run(
                    self.config, policies, self.workload, full_depth=key[1], card=self.card
                )
            except UnsupportedError as error:
                self._refused[key] = str(error)
                raise
            self._least.learn(policies, self._runs[key])
        return self._runs[key]

    def was_run(self, policies: Policies, *, full_depth: bool = False) -> bool:
        """Whether there is a dry run of `policies`, of a few layers or of all."""
        return _without_numbers(policies, full_depth=full_depth) in self._runs

    def bill(self, policies: Policies, *, full_depth: bool = False) -> MemoryTable:
        """The dry run's table with the margin added."""
        run = self.run(policies, full_depth=full_depth)
        return whole_bill(run, policies, self.card, self.link)

    def least_states(self, policies: Policies) -> MemoryTable:
        """What model states alone take, whatever the batch: a lower bound."""
        return self._least.states(policies, self.counts(policies))

    def least_whatever_the_batch(self, policies: Policies) -> MemoryTable:
        """States and what visits the device, and what was seen beside training: a lower bound."""
        return self._least.whatever_the_batch(policies, self.counts(policies))

    def least_bill(self, policies: Policies) -> MemoryTable:
        """A lower bound from closed forms and from the dry runs so far; it makes none."""
        least = self._least.table(policies, self.counts(policies))
        return _whole(least, policies, self.card, self.link)

    def likely_bill(self, policies: Policies) -> MemoryTable | None:
        """The bill as far as those so far tell, near to it and no bound; it makes none. None where
        there is no bill of anything near."""
        likely = self._least.likely(policies, self.counts(policies))
        return None if likely is None else _whole(likely, policies, self.card, self.link)

    def step_time(self, policies: Policies) -> StepTime:
        """Predicted seconds of one optimizer step."""
        if self._timed_with is not self.rates:  # a disk's are measured late
            self._times.clear()
            self._timed_with = self.rates
        if policies not in self._times:
            self._times[policies] = self._step_time(policies)
        return self._times[policies]

    def _step_time(self, policies: Policies) -> StepTime:
        cost = self._cost(policies)
        return predict_step_time(
            cost,
            policies,
            self.workload,
            self.rates.at_width(cost.hidden_size),
            self.traffic(policies),
            machines=self.machines,
            on_card=self.card is not None,
        )

    def traffic(self, policies: Policies) -> Traffic:
        """What one optimizer step moves between tiers."""
        tokens = self.workload.average_tokens_per_step / policies.sharding.ranks
        run = self.counts(policies)
        per_token = self._activation_bytes_per_token
        if policies.checkpointing.enabled:
            inputs = run.shape.layers * run.shape.hidden_size * policies.precision.parameter_bytes
            every = policies.checkpointing.every
            per_token = inputs / every + per_token * (1 - 1 / every)
        return traffic_of(run, policies, tokens * per_token)

    def exchanges(self, policies: Policies) -> list[Exchange]:
        """What ranks send each other in one optimizer step."""
        return exchanges(self._cost(policies).sizes, policies, self.workload)

    def counts(self, policies: Policies) -> DryRun:
        """A run of the same model and adapter: its counts and its shape are theirs too. Those of a
        base that is not packed follow from a run of one that is."""
        weights = policies.adapter, policies.quantisation
        if weights not in self._counted:  # asked for with every time and bound
            self._counted[weights] = self._counts(policies)
        return self._counted[weights]

    def _counts(self, policies: Policies) -> DryRun:
        plainest = self._plainest(policies)
        packed = self._packed(policies)
        if packed is not None and not self.was_run(plainest) and self.was_run(packed):
            run = self.run(packed)
            return replace(run, frozen=run.frozen + run.quantised, quantised=0)
        return self.run(plainest)

    def has_counts(self, policies: Policies) -> bool:
        """Whether counts need no dry run any more."""
        packed = self._packed(policies)
        known = packed is not None and self.was_run(packed)
        return known or self.was_run(self._plainest(policies))

    def _packed(self, policies: Policies) -> Policies | None:
        """The plainest with the same adapter on a base of few bits, where theirs is not."""
        if policies.adapter is None or policies.quantisation is not None:
            return None
        return self._plainest(replace(policies, quantisation=QuantisationPolicy()))

    def _plainest(self, policies: Policies) -> Policies:
        """What has the same adapter and base, and as little else as possible."""
        same = (self.plain.adapter, self.plain.quantisation)
        if (policies.adapter, policies.quantisation) == same:
            return self.plain
        optimizer = replace(self.plain.optimizer, master=Master.FP32)
        return replace(
            self.plain,
            adapter=policies.adapter,
            quantisation=policies.quantisation,
            optimizer=optimizer,
            placement=PlacementPolicy(),
        )

    def _cost(self, policies: Policies) -> ModelCost:
        weights = policies.adapter, policies.quantisation
        if weights not in self._costs:
            self._costs[weights] = self._cost_of(self.counts(policies))
        return self._costs[weights]

    def _cost_of(self, run: DryRun) -> ModelCost:
        shape = run.shape
        head = shape.vocab_size * shape.hidden_size
        total = run.trainable + run.frozen + run.quantised
        working = total - self._idle_parameters
        return ModelCost(
            parameters=total,
            trainable=run.trainable,
            matmul_parameters=working if shape.tied else working - head,
            head_parameters=head,
            layers=shape.layers,
            hidden_size=shape.hidden_size,
            activation_bytes_per_token=self._activation_bytes_per_token,
            sizes=_sizes(run),
        )

    @cached_property
    def _idle_parameters(self) -> int:
        """Of experts that a token is not sent to; 0 where there is no closed form."""
        counts = ModelSpec("", "file", dict(fields_of(self.config))).parameter_counts()
        return 0 if counts is None else counts.total - counts.active

    @cached_property
    def _activation_bytes_per_token(self) -> float:
        """Of layers, without the loss's own."""
        keeping_all = replace(
            self.plain, checkpointing=CheckpointingPolicy(), placement=PlacementPolicy()
        )
        peaks = self.run(keeping_all).table.peaks
        most = max(kinds[Tier.DEVICE].get(Kind.ACTIVATIONS, 0) for kinds in peaks.values())
        of_a_token = most / (self.plain.batch.micro_batch_size * self.workload.sequence_length)
        if self.plain.loss.kind is LossKind.FULL:  # which keeps the logarithms of probabilities
            of_a_token -= FP32_BYTES * self.run(keeping_all).shape.vocab_size
        return max(0.0, of_a_token)
