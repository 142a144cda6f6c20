"""What Megatron-LM's last pipeline stage holds: closed forms of its own modules and buffers.

Megatron's layers are its own, so no dry run of transformers' modules stands for them. Per token
they keep what Korthikanti et al. count (https://arxiv.org/abs/2205.05198, sections 4 and 5:
sbh(34 + 5as/h)), written here by tensor so that grouped heads, gated and expert MLPs have their own
sizes. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tightfit.bill.other_engines import OtherRun, Recompute
from tightfit.bill.other_states import Bytes
from tightfit.bill.table import Kind

_HALF = 2
_FP32 = 4
_MASK = 1  # of dropout
_SCORES = 5  # softmax 2, mask 1, dropped softmax 2
_LOGITS = 6  # fp32, exponentiated in place, and their gradient in half precision
_MAIN_GRADIENT = 4
_MASTER_AND_MOMENTS = 12


@dataclass(frozen=True)
class MegatronModel:
    """Sizes of a Megatron-core GPT.

    Attributes:
        gated: whether the MLP has a gate.
        learned_positions: rows of the position embedding; 0 for rotary ones.
        experts: in each layer; 1 for a dense MLP, whose tokens each pass `experts_per_token`.
        expert_parallel: ranks that share the experts.
        virtual_stages: chunks of layers on each stage, interleaved.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool = False
    gated: bool = False
    learned_positions: int = 0
    experts: int = 1
    experts_per_token: int = 1
    expert_parallel: int = 1
    virtual_stages: int = 1

    @property
    def attention_parameters(self) -> int:
        """Of one layer."""
        return self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)

    @property
    def mlp_parameters(self) -> int:
        """Of one expert, or of the one MLP."""
        return self.hidden * self.intermediate * (3 if self.gated else 2)


def megatron_bytes(model: MegatronModel, run: OtherRun) -> Mapping[str, Bytes]:
    """Bytes by kind between steps and at the peak, on the last pipeline stage."""
    resident = _states(model, run)
    layers = model.layers // run.pipeline_parallel
    whole = _layer_bytes(model, run)
    kept = whole if run.recompute is Recompute.NONE else _HALF * model.hidden / _shared(run)
    in_flight = layers + _waiting_layers(model, run)
    activations = run.tokens * (kept * in_flight + (whole if kept != whole else 0))
    logits = run.tokens * model.vocabulary / run.tensor_parallel * _LOGITS
    return {
        "step": resident,
        "backward head": {**resident, Kind.ACTIVATIONS: activations, Kind.LOGITS: logits},
    }


def _states(model: MegatronModel, run: OtherRun) -> Bytes:
    """bf16 weights and one fp32 gradient each, in buffers; fp32 masters and Adam's moments.

    The distributed optimizer shares the latter between data-parallel ranks
    (megatron/core/distributed/param_and_grad_buffer.py, optimizer/distrib_optimizer.py).
    """
    tensor, stages = run.tensor_parallel, run.pipeline_parallel
    ends = model.vocabulary * model.hidden / tensor
    if stages == 1:
        ends = ends * (1 if model.tied else 2) + model.learned_positions * model.hidden
    layers = model.layers / stages / tensor
    mlps = layers * model.mlp_parameters * model.experts / model.expert_parallel
    others = layers * model.attention_parameters + ends
    expert_shards = max(1, run.shards // model.expert_parallel)
    on_card = 0 if run.offload_optimizer else _MASTER_AND_MOMENTS
    return {
        Kind.PARAMETERS: (mlps + others) * _HALF,
        Kind.GRADIENTS: (mlps + others) * _MAIN_GRADIENT,
        Kind.OPTIMIZER_STATES: on_card * (mlps / expert_shards + others / run.shards),
    }


def _shared(run: OtherRun) -> int:
    """Ranks that share the tensors between matrices."""
    return run.tensor_parallel if run.sequence_parallel else 1


def _layer_bytes(model: MegatronModel, run: OtherRun) -> float:
    """What one layer keeps per token."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    between = 2 * (2 * _HALF + _MASK) * model.hidden  # both halves: norm's input, output, dropout
    attention: float = (2 * queries + 2 * keys) * _HALF
    if not run.flash_attention:
        attention += _SCORES * model.heads * run.sequence_length / run.context_parallel
    inside: float = (3 if model.gated else 2) * _HALF * model.intermediate
    experts = 0.0
    if model.experts > 1:  # tokens are copied to their experts, and what comes back is kept
        inside *= model.experts_per_token
        experts = 2 * _HALF * model.hidden * model.experts_per_token
    return (
        between / _shared(run) + (attention + inside) / run.tensor_parallel + experts / _shared(run)
    )


def _waiting_layers(model: MegatronModel, run: OtherRun) -> float:
    """Layers of other micro-batches whose activations wait on the last stage.

    None with plain 1F1B; with interleaved chunks (https://arxiv.org/abs/2104.04473, section 2.2)
    (chunks - 1) x stages of them have run before the first backward.
    """
    chunks, stages = model.virtual_stages, run.pipeline_parallel
    if chunks == 1:
        return 0
    per_chunk = model.layers / stages / chunks
    return ((chunks - 1) * stages + 1) * per_chunk - model.layers / stages
