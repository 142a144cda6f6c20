from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PretrainedConfig

from tightfit.bill.other_engines import (
    Metric,
    OtherEngine,
    OtherLoss,
    OtherRun,
    Recompute,
    Widths,
)
from tightfit.bill.table import Kind
from tightfit.dry_run.config import load_config
from tightfit.dry_run.depth import with_depth
from tightfit.dry_run.other_engines import OtherBill, _one_step, other_bill
from tightfit.dry_run.other_replay import Part, Trace
from tightfit.policies import AdapterPolicy

ROOT = Path(__file__).parent.parent.parent
CASES = ROOT / "tests" / "cases" / "published_memory.jsonl"
MIB = 2**20
HIDDEN, LAYERS, VOCABULARY, TOKENS = 256, 8, 4096, 512
LOGITS = 2 * TOKENS * VOCABULARY  # bytes in bf16
LORA = AdapterPolicy(8, 16, 0.0, ("q_proj", "v_proj"))


@pytest.fixture(scope="module")
def config() -> PretrainedConfig:
    return load_config(
        {
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 1024,
            "vocab_size": VOCABULARY,
            "tie_word_embeddings": False,
            "max_position_embeddings": 4096,
        }
    )


RUN = OtherRun(sequence_length=TOKENS, loss=OtherLoss(keep_logits=False))


def of_kind(bill: OtherBill, moment: str, *kinds: Kind) -> float:
    return sum(bill.moments[moment].get(kind, 0) for kind in kinds)


def test_a_fused_loss_keeps_logits_and_one_gradient_in_their_own_type(
    config: PretrainedConfig,
) -> None:
    """In place of fp32 log-probabilities and two fp32 gradients, while the loss is undone."""
    plain = other_bill(config, RUN)
    fused = other_bill(config, replace(RUN, loss=OtherLoss(fused=True, keep_logits=False)))
    saved = plain.allocated_bytes - fused.allocated_bytes
    assert saved == pytest.approx((12 - 4) * LOGITS / 2, rel=0.01)


def test_logits_in_recomputed_pieces_never_live_at_once(config: PretrainedConfig) -> None:
    pieces = other_bill(config, replace(RUN, loss=OtherLoss(recompute_tokens=64)))
    assert of_kind(pieces, "forward head", Kind.ACTIVATIONS) < of_kind(
        other_bill(config, RUN), "forward head", Kind.ACTIVATIONS
    )


def test_full_recomputation_keeps_a_layers_input_only(config: PretrainedConfig) -> None:
    few, more = (
        other_bill(with_depth(config, depth), replace(RUN, recompute=Recompute.FULL))
        for depth in (LAYERS, 2 * LAYERS)
    )
    kept = of_kind(more, "forward head", Kind.ACTIVATIONS) - of_kind(
        few, "forward head", Kind.ACTIVATIONS
    )
    assert kept == LAYERS * TOKENS * HIDDEN * 2


def test_what_is_kept_grows_from_inputs_to_everything(config: PretrainedConfig) -> None:
    kept = [
        of_kind(
            other_bill(config, replace(RUN, recompute=how)), "forward last layer", Kind.ACTIVATIONS
        )
        for how in (
            Recompute.FULL,
            Recompute.SELECTIVE,
            Recompute.ALTERNATE,
            Recompute.NONE,
        )
    ]
    assert kept == sorted(kept)


def test_offloaded_layer_inputs_do_not_grow_with_depth(config: PretrainedConfig) -> None:
    run = replace(RUN, recompute=Recompute.FULL, offload_activations=True)
    few, more = (other_bill(with_depth(config, n), run) for n in (LAYERS, 2 * LAYERS))
    assert of_kind(few, "forward head", Kind.ACTIVATIONS) == of_kind(
        more, "forward head", Kind.ACTIVATIONS
    )


def test_a_compiled_layer_keeps_less_than_an_eager_one(config: PretrainedConfig) -> None:
    eager, compiled = (
        of_kind(
            other_bill(config, replace(RUN, compiled=on)), "forward last layer", Kind.ACTIVATIONS
        )
        for on in (False, True)
    )
    assert compiled < eager


def test_shards_take_their_part_of_gradients(config: PretrainedConfig) -> None:
    run = replace(RUN, engine=OtherEngine.FSDP2, shards=8)
    shared = other_bill(config, run)
    gradients = of_kind(shared, "backward end", Kind.GRADIENTS)
    assert gradients * 8 == pytest.approx(2 * (shared.counts.base - shared.counts.root), rel=0.2)
    assert of_kind(shared, "step", Kind.GRADIENTS) * 8 == 2 * shared.counts.base


def test_fused_attention_inputs_stay_whole_for_the_values(config: PretrainedConfig) -> None:
    run = replace(RUN, adapter=LORA, widths=Widths(adapter=2))
    apart, fused = (
        of_kind(
            other_bill(config, replace(run, fused_qkv=on)), "forward last layer", Kind.ACTIVATIONS
        )
        for on in (False, True)
    )
    assert fused - apart == LAYERS * 2 * TOKENS * HIDDEN * 2


def test_tensor_parallel_ranks_hold_their_part(config: PretrainedConfig) -> None:
    alone = other_bill(config, RUN)
    for run in (
        replace(RUN, tensor_parallel=4),
        replace(RUN, tensor_parallel=4, sequence_parallel=True),
    ):
        part = other_bill(config, run)
        assert part.counts.base == pytest.approx(alone.counts.base / 4, rel=0.01)
        assert part.allocated_bytes < alone.allocated_bytes / 2


def test_waiting_micro_batches_of_a_pipeline_add_their_activations(
    config: PretrainedConfig,
) -> None:
    run = replace(RUN, pipeline_parallel=2)
    one, three = (other_bill(config, replace(run, in_flight=n)) for n in (1, 3))
    kept = of_kind(one, "forward last layer", Kind.ACTIVATIONS)
    added = of_kind(three, "forward last layer", Kind.ACTIVATIONS) - kept
    assert added == 2 * kept


def test_reserved_is_more_than_allocated_and_no_more_than_the_card(
    config: PretrainedConfig,
) -> None:
    run = replace(RUN, metric=Metric.RESERVED, lengths=(0.4, 0.9, 0.3, 1.0))
    bill = other_bill(config, run)
    assert bill.allocated_bytes < bill.reserved_bytes < bill.peak_bytes(Metric.DEVICE)
    small = replace(run, card_bytes=round(bill.allocated_bytes + bill.outside_bytes))
    assert other_bill(config, small).peak_bytes(Metric.DEVICE) <= small.card_bytes + 1  # type: ignore[operator]


def shape_of(trace: Trace, depth: int) -> list[tuple[Any, int, int, bool]]:
    """Events without the numbers of storages made before the first layer."""
    return [
        (segment.part, segment.layer, size, gradient)
        for (segment, _), size, gradient in trace.deeper(depth)
        if segment.part is not Part.START
    ]


def test_a_trace_of_five_layers_made_deeper_is_that_of_eight(config: PretrainedConfig) -> None:
    for run in (RUN, replace(RUN, recompute=Recompute.FULL, accumulates=True)):
        short, long = (_one_step(with_depth(config, n), run).trace for n in (5, 8))
        assert shape_of(short, 8) == shape_of(long, 8)


# Against published figures


@pytest.fixture(scope="module")
def benchmark() -> Iterator[Any]:
    """`benchmarks/published.py`, which is a script and no package."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import published

    yield published
    sys.path.remove(str(ROOT / "benchmarks"))


ROWS = {row["id"]: row for row in map(json.loads, CASES.read_text(encoding="utf-8").splitlines())}


@pytest.mark.parametrize(
    "name",
    [
        "litgpt_rt_llama2_7b_lora_bf16_mb1_1gpu",
        "litgpt_rt_llama2_13b_lora_bf16_mb1_1gpu",
        "tune_3b_chunked_ce",
        "fsdpqlora_3090_7b_lora_bs4",
        "titan2412_8b_fsdp8_bs2_compile",
        "primerl_qwen34b_rl_full_s16384_ac_8xh100",
        "dse_bf16master_6_86b_4gpu_bf16_ac",
        "megatron_gpt3_7b_tp4_pp1_memory_speed_h100",
    ],
)
def test_a_published_figure_is_met_within_a_tenth(benchmark: Any, name: str) -> None:
    (line,) = benchmark.compare([ROWS[name]])
    assert abs(line.error) <= 0.1


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(ROWS)), st.sets(st.sampled_from(sorted(set().union(*ROWS.values())))))
def test_any_row_is_described_or_out_of_scope(name: str, missing: set[str]) -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from published_rows import OutOfScope, describe

    row = {key: value for key, value in ROWS[name].items() if key not in missing}
    with suppress(OutOfScope):
        assert describe(row).run.tokens > 0
