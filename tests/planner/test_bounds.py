"""A lower bound is never above the bill, and rises with what was seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from transformers import LlamaConfig

from tightfit.bill.runtime import Capability
from tightfit.bill.table import Kind, MemoryTable, Phase
from tightfit.facts.job import Job
from tightfit.facts.workload import Workload
from tightfit.planner.bounds import LowerBounds
from tightfit.planner.fitting import possible
from tightfit.planner.options import options_of
from tightfit.planner.pricing import Pricing
from tightfit.planner.rates import Rates
from tightfit.policies import (
    BatchPolicy,
    CheckpointingPolicy,
    LossKind,
    LossPolicy,
    PlacementPolicy,
    Policies,
    ShardingPolicy,
    Tier,
)


def test_no_bill_is_below_its_bound(pricing: Pricing, job: Callable[..., Job]) -> None:
    """With all that is known from every candidate, each is held against its own bill."""
    options = options_of(job(), precision="fp32", chunked_loss=True)
    candidates = [policies for policies in options.candidates() if possible(policies)]
    bills = {policies: pricing.bill(policies) for policies in candidates}
    assert len(bills) == 36
    for policies, bill in bills.items():
        least = pricing.least_bill(policies)
        for tier in Tier:
            assert least.peak_bytes(tier) <= bill.peak_bytes(tier)
        own = bill.peak_bytes(Tier.DEVICE) - pricing.least_states(policies).peak_bytes(Tier.DEVICE)
        seen = least.peak_bytes(Tier.DEVICE) - pricing.least_states(policies).peak_bytes(
            Tier.DEVICE
        )
        assert seen > own / 4, "the bound says too little to turn anything down"


def test_what_was_seen_of_a_large_batch_bounds_a_smaller_one(pricing: Pricing) -> None:
    fresh = Pricing(pricing.plain, pricing.config, pricing.workload, pricing.rates)
    small = replace(pricing.plain, batch=BatchPolicy(1, 2))
    fresh.counts(small)  # the plain run, of two sequences
    least = fresh.least_bill(small).peak_bytes(Tier.DEVICE)
    assert fresh.least_states(small).peak_bytes(Tier.DEVICE) < least
    assert least <= fresh.bill(small).peak_bytes(Tier.DEVICE)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("card", [None, (8, 0)], ids=["cpu", "card"])
def test_of_no_other_candidate_a_bill_is_needed_to_bound_it(
    pricing: Pricing, job: Callable[..., Job], precision: str, card: Capability | None
) -> None:
    """The plain run alone says what others take at least, without being wrong about any."""
    options = options_of(job(), precision=precision, chunked_loss=True, on_card=card is not None)
    fresh = Pricing(options.plain(), pricing.config, pricing.workload, pricing.rates, card)
    near = [p for p in options.candidates() if p.placement == PlacementPolicy()]
    least = [fresh.least_bill(policies).peak_bytes(Tier.DEVICE) for policies in near]
    bills = [fresh.bill(policies).peak_bytes(Tier.DEVICE) for policies in near]
    assert len(near) == 18
    assert all(low <= bill for low, bill in zip(least, bills, strict=True))
    states = fresh.least_states(near[0]).peak_bytes(Tier.DEVICE)
    known = [(low - states) / (bill - states) for low, bill in zip(least, bills, strict=True)]
    assert sum(known) / len(known) > 0.3, "so little turns nothing down"


def test_activations_that_leave_do_not_count(pricing: Pricing) -> None:
    away = replace(pricing.plain, placement=PlacementPolicy(activations=Tier.HOST))
    least = [pricing.least_bill(p).peak_bytes(Tier.DEVICE) for p in (away, pricing.plain)]
    assert least[0] < least[1]


def table(device: int, pinned: int) -> MemoryTable:
    kinds = {Tier.DEVICE: {Kind.LOGITS: device}, Tier.PINNED: {Kind.ACTIVATIONS: pinned}}
    return MemoryTable({Phase.BACKWARD: kinds})


def test_activations_that_left_bound_what_the_host_takes(pricing: Pricing) -> None:
    run = pricing.counts(pricing.plain)
    bounds = LowerBounds(sequence_length=1)  # so short that closed forms say less
    away = replace(pricing.plain, placement=PlacementPolicy(activations=Tier.HOST))
    bounds.learn(away, replace(run, table=table(100_000, 1000)))
    smaller = replace(away, batch=BatchPolicy(1, 2))
    larger = replace(away, batch=BatchPolicy(4, 1))
    found = [bounds.table(p, run).peak_bytes(Tier.HOST) for p in (smaller, away, larger)]
    assert found == [500, 1000, 1000]
    stays = replace(smaller, placement=PlacementPolicy())
    assert bounds.table(stays, run).peak_bytes(Tier.HOST) == 0
    states = bounds.states(stays, run).peak_bytes(Tier.DEVICE)
    assert bounds.table(stays, run).peak_bytes(Tier.DEVICE) == states + 50_000


@pytest.mark.slow
@pytest.mark.parametrize("card", [None, (8, 0)], ids=["cpu", "card"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_no_division_of_ranks_is_below_its_bound(
    job: Callable[..., Job], card: Capability | None, tied: bool, rates: Rates
) -> None:
    """From the plain run alone, and when all are known."""
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    keys = {"num_gpus": 4, "train_batch_size": 8, "loss": "full", "offload_optimizer": "none",
            "offload_param": "none", "offload_activations": "false"}  # fmt: skip
    options = options_of(
        job(**keys), precision="fp32", chunked_loss=True, on_card=card is not None,
        config=config.to_dict(),
    )  # fmt: skip
    candidates = list(options.candidates())
    divisions = {policies.sharding: policies for policies in candidates}.values()
    assert len(divisions) >= 8
    pricing = Pricing(options.plain(), config, Workload(64, 8), rates, card)
    pricing.bill(options.plain())
    pricing.bill(replace(options.plain(), checkpointing=CheckpointingPolicy(True)))
    before = {policies: pricing.least_bill(policies) for policies in divisions}
    for policies in divisions:
        bill = pricing.bill(policies)
        for least in (before[policies], pricing.least_bill(policies)):
            assert least.peak_bytes(Tier.DEVICE) <= bill.peak_bytes(Tier.DEVICE), policies
        share = before[policies].peak_bytes(Tier.DEVICE) / bill.peak_bytes(Tier.DEVICE)
        assert share > 0.3, f"so little turns nothing down: {policies.sharding}"


def test_tensor_ranks_and_stages_leave_a_part(pricing: Pricing) -> None:
    """Of what was seen of one rank: no more than that may be bounded from below."""
    plain = replace(pricing.plain, batch=BatchPolicy(1, 4))
    alone = pricing.counts(plain)
    bounds = LowerBounds(sequence_length=1)
    kinds = {Tier.DEVICE: {Kind.ACTIVATIONS: 10_000_000}}
    bounds.learn(plain, replace(alone, table=MemoryTable({Phase.FORWARD: kinds})))

    def of_layers(sharding: ShardingPolicy) -> int:
        policies = replace(plain, sharding=sharding)
        least = bounds.table(policies, alone).peaks[Phase.FORWARD][Tier.DEVICE]
        return least.get(Kind.ACTIVATIONS, 0)

    one = of_layers(ShardingPolicy())
    assert one >= 9_900_000
    assert of_layers(ShardingPolicy(4, 3)) == one, "data-parallel ranks leave as much each"
    assert of_layers(ShardingPolicy(2, tensor_parallel=2)) == pytest.approx(one / 2, rel=0.01)
    staged = of_layers(ShardingPolicy(2, pipeline_parallel=2))
    assert one <= staged < 1.2 * one, "half the layers of two micro-batches, and an end of its own"


@pytest.mark.parametrize(("alike", "share"), [(True, 1 / 2), (False, 0)])
def test_layers_of_which_none_is_computed_again_bound_every_second_one(
    pricing: Pricing, alike: bool, share: float
) -> None:
    """Where all are of one kind; what is seen of every one of them does so always."""
    plain = replace(pricing.plain, loss=LossPolicy(LossKind.SLICED))
    run = pricing.counts(pricing.plain)
    run = replace(run, shape=replace(run.shape, alike=alike, layers=4))
    second = replace(plain, checkpointing=CheckpointingPolicy(True, every=2))
    every = replace(plain, checkpointing=CheckpointingPolicy(True))
    bounds = LowerBounds(sequence_length=1)

    def of_layers() -> float:
        least = bounds.table(second, run).peaks[Phase.FORWARD][Tier.DEVICE]
        return least.get(Kind.ACTIVATIONS, 0) / 10**7

    for seen, expected in ((plain, share), (every, max(share, 1))):
        kinds = {Tier.DEVICE: {Kind.ACTIVATIONS: 10**7}}
        bounds.learn(seen, replace(run, table=MemoryTable({Phase.FORWARD: kinds})))
        assert of_layers() == pytest.approx(expected, abs=0.01)


def test_parameters_that_visited_the_device_visit_it_for_a_smaller_batch(pricing: Pricing) -> None:
    run = pricing.counts(pricing.plain)
    bounds = LowerBounds(sequence_length=1)
    away = replace(pricing.plain, placement=PlacementPolicy(*[Tier.HOST] * 3))
    seen = {Tier.DEVICE: {Kind.LOGITS: 1000, Kind.PARAMETERS: 10**9}}
    bounds.learn(away, replace(run, table=MemoryTable({Phase.FORWARD: seen})))
    smaller = replace(away, batch=BatchPolicy(1, 2))
    least = bounds.table(smaller, run).phase_peak_bytes(Phase.FORWARD, Tier.DEVICE)
    assert least == 10**9 + 500
    farther = replace(smaller, placement=replace(away.placement, prefetch=2))
    elsewhere = bounds.table(farther, run).phase_peak_bytes(Phase.FORWARD, Tier.DEVICE)
    assert elsewhere < 10**9, "with other layers fetched ahead others visit"


LARGE = LlamaConfig(
    vocab_size=512, hidden_size=512, intermediate_size=1024, num_hidden_layers=8,
    num_attention_heads=8, num_key_value_heads=4,
)  # fmt: skip


def large(job: Callable[..., Job], rates: Rates, **keys: object) -> tuple[Pricing, list[Policies]]:
    """What is open to a model whose activations are large enough to leave, priced for a card."""
    options = options_of(
        job(train_batch_size=4, loss="full", **keys), precision="bf16", chunked_loss=True,
        on_card=True, config=LARGE.to_dict(),
    )  # fmt: skip
    pricing = Pricing(options.plain(), LARGE, Workload(2048, 4), rates, (8, 0))
    return pricing, list(options.candidates())


def test_activations_that_will_leave_bound_the_host_before_any_has_left(
    job: Callable[..., Job], rates: Rates
) -> None:
    keys = {"offload_param": "none", "offload_optimizer": "none", "offload_activations": "true"}
    pricing, candidates = large(job, rates, **keys)
    assert len(candidates) == 9
    least = {
        policies: pricing.least_bill(policies).peak_bytes(Tier.HOST) for policies in candidates[::2]
    }
    for policies, known in least.items():
        bill = pricing.bill(policies)
        takes = bill.peak_bytes(Tier.HOST) + bill.peak_bytes(Tier.PINNED)
        assert known <= takes, policies
        if not policies.checkpointing.enabled:
            assert known > 0.5 * takes, "so little turns nothing down"


def test_what_is_likely_is_near_to_the_bill(job: Callable[..., Job], rates: Rates) -> None:
    """Of smaller micro-batches, after the plain run; adapters' states may be elsewhere."""
    keys = {"finetuning_type": "lora", "offload_activations": "true", "offload_param": "cpu",
            "gradient_checkpointing": True}  # fmt: skip
    pricing, candidates = large(job, rates, **keys)
    smaller = [p for p in candidates if p.batch.micro_batch_size < 4]
    assert len(smaller) == 4
    for policies in smaller[::3]:
        likely, bill = pricing.likely_bill(policies), pricing.bill(policies)
        assert likely is not None
        near = pytest.approx(bill.peak_bytes(Tier.DEVICE), rel=0.1)
        assert likely.peak_bytes(Tier.DEVICE) == near, policies


def test_what_all_tensor_ranks_have_is_learnt_from_two_sizes_of_their_groups(
    pricing: Pricing,
) -> None:
    """A quarter of what layers leave is on each rank, three quarters are divided."""
    plain = replace(
        pricing.plain, loss=LossPolicy(LossKind.SLICED), batch=BatchPolicy(1, 4),
    )  # fmt: skip
    run = pricing.counts(pricing.plain)
    bounds = LowerBounds(sequence_length=1)

    def divided(ranks: int) -> Policies:
        return replace(plain, sharding=ShardingPolicy(ranks, tensor_parallel=ranks))

    def of_layers() -> int:
        least = bounds.table(divided(4), run).peaks[Phase.FORWARD][Tier.DEVICE]
        return least.get(Kind.ACTIVATIONS, 0)

    for ranks, left in ((1, 100_000_000), (2, 62_500_000)):
        kinds = {Tier.DEVICE: {Kind.ACTIVATIONS: left}}
        seen = replace(run, table=MemoryTable({Phase.FORWARD: kinds}))
        bounds.learn(divided(ranks), seen)
        if ranks == 1:
            assert of_layers() == pytest.approx(25_000_000, rel=0.01)
    assert 0.9 * 43_750_000 < of_layers() < 43_750_000


def test_gathered_parameters_that_were_seen_are_there_for_a_smaller_batch(
    pricing: Pricing,
) -> None:
    run = pricing.counts(pricing.plain)
    bounds = LowerBounds(sequence_length=1)
    shared = replace(pricing.plain, sharding=ShardingPolicy(2, 3))
    kinds = {Tier.DEVICE: {Kind.LOGITS: 1000, Kind.COLLECTIVES: 10**9}}
    bounds.learn(shared, replace(run, table=MemoryTable({Phase.BACKWARD: kinds})))
    smaller = replace(shared, batch=BatchPolicy(1, 2))
    states = bounds.states(smaller, run).phase_peak_bytes(Phase.FORWARD, Tier.DEVICE)
    least = bounds.table(smaller, run).phase_peak_bytes(Phase.FORWARD, Tier.DEVICE)
    assert least - states == 10**9 + 500
