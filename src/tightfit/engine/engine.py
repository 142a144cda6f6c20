"""The handle on a model made to fit: losses, backward, step.

`Engine` is what a person's own training loop holds and what tightfit's own loop and dry run use;
there is no other path. Knows nothing of data, schedules or plans.
"""

from __future__ import annotations

import torch
from torch import nn

from tightfit import ledger
from tightfit.bill.table import Phase
from tightfit.engine.gradients import GradientStore
from tightfit.engine.optimizer import PlacedAdamW


class Engine:
    """A model, its gradients and its optimizer, each where the plan put it.

    Make one with `tightfit.fit`.

    Attributes:
        model: call it in your loop; its class is that of the model given, or peft's.
        optimizer: give it to a scheduler; its step belongs to `Engine.step`.
    """

    def __init__(self, model: nn.Module, optimizer: PlacedAdamW, gradients: GradientStore) -> None:
        self.model = model
        self.optimizer = optimizer
        self._gradients = gradients
        model.register_forward_pre_hook(_begin_forward)

    @property
    def device(self) -> torch.device:
        """Where the model's parameters are."""
        return next(self.model.parameters()).device

    def loss(
        self, input_ids: torch.Tensor, labels: torch.Tensor, trained_tokens: int
    ) -> torch.Tensor:
        """Cross-entropy summed over this micro-batch's trained tokens, over `trained_tokens`.

        Args:
            input_ids: `[batch, seq]`, padded on the right. Causal attention never looks right, so
                padding needs no mask as long as its labels are -100.
            labels: `[batch, seq]`, -100 where nothing is trained.
            trained_tokens: trained tokens of the whole global batch, so that the sum over its
                micro-batches is the loss per token however it is split. With none at all the
                loss is 0.
        """
        ledger.set_phase(Phase.FORWARD)
        loss: torch.Tensor = self.model(
            input_ids=input_ids,
            labels=labels,
            use_cache=False,
            num_items_in_batch=torch.tensor(max(trained_tokens, 1), device=input_ids.device),
        ).loss
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of `loss` to those since the last `step`.

        What is minimised is the sum of the losses given: with accumulation, divide yours by the
        number of micro-batches, or use `loss` above.
        """
        ledger.set_phase(Phase.BACKWARD)
        loss.backward()

    def step(self) -> float:
        """Clip by the exact global norm, update, forget the gradients; returns the norm.

        A norm that is not finite updates nothing.
        """
        ledger.set_phase(Phase.STEP)
        norm = self.optimizer.step(self._gradients.take())
        self._gradients.clear()
        return float(norm)

    def discard_gradients(self) -> None:
        """Forget the gradients since the last step, for a step that is given up."""
        self._gradients.clear()

    @torch.no_grad()
    def evaluation_loss(self, input_ids: torch.Tensor, labels: torch.Tensor) -> float:
        """Cross-entropy summed over the trained tokens, without gradients, dropout off."""
        training = self.model.training
        self.model.eval()
        try:
            with ledger.phase(Phase.EVAL):
                return float(
                    self.model(
                        input_ids=input_ids,
                        labels=labels,
                        use_cache=False,
                        num_items_in_batch=torch.tensor(1, device=input_ids.device),
                    ).loss
                )
        finally:
            self.model.train(training)


def _begin_forward(module: nn.Module, inputs: object) -> None:
    """Whoever calls the model with gradients on begins a forward."""
    if torch.is_grad_enabled():
        ledger.set_phase(Phase.FORWARD)
