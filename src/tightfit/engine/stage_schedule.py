"""Runs the micro-batches of a step through the stages of a pipeline.

1F1B (https://arxiv.org/abs/1806.03377, https://arxiv.org/abs/2104.04473): stage s of p begins with
p - s - 1 forwards, then does one backward after each forward, so that it has the activations of at
most p - s micro-batches. GPipe (https://arxiv.org/abs/1811.06965) does all forwards first. Either
way gradients come in the order of micro-batches, and every backward is one of its own: ranks that
share a stage's states add gradients up, and drop whole parameters, as often as without a pipeline
(torch's own stages keep both to the end of the step, and receive into a buffer for every
micro-batch at once). Of a micro-batch that is on its way a stage keeps what autograd does, and what
it has received: not what it has sent. Every stage sees every micro-batch, so their shapes need not
be sent and may differ. Knows nothing of optimizers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tightfit import ledger
from tightfit.bill.table import Kind, Phase
from tightfit.engine.clipping import Gradients
from tightfit.engine.disk_gradients import DiskGradient
from tightfit.engine.ranks import Ranks, summed
from tightfit.engine.stage_ranks import add_up_with, swap
from tightfit.engine.stages import Stage
from tightfit.errors import UnsupportedError
from tightfit.policies import PipelineSchedule

MicroBatch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class _OnItsWay:
    """A micro-batch whose backward is to come.

    Attributes:
        received: None on the first stage.
        result: what backward begins with: hidden states that were sent, or the loss.
        shape: of the hidden states.
    """

    received: torch.Tensor | None
    result: GradientEdge
    shape: tuple[int, ...]


class Pipeline:
    """All stages of a model, seen from one of them. Every rank must call the same in order.

    Args:
        root: what is called in training: the stage's model, or peft's wrapping of it.
        group: the rank of each stage that has this rank's place in it, in the order of stages.
        ranks: are told when a backward begins.
    """

    def __init__(
        self,
        stage: Stage,
        root: nn.Module,
        group: dist.ProcessGroup,
        schedule: PipelineSchedule,
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        self._stage = stage
        self._root = root
        self._group = group
        self._schedule = schedule
        self._ranks = ranks
        self.device = device
        self._dtype = stage.model.dtype
        self._width = int(stage.model.config.get_text_config().hidden_size)
        self._shared = stage.shared
        # NCCL wants all ranks of a group in its first call, and neighbours are not all.
        dist.all_reduce(torch.zeros((), device=device), group=group)

    def run(self, micro_batches: Sequence[MicroBatch], trained_tokens: int) -> float:
        """Forward and backward of all of a step; the sum of their losses, the same on every stage.

        Args:
            micro_batches: input ids and labels, `[batch, seq]`, the same on all stages; each is
                looked up once. All ranks must have as many.
            trained_tokens: as of `Engine.loss`.
        """
        step = _Step(self, micro_batches, trained_tokens)
        count = len(micro_batches)
        ahead = count
        if self._schedule is PipelineSchedule.ONE_FORWARD_ONE_BACKWARD:
            ahead = min(count, self._stage.stages - 1 - self._stage.number)
        for index in range(ahead):
            step.forward(index, self._from_previous(step.shape(index)))
            self._to_next(step.leaving(), None)
        received = self._from_previous(step.shape(ahead)) if ahead < count else None
        for index in range(ahead, count):
            step.forward(index, received)
            received = None  # nothing is held here that backward is done with
            received = self._to_previous(
                step.backward(self._to_next(step.leaving(), step.oldest_shape)),
                step.shape(index + 1),
            )
        for _ in range(ahead):
            self._to_previous(step.backward(self._to_next(None, step.oldest_shape)), None)
        return self.sum_of(step.loss)

    @torch.no_grad()
    def evaluation_loss(self, input_ids: torch.Tensor, labels: torch.Tensor) -> float:
        """The summed cross-entropy of one batch, the same on every stage."""
        received = self._from_previous(self.shape_of(input_ids))
        result = self.call((input_ids, labels), received)
        if self._stage.is_last:
            return self.sum_of(float(result))
        self._to_next(result, None)
        return self.sum_of(0.0)

    @torch.no_grad()
    def next_token(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The likeliest token after each sequence, `[batch]`, the same on every stage."""
        received = self._from_previous(self.shape_of(input_ids))
        result = self.call((input_ids, None), received)
        if not self._stage.is_last:
            self._to_next(result, None)
        tokens = torch.zeros_like(input_ids[:, 0])
        if self._stage.is_last:
            tokens = result[:, -1].argmax(dim=-1)
        dist.broadcast(tokens, group=self._group, group_src=self._stage.stages - 1)
        return tokens

    def sum_of(self, value: float) -> float:
        """Over all stages."""
        return summed([value], self.device, self._group)[0]

    def add_up(self, gradients: Gradients) -> None:
        """Make the gradients of what the first and the last stage share those of both."""
        if self._shared is None or self._shared not in gradients:
            return
        gradient = gradients[self._shared]
        if isinstance(gradient, DiskGradient):
            raise UnsupportedError(
                "gradients on nvme of an embedding that two pipeline stages share: place them on "
                "the host (offload_gradient: cpu)"
            )
        peer = self._stage.stages - 1 if self._stage.is_first else 0
        add_up_with(peer, gradient, self._group, self.device)

    def call(
        self,
        batch: tuple[torch.Tensor, torch.Tensor | None],
        received: torch.Tensor | None,
        *,
        trained_tokens: int = 1,
    ) -> torch.Tensor:
        """This stage's forward: hidden states, `[batch, seq, hidden]`; on the last the loss, or
        without labels the logits after the last token, `[batch, 1, vocabulary]`."""
        input_ids, labels = batch
        inputs: dict[str, Any] = {"input_ids": input_ids, "use_cache": False}
        if received is not None:
            assert self._stage.entrance is not None
            self._stage.entrance.received = received
            del inputs["input_ids"]
            inputs["inputs_embeds"] = received
        try:
            if not self._stage.is_last:
                hidden: torch.Tensor = self._root(**inputs)
                self._check(hidden, input_ids)
                return hidden
            if labels is None:
                logits: torch.Tensor = self._root(**inputs, logits_to_keep=1).logits
                return logits
            divisor = torch.tensor(max(trained_tokens, 1), device=input_ids.device)
            loss: torch.Tensor = self._root(
                **inputs, labels=labels, num_items_in_batch=divisor
            ).loss
            return loss
        finally:
            if self._stage.entrance is not None:
                self._stage.entrance.received = None

    def shape_of(self, input_ids: torch.Tensor) -> tuple[int, ...]:
        """The shape of the hidden states of a micro-batch."""
        return (*input_ids.shape, self._width)

    @property
    def ends(self) -> bool:
        """Whether this is the last stage."""
        return self._stage.is_last

    def begin_backward(self, *, last: bool) -> None:
        """Tell the ranks that share this stage."""
        self._ranks.begin_backward(last=last)

    def _check(self, hidden: torch.Tensor, input_ids: torch.Tensor) -> None:
        """See that the next stage is sent what it waits for.

        Raises:
            UnsupportedError: the model's layers pass something else on.
        """
        if tuple(hidden.shape) != self.shape_of(input_ids) or hidden.dtype is not self._dtype:
            raise UnsupportedError(
                f"this model's layers pass {hidden.dtype} {tuple(hidden.shape)} on, and not "
                f"{self._dtype} {self.shape_of(input_ids)}: set pipeline_parallel_size 1"
            )

    def _from_previous(self, shape: tuple[int, ...] | None) -> torch.Tensor | None:
        return self._trade(self._stage.number - 1, None, shape, Kind.ACTIVATIONS)

    def _to_previous(
        self, given: torch.Tensor | None, shape: tuple[int, ...] | None
    ) -> torch.Tensor | None:
        """Send gradients back, and receive the next micro-batch's hidden states, if it has one."""
        return self._trade(self._stage.number - 1, given, shape, Kind.ACTIVATIONS)

    def _to_next(
        self, given: torch.Tensor | None, shape: tuple[int, ...] | None
    ) -> torch.Tensor | None:
        """Send hidden states, and receive the gradients of the oldest, if they are waited for."""
        return self._trade(self._stage.number + 1, given, shape, Kind.TEMPORARIES)

    def _trade(
        self,
        peer: int,
        given: torch.Tensor | None,
        shape: tuple[int, ...] | None,
        kind: Kind,
    ) -> torch.Tensor | None:
        """Send and receive what is not None; None where there is no such stage."""
        if not 0 <= peer < self._stage.stages:
            return None
        wanted = None
        if shape is not None:
            with ledger.labelled(kind):
                wanted = torch.empty(shape, dtype=self._dtype, device=self.device)
        swap(
            self._group,
            [] if given is None else [(peer, given.detach().contiguous())],
            [] if wanted is None else [(peer, wanted)],
        )
        return wanted


class _Step:
    """The micro-batches of one step on one stage.

    Attributes:
        loss: of those whose forward was here; 0 on all stages but the last.
    """

    def __init__(
        self, pipeline: Pipeline, micro_batches: Sequence[MicroBatch], trained_tokens: int
    ) -> None:
        self._pipeline = pipeline
        self._micro_batches = micro_batches
        self._trained_tokens = trained_tokens
        self._on_their_way: deque[_OnItsWay] = deque()
        self._looked_up: dict[int, MicroBatch] = {}
        self._leaving: torch.Tensor | None = None
        self._left = len(micro_batches)
        self.loss = 0.0

    def shape(self, index: int) -> tuple[int, ...] | None:
        """Of the hidden states of a micro-batch; None if there is no such one."""
        if index >= len(self._micro_batches):
            return None
        return self._pipeline.shape_of(self._batch(index)[0])

    @property
    def oldest_shape(self) -> tuple[int, ...]:
        """Of the hidden states whose backward comes next."""
        return self._on_their_way[0].shape

    def forward(self, index: int, received: torch.Tensor | None) -> None:
        """The stage's forward of one micro-batch."""
        ledger.set_phase(Phase.FORWARD)
        batch = self._batch(index)
        del self._looked_up[index]
        if received is not None:
            received.requires_grad_()
        result = self._pipeline.call(batch, received, trained_tokens=self._trained_tokens)
        if self._pipeline.ends:
            self.loss += float(result.detach())
        else:
            self._leaving = result.detach()
        shape = self._pipeline.shape_of(batch[0])
        self._on_their_way.append(_OnItsWay(received, get_gradient_edge(result), shape))

    def leaving(self) -> torch.Tensor | None:
        """What the last forward has for the next stage, once: it is not kept."""
        leaving, self._leaving = self._leaving, None
        return leaving

    def backward(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """The backward of the oldest micro-batch; the gradients of what it had received.

        Args:
            gradient: of what it had sent; None on the last stage.
        """
        ledger.set_phase(Phase.BACKWARD)
        oldest = self._on_their_way.popleft()
        self._left -= 1
        self._pipeline.begin_backward(last=self._left == 0)
        if gradient is None:
            gradient = torch.ones((), device=self._pipeline.device)
        torch.autograd.backward((oldest.result,), (gradient,))
        return None if oldest.received is None else oldest.received.grad

    def _batch(self, index: int) -> MicroBatch:
        if index not in self._looked_up:
            self._looked_up[index] = self._micro_batches[index]
        return self._looked_up[index]
