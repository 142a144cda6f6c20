"""What the ways of sharing a model's states out take per card, side by side.

Rows for DDP and ZeRO-1, 2 and 3, each with the optimizer on the device and on the host, ZeRO-3 with
its parameters there too; every row with its `textbook` and its `tightfit` bytes. Works out closed
forms of model states only; whoever prices the whole of a row puts that in the place of `tightfit`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tightfit.bill.model_states import StateBytes, tensor_state_bytes
from tightfit.bill.shards import ModelTensors
from tightfit.bill.textbook import Totals, textbook_state_bytes
from tightfit.policies import PlacementPolicy, Policies, Tier

DEFAULT_CARDS = 8
ON_HOST = (Tier.HOST, Tier.PINNED)


@dataclass(frozen=True)
class StateBill:
    """Bytes by tier and kind on one rank."""

    tiers: StateBytes

    @property
    def device_bytes(self) -> int:
        """Bytes on the card."""
        return sum(self.tiers.get(Tier.DEVICE, {}).values())

    @property
    def host_bytes(self) -> int:
        """Bytes of one rank on its host, page-locked ones included."""
        return sum(sum(self.tiers.get(tier, {}).values()) for tier in ON_HOST)

    @property
    def nvme_bytes(self) -> int:
        """Bytes of one rank on disk."""
        return sum(self.tiers.get(Tier.NVME, {}).values())


@dataclass(frozen=True)
class ComparisonRow:
    """One way of sharing out, with both bills of one rank.

    Attributes:
        name: as users know it, such as `ZeRO-2, optimizer on host`.
        policies: what the row assumes.
        textbook: what papers print.
        tightfit: what this engine keeps.
    """

    name: str
    policies: Policies
    textbook: StateBill
    tightfit: StateBill


def compare_sharding(
    model: ModelTensors,
    policies: Policies,
    *,
    cards: int | None = None,
) -> list[ComparisonRow]:
    """The rows of `estimate --compare`, model states alone.

    Args:
        model: shapes of all parameters.
        policies: the job's; sharding stage and placement of model states are what rows vary.
        cards: ranks in all; by default the job's, or 8 where it has one only.

    Raises:
        UnsupportedError: `cards` is no multiple of the job's tensor and pipeline parallel sizes.
    """
    ranks = policies.sharding.ranks if policies.sharding.ranks > 1 else DEFAULT_CARDS
    totals = Totals.of(model)
    rows: list[ComparisonRow] = []
    for name, varied in _variants(policies, cards or ranks):
        textbook = textbook_state_bytes(totals, varied)
        tightfit = tensor_state_bytes(model, varied)
        rows.append(ComparisonRow(name, varied, StateBill(textbook), StateBill(tightfit)))
    return rows


def _variants(policies: Policies, cards: int) -> Iterator[tuple[str, Policies]]:
    activations = policies.placement.activations
    resident = PlacementPolicy(activations=activations)
    optimizer = replace(resident, gradients=Tier.HOST, optimizer_states=Tier.HOST)
    everything = replace(optimizer, parameters=Tier.HOST)
    for stage in range(4):
        name = f"ZeRO-{stage}" if stage else "DDP"
        replicas = policies.sharding.replicas if stage else 1
        sharding = replace(policies.sharding, ranks=cards, zero_stage=stage, replicas=replicas)
        sharded = replace(policies, sharding=sharding, placement=resident)
        yield name, sharded
        yield f"{name}, optimizer on host", replace(sharded, placement=optimizer)
        if stage == 3:
            yield (
                f"{name}, optimizer and parameters on host",
                replace(sharded, placement=everything),
            )
