"""The bill of a run with another engine: its own closed forms, and a plain step on fake tensors.

The ledger and the modules of transformers are those of our own dry run, the step is not: no engine
of ours, gradients and parameters weighed as the other engine stores them while they are counted,
so that the peak is found at its own moment. Counts a few layers and extrapolates by section.
Knows no planner and no policy of ours but the adapter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn
from transformers import PretrainedConfig

from tightfit.bill.other_engines import Metric, OtherEngine, OtherRun, Recompute
from tightfit.bill.other_states import (
    Counts,
    Moment,
    gather_pool_bytes,
    gradient_share,
    state_bytes,
)
from tightfit.bill.runtime import runtime_bytes
from tightfit.bill.table import Kind, Phase
from tightfit.dry_run.config import load_config
from tightfit.dry_run.depth import depths_of, with_depth
from tightfit.dry_run.fakes import fake_tensors
from tightfit.dry_run.kernels import card_kernels
from tightfit.dry_run.other_ledger import GradientBooks, WeightedLedger, mark_segments
from tightfit.dry_run.other_modules import compile_layers, imitate
from tightfit.dry_run.other_replay import Part, Segment, Trace, fragmentation_bytes
from tightfit.dry_run.other_step import adapt, build, forward, recompute_layers
from tightfit.dry_run.sections import follow_layers
from tightfit.engine.layers import decoder_layers
from tightfit.ledger import Section
from tightfit.policies import Tier

Kinds = Mapping[Kind, float]


@dataclass(frozen=True)
class OtherBill:
    """What another engine takes on one card.

    Attributes:
        moments: bytes by kind at the peak of every part of a step.
        counts: the model's numbers of parameters.
        workspace_bytes: of cuBLAS, which torch's allocator gives out.
        fragmentation_bytes: what the allocator reserves beyond.
        outside_bytes: context and communication library.
    """

    moments: Mapping[str, Kinds]
    counts: Counts
    workspace_bytes: float = 0
    fragmentation_bytes: float = 0
    outside_bytes: float = 0

    @property
    def allocated_bytes(self) -> float:
        """Highest total of all parts, with workspaces: `torch.cuda.max_memory_allocated`."""
        return max(sum(kinds.values()) for kinds in self.moments.values()) + self.workspace_bytes

    @property
    def reserved_bytes(self) -> float:
        """`torch.cuda.max_memory_reserved`."""
        return self.allocated_bytes + self.fragmentation_bytes

    def peak_bytes(self, metric: Metric) -> float:
        """What `metric` counts."""
        if metric is Metric.ALLOCATED:
            return self.allocated_bytes
        return self.reserved_bytes + (self.outside_bytes if metric is Metric.DEVICE else 0)

    @property
    def peak_moment(self) -> str:
        """The part of the step with the highest total."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))


def other_bill(config: PretrainedConfig, run: OtherRun) -> OtherBill:
    """What `run` allocates, without context, libraries and the allocator's losses.

    Raises:
        ConfigError: an adapter's target names no module of the model.
    """
    counts, sections, fragmentation = _count(*_one_rank(config, run))
    waiting = sections[Phase.FORWARD, "last layer"].get(Kind.ACTIVATIONS, 0) * (run.in_flight - 1)
    states = state_bytes(run, counts)
    moments: dict[str, Kinds] = {
        "step": _sum(states.resident, states.during[Moment.STEP]),
    }
    for (phase, name), kinds in sections.items():
        if phase is Phase.LOAD:
            continue
        during = states.during[_moment(phase, name)]
        others = {Kind.ACTIVATIONS: waiting}  # of other micro-batches in the pipeline
        moments[f"{phase} {name}".strip()] = _sum(states.resident, during, kinds, others)
    runtime = runtime_bytes(
        run.capability, ranks=run.shards, all_reduces=run.engine is OtherEngine.DDP
    )
    bill = OtherBill(moments, counts, runtime.workspace_bytes, fragmentation, runtime.outside_bytes)
    if run.card_bytes is None:
        return bill
    room = max(0.0, run.card_bytes - runtime.outside_bytes - bill.allocated_bytes)
    return replace(bill, fragmentation_bytes=min(fragmentation, room))


def _sum(*parts: Kinds) -> Kinds:
    total: dict[Kind, float] = defaultdict(float)
    for part in parts:
        for kind, size in part.items():
            total[kind] += size
    return {kind: count for kind, count in total.items() if count}


def _moment(phase: Phase, name: str) -> Moment:
    if name == "head":
        return Moment.HEAD
    if phase is Phase.FORWARD:
        return Moment.FORWARD
    return Moment.END if name in ("embedding", "end") else Moment.BACKWARD


def _one_rank(config: PretrainedConfig, run: OtherRun) -> tuple[PretrainedConfig, OtherRun]:
    """The model and the run as one rank sees them.

    Of tensor-parallel ranks each has its heads and its part of the MLP; with sequence parallelism
    everything is shared out evenly, which is what the whole model does on its part of a sequence.
    """
    if run.pipeline_parallel > 1:
        config = with_depth(config, max(1, config.num_hidden_layers // run.pipeline_parallel))
    ranks = run.tensor_parallel
    if ranks == 1:
        return config, run
    if run.sequence_parallel:
        return config, replace(run, sequence_length=run.sequence_length // ranks)
    fields = config.to_dict()
    width = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        fields[name] = max(1, fields[name] // ranks)
    return load_config({**fields, "head_dim": width}), run


def _count(
    config: PretrainedConfig, run: OtherRun
) -> tuple[Counts, Mapping[Section, Kinds], float]:
    """Counts of parameters, bytes of every section and what is lost, at full depth."""
    depth = config.num_hidden_layers
    depths = depths_of(config)
    if not depths.steps or run.recompute is Recompute.ALTERNATE:
        few = _one_step(config, run)
        return few.counts, few.sections, _lost(few.trace, few.counts, run, depth)
    few = _one_step(with_depth(config, depths.few), run)
    more = _one_step(with_depth(config, depths.more), run)
    steps = depths.steps
    numbers = vars(more.counts)
    counts = Counts(
        **{
            name: round(_line(value, numbers[name], steps))
            for name, value in vars(few.counts).items()
        }
    )
    sections = {
        s: _extrapolate(few.sections[s], more.sections[s], steps, run) for s in few.sections
    }
    return counts, sections, _lost(more.trace, counts, run, depth)


def _lost(trace: Trace, counts: Counts, run: OtherRun, depth: int) -> float:
    """What the allocator reserves and cannot hand out."""
    if run.metric is Metric.ALLOCATED:
        return 0
    states = state_bytes(run, counts)
    lost = fragmentation_bytes(
        trace,
        states,
        depth,
        lengths=run.lengths,
        expandable_segments=run.expandable_segments,
        gradients_apart=run.engine in (OtherEngine.FSDP1, OtherEngine.FSDP2) and run.shards > 1,
    )
    return lost + gather_pool_bytes(run, counts)


def _line(at_few: float, at_more: float, steps: float) -> float:
    return at_more + steps * (at_more - at_few)


def _extrapolate(few: Kinds, more: Kinds, steps: float, run: OtherRun) -> Kinds:
    """Each kind `steps` differences on; activations stay where they are if layers offload them."""
    still = {Kind.ACTIVATIONS} if run.offload_activations else set()
    return {
        kind: max(a, b) if kind in still else _line(a, b, steps)
        for kind in few.keys() | more.keys()
        for a, b in [(few.get(kind, 0), more.get(kind, 0))]
    }


@dataclass(frozen=True)
class _Step:
    """What was counted in one step of a model of some depth."""

    counts: Counts
    sections: Mapping[Section, Kinds]
    trace: Trace


def _one_step(config: PretrainedConfig, run: OtherRun) -> _Step:
    with fake_tensors():
        model = build(config, run)
        layers = decoder_layers(model)
        base = _base_counts(model, layers)
        recompute_layers(layers, run.recompute)
        part = 1 / run.tensor_parallel if run.sequence_parallel else 1.0
        weights = {Kind.PARAMETERS: 0.0, Kind.GRADIENTS: gradient_share(run) * part}
        with WeightedLedger(weights, len(layers)) as counting, card_kernels(run.capability):
            counting.adopt(model)
            adapted = adapt(model, run)
            counting.adopt(adapted)
            imitate(layers, run)
            if run.compiled:
                compile_layers(layers)
            adapted.train()
            follow_layers(layers, counting)
            gradients = GradientBooks(run, counting)
            gradients.follow(model, layers)
            mark_segments(layers, counting)
            counting.trace.events.clear()
            for number in range(2 if run.accumulates else 1):
                counting.segment = Segment(number, Part.START)
                counting.set_section(Phase.FORWARD)
                loss, kept = forward(model, run)
                counting.set_section(Phase.BACKWARD, "head")
                loss.backward()
                gradients.finish()
                del loss, kept
        sections = {section: tiers[Tier.DEVICE] for section, tiers in counting.sections().items()}
        trace = replace(
            counting.trace,
            parameters=[p.numel() for p in adapted.parameters()],
            trained=[p.numel() for p in adapted.parameters() if p.requires_grad],
            events={segment: list(events) for segment, events in counting.trace.events.items()},
        )
        counts = _counts(base, adapted, layers)
        counts = Counts(**{name: round(value * part) for name, value in vars(counts).items()})
        return _Step(counts, sections, trace)


def _base_counts(model: nn.Module, layers: nn.ModuleList) -> dict[str, int]:
    """Of the model before adapters change it."""
    base = sum(p.numel() for p in model.parameters())
    inside = sum(p.numel() for p in layers.parameters())
    head = model.get_output_embeddings().weight  # type: ignore[operator]
    tied = head is model.get_input_embeddings().weight  # type: ignore[operator]
    matrices = [p.numel() for p in layers.parameters() if p.dim() > 1]
    return {
        "base": base,
        "layer": inside // len(layers),
        "root": base - inside,
        "linear": sum(matrices),
        "head": 0 if tied else head.numel(),
        "largest": max(matrices),
    }


def _counts(base: dict[str, int], adapted: nn.Module, layers: nn.ModuleList) -> Counts:
    trained = [p for p in adapted.parameters() if p.requires_grad]
    adapters_only = len(trained) < len(list(adapted.parameters()))
    in_layer = [p for p in layers[-1].parameters() if p.requires_grad]
    # Of ends that are trained beside adapters peft keeps a copy.
    inside = {id(p) for p in layers.parameters()}
    adapters = [
        p
        for name, p in adapted.named_parameters()
        if "lora_" in name or (adapters_only and p.requires_grad and id(p) not in inside)
    ]
    return Counts(
        **base,
        trainable=sum(p.numel() for p in trained),
        adapters=sum(p.numel() for p in adapters),
        trainable_layer=sum(p.numel() for p in in_layer),
    )
