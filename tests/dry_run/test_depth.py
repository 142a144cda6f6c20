"""Which depths stand for a model, and the line from them to it."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Gemma3TextConfig, LlamaConfig, Qwen2MoeConfig

from tightfit.bill.table import Kind
from tightfit.dry_run.depth import (
    Depths,
    depths_of,
    extrapolate,
    layer_signatures,
    prefix_and_period,
    with_depth,
)

SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize(
    ("pattern", "prefix", "period"),
    [
        ("ffffff", 0, 1),
        ("sfsfsf", 0, 2),
        ("sfsfsfs", 0, 2),
        ("sssssf" * 4, 0, 6),
        ("sssssf" * 4 + "ss", 0, 6),
        ("dmmmmm", 1, 1),
        ("dddmmm", 3, 1),
        ("dsfsfsf", 1, 2),
        ("f", 0, 1),
    ],
)
def test_layers_are_a_prefix_and_rounds(pattern: str, prefix: int, period: int) -> None:
    assert prefix_and_period([(letter,) for letter in pattern]) == (prefix, period)


def config_of(pattern: str) -> Gemma3TextConfig:
    types = {"s": "sliding_attention", "f": "full_attention"}
    layers = [types[letter] for letter in pattern]
    return Gemma3TextConfig(
        **SIZES, **TOKENS, num_hidden_layers=len(layers), layer_types=layers, head_dim=8
    )


@pytest.mark.parametrize(
    ("pattern", "shallow", "depths"),
    [
        ("f" * 30, 2, Depths(2, 3, 27)),
        ("f" * 30, 4, Depths(4, 5, 25)),
        ("f" * 3, 2, Depths(3, 3, 0)),
        ("sf" * 13, 2, Depths(4, 6, 10)),
        ("sf" * 13 + "s", 2, Depths(5, 7, 10)),
        ("sssssf" * 4 + "ss", 2, Depths(8, 14, 2)),
        ("sssssf" * 4 + "ss", 4, Depths(14, 20, 1)),
        ("sf" * 2, 2, Depths(4, 4, 0)),
    ],
)
def test_depths_end_with_the_same_layer(pattern: str, shallow: int, depths: Depths) -> None:
    config = config_of(pattern)
    assert depths_of(config, shallow) == depths
    for depth in (depths.few, depths.more):
        assert layer_signatures(with_depth(config, depth))[-1] == layer_signatures(config)[-1]
    assert depths.more + depths.steps * (depths.more - depths.few) == len(pattern)


def test_experts_that_begin_late_or_come_in_turns_are_seen() -> None:
    config = Qwen2MoeConfig(**SIZES, num_hidden_layers=9, decoder_sparse_step=3)
    assert prefix_and_period(layer_signatures(config)) == (0, 3)
    config = Qwen2MoeConfig(**SIZES, num_hidden_layers=9, mlp_only_layers=[0, 1])
    assert prefix_and_period(layer_signatures(config)) == (2, 1)
    assert depths_of(config) == Depths(4, 5, 4)


def test_cut_configs_keep_their_pattern() -> None:
    config = config_of("sssssf" * 4 + "ss")
    cut = with_depth(config, 8)
    assert cut.num_hidden_layers == 8
    assert cut.layer_types == config.layer_types[:8]


def test_a_list_of_other_meaning_is_not_cut() -> None:
    config = LlamaConfig(**SIZES, num_hidden_layers=6, eos_token_id=[2, 3])
    assert with_depth(config, 2).eos_token_id == [2, 3]


def test_the_line_goes_on_by_equal_steps() -> None:
    few, more = {Kind.PARAMETERS: 10, Kind.LOGITS: 3}, {Kind.PARAMETERS: 14, Kind.LOGITS: 3}
    assert extrapolate(few, [(more, 6)]) == {Kind.PARAMETERS: 34, Kind.LOGITS: 3}
    assert extrapolate(few, [(more, 1)]) == more
