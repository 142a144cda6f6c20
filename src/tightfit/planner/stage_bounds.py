"""What the fullest stage of a pipeline takes at least, with the layers it is given or with any.

A stage has its part of the model states and what its layers leave, once for each micro-batch in
flight. What a stage had with so many layers it has a part of with fewer. Where nobody has said how
many layers stages have, the bound holds for every way to cut: the search may take another one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tightfit.bill.model_states import state_widths
from tightfit.bill.stages import layout_of, least_full, split_evenly
from tightfit.bill.timetable import most_in_flight
from tightfit.dry_run import DryRun
from tightfit.policies import LossPolicy, Policies, ShardingPolicy, Tier


def parameters_of_parts(run: DryRun) -> tuple[int, int]:
    """Parameters of an average layer, and of the embedding or output layer."""
    shape = run.shape
    end = shape.vocab_size * shape.hidden_size
    total = run.trainable + run.frozen + run.quantised
    return max(0, total - (1 if shape.tied else 2) * end) // shape.layers, end


def is_uncut(policies: Policies) -> bool:
    """Whether they are of a pipeline, and nobody has said how many layers its stages have."""
    sharding = policies.sharding
    return sharding.pipeline_parallel > 1 and not sharding.stage_layers


def in_flight(policies: Policies) -> list[int]:
    """Of how many forwards through one of its runs of layers each stage has the activations."""
    sharding, steps = policies.sharding, policies.batch.accumulation_steps
    stages = sharding.pipeline_parallel
    sizes = stages, sharding.virtual_stages, steps
    return [most_in_flight(sharding.pipeline_schedule, stage, *sizes) for stage in range(stages)]


def layers_by_parameters(policies: Policies, run: DryRun) -> tuple[int, ...]:
    """Of each run, if all layers are alike; where somebody says them, as they say."""
    sharding = policies.sharding
    sizes = sharding.pipeline_parallel, sharding.virtual_stages, sharding.stage_layers
    return tuple(map(len, layout_of(run.shape.layers, *parameters_of_parts(run), *sizes)))


@dataclass(frozen=True)
class SeenStage:
    """What one stage had of a batch at one moment.

    Attributes:
        layers: of each of its runs.
        staying_bytes: on the device, without activations.
        activation_bytes: of these.
    """

    loss: LossPolicy
    sharding: ShardingPolicy
    number: int
    layers: tuple[int, ...]
    sequences: int
    staying_bytes: int
    activation_bytes: int

    def is_of(self, policies: Policies) -> bool:
        """Whether these policies have the same loss, which the last stage makes, and stages alike
        but for their layers."""
        makes_loss = self.number == self.sharding.pipeline_parallel - 1
        alike = self.sharding == uncut(policies.sharding)
        return alike and (self.loss == policies.loss or not makes_loss)

    def least_bytes(self, policies: Policies, layers: tuple[int, ...], *, stay: bool) -> int:
        """What the same stage has with another micro-batch and other layers, at least."""
        count = self.staying_bytes + (self.activation_bytes if stay else 0)
        sequences = policies.batch.micro_batch_size / self.sequences
        fewer = (now / then for now, then in zip(layers, self.layers, strict=True))
        return int(count * min(1.0, sequences) * min(1.0, *fewer))


def uncut(sharding: ShardingPolicy) -> ShardingPolicy:
    """`sharding` without how many layers stages have."""
    return replace(sharding, stage_layers=())


@dataclass(frozen=True)
class StageBound:
    """The bound of one candidate.

    Attributes:
        average_bytes: of model states of an average stage.
        of_layers: what all layers leave of one micro-batch.
        seen: of stages like its own.
        stay: whether activations stay on the device.
    """

    policies: Policies
    run: DryRun
    average_bytes: int
    of_layers: int
    seen: tuple[SeenStage, ...]
    stay: bool

    def beyond_average(self) -> int:
        """By how much the fullest stage exceeds the states of an average one."""
        sharding, layers = self.policies.sharding, self.run.shape.layers
        stages, chunks = sharding.pipeline_parallel, sharding.virtual_stages
        flight = in_flight(self.policies)

        def of_cut(runs: tuple[int, ...]) -> int:
            return max(self._of_stage(n, runs[n::stages], flight[n]) for n in range(stages))

        def of_so_many(stage: int, own: int) -> int:
            return self._of_stage(stage, split_evenly([own], chunks), flight[stage])

        fullest = of_cut(layers_by_parameters(self.policies, self.run))
        if not sharding.stage_layers:
            best = least_full(layers, stages, of_so_many, chunks)
            fullest = min(fullest, of_cut(split_evenly(best, chunks)))
        return max(fullest, self.of_layers // stages)

    def _of_stage(self, number: int, layers: tuple[int, ...], flight: int) -> int:
        run, policies = self.run, self.policies
        stages = policies.sharding.pipeline_parallel
        measured = (
            seen.least_bytes(self.policies, layers, stay=self.stay)
            for seen in self.seen
            if seen.number == number
        )
        left = self.of_layers * min(layers) * flight // run.shape.layers
        batch = max(left, *measured, 0)
        ends, all_ends = number in (0, stages - 1), 1 if run.shape.tied else 2
        end = self._end_bytes()
        inside = (stages * self.average_bytes - all_ends * end) / run.shape.layers
        own = sum(layers) * max(0.0, inside) + ends * end
        if policies.adapter is not None and policies.adapter.modules_to_save:
            own = 0.0  # what states of whole modules are where is not told by counts
        return int(batch + own - self.average_bytes)

    def _end_bytes(self) -> float:
        """States of the embedding, or of the output layer, on the device of each of their ranks:
        under adapters the parameters in the job's precision, else what all parameters have."""
        policies, run = self.policies, self.run
        sharding, placement = policies.sharding, policies.placement
        _, end = parameters_of_parts(run)
        if policies.adapter is None:
            return self.average_bytes * sharding.pipeline_parallel * end / run.trainable
        if placement.parameters is not Tier.DEVICE and placement.parameter_fraction == 1:
            return 0.0
        width = state_widths(policies).frozen
        return width * end / (sharding.tensor_parallel * sharding.shards)
