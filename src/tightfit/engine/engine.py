"""The handle on a model made to fit: losses, backward, step.

`Engine` is what a person's own training loop holds and what tightfit's own loop and dry run use;
there is no other path. Knows nothing of data, schedules or plans.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from tightfit import ledger
from tightfit.bill.table import Phase
from tightfit.engine.gradients import GradientStore
from tightfit.engine.loss_scale import LossScale
from tightfit.engine.optimizer import PlacedOptimizer
from tightfit.engine.ranks import Ranks
from tightfit.engine.stage_schedule import MicroBatch, Pipeline
from tightfit.engine.streaming import ParameterStream
from tightfit.errors import UnsupportedError
from tightfit.ledger import local_part


class Engine:
    """A model, its gradients and its optimizer, each where the plan put it.

    Make one with `tightfit.fit`.

    Attributes:
        model: call it in your loop; its class is that of the model given, or peft's.
        optimizer: give it to a scheduler; its step belongs to `Engine.step`.
        ranks: all ranks of the run, seen from this one.
        loss_scale: of gradients in fp16; None where they are of another type.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: PlacedOptimizer,
        gradients: GradientStore,
        ranks: Ranks,
        accumulation_steps: int,
        stream: ParameterStream | None = None,
        pipeline: Pipeline | None = None,
        loss_scale: LossScale | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._gradients = gradients
        self.ranks = ranks
        self._stream = stream
        self._pipeline = pipeline
        self.loss_scale = loss_scale
        self._accumulation_steps = accumulation_steps
        self._backward_calls = 0  # since the last step
        model.register_forward_pre_hook(_begin_forward, prepend=True)

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.optimizer.device

    @property
    def data_rank(self) -> int:
        """The number of this rank among those that are to be given different sequences.

        Ranks that share layers' matrices have the same number and need the same batches.
        """
        return self.ranks.data_rank

    @property
    def data_ranks(self) -> int:
        """How many ranks, or groups of them, are given different sequences."""
        return self.ranks.data_ranks

    @property
    def is_stage(self) -> bool:
        """Whether the model is one stage of a pipeline: calling it takes or returns hidden
        states."""
        return self._pipeline is not None

    @property
    def written_bytes(self) -> int:
        """What the last update that was finished has written to the nvme tier's disk."""
        return self.optimizer.written_bytes

    def forward_backward(self, micro_batches: Sequence[MicroBatch], trained_tokens: int) -> float:
        """All micro-batches of a step, forward and backward; then call `step`.

        Works with every plan: the stages of a pipeline have several micro-batches at a time.

        Args:
            micro_batches: this rank's input ids and labels, as `loss` wants them; each is looked
                up once, when its forward comes. Ranks that have the same `data_rank` need the
                same, all ranks as many.
            trained_tokens: as of `loss`.

        Returns:
            The sum of this rank's losses; on every stage of a pipeline that of its last one.
        """
        if self._pipeline is not None:
            return self._pipeline.run(micro_batches, trained_tokens)
        total = 0.0
        for number in range(len(micro_batches)):
            loss = self.loss(*micro_batches[number], trained_tokens)
            self.backward(loss)
            total += float(loss.detach())
            del loss
        return total

    def loss(
        self, input_ids: torch.Tensor, labels: torch.Tensor, trained_tokens: int
    ) -> torch.Tensor:
        """Cross-entropy summed over this micro-batch's trained tokens, over `trained_tokens`.

        Of this rank: the loss of the global batch is the sum over all ranks and micro-batches.

        Args:
            input_ids: `[batch, seq]`, padded on the right. Causal attention never looks right, so
                padding needs no mask as long as its labels are -100.
            labels: `[batch, seq]`, -100 where nothing is trained.
            trained_tokens: trained tokens of the whole global batch, so that the sum over its
                micro-batches (on all ranks) is the loss per token however it is split. With none
                at all the loss is 0.

        Raises:
            UnsupportedError: this rank has one stage of a pipeline.
        """
        if self._pipeline is not None:
            raise UnsupportedError(
                "a stage of a pipeline has no loss of its own: give all micro-batches of a step to "
                "engine.forward_backward"
            )
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

        What is minimised is the sum of the losses given, over all ranks: with accumulation, divide
        yours by the number of micro-batches of all ranks, or use `loss` above.

        Ranks add their gradients up during the plan's last micro-batch; if `step` comes earlier,
        then there. All ranks must make as many calls between steps.
        """
        ledger.set_phase(Phase.BACKWARD)
        self._backward_calls += 1
        self.ranks.begin_backward(last=self._backward_calls >= self._accumulation_steps)
        if self.loss_scale is not None:
            loss = loss * self.loss_scale.value
        loss.backward()

    def step(self) -> float:
        """Clip by the exact global norm, update, forget the gradients; returns the norm.

        The norm is that of the gradients of all ranks, and the same number on each. One that is
        not finite updates nothing; in fp16 the loss scale follows it. With a lazy step, updates off
        the device go on while the next forward runs: `drain` before you read parameters yourself.
        """
        ledger.set_phase(Phase.STEP)
        self._backward_calls = 0
        self.optimizer.drain()  # gradients land where those of the last step were
        self.ranks.finish_gradients()
        if self._stream is not None:
            self._stream.release()
        gradients = self._gradients.take()
        if self._pipeline is not None:
            self._pipeline.add_up(gradients)
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        norm = float(self.optimizer.step(gradients, self._gradients.norms(), scale=scale))
        if self.loss_scale is not None:
            self.loss_scale.after_step(finite=math.isfinite(norm))
        del gradients
        self._gradients.clear()
        return norm

    def drain(self) -> None:
        """Return when every parameter has what the last `step` gave it, each rank having its part
        of those that are shared."""
        self.optimizer.drain()
        self.ranks.settle()

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values of a parameter or buffer, of this rank's part, wherever they live. Those on
        the disk are read into the host's memory. Drain first.

        Raises:
            DiskError: they cannot be read.
        """
        saved = None
        if self._stream is not None and isinstance(tensor, nn.Parameter):
            saved = self._stream.values_to_save(tensor)
        return local_part(tensor).detach() if saved is None else saved

    @torch.no_grad()
    def load_values(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        """Make `values` those of a parameter, of this rank's part. Drain first.

        Raises:
            DiskError: they cannot be written.
        """
        if self._stream is not None:
            self._stream.bring(parameter)
        local_part(parameter).copy_(values)
        if self._stream is not None:
            self._stream.take_back(parameter)

    def discard_gradients(self) -> None:
        """Forget the gradients since the last step, for a step that is given up."""
        self._backward_calls = 0
        self.ranks.discard_gradients()
        self._gradients.clear()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, the model is evaluated: no gradients, dropout off. It leaves nothing behind."""
        training = self.model.training
        self.model.eval()
        try:
            with ledger.phase(Phase.EVAL), torch.no_grad():
                yield
        finally:
            self.model.train(training)
            self.ranks.settle()
            if self._stream is not None:
                self._stream.release()

    def next_token(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The likeliest token after each of some sequences, `[batch, seq]`, on a pipeline, whose
        stages must all call it. Nothing is kept from one call to the next.

        Args:
            input_ids: without padding.
        """
        assert self._pipeline is not None, "a whole model generates by itself"
        with self.evaluating():
            return self._pipeline.next_token(input_ids)

    def evaluation_loss(self, input_ids: torch.Tensor, labels: torch.Tensor) -> float:
        """Cross-entropy summed over the trained tokens, without gradients, dropout off."""
        with self.evaluating():
            if self._pipeline is not None:
                return self._pipeline.evaluation_loss(input_ids, labels)
            return float(
                self.model(
                    input_ids=input_ids,
                    labels=labels,
                    use_cache=False,
                    num_items_in_batch=torch.tensor(1, device=input_ids.device),
                ).loss
            )


def _begin_forward(module: nn.Module, inputs: object) -> None:
    """Whoever calls the model with gradients on begins a forward."""
    if torch.is_grad_enabled():
        ledger.set_phase(Phase.FORWARD)
