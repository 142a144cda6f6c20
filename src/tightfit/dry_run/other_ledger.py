"""A ledger for runs with other engines: weighs what they shard, traces what comes and goes.

Knows layers and gradients, no engine's closed forms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from tightfit.bill.other_engines import OtherEngine, OtherRun
from tightfit.bill.table import Kind, Phase
from tightfit.dry_run.other_replay import Key, Part, Segment, Trace
from tightfit.ledger import Ledger
from tightfit.policies import Tier


class WeightedLedger(Ledger):
    """A ledger in which bytes of some kinds count more or less than one, and which keeps a trace.

    Attributes:
        segment: where new storages begin.
    """

    def __init__(self, weights: Mapping[Kind, float], depth: int) -> None:
        self._weights = weights
        self.trace = Trace(depth)
        self.segment = Segment(0, Part.START)
        self._weighted_bytes: dict[int, int] = {}
        self._event_keys: dict[int, Key] = {}
        self._event_counts: Counter[Segment] = Counter()
        self._is_marking = False
        super().__init__()

    def mark(self, tensor: torch.Tensor, kind: Kind, tier: Tier | None = None) -> None:
        """As any ledger does; another weight is another size to the allocator, not an end."""
        self._is_marking = True
        super().mark(tensor, kind, tier)
        self._is_marking = False
        record = self._storages.get(tensor.untyped_storage()._cdata)
        if record is not None:
            self._write_event(id(record), gradient=kind is Kind.GRADIENTS)

    def _add(self, record: Any, change: int) -> None:
        weighted = round(change * self._weights.get(record.kind, 1))
        super()._add(record, weighted)
        name = id(record)
        if name not in self._weighted_bytes:  # ids come again, keys do not
            self._event_keys[name] = self.segment, self._event_counts[self.segment]
            self._event_counts[self.segment] += 1
        self._weighted_bytes[name] = self._weighted_bytes.get(name, 0) + weighted
        if not self._is_marking:
            self._write_event(name, gradient=record.kind is Kind.GRADIENTS)

    def _write_event(self, name: int, *, gradient: bool) -> None:
        events = self.trace.events.setdefault(self.segment, [])
        events.append((self._event_keys[name], self._weighted_bytes[name], gradient))
        if not self._weighted_bytes[name]:
            del self._weighted_bytes[name]


def mark_segments(layers: nn.ModuleList, counting: WeightedLedger) -> None:
    """Let the trace follow the layers, in forward and in backward."""

    def enter(part: Part, layer: int) -> None:
        counting.segment = counting.segment._replace(part=part, layer=layer)

    def before(index: int, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if counting.section[0] is Phase.FORWARD:
            enter(Part.FORWARD, index)
            if index == 0 and inputs and inputs[0].requires_grad:
                inputs[0].register_hook(lambda gradient: enter(Part.END, 0))

    def after(index: int, module: nn.Module, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if counting.section[0] is not Phase.BACKWARD:
            if hidden.requires_grad:
                hidden.register_hook(lambda gradient: enter(Part.BACKWARD, index))
            if index == len(layers) - 1:
                enter(Part.HEAD, 0)

    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(partial(before, index))
        layer.register_forward_hook(partial(after, index))


class GradientBooks:
    """Books gradients when the engine would have made shards of them.

    FSDP reduces a layer's gradients when all of them are there, through a buffer in the type of
    the exchange that lives until the next layer needs one; other engines take each as it comes.
    """

    def __init__(self, run: OtherRun, counting: Ledger) -> None:
        self._run = run
        self._counting = counting
        self._in_groups = run.engine in (OtherEngine.FSDP1, OtherEngine.FSDP2)
        self._part = 1 / run.tensor_parallel if run.sequence_parallel else 1.0
        self._waiting: list[torch.Tensor] = []
        self._buffer: torch.Tensor | None = None

    def follow(self, model: nn.Module, layers: nn.ModuleList) -> None:
        """Watch the gradients of all parameters that are trained."""
        inside = {id(p) for layer in layers for p in layer.parameters()}
        self._root: list[torch.Tensor] = []
        for parameter in model.parameters():
            if parameter.requires_grad:
                target = self._waiting if id(parameter) in inside else self._root
                hook = partial(self._arrived, target)
                parameter.register_post_accumulate_grad_hook(hook)
        if self._in_groups:
            for layer in layers:
                layer.register_forward_hook(self._watch)

    def finish(self) -> None:
        """The last layer's and the outermost group's, after backward."""
        if self._in_groups:
            self._reduce(self._waiting)
            self._counting.set_section(Phase.BACKWARD, "end")
            self._reduce(self._root)
        self._buffer = None

    def _watch(self, module: nn.Module, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad and self._counting.section[0] is Phase.FORWARD:
            hidden.register_hook(lambda gradient: self._reduce(self._waiting))

    def _arrived(self, waiting: list[torch.Tensor], parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        if self._in_groups:
            waiting.append(parameter.grad)
        else:
            self._counting.mark(parameter.grad, Kind.GRADIENTS)

    def _reduce(self, waiting: list[torch.Tensor]) -> None:
        if not waiting:
            return
        self._buffer = None
        size = sum(gradient.numel() for gradient in waiting)
        if self._run.shards > 1:
            with self._counting.labelled(Kind.COLLECTIVES, None):
                count = round(size * self._run.widths.reduce * self._part)
                self._buffer = torch.empty(count, dtype=torch.uint8)
        for gradient in waiting:
            self._counting.mark(gradient, Kind.GRADIENTS)
        waiting.clear()
