"""What ranks send each other, held against what the engine asks a process group for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, PretrainedConfig

from tightfit.dry_run.assumed import tensors_of
from tightfit.dry_run.config import build_model
from tightfit.dry_run.fakes import fake_tensors, make_fake
from tightfit.dry_run.program import fake_batch, fill
from tightfit.dry_run.ranks import fake_ranks
from tightfit.engine.adapter import import_library
from tightfit.engine.apply import fit
from tightfit.engine.mesh import Dimension
from tightfit.facts.workload import Workload
from tightfit.planner.collectives import (
    Collective,
    Exchange,
    ModelSizes,
    bytes_between_machines,
    distances,
    exchanges,
    sent_bytes,
)
from tightfit.policies import (
    AdapterPolicy,
    BatchPolicy,
    CheckpointingPolicy,
    LossKind,
    LossPolicy,
    PlacementPolicy,
    Policies,
    QuantisationPolicy,
    ShardingPolicy,
    Tier,
)

LENGTH = 16
Seen = Counter[tuple[Dimension, Collective]]


def config(layers: int = 2, *, tied: bool = True) -> PretrainedConfig:
    """Every size a multiple of every number of ranks here, so that nothing is padded."""
    return LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=tied,
    )  # fmt: skip


def sizes_of(config: PretrainedConfig, policies: Policies) -> ModelSizes:
    tensors = tensors_of(config, policies)
    return ModelSizes(
        trainable=tensors.count(trainable=True),
        frozen=tensors.count(trainable=False),
        quantised=tensors.count(trainable=False, quantised=True),
        trained_tensors=sum(tensor.trainable for tensor in tensors),
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        tied=config.tie_word_embeddings,
    )


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# Methods of a process group, as torch has them by either name; and whose bytes are whole.
METHODS: dict[str, tuple[Collective, Callable[..., torch.Tensor]]] = {
    "allreduce": (Collective.ALL_REDUCE, lambda tensors, *_: tensors[0]),
    "_allgather_base": (Collective.ALL_GATHER, lambda output, *_: output),
    "all_gather_single": (Collective.ALL_GATHER, lambda output, *_: output),
    "_reduce_scatter_base": (Collective.REDUCE_SCATTER, lambda output, given, *_: given),
    "reduce_scatter_single": (Collective.REDUCE_SCATTER, lambda output, given, *_: given),
    "send": (Collective.SEND, lambda tensors, *_: tensors[0]),
}


@contextmanager
def counted(policies: Policies, calls: Seen, whole: Seen) -> Iterator[None]:
    """Count calls and their bytes, by dimension and kind."""
    sizes = {
        Dimension.TENSOR: policies.sharding.tensor_parallel,
        Dimension.SHARD: policies.sharding.shards,
        Dimension.REPLICATE: policies.sharding.data_parallel // policies.sharding.shards,
        Dimension.PIPELINE: policies.sharding.pipeline_parallel,
    }
    apart = {
        step: dimension
        for dimension, step in distances(policies.sharding).items()
        if sizes[dimension] > 1
    }  # by how far apart neighbours are numbered

    def replacement(name: str) -> Callable[..., Any]:
        method = getattr(dist.ProcessGroup, name)
        kind, which = METHODS[name]

        def call(group: dist.ProcessGroup, *inputs: Any, **named: Any) -> Any:
            first, second, *_ = dist.get_process_group_ranks(group)
            key = apart[second - first], kind
            calls[key] += 1
            whole[key] += _bytes(which(*inputs))
            return method(group, *inputs, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in METHODS:
            if name in vars(dist.ProcessGroup):
                patch.setattr(dist.ProcessGroup, name, replacement(name))
        yield


def seen(config: PretrainedConfig, policies: Policies, rank: int) -> tuple[Seen, Seen]:
    """Calls and whole bytes of one step of a rank."""
    calls, whole = Counter(), Counter()  # type: Seen, Seen
    batch = policies.batch
    if policies.adapter is not None:
        import_library()
    with torch.device("meta"):
        model = build_model(config, torch.float32)
    with fake_ranks(policies.sharding.ranks, rank), fake_tensors():
        make_fake(model)
        engine = fit(model, policies, values=fill)
        with counted(policies, calls, whole):
            size = batch.micro_batch_size, LENGTH
            batches = [fake_batch(*size) for _ in range(batch.accumulation_steps)]
            engine.ranks.total([0.0, 0.0])
            engine.forward_backward(batches, 100)
            engine.step()
    return calls, whole


def of_the_busiest(config: PretrainedConfig, policies: Policies) -> tuple[Seen, Seen]:
    """Those of the stage whose ranks send most of a kind."""
    stages = policies.sharding.pipeline_parallel
    apart = policies.sharding.ranks // stages
    most_calls, most = Counter(), Counter()  # type: Seen, Seen
    for stage in range(stages):
        calls, whole = seen(config, policies, apart * stage)
        for key in calls:
            if whole[key] > most[key]:
                most_calls[key], most[key] = calls[key], whole[key]
    return most_calls, most


CHUNKED, SLICED = LossPolicy(LossKind.CHUNKED, chunk_tokens=8), LossPolicy(LossKind.SLICED)
CHECKPOINTING = CheckpointingPolicy(True)
LORA = AdapterPolicy(rank=4)
TWO = BatchPolicy(2, 2)
HOST = PlacementPolicy(gradients=Tier.HOST, optimizer_states=Tier.HOST)
CASES: dict[str, dict[str, Any]] = {
    "ZeRO-0": {"sharding": ShardingPolicy(4, 0)},
    "ZeRO-0, gradients leave": {"sharding": ShardingPolicy(4, 0), "placement": HOST},
    "ZeRO-0, LoRA": {"sharding": ShardingPolicy(4, 0), "adapter": LORA},
    "ZeRO-1": {"sharding": ShardingPolicy(4, 1)},
    "ZeRO-2": {"sharding": ShardingPolicy(4, 2)},
    "ZeRO-3": {"sharding": ShardingPolicy(4, 3)},
    "ZeRO-3, checkpointing": {"sharding": ShardingPolicy(4, 3), "checkpointing": CHECKPOINTING},
    "ZeRO-3, LoRA": {"sharding": ShardingPolicy(4, 3), "adapter": LORA},
    "ZeRO-3, QLoRA": {
        "sharding": ShardingPolicy(4, 3), "adapter": LORA, "quantisation": QuantisationPolicy(4),
    },
    "HSDP of ZeRO-1": {"sharding": ShardingPolicy(4, 1, replicas=2)},
    "HSDP of ZeRO-3": {"sharding": ShardingPolicy(4, 3, replicas=2)},
    "tensor": {"sharding": ShardingPolicy(4, tensor_parallel=4)},
    "tensor, chunked": {"sharding": ShardingPolicy(4, tensor_parallel=4), "loss": CHUNKED},
    "tensor, sliced": {"sharding": ShardingPolicy(4, tensor_parallel=4), "loss": SLICED},
    "tensor, checkpointing": {
        "sharding": ShardingPolicy(4, tensor_parallel=4), "checkpointing": CHECKPOINTING,
    },
    "tensor, every second layer": {
        "sharding": ShardingPolicy(4, tensor_parallel=4),
        "checkpointing": CheckpointingPolicy(True, every=2),
    },
    "tensor, LoRA": {"sharding": ShardingPolicy(4, tensor_parallel=4), "adapter": LORA},
    "ZeRO-0 and tensor": {"sharding": ShardingPolicy(4, 0, tensor_parallel=2)},
    "ZeRO-3 and tensor": {"sharding": ShardingPolicy(4, 3, tensor_parallel=2)},
    "HSDP and tensor": {"sharding": ShardingPolicy(8, 2, tensor_parallel=2, replicas=2)},
    "2 stages": {"sharding": ShardingPolicy(2, pipeline_parallel=2)},
    "4 stages": {"sharding": ShardingPolicy(4, pipeline_parallel=4)},
    "stages of ZeRO-2": {"sharding": ShardingPolicy(4, 2, pipeline_parallel=2)},
    "stages of ZeRO-0": {"sharding": ShardingPolicy(4, 0, pipeline_parallel=2)},
    "stages of ZeRO-3 and tensor": {
        "sharding": ShardingPolicy(8, 3, tensor_parallel=2, pipeline_parallel=2), "loss": CHUNKED,
    },
}  # fmt: skip


UNTIED = ["ZeRO-3", "ZeRO-0, LoRA", "tensor", "4 stages", "stages of ZeRO-0"]


@pytest.mark.parametrize(
    ("name", "tied"), [*((name, True) for name in CASES), *((name, False) for name in UNTIED)]
)
def test_the_engine_sends_what_the_closed_form_says(name: str, tied: bool) -> None:
    policies = Policies(batch=TWO, **CASES[name])
    model = config(max(2, policies.sharding.pipeline_parallel), tied=tied)
    calls, whole = of_the_busiest(model, policies)
    workload = Workload(LENGTH, policies.global_batch_size)
    found = exchanges(sizes_of(model, policies), policies, workload)
    expected_calls, expected = Counter(), Counter()  # type: Counter[Any], Counter[Any]
    for exchange in found:
        key = exchange.dimension, exchange.kind
        expected_calls[key] += exchange.count
        expected[key] += exchange.bytes_each * exchange.count
    assert dict(expected_calls) == pytest.approx(dict(calls))
    # Norms and the ends of a pipeline are a little more or less than an even share.
    assert dict(expected) == pytest.approx(dict(whole), rel=0.02)


def test_one_rank_sends_nothing() -> None:
    assert exchanges(sizes_of(config(), Policies()), Policies(), Workload(LENGTH, 1)) == []


@pytest.mark.parametrize(
    ("kind", "ranks", "times"),
    [
        (Collective.ALL_GATHER, 2, 1 / 2),
        (Collective.REDUCE_SCATTER, 8, 7 / 8),
        (Collective.ALL_REDUCE, 8, 2 * 7 / 8),
        (Collective.SEND, 8, 1),
    ],
)
def test_a_ring_sends_its_part(kind: Collective, ranks: int, times: float) -> None:
    assert Exchange(Dimension.SHARD, kind, ranks, 100, 3).sent_bytes == pytest.approx(300 * times)


@pytest.mark.parametrize(
    ("sharding", "machines", "expected"),
    [
        # A ring of all: what one rank sends. P and T are a copy of parameters and of gradients.
        (ShardingPolicy(8, 3), 2, lambda p, t: 7 / 8 * (2 * p + t)),
        # Four rings of a quarter each.
        (ShardingPolicy(8, 3, replicas=2), 2, lambda p, t: t),
        # Tensor ranks are on one machine, each of the two has a ring of its half.
        (ShardingPolicy(8, 3, tensor_parallel=2), 2, lambda p, t: 3 / 4 * (2 * p + t)),
        (ShardingPolicy(8, 0), 2, lambda p, t: 2 * 7 / 8 * t),
        # Every machine has a stage, whose four ranks send hidden states and share the rest.
        (ShardingPolicy(8, 3, pipeline_parallel=2), 2, None),
        (ShardingPolicy(8, 3), 1, lambda p, t: 0),
    ],
)
def test_what_leaves_a_machine(
    sharding: ShardingPolicy, machines: int, expected: Callable[[float, float], float] | None
) -> None:
    """Of a model whose layers are nearly all of it, so that all is gathered twice."""
    sizes = ModelSizes(10**6, 0, 0, 10, 100, 1, 1, tied=True)
    policies = Policies(sharding=sharding)
    found = exchanges(sizes, policies, Workload(1, sharding.data_parallel))
    leaves = bytes_between_machines(found, policies, machines)
    if expected is None:
        stages = [e for e in found if e.dimension is Dimension.PIPELINE]
        assert leaves == pytest.approx(4 * sent_bytes(stages))
    else:
        whole = 4 * 10**6
        assert leaves == pytest.approx(expected(whole, whole), rel=1e-3, abs=100)
