from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn

from tightfit.bill.shards import ModelTensors, Tensor, adapter_tensors, shard_rows

COUNTS = st.integers(0, 10**12)
SMALL = st.integers(1, 64)


@given(rows=st.integers(1, 300), ranks=SMALL)
def test_rows_are_cut_as_torch_cuts_them(rows: int, ranks: int) -> None:
    chunks = [len(chunk) for chunk in torch.empty(rows).chunk(ranks)]
    expected = chunks + [0] * (ranks - len(chunks))
    assert [shard_rows(rows, ranks, rank) for rank in range(ranks)] == expected


@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    ranks=SMALL,
    divided_dim=st.sampled_from([None, 0]),
)
def test_shards_hold_at_least_the_whole(
    shape: list[int], ranks: int, divided_dim: int | None
) -> None:
    tensor = Tensor(tuple(shape), count=3, divided_dim=divided_dim)
    for part in (tensor.sharded(ranks), tensor.divided(ranks)):
        assert tensor.total_elements <= ranks * part.total_elements
        assert part.total_elements <= tensor.total_elements


def test_tensor_parallelism_divides_what_is_divided() -> None:
    assert Tensor((10, 7), divided_dim=0).divided(4).shape == (3, 7)
    assert Tensor((10, 7), divided_dim=1).divided(4).shape == (10, 2)
    assert Tensor((10,)).divided(4).shape == (10,)


NAMED = [
    ("model.embed_tokens.weight", Tensor((96, 16))),
    ("model.layers.0.mlp.experts.5.weight", Tensor((8, 16))),
    ("model.layers.1.mlp.weight", Tensor((4, 16))),
    ("model.layers.0.norm.weight", Tensor((16,))),
    ("model.layers.2.norm.weight", Tensor((2,), trainable=False)),
    ("model.norm.weight", Tensor((16,))),
    ("lm_head.weight", Tensor((96, 16))),
]


def test_names_tell_the_groups() -> None:
    model = ModelTensors.grouped(NAMED)
    assert model.embedding == (Tensor((96, 16)),)
    assert model.layers == (
        (Tensor((8, 16)), Tensor((16,))),
        (Tensor((4, 16)),),
        (Tensor((2,), trainable=False),),
    )
    assert model.head == (Tensor((16,)), Tensor((96, 16)))
    assert model.root == model.embedding + model.head
    assert model.count(trainable=True) == 2 * 96 * 16 + 8 * 16 + 4 * 16 + 16 + 16
    assert model.count(trainable=False) == 2


def test_stages_share_out_everything_once() -> None:
    model = ModelTensors.grouped(NAMED)
    for stages in (1, 2, 3):
        parts = [model.stage(number, stages) for number in range(stages)]
        assert sorted(t.shape for part in parts for t in part) == sorted(t.shape for t in model)
        assert [layer for part in parts for layer in part.layers] == list(model.layers)
    assert model.stage(0, 2).head == ()
    assert model.stage(1, 2).embedding == ()


def test_the_last_stage_copies_a_tied_embedding() -> None:
    tied = ModelTensors.grouped(NAMED[:-1], tied=True)
    assert [tied.stage(number, 3).embedding for number in range(3)] == [
        tied.embedding,
        (),
        tied.embedding,
    ]
    assert tied.stage(0, 1) == tied


@given(trainable=COUNTS, frozen=COUNTS, quantised=COUNTS, layers=SMALL)
def test_counts_alone_become_even_layers(
    trainable: int, frozen: int, quantised: int, layers: int
) -> None:
    model = ModelTensors.flat(trainable, frozen, quantised, layers=layers)
    assert len(model.layers) == layers
    found = (
        model.count(trainable=True),
        model.count(trainable=False),
        model.count(trainable=False, quantised=True),
    )
    for count, expected in zip(found, (trainable, frozen, quantised), strict=True):
        assert expected <= count < expected + layers


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_are_those_of_peft(dora: bool) -> None:
    module = nn.Sequential()
    module.add_module("up", nn.Linear(5, 12, bias=False))
    adapted = get_peft_model(module, LoraConfig(r=3, target_modules=["up"], use_dora=dora))
    expected = [tuple(p.shape) for p in adapted.parameters() if p.requires_grad]
    found = [tensor.shape for tensor in adapter_tensors(12, 5, 3, dora=dora)]
    assert sorted(found) == sorted(expected)
