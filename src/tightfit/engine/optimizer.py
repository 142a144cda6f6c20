"""AdamW whose states live on the tier the plan names, with exact clipping by the global norm.

The update is torch's own fused AdamW and the order of operations is that of `clip_grad_norm_`
followed by `torch.optim.AdamW(fused=True)`, so both give the same bits. Where the update cannot
run on the parameter itself (16 bits wide, or another tier), an fp32 master lives with the states.
Knows nothing of models or of how gradients got where they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw

from tightfit import ledger
from tightfit.bill.table import Kind
from tightfit.engine.ranks import Ranks
from tightfit.engine.transfer import Transfer
from tightfit.errors import ConfigError
from tightfit.ledger import local_part
from tightfit.policies import OptimizerPolicy, Tier

Gradients = Mapping[nn.Parameter, torch.Tensor]


class PlacedAdamW(torch.optim.Optimizer):
    """AdamW (https://arxiv.org/abs/1711.05101) on the device or on the host.

    States are created here and now, in place on their tier, so that the first step needs no more
    memory than the others. Learning-rate schedulers of torch and transformers accept it. Of a
    parameter that ranks share, each rank has the states of its own part.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        policy: OptimizerPolicy,
        tier: Tier,
        transfer: Transfer,
        ranks: Ranks,
    ) -> None:
        self._tier = tier
        self._transfer = transfer
        self._ranks = ranks
        self._max_grad_norm = policy.max_grad_norm
        super().__init__(
            _decay_groups(parameters, policy.weight_decay),
            {"lr": policy.learning_rate, "betas": policy.betas, "eps": policy.epsilon},
        )
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = self._initial_state(local_part(parameter))

    def _initial_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        device = parameter.device if self._tier is Tier.DEVICE else torch.device("cpu")
        state: dict[str, torch.Tensor] = {}
        if self._tier is not Tier.DEVICE or parameter.dtype is not torch.float32:
            state["master"] = self._master(parameter)
        # Moments never travel, so on the host they need not be page-locked.
        with ledger.labelled(Kind.OPTIMIZER_STATES, self._tier):
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros(parameter.shape, dtype=torch.float32, device=device)
        return state

    def _master(self, parameter: torch.Tensor) -> torch.Tensor:
        if self._tier is Tier.DEVICE:
            with ledger.labelled(Kind.MASTER_WEIGHTS, Tier.DEVICE):
                return parameter.detach().to(torch.float32)
        master = self._transfer.empty_on_host(parameter, Kind.MASTER_WEIGHTS, torch.float32)
        self._transfer.copy(master, parameter.detach())
        self._transfer.wait()
        return master

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy saved states into those that are here, so that each keeps its tier and its type.

        torch's own would give all of them the device and the type of their parameter. Load the
        model first: a master that was not saved, as no other tier or type needed one, is its
        parameter.

        Raises:
            ConfigError: they are the states of other parameters.
        """
        groups = state_dict["param_groups"]
        _check_same_parameters(self.param_groups, groups, state_dict["state"])
        for group, saved in zip(self.param_groups, groups, strict=True):
            for parameter, number in zip(group["params"], saved["params"], strict=True):
                values = {"master": local_part(parameter), **state_dict["state"][number]}
                for name, tensor in self.state[parameter].items():
                    tensor.copy_(values[name])
            group.update({key: value for key, value in saved.items() if key != "params"})

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Take over parameters that were loaded from outside, where the master has their type.

        A wider master is part of a checkpoint itself and stays.
        """
        for parameter, state in self.state.items():
            if "master" in state and state["master"].dtype is parameter.dtype:
                self._transfer.copy(state["master"], local_part(parameter).detach())
        self._transfer.wait()

    @torch.no_grad()
    def step(self, gradients: Gradients) -> torch.Tensor:  # type: ignore[override]
        """Clip and apply `gradients`, which are consumed; returns their global norm before it.

        Args:
            gradients: by parameter, this rank's part, on the optimizer's tier, in the order of
                `model.parameters()`. Parameters without one are left as they are.

        A norm that is not finite leaves parameters and states untouched.
        """
        self._transfer.wait()
        values = list(gradients.values())
        with ledger.labelled(Kind.TEMPORARIES, self._tier):
            norm = self._ranks.global_norm(_total_norm(values))
            if not bool(torch.isfinite(norm)):
                return norm
            factor = _clip_factor(norm, self._max_grad_norm) if self._max_grad_norm else None
            for group in self.param_groups:
                present = [p for p in group["params"] if p in gradients]
                for batch in _batches(present):
                    self._update(group, batch, [gradients[p] for p in batch], factor)
        self._transfer.wait()
        return norm

    def _update(
        self,
        group: dict[str, Any],
        batch: list[nn.Parameter],
        gradients: list[torch.Tensor],
        clip_factor: torch.Tensor | None,
    ) -> None:
        """Apply AdamW to one batch of parameters and send the results to the device."""
        states = [self.state[p] for p in batch]
        parameters = [local_part(p) for p in batch]
        wide = [gradient.to(torch.float32) for gradient in gradients]
        if clip_factor is not None:
            for gradient in wide:
                gradient.mul_(clip_factor)
        adamw(
            [state.get("master", p) for state, p in zip(states, parameters, strict=True)],
            wide,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            maximize=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )
        for parameter, state, gradient in zip(parameters, states, gradients, strict=True):
            if "master" in state:
                self._publish(parameter, state["master"], gradient)

    def _publish(self, parameter: torch.Tensor, master: torch.Tensor, spent: torch.Tensor) -> None:
        """Copy a master into its parameter; 16-bit values travel through the spent gradient."""
        if self._tier is Tier.DEVICE:
            parameter.copy_(master)
        elif master.dtype is parameter.dtype:
            self._transfer.copy(parameter.detach(), master)
        else:
            self._transfer.copy(parameter.detach(), spent.copy_(master))


def _check_same_parameters(
    here: list[dict[str, Any]], saved: list[dict[str, Any]], states: Mapping[int, Any]
) -> None:
    """Saved states have the shapes of the parameters that are here.

    Raises:
        ConfigError: they have others.
    """
    shapes = [[local_part(parameter).shape for parameter in group["params"]] for group in here]
    if shapes != [[states[number]["exp_avg"].shape for number in g["params"]] for g in saved]:
        raise ConfigError(
            "the saved optimizer belongs to another model or method; fit the model as it was when "
            "the optimizer was saved"
        )


def _decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; norms and biases, which have one dimension, do not."""
    everything = list(parameters)
    groups = [
        {"params": [p for p in everything if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in everything if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _batches(parameters: list[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
    """All at once where gradients are applied as they are; one by one where each is upcast first,
    so that only one fp32 gradient lives at a time."""
    if all(p.dtype is torch.float32 for p in parameters):
        return [parameters] if parameters else []
    return [[p] for p in parameters]


def _total_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The global norm in fp32; `get_total_norm` would round that of 16-bit gradients."""
    if all(gradient.dtype is torch.float32 for gradient in gradients):
        return nn.utils.get_total_norm(gradients)
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def _clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The factor of `torch.nn.utils.clip_grad_norm_`, same constant and order."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
