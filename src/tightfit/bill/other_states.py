"""What other engines hold of a model's states: DeepSpeed, FSDP1, FSDP2, DDP, one process.

`state_bytes` says what an engine keeps from step to step and what it adds in each part of a step:
gathered layers, reduce buckets, unpacked weights, the optimizer's temporaries. Closed forms by the
engines' own accounting, from numbers of parameters alone. Knows no torch and no activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from tightfit.bill.other_engines import FP32_BYTES, OtherEngine, OtherRun, Recompute
from tightfit.bill.table import Kind

Bytes = Mapping[Kind, float]


@dataclass(frozen=True)
class Counts:
    """Numbers of parameters of a model and of what is trained in it.

    Attributes:
        base: all of them without adapters, tied ones once.
        layer: of one decoder layer (the mean).
        root: outside the decoder layers: embedding, last norm, head.
        linear: weights of linear layers inside decoder layers.
        head: weights of the output layer that are its own; 0 where it is the embedding.
        largest: of the largest matrix of a decoder layer.
        trainable: that get gradients, adapters included.
        adapters: of adapters.
        trainable_layer: that get gradients in one decoder layer.
    """

    base: int
    layer: int
    root: int
    linear: int
    head: int
    largest: int
    trainable: int
    adapters: int
    trainable_layer: int


class Moment(StrEnum):
    """Parts of a step that differ in what an engine adds to a model's states."""

    FORWARD = "forward"  # of the decoder layers
    HEAD = "head"  # output layer and loss, forward and backward
    BACKWARD = "backward"  # of the decoder layers
    END = "end of backward"  # of the embedding; FSDP reduces its outermost group
    STEP = "step"


@dataclass(frozen=True)
class EngineStates:
    """Bytes on one card.

    Attributes:
        resident: from one step to the next.
        during: what else is alive at each moment.
    """

    resident: Bytes
    during: Mapping[Moment, Bytes]


_DEEPSPEED = (OtherEngine.ZERO1, OtherEngine.ZERO2, OtherEngine.ZERO3)
_FSDP = (OtherEngine.FSDP1, OtherEngine.FSDP2)
_WHOLE_PARAMETERS = (OtherEngine.SINGLE, OtherEngine.DDP, OtherEngine.ZERO1, OtherEngine.ZERO2)


def parameter_bytes(run: OtherRun, counts: Counts) -> float:
    """Stored parameters of the whole model, before they are shared out."""
    widths = run.widths
    quantised = 0
    if widths.quantised is not None:
        quantised = counts.linear + (counts.head if widths.quantised_head else 0)
    plain = counts.base - quantised
    return (
        plain * widths.weight
        + quantised * (widths.quantised or 0)
        + counts.adapters * run.adapter_width
    )


def gradient_share(run: OtherRun) -> float:
    """The part of a whole gradient in the layers' type that stays on the card."""
    if run.optimizer_in_backward or run.offload_gradients or run.offload_parameters:
        return 0
    if run.engine in _DEEPSPEED[1:]:
        return 0  # they leave for the bucket and the partition, which are resident
    if run.engine in _FSDP and run.no_sync:
        return run.widths.reduce / run.widths.compute
    own = run.widths.gradient / (run.adapter_width if run.adapter else run.widths.compute)
    return own / (run.shards if run.engine in _FSDP else 1)


def state_bytes(run: OtherRun, counts: Counts) -> EngineStates:
    """What `run.engine` holds of the model of `counts`."""
    return EngineStates(_resident(run, counts), {m: _during(run, counts, m) for m in Moment})


def _resident(run: OtherRun, counts: Counts) -> Bytes:
    widths, trainable = run.widths, counts.trainable
    sharded = 1 if run.engine in _WHOLE_PARAMETERS else run.shards
    states_over = 1 if run.engine in (OtherEngine.SINGLE, OtherEngine.DDP) else run.shards
    on_card = not (run.offload_optimizer or run.offload_parameters)
    return {
        Kind.PARAMETERS: 0 if run.offload_parameters else parameter_bytes(run, counts) / sharded,
        Kind.MASTER_WEIGHTS: on_card * trainable * widths.master / states_over,
        Kind.OPTIMIZER_STATES: on_card * trainable * widths.states / states_over,
        Kind.COLLECTIVES: _buckets(run, counts),
        Kind.GRADIENTS: _partition(run, counts),
    }


def _partition(run: OtherRun, counts: Counts) -> float:
    """DeepSpeed's own copy of the gradients of its partition; FSDP1's of frozen parameters."""
    if run.engine is OtherEngine.FSDP1 and run.frozen_gradients:
        frozen = counts.base - (counts.trainable - counts.adapters)
        return frozen * run.widths.compute / (1 if run.no_sync else run.shards)
    if run.engine not in _DEEPSPEED[1:] or run.offload_gradients:
        return 0
    return counts.trainable * run.widths.gradient / run.shards


def _buckets(run: OtherRun, counts: Counts) -> float:
    """Buffers that live as long as the engine does."""
    if run.engine is OtherEngine.DDP:  # gradients are copied into buckets as large as they are
        return counts.trainable * run.widths.gradient
    if run.engine in _DEEPSPEED[1:]:
        copies = 2 if run.deepspeed.overlap else 1
        return copies * run.deepspeed.reduce * run.widths.reduce
    return 0


def _during(run: OtherRun, counts: Counts, moment: Moment) -> Bytes:
    if moment is Moment.STEP:
        return {
            Kind.GRADIENTS: _gradients_at_step(run, counts),
            Kind.TEMPORARIES: _step(run, counts),
        }
    return {
        Kind.COLLECTIVES: _gathered(run, counts, moment),
        Kind.TEMPORARIES: _dequantised(run, counts, moment),
    }


def _dequantised(run: OtherRun, counts: Counts, moment: Moment) -> float:
    """Matrices that a quantised layer has unpacked for its products."""
    if run.widths.quantised is None or moment not in (Moment.FORWARD, Moment.BACKWARD):
        return 0
    if run.widths.keeps_unpacked:  # unpacking goes through int32
        return counts.layer * run.widths.compute + counts.largest * FP32_BYTES
    return counts.largest * run.widths.compute


def _gathered(run: OtherRun, counts: Counts, moment: Moment) -> float:
    """Whole parameters beside their shards.

    FSDP gathers the next layer while one computes; its outermost group is gathered once. DeepSpeed
    stage 3 keeps what it will read again within `live` elements.
    """
    compute = run.widths.compute
    if run.engine is OtherEngine.ZERO3:
        if run.shards == 1:
            return 0
        everything = run.recompute is Recompute.NONE  # products keep views of gathered weights
        return (counts.base if everything else min(run.deepspeed.live, counts.base)) * compute
    if run.engine not in _FSDP or (run.shards == 1 and run.widths.weight == compute):
        return 0
    layer = counts.layer * compute
    if run.widths.quantised is not None:
        layer = (
            counts.linear / max(counts.base - counts.root, 1) * counts.layer * run.widths.quantised
        )
    if run.keep_layers:
        return counts.base * compute
    if moment in (Moment.FORWARD, Moment.BACKWARD):
        return (counts.root * compute if run.keep_root else 0) + 2 * layer
    return largest_end(run, counts) * compute + (layer if moment is Moment.HEAD else 0)


def largest_end(run: OtherRun, counts: Counts) -> int:
    """Parameters of FSDP's largest group outside the layers: one for all, or embedding and head."""
    return counts.root if run.keep_root else max(counts.head, counts.root - counts.head)


def gather_pool_bytes(run: OtherRun, counts: Counts) -> float:
    """What FSDP2's gathers keep reserved beside what is gathered.

    They receive on a stream of their own, whose pool of the allocator lends nothing to others and
    grows to the largest group, before its parameters are copied out
    (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
    """
    if run.engine is not OtherEngine.FSDP2 or run.shards == 1:
        return 0
    return max(0, largest_end(run, counts) - counts.layer) * run.widths.compute


def _gradients_at_step(run: OtherRun, counts: Counts) -> float:
    if run.optimizer_in_backward or run.offload_gradients or run.offload_parameters:
        return 0
    if run.engine in _DEEPSPEED[1:]:
        return 0
    shards = run.shards if run.engine in _FSDP else 1
    return counts.trainable * run.widths.gradient / shards


def _step(run: OtherRun, counts: Counts) -> float:
    """Temporaries of the update.

    DeepSpeed stage 2 flattens its gradients and casts them to fp32; stage 3 does so for one
    sub-group at a time.
    """
    if run.offload_optimizer or run.offload_parameters or run.optimizer_in_backward:
        return 0
    own = counts.trainable / (run.shards if run.engine not in _WHOLE_PARAMETERS[:2] else 1)
    if run.engine is OtherEngine.ZERO3:
        own = min(own, run.deepspeed.sub_group)
        return own * (run.widths.master + run.widths.step)
    if run.engine in _DEEPSPEED:
        return own * (run.widths.gradient + run.widths.master + run.widths.step)
    return own * run.widths.step


def host_bytes(run: OtherRun, counts: Counts) -> float:
    """What a rank of DeepSpeed or FSDP keeps on its host, without buffers.

    DeepSpeed: 16 bytes for each parameter whose updates are there (fp32 master, two moments, fp32
    gradient) and the parameters themselves where they are too, which makes the 18 of its own
    `estimate_zero3_model_states_mem_needs` before the half that it adds for buffers. FSDP offloads
    all of it, and updates the parameters themselves. What is on the disk is `disk_bytes`.
    """
    widths, own = run.widths, counts.trainable / run.shards
    parameters = parameter_bytes(run, counts) / run.shards if run.offload_parameters else 0
    if run.engine in _FSDP:
        states = own * (widths.gradient + widths.master + widths.states)
        return parameters + (states if run.offload_parameters else 0)
    states = own * (FP32_BYTES + FP32_BYTES + widths.states) if run.offload_optimizer else 0
    return parameters + states - disk_bytes(run, counts)


def disk_bytes(run: OtherRun, counts: Counts) -> float:
    """What a rank of DeepSpeed keeps on its disk: masters and moments, parameters, or both."""
    own = counts.trainable / run.shards
    states = own * (FP32_BYTES + run.widths.states) if run.optimizer_on_disk else 0
    parameters = parameter_bytes(run, counts) / run.shards if run.parameters_on_disk else 0
    return states + parameters
