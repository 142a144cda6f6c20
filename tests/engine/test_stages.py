"""Stages of a pipeline train as one process does, and take what their dry runs say.

`sharded_runs.py` makes the runs, on real processes; here they are compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine import sharded_runs as runs
from tests.engine.compared_runs import check_parameters, chosen, is_narrow, made, read, with_more
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel

from tightfit.dry_run.ranks import fake_ranks
from tightfit.engine.apply import fit
from tightfit.engine.layers import Absent, own_layers
from tightfit.engine.stages import apply_stage
from tightfit.errors import ConfigError, UnsupportedError
from tightfit.policies import AdapterPolicy, Policies, ShardingPolicy

# Sums in another order; 16 bits are rounded.
LOSS = {"fp32": 1e-5, "fp16": 1e-3}  # relative
NORM = {"fp32": 5e-6, "fp16": 1e-2}  # relative
PARAMETERS = {"fp32": 1e-5, "fp16": 2e-2}
CASES = with_more(runs.PIPELINE, runs.MORE_PIPELINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Where all runs have left their results."""
    return made(tmp_path_factory.mktemp("staged"), chosen(request))


def check_numbers(folder: Path, ranks: int, case: str) -> None:
    alone, expected = read(folder, case, ranks, "alone")
    precision = "fp16" if is_narrow(case) else "fp32"
    sharding = runs.policies_of(case, ranks).sharding
    losses = torch.zeros(runs.STEPS)
    seen = set()
    for rank in range(ranks):
        own, parameters = read(folder, case, ranks, str(rank))
        assert own["norms"] == pytest.approx(alone["norms"], rel=NORM[precision])
        losses += torch.tensor(own["losses"]) * sharding.data_parallel / ranks
        check_parameters(parameters, expected, PARAMETERS[precision])
        seen |= parameters.keys()
    assert losses.tolist() == pytest.approx(alone["losses"], rel=LOSS[precision])
    assert seen == expected.keys()


def check_bill(folder: Path, ranks: int, case: str) -> None:
    """Byte for byte in every later step."""
    for rank, who in runs.fake_names(case, ranks).items():
        fake, _ = read(folder, case, ranks, who)
        real, _ = read(folder, case, ranks, str(rank))
        for step in runs.later_steps():
            for phase, tiers in fake["tables"][str(runs.FAKE_STEPS - 1)].items():
                for tier, kinds in tiers.items():
                    found = sum(real["tables"][step][phase][tier].values())
                    assert found == sum(kinds.values()), (case, who, step, phase, tier)


@pytest.mark.parametrize(("ranks", "case"), CASES)
def test_stages_train_as_one_process_does(folder: Path, ranks: int, case: str) -> None:
    check_numbers(folder, ranks, case)


@pytest.mark.parametrize(("ranks", "case"), CASES)
def test_stages_share_out_the_layers_alone(folder: Path, ranks: int, case: str) -> None:
    stages = runs.policies_of(case, ranks).sharding.pipeline_parallel
    parameters = [read(folder, case, ranks, str(rank))[1] for rank in range(ranks)]
    for one in parameters[: ranks // stages]:
        for last in parameters[-ranks // stages :]:
            both = one.keys() & last.keys()
            assert both == (set() if "untied" in case else {tied_name(case)})
            assert all(torch.equal(one[name], last[name]) for name in both)


def tied_name(case: str) -> str:
    return "base_model.model." * ("lora" in case) + "model.embed_tokens.weight"


@pytest.mark.parametrize(("ranks", "case"), CASES)
def test_the_fake_stage_takes_what_a_real_one_does(folder: Path, ranks: int, case: str) -> None:
    check_bill(folder, ranks, case)


@pytest.mark.slow
def test_more_ways_to_train_in_stages(tmp_path: Path) -> None:
    made(tmp_path, runs.STAGES)
    for ranks, cases in runs.STAGES.items():
        for case in cases:
            check_numbers(tmp_path, ranks, case)
            check_bill(tmp_path, ranks, case)


def test_every_stage_has_its_own_layers_and_ends(make_model: Any) -> None:
    kept = []
    for number in range(3):
        model = make_model(num_hidden_layers=4, tie_word_embeddings=False)
        stage = apply_stage(model, number, 3)
        assert stage.is_first == (number == 0)
        assert stage.is_last == (number == 2)
        assert len(model.model.layers) == 4
        assert len(own_layers(model)) in (1, 2)
        kept.append({name for name, _ in model.named_parameters()})
    whole = {
        name
        for name, _ in make_model(num_hidden_layers=4, tie_word_embeddings=False).named_parameters()
    }
    assert set.union(*kept) == whole
    assert sum(map(len, kept)) == len(whole), "each is on one stage"


def test_interleaved_stages_have_runs_of_layers_in_turn(make_model: Any) -> None:
    models = [make_model(num_hidden_layers=5, tie_word_embeddings=False) for _ in range(2)]
    expected = [tuple(layer.parameters()) for layer in models[0].model.layers]
    stages = [apply_stage(model, number, 2, 2) for number, model in enumerate(models)]
    first = stages[0]
    assert [chunk.is_last for stage in stages for chunk in stage.chunks] == [False] * 3 + [True]
    assert first.chunks[0].entrance is None
    assert first.chunks[1].entrance is not None
    numbers = [
        {n for n, layer in enumerate(model.model.layers) if not isinstance(layer, Absent)}
        for model in models
    ]
    assert numbers[0] | numbers[1] == set(range(5))
    assert not numbers[0] & numbers[1]
    kept = [tuple(models[0].model.layers[n].parameters()) for n in sorted(numbers[0])]
    assert kept == [expected[n] for n in sorted(numbers[0])]
    assert isinstance(models[0].lm_head, Absent)
    assert isinstance(models[1].model.embed_tokens, Absent)


def test_the_last_stage_knows_a_tied_embedding_by_its_name(make_model: Any) -> None:
    model = make_model()
    stage = apply_stage(model, 1, 2)
    assert stage.copies == {model.lm_head.weight}
    assert "model.embed_tokens.weight" in dict(model.named_parameters())
    first = make_model()
    assert not apply_stage(first, 0, 2).copies
    assert isinstance(first.lm_head, Absent)


def gpt2() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=20, n_positions=8)
    )
    return model


def test_what_cannot_be_cut_is_refused(make_model: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"gpt2 model.*llama, qwen2"):
        apply_stage(gpt2(), 0, 2)
    with pytest.raises(UnsupportedError, match="more than the model's 2 layers"):
        apply_stage(make_model(), 0, 3)
    with pytest.raises(UnsupportedError, match=r"2 x virtual_pipeline_stages 2 = 4 .* 2 layers"):
        apply_stage(make_model(), 0, 2, 2)
    with pytest.raises(UnsupportedError, match=r"pipeline_layers 2 \+ 1 = 3, .* has 2 layers"):
        apply_stage(make_model(), 0, 2, given=(2, 1))
    odd = make_model()
    odd.model.register_parameter("extra", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(UnsupportedError, match=r"model\.extra.*not in its pipeline plan"):
        apply_stage(odd, 0, 2)
    routers = make_model()
    routers.config.output_router_logits = True
    with pytest.raises(UnsupportedError, match="output_router_logits"):
        apply_stage(routers, 0, 2)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_adapters_on_a_tied_embedding_are_refused(make_model: Any) -> None:
    policies = Policies(
        sharding=ShardingPolicy(2, pipeline_parallel=2),
        adapter=AdapterPolicy(targets=("q_proj", "embed_tokens")),
    )
    with fake_ranks(2), pytest.raises(UnsupportedError, match="two pipeline stages have"):
        fit(make_model(), policies)


def test_a_stage_has_no_loss_of_its_own(make_model: Any, make_batch: Any) -> None:
    with fake_ranks(2):
        engine = fit(make_model(), Policies(sharding=ShardingPolicy(2, pipeline_parallel=2)))
        with pytest.raises(UnsupportedError, match="forward_backward"):
            engine.loss(*make_batch(0), 30)


def test_without_a_pipeline_it_is_a_loop(make_model: Any, make_batch: Any) -> None:
    batches = [make_batch(0), make_batch(1, length=7)]
    one, other = fit(make_model(), Policies()), fit(make_model(), Policies())
    expected = 0.0
    for ids, labels in batches:
        loss = one.loss(ids, labels, 40)
        one.backward(loss)
        expected += float(loss.detach())
    assert other.forward_backward(batches, 40) == expected
    assert other.step() == one.step()


def test_as_many_ranks_as_the_stages_need(make_model: Any) -> None:
    with pytest.raises(ConfigError, match="for 2 ranks, and this is a process group of 1"):
        fit(make_model(), Policies(sharding=ShardingPolicy(2, pipeline_parallel=2)))
