"""The jobs that the bill is held against: models, settings, and a design that pairs them all.

Every pair of settings that can go together is in some row; rows beyond those are spent on triples.
The design is made by a greedy search without chance in it, so that it is the same everywhere.
Knows nothing of how a row is run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from itertools import combinations, cycle, product
from typing import Any

from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from tightfit.facts.workload import Workload
from tightfit.policies import (
    AdapterPolicy,
    AttentionKernel,
    AttentionPolicy,
    BatchPolicy,
    CheckpointingPolicy,
    LossKind,
    LossPolicy,
    PlacementPolicy,
    Policies,
    PrecisionPolicy,
    QuantisationPolicy,
    ShardingPolicy,
    Tier,
)

ROWS = 100
EVALUATED_SEQUENCES = 2
CHUNK_TOKENS = 40  # divides neither of the batches

# Widths are multiples of 64, so that 4-bit blocks are whole; the vocabulary is not divided by any
# number of ranks, so that shards are padded; the windows are shorter than the sequences.
_TOKENS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SMALL: dict[str, Any] = {
    "vocab_size": 1001,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 12,  # of two kinds in turn where there are two: enough to leave some out
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    **_TOKENS,
}
_WINDOW: dict[str, Any] = {"sliding_window": 16, "head_dim": 16}

MODELS: dict[str, PretrainedConfig] = {
    "SmolLM2-135M": LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        **_TOKENS,
    ),
    "Llama": LlamaConfig(**{**_SMALL, "num_hidden_layers": 8}, tie_word_embeddings=False),
    "Qwen2 tied": Qwen2Config(**{**_SMALL, "num_hidden_layers": 8}, tie_word_embeddings=True),
    "Qwen3-MoE": Qwen3MoeConfig(
        **_SMALL,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        decoder_sparse_step=2,  # every second layer is dense
        tie_word_embeddings=False,
    ),
    "Gemma 2": Gemma2Config(**_SMALL, **_WINDOW),
    "Gemma 3": Gemma3TextConfig(
        **_SMALL, **_WINDOW, layer_types=["sliding_attention", "full_attention"] * 6
    ),
    "GPT-2": GPT2Config(
        vocab_size=1001,
        n_embd=64,
        n_layer=8,
        n_head=4,
        n_positions=256,
        **_TOKENS,
    ),
}


_CHECKPOINTING = {
    "none": CheckpointingPolicy(),
    "all": CheckpointingPolicy(True),
    "every 2nd": CheckpointingPolicy(True, every=2),
}


@dataclass(frozen=True)
class Row:
    """One job.

    Attributes:
        ranks: how many, and which stage of ZeRO they share by.
        checkpointing: of no layer, all, or every second.
        optimizer: the tier of gradients, optimizer states and master weights.
    """

    model: str
    tuning: str
    ranks: tuple[int, int]
    precision: str
    checkpointing: str
    loss: str
    micro_batch: int
    accumulation: int
    sequence: int
    optimizer: str
    attention: str

    @property
    def config(self) -> PretrainedConfig:
        """The model's."""
        return MODELS[self.model]

    @property
    def policies(self) -> Policies:
        """The row in the words of the engine."""
        tier = Tier(self.optimizer)
        ranks, stage = self.ranks
        return Policies(
            batch=BatchPolicy(self.micro_batch, self.accumulation),
            loss=LossPolicy(LossKind(self.loss), CHUNK_TOKENS),
            checkpointing=_CHECKPOINTING[self.checkpointing],
            placement=PlacementPolicy(tier, tier),
            precision=PrecisionPolicy(self.precision),
            adapter=None if self.tuning == "full" else AdapterPolicy(rank=8),
            attention=AttentionPolicy(AttentionKernel(self.attention)),
            quantisation=QuantisationPolicy() if self.tuning == "qlora" else None,
            sharding=ShardingPolicy(ranks, stage),
        )

    @property
    def workload(self) -> Workload:
        """What is trained and evaluated."""
        return Workload(
            sequence_length=self.sequence,
            global_batch_size=self.policies.global_batch_size,
            evaluation_sequence_length=self.sequence,
            evaluation_batch_size=EVALUATED_SEQUENCES,
        )

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Row:
        """The inverse of `dataclasses.asdict`, through JSON."""
        return cls(**{**data, "ranks": tuple(data["ranks"])})

    @property
    def sharing(self) -> str:
        """Ranks and stage in print."""
        ranks, stage = self.ranks
        if ranks == 1:
            return "1"
        return f"{ranks} DDP" if stage == 0 else f"{ranks} ZeRO-{stage}"


LEVELS: dict[str, tuple[Any, ...]] = {
    "model": tuple(MODELS),
    "ranks": ((1, 0), (2, 0), (2, 1), (2, 2), (2, 3), (4, 1), (4, 2), (4, 3)),
    "tuning": ("full", "lora", "qlora"),
    "precision": ("fp32", "bf16"),
    "checkpointing": tuple(_CHECKPOINTING),
    "loss": ("full", "chunked"),
    "micro_batch": (1, 4),
    "accumulation": (1, 2),
    "sequence": (48, 96),
    "optimizer": ("device", "host"),
    "attention": ("sdpa", "eager"),
}
assert set(LEVELS) == {field.name for field in fields(Row)}

Setting = tuple[str, Any]  # a factor and its level
Partial = dict[str, Any]
Wanted = dict[tuple[Setting, ...], None]  # an ordered set


def allowed(row: Mapping[str, Any]) -> bool:
    """Whether a row, or what is chosen of it so far, can be run.

    Gemma 2 caps its logits, which the chunked loss does not do, and its attention scores, which
    torch's kernels do not; 135M parameters in 16 bits take minutes on a CPU without 16-bit
    arithmetic.
    """
    model = row.get("model")
    if model == "Gemma 2" and (row.get("loss") == "chunked" or row.get("attention") == "sdpa"):
        return False
    return not (model == "SmolLM2-135M" and row.get("precision") == "bf16")


def grid(count: int = ROWS) -> list[Row]:
    """`count` rows, or as many as it takes: the first of them cover every allowed pair of settings,
    the others as many triples as they can."""
    rows: list[Partial] = []
    pairs, triples = _combinations(2), _combinations(3)
    used: Counter[Setting] = Counter()
    for model in cycle(LEVELS["model"]):
        if not pairs and len(rows) >= count:
            return [Row(**row) for row in rows]
        missing = [wanted for wanted in (pairs, triples) if wanted]
        row = _filled_up(_first_of(missing[0], model, used), missing, used)
        rows.append(row)
        used.update(row.items())
        for size, wanted in ((2, pairs), (3, triples)):
            for done in _parts(row, size):
                wanted.pop(done, None)
    raise AssertionError("a cycle ends")


def _first_of(wanted: Wanted, model: str, used: Counter[Setting]) -> Partial:
    """Where a row begins: with what was used least; models take turns while they have any left."""
    own = [settings for settings in wanted if ("model", model) in settings] or wanted
    return dict(min(own, key=lambda settings: sum(used[setting] for setting in settings)))


def _filled_up(row: Partial, missing: list[Wanted], used: Counter[Setting]) -> Partial:
    """Add factor by factor the level that covers most of what is missing, else the rarest."""

    def gain(factor: str, level: Any) -> tuple[int, ...]:
        candidate = {**row, factor: level}
        covered = (
            sum(part in wanted for part in _parts(candidate, len(next(iter(wanted)))))
            for wanted in missing
        )
        return (*covered, -used[factor, level])

    for factor, levels in LEVELS.items():
        if factor not in row:
            possible = [level for level in levels if allowed({**row, factor: level})]
            row[factor] = max(possible, key=partial(gain, factor))
    return row


def _combinations(size: int) -> Wanted:
    """All allowed settings of `size` factors, in order."""
    found: Wanted = {}
    for factors in combinations(LEVELS, size):
        for levels in product(*(LEVELS[factor] for factor in factors)):
            settings = tuple(zip(factors, levels, strict=True))
            if allowed(dict(settings)):
                found[settings] = None
    return found


def _parts(row: Partial, size: int) -> Iterator[tuple[Setting, ...]]:
    """The settings of every `size` factors that are chosen, in the order of `LEVELS`."""
    chosen = [(factor, row[factor]) for factor in LEVELS if factor in row]
    return combinations(chosen, size)
