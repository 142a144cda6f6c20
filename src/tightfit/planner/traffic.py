"""Bytes that cross between tiers in one optimizer step, by the part of it that can hide them.

Counts only; how long they take and what hides them is `step_time.py`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.bill.model_states import state_widths
from tightfit.bill.optimizers import FP32_BYTES
from tightfit.bill.table import Kind
from tightfit.dry_run import DryRun
from tightfit.planner.fractions import share_leaving, state_bytes
from tightfit.policies import Policies, Tier

_KEPT_LAYERS = 1  # what the last layer saves would only come back at once


@dataclass(frozen=True)
class Traffic:
    """One rank's bytes of one optimizer step, over all its micro-batches.

    Attributes:
        parameters_in: to the device in forward, and again in backward.
        activations: to the host in forward, and back in backward.
        gradients_out: to the host while backward runs.
        gradients_late: to the host after backward.
        gradients_added: of those that go out, what is added on the host to what is there.
        values_in: to the device after the update.
        disk_parameters: read in forward, and again in backward.
        disk_gradients: written in backward; but for the first micro-batch, read there too.
        disk_read, disk_written: around the update.
        updated_off: parameters whose update runs on the host.
        updated_first: those of them that forward begins with.
    """

    parameters_in: float = 0.0
    activations: float = 0.0
    gradients_out: float = 0.0
    gradients_late: float = 0.0
    gradients_added: float = 0.0
    values_in: float = 0.0
    disk_parameters: float = 0.0
    disk_gradients: float = 0.0
    disk_read: float = 0.0
    disk_written: float = 0.0
    updated_off: float = 0.0
    updated_first: float = 0.0

    @property
    def copied_bytes(self) -> float:
        """Between device and host, both ways."""
        return (
            2 * self.parameters_in
            + 2 * self.activations
            + self.gradients_out
            + self.gradients_late
            + self.values_in
        )

    @property
    def written_bytes(self) -> float:
        """To the disk: what wears it."""
        return self.disk_gradients + self.disk_written


def traffic_of(run: DryRun, policies: Policies, activation_bytes: float) -> Traffic:
    """What moves under `policies` on one of the ranks.

    Args:
        run: of the same model and adapter; its counts and shape are used.
        activation_bytes: that the layers leave for backward in all micro-batches together.
    """
    placement, steps = policies.placement, policies.batch.accumulation_steps
    tiers = state_bytes(run, policies)
    parameters = _off(tiers, Kind.PARAMETERS)
    on_disk = tiers[Tier.NVME]
    leaves = placement.optimizer_states is not Tier.DEVICE
    updated = share_leaving(placement.optimizer_fraction, run, trained=True) * run.trainable
    updated = updated / policies.sharding.updaters if leaves else 0.0
    widths = state_widths(policies)
    gradients = updated * widths.trainable
    late = placement.gradients is Tier.DEVICE
    on_nvme = placement.gradients is Tier.NVME
    trained_values = on_disk.get(Kind.PARAMETERS, 0) if policies.adapter is None else 0
    # An update makes values from an fp32 master; else it changes them.
    read_values = 0 if widths.master == FP32_BYTES else trained_values
    states = on_disk.get(Kind.OPTIMIZER_STATES, 0) + on_disk.get(Kind.MASTER_WEIGHTS, 0)
    return Traffic(
        parameters_in=steps * parameters,
        activations=0.0
        if placement.activations is Tier.DEVICE
        else activation_bytes * max(0, run.shape.layers - _KEPT_LAYERS) / run.shape.layers,
        gradients_out=0.0 if late else steps * gradients,
        gradients_late=gradients if late else 0.0,
        gradients_added=0.0 if late or on_nvme else (steps - 1) * gradients,
        values_in=gradients * _resident_share(run, policies),
        disk_parameters=steps * on_disk.get(Kind.PARAMETERS, 0),
        disk_gradients=steps * gradients if on_nvme else 0.0,
        disk_read=states + read_values + (gradients if on_nvme else 0.0),
        disk_written=states + trained_values,
        updated_off=updated,
        updated_first=_first_values(run, policies) if leaves else 0.0,
    )


def _off(tiers: dict[Tier, dict[Kind, int]], kind: Kind) -> int:
    return sum(tiers[tier].get(kind, 0) for tier in (Tier.HOST, Tier.NVME))


def _resident_share(run: DryRun, policies: Policies) -> float:
    """Of the values that were updated elsewhere, those that live on the device; others are fetched
    when their layer's turn comes."""
    placement = policies.placement
    if placement.parameters is Tier.DEVICE:
        return 1.0
    return 1.0 - share_leaving(placement.parameter_fraction, run, trained=False)


def _first_values(run: DryRun, policies: Policies) -> float:
    """The embedding, where it is trained and its update leaves the device."""
    leaves = policies.placement.optimizer_fraction == 1 and policies.adapter is None
    embedding = run.shape.vocab_size * run.shape.hidden_size
    return embedding / policies.sharding.updaters if leaves else 0.0
