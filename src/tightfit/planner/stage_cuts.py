"""How many layers the stages of a pipeline would have so that the fullest of them fits.

Worked out from the bills of the stages under one cut. What goes with a stage's layers goes with
their number: states, and activations once for each micro-batch in flight. The ends' states, what a
loss holds and what is temporary stay. That is near to the truth and not the truth (what a layer
that is computed again leaves does not go with layers), so what comes out is priced like any other
candidate, and may be the start of a better one. No more layers move than must: the more even the
stages are, the less they wait for each other.
"""

from __future__ import annotations

from tightfit.bill.stages import least_full, split_evenly
from tightfit.bill.table import Kind, Phase
from tightfit.bill.whole import keeps_whole_parameters
from tightfit.dry_run import DryRun
from tightfit.planner.stage_bounds import in_flight, parameters_of_parts
from tightfit.policies import Policies, Tier

_STATES = (Kind.PARAMETERS, Kind.GRADIENTS, Kind.MASTER_WEIGHTS, Kind.OPTIMIZER_STATES)


def fullest_stage_bytes(run: DryRun) -> int:
    """What the fullest stage of a pipeline takes on the device."""
    return max(table.peak_bytes(Tier.DEVICE) for table in run.stages.values())


def layers_that_fit(policies: Policies, run: DryRun, room_bytes: int) -> tuple[int, ...]:
    """The layers of each run, in the order of the model: of the cuts whose stages have room the
    most even one in parameters; where none has, the one whose fullest stage is least full.

    Args:
        run: of `policies`, which are of a pipeline.
        room_bytes: that a stage may take on the device.
    """
    sharding = policies.sharding
    stages, chunks = sharding.pipeline_parallel, sharding.virtual_stages
    seen = _Seen(policies, run)
    inside, end = parameters_of_parts(run)

    def full(stage: int, layers: int) -> tuple[int, int]:
        too_much = max(0, seen.bytes_with(stage, layers) - room_bytes)
        return too_much, layers * inside + end * (stage in (0, stages - 1))

    return split_evenly(least_full(run.shape.layers, stages, full, chunks), chunks)


class _Seen:
    """The stages of one cut, and what they would take with other layers.

    Args:
        policies: of the cut.
        run: of them.
    """

    def __init__(self, policies: Policies, run: DryRun) -> None:
        self._policies, self._run = policies, run
        self._flight = in_flight(policies)

    def bytes_with(self, stage: int, layers: int) -> int:
        """On the device at its highest moment."""
        number = self._nearest(stage)
        before = sum(self._run.stage_layers[number :: self._policies.sharding.pipeline_parallel])
        times = layers / before
        flight = self._flight[stage] / self._flight[number]
        return max(
            round(
                sum(
                    self._with(kind, count, before, times, flight, stage)
                    for kind, count in tiers.get(Tier.DEVICE, {}).items()
                )
            )
            for phase, tiers in self._run.stages[number].peaks.items()
            if phase is not Phase.LOAD
        )

    def _nearest(self, stage: int) -> int:
        """The stage itself, or where it was not run the nearest one before it: one between the
        ends too."""
        return max(number for number in self._run.stages if number <= stage)

    def _with(
        self, kind: Kind, count: int, before: int, times: float, flight: float, stage: int
    ) -> float:
        """What becomes of so much of a kind with so many times the layers there were before."""
        if kind is Kind.ACTIVATIONS:
            return count * times * flight
        whole = kind is Kind.COLLECTIVES and keeps_whole_parameters(self._policies)
        if kind in _STATES or whole:
            of_layers = count * self._share_of_layers(kind, before, stage)
            return count + of_layers * (times - 1)
        return count

    def _share_of_layers(self, kind: Kind, layers: int, stage: int) -> float:
        """The part of a stage's states that is of its layers. Adapters are in layers, and of a base
        in few bits the ends are what is not."""
        run = self._run
        if stage not in (0, self._policies.sharding.pipeline_parallel - 1):
            return 1.0
        if self._policies.adapter is not None and kind is not Kind.PARAMETERS:
            return 1.0
        inside, end = parameters_of_parts(run)
        base = self._policies.quantisation
        if base is not None and run.quantised:
            width = 8 * self._policies.precision.parameter_bytes
            inside = inside * base.bits // width
        return inside * layers / (inside * layers + end)
