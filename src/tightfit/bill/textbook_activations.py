"""What papers print for the activations and working memory of a GPT-like transformer.

Part of the `textbook` bill. The models of transformers save other tensors than Megatron-LM's, so
the dry run counts those of a real job; these are here for comparison. Half precision throughout.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

INFINITY_STATE_BYTES = 20  # per parameter in https://arxiv.org/abs/2104.07857: fp32 gradients too


@dataclass(frozen=True)
class Transformer:
    """A GPT-like model and its micro-batch, in the letters of https://arxiv.org/abs/2205.05198.

    Attributes:
        sequence: s, tokens per sample.
        batch: b, samples per micro-batch.
        hidden: h.
        heads: a.
        layers: L.
        vocabulary: v.
    """

    sequence: int
    batch: int
    hidden: int
    heads: int
    layers: int
    vocabulary: int = 0

    @property
    def hidden_values(self) -> int:
        """s * b * h, the values of one hidden state."""
        return self.sequence * self.batch * self.hidden

    @property
    def score_factor(self) -> float:
        """5 a s / h: bytes of attention scores per value of a hidden state."""
        return 5 * self.heads * self.sequence / self.hidden


class Recomputation(StrEnum):
    """What is computed again in backward."""

    NONE = "none"
    SELECTIVE = "selective"  # the attention scores
    FULL = "full"  # everything but a layer's input


def layer_activation_bytes(
    model: Transformer,
    recomputation: Recomputation = Recomputation.NONE,
    *,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
) -> float:
    """Bytes that one layer keeps for backward on one rank.

    sbh(34 + 5as/h) without recomputation, sbh * 34 with selective and sbh * 2 with full. Of the
    34, tensor parallelism leaves 10 on every rank, which sequence parallelism divides too.

    Source: https://arxiv.org/abs/2205.05198, sections 4 and 5.
    """
    if recomputation is Recomputation.FULL:
        return 2 * model.hidden_values
    common = 10 / tensor_parallel if sequence_parallel else 10
    scores = model.score_factor if recomputation is Recomputation.NONE else 0.0
    return model.hidden_values * (common + (24 + scores) / tensor_parallel)


def first_stage_activation_bytes(
    model: Transformer,
    recomputation: Recomputation = Recomputation.NONE,
    *,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    pipeline_parallel: int = 1,
    interleaved: int = 1,
) -> float:
    """Bytes of all layers on the first pipeline stage, which holds most.

    With 1F1B it holds as many micro-batches of L/p layers as there are stages: those of L layers,
    whatever p. A schedule with m interleaved stages per rank holds 1 + (p - 1)/(p m) times that.

    Source: https://arxiv.org/abs/2205.05198, section 4.
    """
    each = layer_activation_bytes(
        model,
        recomputation,
        tensor_parallel=tensor_parallel,
        sequence_parallel=sequence_parallel,
    )
    factor = 1.0
    if interleaved > 1:
        factor += (pipeline_parallel - 1) / (pipeline_parallel * interleaved)
    return each * model.layers * factor


def edge_activation_bytes(
    model: Transformer, *, tensor_parallel: int = 1, pipeline_parallel: int = 1
) -> float:
    """Bytes around the layers on the first pipeline stage, with sequence parallelism.

    The dropout mask of the embedding for p micro-batches; where there is one stage only, also the
    inputs of final norm and output layer and the fp32 logits: sbh/t (p + 4(1 + v/h)).

    Source: https://arxiv.org/abs/2205.05198, section 4.
    """
    factor = float(pipeline_parallel)
    if pipeline_parallel == 1:
        factor += 4 * (1 + model.vocabulary / model.hidden)
    return model.hidden_values * factor / tensor_parallel


def gpt2_activation_bytes(model: Transformer) -> float:
    """12 values of half precision per hidden value and layer, for GPT-2.

    Source: https://arxiv.org/abs/1910.02054, section 3.2, footnote.
    """
    return 2 * 12 * model.hidden_values * model.layers


def block_parameters(model: Transformer) -> int:
    """12 L h^2: the matrices of all layers (https://arxiv.org/abs/2104.07857, section 3)."""
    return 12 * model.layers * model.hidden**2


def infinity_state_bytes(model: Transformer) -> int:
    """240 L h^2: model states with gradients in half and in full precision.

    Source: https://arxiv.org/abs/2104.07857, section 3.
    """
    return INFINITY_STATE_BYTES * block_parameters(model)


def checkpoint_bytes(model: Transformer, layers_per_checkpoint: int = 1) -> float:
    """The inputs of checkpointed blocks: 2 b s h L / ci.

    ci is the number of layers between two checkpoints. Source: https://arxiv.org/abs/2104.07857,
    section 3.
    """
    return 2 * model.hidden_values * model.layers / layers_per_checkpoint


def parameter_working_bytes(model: Transformer) -> int:
    """Parameter and gradient of the largest matrix, from h to 4h: 4 h * 4h.

    Source: https://arxiv.org/abs/2104.07857, section 3.
    """
    return 4 * model.hidden * 4 * model.hidden


def activation_working_bytes(model: Transformer, layers_per_checkpoint: int = 1) -> int:
    """What one checkpointed block makes when it runs again: b s ci (16 h + 2 a s).

    Source: https://arxiv.org/abs/2104.07857, section 3.
    """
    tokens = model.batch * model.sequence
    per_token = 16 * model.hidden + 2 * model.heads * model.sequence
    return tokens * layers_per_checkpoint * per_token
