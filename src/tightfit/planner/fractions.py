"""How many layers' states must leave the device, and the fraction that says so.

Closed forms of layers that are all alike: what a fraction really takes is a dry run's to say. As
in the engine, what belongs to no layer leaves only with everything (a fraction of 1).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from functools import lru_cache
from math import ceil

from tightfit.bill.model_states import StateBytes, model_state_bytes
from tightfit.bill.table import MARGIN_SHARE, Kind, MemoryTable, Phase
from tightfit.dry_run import DryRun
from tightfit.policies import CheckpointingPolicy, LossPolicy, PlacementPolicy, Policies, Tier

_PARAMETERS = (Kind.PARAMETERS,)
_STATES = (Kind.GRADIENTS, Kind.MASTER_WEIGHTS, Kind.OPTIMIZER_STATES)


def leaving_layers(fraction: float, layers: int) -> int:
    """Layers that leave: rounded up, as the engine does."""
    return ceil(fraction * layers)


def fraction_of(leaving: int, layers: int) -> float:
    """The shortest decimal below 1 that means `leaving` of `layers` layers.

    It lies inside its interval, never at an end that rounding could cross.
    """
    digits, scale = 1, 10
    while True:
        candidate = ceil(scale * leaving / layers) - 1
        if scale * (leaving - 1) < candidate * layers < scale * leaving:
            return round(candidate / scale, digits)
        digits, scale = digits + 1, scale * 10


def share_leaving(fraction: float, run: DryRun, *, trained: bool) -> float:
    """Share of a model's parameters, or of those that are trained, that a fraction sends away.

    Adapters are in layers; of a model, all but the embedding and the output layer is.
    """
    if fraction == 1:
        return 1.0
    layers, shape = run.shape.layers, run.shape
    share = leaving_layers(fraction, layers) / layers
    total = run.trainable + run.frozen + run.quantised
    if trained and total > run.trainable:
        return share
    ends = (1 if shape.tied else 2) * shape.vocab_size * shape.hidden_size
    return share * max(0.0, 1 - ends / total)


def state_bytes(run: DryRun, policies: Policies) -> dict[Tier, dict[Kind, int]]:
    """Model states by tier and kind under `policies`, fractions included.

    Args:
        run: of the same model and adapter; its counts and shape are used.
    """
    placement = policies.placement
    off = _whole(run, policies)
    shares = {
        _STATES: share_leaving(placement.optimizer_fraction, run, trained=True),
        _PARAMETERS: share_leaving(placement.parameter_fraction, run, trained=False),
    }
    table: dict[Tier, dict[Kind, int]] = {tier: {} for tier in Tier}
    staying = any(share < 1 for share in shares.values())
    on = _whole(run, replace(policies, placement=PlacementPolicy())) if staying else {}
    for kinds, share in shares.items():
        for bill, part in ((off, share), (on, 1 - share)):
            for tier, counts in bill.items():
                for kind in kinds:
                    count = round(part * counts.get(kind, 0))
                    table[tier][kind] = table[tier].get(kind, 0) + count
    return table


def _whole(run: DryRun, policies: Policies) -> StateBytes:
    """As if all left that has a fraction leaving; states know no loss and no checkpointing."""
    alike = replace(policies, loss=LossPolicy(), checkpointing=CheckpointingPolicy())
    return _states(run.trainable, run.frozen, run.quantised, alike)


@lru_cache(maxsize=4096)
def _states(trainable: int, frozen: int, quantised: int, policies: Policies) -> StateBytes:
    """Asked for with every time and bound of thousands of candidates."""
    return model_state_bytes(trainable, frozen, policies, quantised=quantised)


def with_fraction(policies: Policies, name: str, fraction: float) -> Policies:
    """`policies` with the field `name` of its placement at `fraction`."""
    placement = policies.placement
    if name == "optimizer_fraction":
        placement = replace(placement, optimizer_fraction=fraction)
    else:
        placement = replace(placement, parameter_fraction=fraction)
    return replace(policies, placement=placement)


def least_leaving(
    whole: Policies, name: str, bill: MemoryTable, run: DryRun, limit_bytes: int
) -> int | None:
    """The fewest layers that must leave for the device to hold the rest.

    Args:
        whole: policies with everything off the device that `name` is the fraction of.
        bill: of `whole`, margin included.
        run: whose counts and shape are used.
        limit_bytes: of the device.

    None where even one layer is too many to keep.
    """
    layers = run.shape.layers
    counts = range(1, layers + 1)

    def is_enough(leaving: int) -> bool:
        policies = with_fraction(whole, name, fraction_of(leaving, layers))
        return _device_bytes(whole, policies, bill, run) <= limit_bytes

    index = bisect_left(counts, True, key=is_enough)  # the more leave the less is there
    return None if index == layers else counts[index]


def layer_bytes(run: DryRun, whole: Policies, name: str) -> int:
    """What one layer that stays takes on the device, gradients included; at least a byte."""
    layers = run.shape.layers
    one, two = (
        sum(
            state_bytes(run, with_fraction(whole, name, fraction_of(n, layers)))[
                Tier.DEVICE
            ].values()
        )
        for n in (1, min(2, layers))
    )
    return max(1, one - two)


def _device_bytes(whole: Policies, policies: Policies, bill: MemoryTable, run: DryRun) -> int:
    """The device's peak when what stays under `policies` is added to the bill of `whole`.

    Gradients of a single micro-batch are complete at the end of backward, when activations are
    gone: they count in the step, and earlier only where micro-batches add up.
    """
    before, after = (state_bytes(run, p)[Tier.DEVICE] for p in (whole, policies))
    added = {kind: after.get(kind, 0) - before.get(kind, 0) for kind in Kind}
    gradients = added.pop(Kind.GRADIENTS)
    adding_up = policies.batch.accumulation_steps > 1
    peaks = []
    for phase in bill.peaks:
        kept = added[Kind.PARAMETERS] if phase is Phase.LOAD else sum(added.values())
        if phase is Phase.STEP or (adding_up and phase in (Phase.FORWARD, Phase.BACKWARD)):
            kept += gradients
        peaks.append(bill.phase_peak_bytes(phase, Tier.DEVICE) + round(kept * (1 + MARGIN_SHARE)))
    return max(peaks)
