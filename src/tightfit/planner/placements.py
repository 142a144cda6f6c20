"""Where a job's keys let model states and activations live, from nothing off the device outwards.

What is large and seldom used leaves first: gradients with the optimizer's states, then parameters;
the host comes before the disk. Knows neither memory nor time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from tightfit.facts.job import Job
from tightfit.planner.words import percent
from tightfit.policies import PlacementPolicy, Policies, Tier

_TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}
_PREFETCH = 1  # layers ahead: more only help where copies are late for single layers


@dataclass(frozen=True)
class PlacementChoices:
    """What a job leaves open about placement.

    Attributes:
        states: tiers that gradients and optimizer states may leave for; the device is no leaving.
        parameters, activations: as `states`.
        optimizer_fraction, parameter_fraction: None where the planner finds it.
        prefetch: layers that are fetched ahead; None where the planner says it.
        lazy: None: where it gains.
        on_card: whether the device computes beside the host.
        trains_parameters: full fine-tuning, where parameters leave only after their states.
        together: a split master, whose half in the parameter is where the other half is.
    """

    states: tuple[Tier, ...]
    parameters: tuple[Tier, ...]
    activations: tuple[Tier, ...]
    optimizer_fraction: float | None
    parameter_fraction: float | None
    prefetch: int | None
    lazy: bool | None
    on_card: bool
    trains_parameters: bool
    together: bool

    @cached_property
    def all(self) -> tuple[PlacementPolicy, ...]:
        """Every placement that is open; the one nearest to the device first, all that leaves whole
        where the planner finds the fraction."""
        return tuple(self._all())

    def _all(self) -> Iterator[PlacementPolicy]:
        for activations, parameters, states in product(
            self.activations, self.parameters, self.states
        ):
            if not self._goes_together(states, parameters):
                continue
            for gradients in self._gradient_tiers(states, parameters):
                yield self._placement(gradients, states, parameters, activations)

    def _goes_together(self, states: Tier, parameters: Tier) -> bool:
        """Parameters that are trained leave after their states. To where is another matter: on the
        disk they take less of it than states, and on the host less of that."""
        if self.together and (states is Tier.DEVICE) != (parameters is Tier.DEVICE):
            return False
        if not self.trains_parameters or parameters is Tier.DEVICE:
            return True
        return states is not Tier.DEVICE and self.optimizer_fraction in (None, 1.0)

    def _gradient_tiers(self, states: Tier, parameters: Tier) -> tuple[Tier, ...]:
        """The host, and the disk where everything else is there: the host is short then."""
        if states is Tier.DEVICE:
            return (Tier.DEVICE,)
        on_disk = states is Tier.NVME and parameters is Tier.NVME
        return (Tier.HOST, Tier.NVME) if on_disk else (Tier.HOST,)

    def _placement(
        self, gradients: Tier, states: Tier, parameters: Tier, activations: Tier
    ) -> PlacementPolicy:
        leave = states is not Tier.DEVICE
        travel = parameters is not Tier.DEVICE
        gains = self.on_card or states is Tier.NVME
        return PlacementPolicy(
            gradients=gradients,
            optimizer_states=states,
            parameters=parameters,
            activations=activations,
            optimizer_fraction=(self.optimizer_fraction or 1.0) if leave else 1.0,
            parameter_fraction=(self.parameter_fraction or 1.0) if travel else 1.0,
            prefetch=_PREFETCH if self.prefetch is None else self.prefetch,
            lazy_step=leave and (gains if self.lazy is None else self.lazy),
        )

    def open_fraction(self, placement: PlacementPolicy) -> str | None:
        """The field of `placement` that the planner may lower: that of what left last.

        Parameters that are trained need all states off the device, so only one is open at a time.
        """
        if self.together:
            return None
        if placement.parameters is not Tier.DEVICE:
            wanted = self.parameter_fraction is None and len(self.parameters) > 1
            return "parameter_fraction" if wanted else None
        if placement.optimizer_states is not Tier.DEVICE:
            wanted = self.optimizer_fraction is None and len(self.states) > 1
            return "optimizer_fraction" if wanted else None
        return None

    def agreement(self, placement: PlacementPolicy) -> dict[str, bool]:
        """Whether a placement that somebody wrote is one of those, by the key that would forbid
        it. What does not leave has no fraction to agree about."""
        leaves = placement.optimizer_states is not Tier.DEVICE
        travels = placement.parameters is not Tier.DEVICE
        fetches = travels or placement.activations is not Tier.DEVICE
        return {
            "offload_optimizer": placement.optimizer_states in self.states,
            "offload_param": placement.parameters in self.parameters,
            "offload_activations": placement.activations in self.activations,
            "offload_optimizer_fraction": not leaves
            or self.optimizer_fraction in (None, placement.optimizer_fraction),
            "offload_param_fraction": not travels
            or self.parameter_fraction in (None, placement.parameter_fraction),
            "offload_prefetch": not fetches or self.prefetch in (None, placement.prefetch),
            "lazy_step": not leaves or self.lazy in (None, placement.lazy_step),
        }


def placement_choices(
    job: Job, *, on_card: bool, trains_parameters: bool, together: bool = False
) -> PlacementChoices:
    """What `job` leaves open.

    Args:
        on_card: whether the job is for a card.
        trains_parameters: full fine-tuning; the few states of adapters are not sent to a disk.
        together: whether the optimizer's master is split.
    """
    far = ("none", "cpu", "nvme")
    return PlacementChoices(
        states=_tiers(job.offload_optimizer, far if trains_parameters else far[:2]),
        parameters=_tiers(job.offload_param, far),
        activations={
            "auto": (Tier.DEVICE, Tier.HOST),
            "true": (Tier.HOST,),
            "false": (Tier.DEVICE,),
        }[job.offload_activations],
        optimizer_fraction=_number(job.offload_optimizer_fraction),
        parameter_fraction=_number(job.offload_param_fraction),
        prefetch=None if job.offload_prefetch == "auto" else job.offload_prefetch,
        lazy=None if job.lazy_step == "auto" else job.lazy_step == "true",
        on_card=on_card,
        trains_parameters=trains_parameters,
        together=together,
    )


def _tiers(word: str, automatic: tuple[str, ...]) -> tuple[Tier, ...]:
    return tuple(_TIERS[choice] for choice in (automatic if word == "auto" else (word,)))


def _number(value: float | str) -> float | None:
    return None if isinstance(value, str) else value


def uses_disk(placement: PlacementPolicy) -> bool:
    """Whether anything of a placement is on the nvme tier."""
    return Tier.NVME in (placement.optimizer_states, placement.parameters)


def without_placement(policies: Policies) -> Iterator[tuple[str, Policies]]:
    """`policies` with one thing back on the device, by the name of what was off it.

    Parameters that are trained come back with their states, without which they cannot stay away.
    """
    placement = policies.placement
    states, parameters = placement.optimizer_states, placement.parameters
    if states is not Tier.DEVICE:
        nearer = replace(
            placement,
            gradients=Tier.DEVICE,
            optimizer_states=Tier.DEVICE,
            optimizer_fraction=1.0,
            lazy_step=False,
        )
        name = percent(placement.optimizer_fraction) + _what_is_updated(placement)
        if policies.adapter is None and parameters is not Tier.DEVICE:
            nearer = replace(nearer, parameters=Tier.DEVICE, parameter_fraction=1.0)
            name += ", without which parameters cannot leave"
        yield name, replace(policies, placement=nearer)
    follows = policies.optimizer.split_master and states is not Tier.DEVICE  # is half in them
    if parameters is not Tier.DEVICE and not follows:
        nearer = replace(placement, parameters=Tier.DEVICE, parameter_fraction=1.0)
        share = percent(placement.parameter_fraction)
        yield f"{share}parameters on {_at(parameters)}", replace(policies, placement=nearer)
    if placement.activations is not Tier.DEVICE:
        nearer = replace(placement, activations=Tier.DEVICE)
        yield "activations on the host", replace(policies, placement=nearer)


def _what_is_updated(placement: PlacementPolicy) -> str:
    """Gradients and states by where they are."""
    gradients, states = placement.gradients, placement.optimizer_states
    if gradients is states or gradients is Tier.DEVICE:
        return f"gradients and optimizer on {_at(states)}"
    return f"optimizer on {_at(states)}, its gradients on {_at(gradients)}"


def _at(tier: Tier) -> str:
    return "the host" if tier is Tier.HOST else str(tier)
