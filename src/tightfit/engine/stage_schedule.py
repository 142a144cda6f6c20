"""Runs the micro-batches of a step through the stages of a pipeline, as its timetable says.

Gradients come in the order of micro-batches, and every backward is one of its own: ranks that
share a stage's states add gradients up, and drop whole parameters, as often as without a pipeline
(torch's own stages keep both to the end of the step, and receive into a buffer for every
micro-batch at once). Of a micro-batch that is on its way a stage keeps what autograd does, and what
it has received: not what it has sent. Every stage sees every micro-batch, so their shapes need not
be sent and may differ. Knows nothing of optimizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tightfit import ledger
from tightfit.bill.table import Kind, Phase
from tightfit.bill.timetable import Tick, Work, timetable
from tightfit.engine.clipping import Gradients
from tightfit.engine.disk_gradients import DiskGradient
from tightfit.engine.loss_scale import LossScale
from tightfit.engine.ranks import Ranks, summed
from tightfit.engine.stage_ranks import add_up_with, swap
from tightfit.engine.stages import Chunk, Stage
from tightfit.errors import UnsupportedError
from tightfit.policies import PipelineSchedule

MicroBatch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class _OnItsWay:
    """A micro-batch whose backward is to come.

    Attributes:
        received: None in the first chunk.
        result: what backward begins with: hidden states that were sent, or the loss.
    """

    received: torch.Tensor | None
    result: GradientEdge


class Pipeline:
    """All stages of a model, seen from one of them. Every rank must call the same in order.

    Args:
        root: what is called in training: the stage's model, or peft's wrapping of it.
        group: the rank of each stage that has this rank's place in it, in the order of stages.
        ranks: are told when a backward begins.
        loss_scale: of gradients in fp16.
    """

    def __init__(
        self,
        stage: Stage,
        root: nn.Module,
        group: dist.ProcessGroup,
        schedule: PipelineSchedule,
        ranks: Ranks,
        device: torch.device,
        loss_scale: LossScale | None,
    ) -> None:
        self._stage = stage
        self._root = root
        self._group = group
        self._schedule = schedule
        self._ranks = ranks
        self.device = device
        self._loss_scale = loss_scale
        self._dtype = stage.dtype
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
        stage = self._stage
        sizes = stage.number, stage.stages, len(stage.chunks)
        for tick in timetable(self._schedule, *sizes, len(micro_batches)):
            if tick.work is not None:
                step.do(tick.work)
            step.exchange(tick)
        return self.sum_of(step.loss)

    @torch.no_grad()
    def evaluation_loss(self, input_ids: torch.Tensor, labels: torch.Tensor) -> float:
        """The summed cross-entropy of one batch, the same on every stage."""
        result = self._through(input_ids, labels)
        return self.sum_of(0.0 if result is None else float(result))

    @torch.no_grad()
    def next_token(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The likeliest token after each sequence, `[batch]`, the same on every stage."""
        result = self._through(input_ids, None)
        tokens = torch.zeros_like(input_ids[:, 0])
        if result is not None:
            tokens = result[:, -1].argmax(dim=-1)
        dist.broadcast(tokens, group=self._group, group_src=self._stage.stages - 1)
        return tokens

    def _through(self, input_ids: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor | None:
        """One batch's forward; what comes out, on the stage that has the last chunk."""
        stages, own = self._stage.stages, self._stage.number
        for chunk in self._stage.chunks:
            received = None
            if chunk.entrance is not None:
                received = self.empty(self.shape_of(input_ids), Kind.ACTIVATIONS)
                self.swap([], [((own - 1) % stages, received)])
            result = self.call(chunk, (input_ids, labels), received)
            if chunk.is_last:
                return result
            self.swap([((own + 1) % stages, result)], [])
        return None

    def gradient_of_loss(self) -> torch.Tensor:
        """What the last chunk's backward begins with: one, scaled where gradients are."""
        scale = 1.0 if self._loss_scale is None else self._loss_scale.value
        return torch.full((), scale, device=self.device)

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
        chunk: Chunk,
        batch: tuple[torch.Tensor, torch.Tensor | None],
        received: torch.Tensor | None,
        *,
        trained_tokens: int = 1,
    ) -> torch.Tensor:
        """A chunk's forward: hidden states, `[batch, seq, hidden]`; of the last the loss, or
        without labels the logits after the last token, `[batch, 1, vocabulary]`."""
        input_ids, labels = batch
        inputs: dict[str, Any] = {"use_cache": False}
        inputs["input_ids" if received is None else "inputs_embeds"] = (
            input_ids if received is None else received
        )
        with self._stage.computing(chunk, received):
            if not chunk.is_last:
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

    def shape_of(self, input_ids: torch.Tensor) -> tuple[int, ...]:
        """The shape of the hidden states of a micro-batch."""
        return (*input_ids.shape, self._width)

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Of this stage."""
        return self._stage.chunks

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

    def empty(self, shape: tuple[int, ...], kind: Kind) -> torch.Tensor:
        """Room for what is received."""
        with ledger.labelled(kind):
            return torch.empty(shape, dtype=self._dtype, device=self.device)

    def swap(
        self, sent: list[tuple[int, torch.Tensor]], received: list[tuple[int, torch.Tensor]]
    ) -> None:
        """With other stages, by their numbers."""
        swap(self._group, [(to, tensor.contiguous()) for to, tensor in sent], received)


class _Step:
    """The micro-batches of one step on one stage.

    Attributes:
        loss: of those whose last forward was here; 0 on all stages but the last.
    """

    def __init__(
        self, pipeline: Pipeline, micro_batches: Sequence[MicroBatch], trained_tokens: int
    ) -> None:
        self._pipeline = pipeline
        self._micro_batches = micro_batches
        self._trained_tokens = trained_tokens
        self._on_their_way: dict[tuple[int, int], _OnItsWay] = {}  # by chunk and micro-batch
        self._received: dict[Work, torch.Tensor] = {}
        self._looked_up: dict[int, MicroBatch] = {}
        self._shapes: dict[int, tuple[int, ...]] = {}
        self._leaving: torch.Tensor | None = None
        self._left = len(micro_batches) * len(pipeline.chunks)
        self.loss = 0.0

    def do(self, work: Work) -> None:
        """One forward or backward; what it needs has been received."""
        if work.is_forward:
            self._forward(work)
        else:
            self._backward(work)

    def exchange(self, tick: Tick) -> None:
        """Send what was computed, which is not kept, and receive what is needed later."""
        given, self._leaving = self._leaving, None
        sent, received = [], []
        if tick.sends_to is not None:
            assert given is not None
            sent.append((tick.sends_to, given))
        for work, peer in tick.receives:
            kind = Kind.ACTIVATIONS if work.is_forward else Kind.TEMPORARIES
            self._received[work] = self._pipeline.empty(self._shape(work.micro_batch), kind)
            received.append((peer, self._received[work]))
        self._pipeline.swap(sent, received)

    def _forward(self, work: Work) -> None:
        ledger.set_phase(Phase.FORWARD)
        chunk, batch = self._pipeline.chunks[work.chunk], self._batch(work.micro_batch)
        if work.chunk == len(self._pipeline.chunks) - 1:
            del self._looked_up[work.micro_batch]
        received = self._received.pop(work, None)
        if received is not None:
            received.requires_grad_()
        result = self._pipeline.call(chunk, batch, received, trained_tokens=self._trained_tokens)
        if chunk.is_last:
            self.loss += float(result.detach())
        else:
            self._leaving = result.detach()
        self._on_their_way[work[1:]] = _OnItsWay(received, get_gradient_edge(result))

    def _backward(self, work: Work) -> None:
        """Of a micro-batch whose forward was here; leaves the gradients of what it had received."""
        ledger.set_phase(Phase.BACKWARD)
        its = self._on_their_way.pop(work[1:])
        self._left -= 1
        self._pipeline.begin_backward(last=self._left == 0)
        gradient = self._received.pop(work, None)  # nothing came for the last chunk
        if gradient is None:
            gradient = self._pipeline.gradient_of_loss()
        torch.autograd.backward((its.result,), (gradient,))
        self._leaving = None if its.received is None else its.received.grad

    def _shape(self, index: int) -> tuple[int, ...]:
        """Of the hidden states of a micro-batch."""
        if index not in self._shapes:
            self._shapes[index] = self._pipeline.shape_of(self._batch(index)[0])
        return self._shapes[index]

    def _batch(self, index: int) -> MicroBatch:
        """A micro-batch, looked up once and kept for as long as a chunk is to have it."""
        if index not in self._looked_up:
            self._looked_up[index] = self._micro_batches[index]
        return self._looked_up[index]
