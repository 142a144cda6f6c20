"""Ranks that share each layer's matrices train as one does, and take what their bill says.

`sharded_runs.py` makes the runs, on real processes; here they are compared.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.engine import sharded_runs as runs
from tests.engine.compared_runs import (
    check_parameters,
    chosen,
    is_narrow,
    losses,
    made,
    read,
    with_more,
)

from tightfit.bill.table import Phase
from tightfit.dry_run import dry_run
from tightfit.dry_run.config import load_config
from tightfit.dry_run.fakes import fake_tensors
from tightfit.dry_run.ranks import fake_ranks
from tightfit.engine.apply import fit
from tightfit.engine.tensor_parallel import divided_dims
from tightfit.engine.tensor_styles import Entrance
from tightfit.errors import UnsupportedError
from tightfit.facts.workload import Workload
from tightfit.policies import AdapterPolicy, Policies, QuantisationPolicy, ShardingPolicy, Tier

CASES = with_more(runs.TENSOR, runs.MORE_TENSOR)
# Sums in another order, and what AdamW makes of it where a gradient is next to nothing; partial
# sums of 16 bits are rounded before they are added up over ranks.
LOSS = {"fp32": 1e-6, "bf16": 1e-3}  # relative
NORM = {"fp32": 1e-6, "bf16": 1e-2}  # relative
PARAMETERS = {"fp32": 2e-5, "bf16": 2e-2}
SENSITIVE = 5e-4  # parameters of adapters: B begins at zero, and what A gets is next to nothing
LATER = 1e-4  # norms after twenty steps: each step's differences grow in the next


def of_its_type(case: str, tolerances: dict[str, float]) -> float:
    return tolerances["bf16" if is_narrow(case) else "fp32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Where all runs have left their results."""
    return made(tmp_path_factory.mktemp("tensor"), chosen(request))


def check_numbers(folder: Path, ranks: int, case: str, steps: int) -> None:
    """Losses of the global batch, norms and parameters are those of one process."""
    alone, expected = read(folder, case, ranks, "alone")
    first, parameters = read(folder, case, ranks, "0")
    found = losses(folder, case, ranks)
    assert len(found) == len(first["norms"]) == steps
    if "inf" in case.split():  # of one rank alone
        found[runs.UNUSUAL] = math.inf
    assert found == pytest.approx(alone["losses"], rel=of_its_type(case, LOSS))
    norm = of_its_type(case, NORM) if steps == runs.STEPS else LATER
    assert first["norms"] == pytest.approx(alone["norms"], rel=norm, nan_ok=True)
    assert math.isnan(first["norms"][runs.UNUSUAL]) == ("inf" in case.split())
    tolerance = SENSITIVE if "lora" in case else of_its_type(case, PARAMETERS) * steps / 5
    assert parameters.keys() == expected.keys()
    check_parameters(parameters, expected, tolerance)


@pytest.mark.parametrize(("ranks", "case"), CASES)
def test_ranks_train_as_one_does(folder: Path, ranks: int, case: str) -> None:
    check_numbers(folder, ranks, case, runs.STEPS)


@pytest.mark.parametrize(("ranks", "case"), CASES)
def test_all_ranks_agree_to_the_bit(folder: Path, ranks: int, case: str) -> None:
    """Norms, and parameters that every rank has: they would drift apart with nobody to notice."""
    first, parameters = read(folder, case, ranks, "0")
    for rank in range(1, ranks):
        other, others = read(folder, case, ranks, str(rank))
        assert str(other["norms"]) == str(first["norms"])
        assert all(torch.equal(others[name], value) for name, value in parameters.items())


@pytest.mark.parametrize(("ranks", "case"), CASES)
def test_the_fake_rank_takes_what_a_real_one_does(folder: Path, ranks: int, case: str) -> None:
    """Byte for byte and kind for kind, at init and in every later step."""
    fake, _ = read(folder, case, ranks, "fake")
    real, _ = read(folder, case, ranks, "0")
    assert real["tables"][""] == fake["tables"][""]
    for step in runs.later_steps():
        assert real["tables"][step] == fake["tables"][str(runs.FAKE_STEPS - 1)]


def measured(folder: Path, case: str, ranks: int, rank: int) -> dict[str, dict[str, int]]:
    """Most bytes by phase and tier."""
    found, _ = read(folder, case, ranks, str(rank))
    tables = [found["tables"][step] for step in runs.later_steps()]
    return {
        phase: {
            tier: max(sum(table[phase].get(tier, {}).values()) for table in tables)
            for tier in ("device", "host")
        }
        for phase in ("forward", "backward", "step")
    }


@pytest.mark.parametrize(("ranks", "case"), CASES)
def test_no_rank_takes_more_than_the_first(folder: Path, ranks: int, case: str) -> None:
    """Rank 0 has the largest parts, so its bill is enough for all."""
    first = measured(folder, case, ranks, 0)
    for rank in range(1, ranks):
        for phase, tiers in measured(folder, case, ranks, rank).items():
            assert all(count <= first[phase][tier] for tier, count in tiers.items()), phase


BILLED = [
    (2, "0 tp2 empty moe checkpoint"),
    (4, "2 tp2 checkpoint inf"),
    (4, "3 tp2 empty lora away"),
]


@pytest.mark.parametrize(("ranks", "case"), BILLED)
def test_the_bill_is_what_ranks_take(folder: Path, ranks: int, case: str) -> None:
    """The whole dry run, with what it extrapolates and leaves out: 3% at most, never low."""
    policies = runs.policies_of(case, ranks)
    bill = dry_run(
        runs.config_of(case.split()), policies, Workload(runs.LENGTH, policies.global_batch_size)
    )
    assert bill.notes == ()
    for phase, tiers in measured(folder, case, ranks, 0).items():
        for tier, count in tiers.items():
            billed = sum(bill.table.peaks[Phase(phase)].get(Tier(tier), {}).values())
            assert count <= billed <= 1.03 * count, (phase, tier)


@pytest.mark.slow
def test_every_model_in_every_way_over_twenty_steps(tmp_path: Path) -> None:
    steps = 20
    made(tmp_path, runs.GRID, str(steps))
    for ranks, cases in runs.GRID.items():
        for case in cases:
            check_numbers(tmp_path, ranks, case, steps)


def tiny(**fields: Any) -> Any:
    return load_config({"model_type": "llama", **runs.SIZES, **fields})


def build(config: Any) -> Any:
    with torch.device("meta"):
        return runs.AutoModelForCausalLM.from_config(config)


SMOLLM2 = {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3}
REFUSED = [
    (tiny(), 3, "does not divide the model's 4 query heads; .* shared by 1, 2, 4$"),
    (tiny(**SMOLLM2), 2, "does not divide the model's 9 query heads; .* shared by 1, 3, 9$"),
    (
        tiny(hidden_size=96, num_attention_heads=12, num_key_value_heads=4), 6,
        "the model's 4 key and value heads; .* shared by 1, 2, 4, 12$",
    ),
    (
        load_config({"model_type": "qwen3_moe", **runs.SIZES, **runs.FAMILIES["moe"]}), 4,
        "experts' inner width 16 is not .* shared by 1, 2$",
    ),
    (load_config({"model_type": "gpt2"}), 2, "gpt2 model has no tensor-parallel plan"),
    (
        load_config({"model_type": "deepseek_v2", **runs.SIZES}), 2,
        "says mla_kv_a_proj for model.layers.0.self_attn.kv_a_proj_with_mqa",
    ),
    (tiny(model_type="apertus"), 2, "does not say what becomes of model.layers.0.mlp.act_fn"),
    (
        load_config({**runs.SIZES, **runs.FAMILIES["moe"], "model_type": "qwen3_next"}), 2,
        "does not say what becomes of model.layers.0.linear_attn.conv1d",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("config", "ranks", "said"), REFUSED)
def test_what_cannot_be_shared_is_refused(config: Any, ranks: int, said: str) -> None:
    model = build(config)
    with pytest.raises(UnsupportedError, match=said):
        divided_dims(model, model, ranks)


def test_blocks_of_4_bits_are_not_cut_through() -> None:
    policies = Policies(
        adapter=AdapterPolicy(2),
        quantisation=QuantisationPolicy(),
        sharding=ShardingPolicy(2, tensor_parallel=2),
    )
    with fake_ranks(2), fake_tensors():
        model = runs.make_model(policies, ["llama"])
        said = r"cut model.layers.0.self_attn.q_proj, 16 x 16, through a block of 64 weights"
        with pytest.raises(UnsupportedError, match=said):
            fit(model, policies)


@pytest.mark.parametrize(
    ("words", "targets", "said"),
    [
        (["moe"], (), "adapter of model.layers.0.mlp.experts is not plain LoRA"),
        (["llama", "untied"], ("embed_tokens",), "adapter of model.embed_tokens is not"),
    ],
)
def test_adapters_on_other_layers_are_refused(
    words: list[str], targets: tuple[str, ...], said: str
) -> None:
    policies = Policies(
        adapter=AdapterPolicy(2, targets=targets), sharding=ShardingPolicy(2, tensor_parallel=2)
    )
    with fake_ranks(2), fake_tensors():
        model = runs.make_model(policies, words)
        with pytest.raises(UnsupportedError, match=said):
            fit(model, policies)


FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "olmo2", "granite"]


@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_are_shared_out_and_norms_are_not(family: str) -> None:
    model = build(tiny(model_type=family, head_dim=4))
    dims = divided_dims(model, model, 2)
    for name, parameter in model.named_parameters():
        assert (parameter in dims) == ("norm" not in name), name


def test_layers_of_one_input_sum_its_gradient_once() -> None:
    """Until the module around them returns: what comes then is another input, or none."""
    with fake_ranks(2):
        around, group = torch.nn.Identity(), dist.group.WORLD
        assert group is not None
        entrance = Entrance(around, group)
        first, second = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        entered = entrance(first)
        assert entrance(first) is entered
        assert entrance(second) is not entered
        entered = entrance(first)
        around(first)
        assert entrance(first) is not entered


def test_few_key_heads_are_whole_on_every_rank() -> None:
    model = build(tiny())
    dims = divided_dims(model, model, 4)
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.weight in dims
    assert attention.k_proj.weight not in dims
    assert attention.v_proj.weight not in dims
