from __future__ import annotations

import pytest

from tightfit.bill.textbook_activations import (
    Recomputation,
    Transformer,
    activation_working_bytes,
    block_parameters,
    checkpoint_bytes,
    edge_activation_bytes,
    first_stage_activation_bytes,
    gpt2_activation_bytes,
    infinity_state_bytes,
    layer_activation_bytes,
    parameter_working_bytes,
)

GIB, TIB = 2**30, 2**40
# https://arxiv.org/abs/2205.05198, table 3: GPT-3 and MT-NLG, eight tensor-parallel ranks.
GPT3 = Transformer(2048, 1, 12288, 96, 96, 51200)
MT_NLG = Transformer(2048, 1, 20480, 128, 105, 51200)


@pytest.mark.parametrize(("model", "factor"), [(GPT3, 80), (MT_NLG, 64)], ids=["175B", "530B"])
def test_attention_scores_of_large_models(model: Transformer, factor: int) -> None:
    """Section 5: 5as/h is 80 and 64 for them, beside the 34 of the rest."""
    assert model.score_factor == factor
    assert layer_activation_bytes(model) == model.hidden_values * (34 + factor)


@pytest.mark.parametrize(("model", "saved"), [(GPT3, 0.70), (MT_NLG, 0.65)], ids=["175B", "530B"])
def test_selective_recomputation_saves_what_is_published(model: Transformer, saved: float) -> None:
    """Section 5: 70% and 65% of activations."""
    selective = layer_activation_bytes(model, Recomputation.SELECTIVE)
    assert 1 - selective / layer_activation_bytes(model) == pytest.approx(saved, abs=0.005)


@pytest.mark.parametrize("model", [GPT3, MT_NLG], ids=["175B", "530B"])
def test_both_techniques_save_five_times(model: Transformer) -> None:
    """The abstract: sequence parallelism and selective recomputation, on top of tensor parallel."""
    plain = layer_activation_bytes(model, tensor_parallel=8)
    both = layer_activation_bytes(
        model, Recomputation.SELECTIVE, tensor_parallel=8, sequence_parallel=True
    )
    assert plain / both == pytest.approx(5, rel=0.1)


SMALL = Transformer(sequence=10, batch=2, hidden=8, heads=4, layers=6, vocabulary=32)


@pytest.mark.parametrize(
    ("recomputation", "tensor_parallel", "sequence_parallel", "factor"),
    [
        (Recomputation.NONE, 1, False, 34 + 25),
        (Recomputation.NONE, 4, False, 10 + 24 / 4 + 25 / 4),
        (Recomputation.NONE, 4, True, (34 + 25) / 4),
        (Recomputation.SELECTIVE, 4, False, 10 + 24 / 4),
        (Recomputation.SELECTIVE, 4, True, 34 / 4),
        (Recomputation.FULL, 4, True, 2),
    ],
)
def test_a_layer(
    recomputation: Recomputation, tensor_parallel: int, sequence_parallel: bool, factor: float
) -> None:
    assert layer_activation_bytes(
        SMALL,
        recomputation,
        tensor_parallel=tensor_parallel,
        sequence_parallel=sequence_parallel,
    ) == pytest.approx(10 * 2 * 8 * factor)


@pytest.mark.parametrize(
    ("pipeline", "interleaved", "factor"), [(1, 1, 1), (3, 1, 1), (3, 2, 1 + 2 / 6), (4, 3, 1.25)]
)
def test_the_first_stage(pipeline: int, interleaved: int, factor: float) -> None:
    found = first_stage_activation_bytes(SMALL, pipeline_parallel=pipeline, interleaved=interleaved)
    assert found == pytest.approx(6 * factor * layer_activation_bytes(SMALL))


def test_around_the_layers() -> None:
    # One stage: the embedding's dropout, two inputs of 2 bytes, logits of 4 bytes.
    values, logits = 10 * 2 * 8, 10 * 2 * 32
    assert edge_activation_bytes(SMALL) == values + 4 * values + 4 * logits
    assert edge_activation_bytes(SMALL, tensor_parallel=2, pipeline_parallel=3) == 3 * values / 2


def test_gpt2_of_1_5b() -> None:
    """https://arxiv.org/abs/1910.02054, section 3.2: about 60 GB at sequence 1K and batch 32."""
    gpt2 = Transformer(1024, 32, 1600, 25, 48)
    assert gpt2_activation_bytes(gpt2) == pytest.approx(60e9, rel=0.01)


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "trillions", "states", "checkpoints", "matrix", "working"),
    [
        # https://arxiv.org/abs/2104.07857, figure 2 (a): parameters in 10^12, model states and
        # checkpoints of a node in TiB, working memory of a GPU in GiB.
        (100, 20, 160, "0.50", "9.16", "0.12", "6.25", "2.50"),
        (128, 25, 256, "1.01", "18.31", "0.20", "9.77", "3.56"),
        (195, 64, 512, "10.05", "182.81", "0.76", "64.00", "8.00"),
        (315, 160, 1024, "101.47", "1845.70", "3.08", "400.00", "18.00"),
    ],
)
def test_zero_infinity(
    layers: int,
    hidden: int,
    heads: int,
    trillions: str,
    states: str,
    checkpoints: str,
    matrix: str,
    working: str,
) -> None:
    node = Transformer(1024, 32, hidden * 1024, heads, layers)
    gpu = Transformer(1024, 4, hidden * 1024, heads, layers)
    assert f"{block_parameters(node) / 1e12:.2f}" == trillions
    assert f"{infinity_state_bytes(node) / TIB:.2f}" == states
    assert f"{checkpoint_bytes(node) / TIB:.2f}" == checkpoints
    assert f"{parameter_working_bytes(gpu) / GIB:.2f}" == matrix
    assert f"{activation_working_bytes(gpu) / GIB:.2f}" == working
