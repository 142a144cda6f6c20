"""Runs on two and four ranks are the run on one, also where they go on from each other's
checkpoints."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.taken import asked_for, only
from tests.training.conftest import PLAIN
from tests.training.ranked_runs import LLAMA, RESULTS, SIZES, Leg, on_ranks, run_leg, save_model
from transformers import PreTrainedTokenizerFast

from tightfit.engine.rules import SCALES
from tightfit.facts.job import Job
from tightfit.planner import prepared
from tightfit.planner.plan import Plan
from tightfit.planner.rates import Rates
from tightfit.policies import ShardingPolicy
from tightfit.training.run import make_plan, prepare

STEPS = 4  # the third has one sequence for two ranks: an epoch of 9 in batches of 4
LORA: dict[str, Any] = {"finetuning_type": "lora", "lora_rank": 2, "lora_dropout": 0.0}
AWAY: dict[str, Any] = {"offload_optimizer": "cpu", "offload_param": "cpu"}
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": LORA,
    # Of a tied model: saved under both names.
    "whole": LORA | {"additional_target": "embed_tokens,norm"},
    "dora": LORA | {"use_dora": True},
    "away": AWAY,
    "8bit": {"optim": "adamw_8bit"},
    "compact": {"optim": "adamw_compact", "optim_master": "split_8", "precision": "bf16"},
    # Seven samples in batches of 4, and four held out, of which one rank gets three.
    "uneven": {"val_size": 4, "per_device_eval_batch_size": 3},
    "held": {"val_size": 1},
    "bf16": {"precision": "bf16"},
    # Files have experts one by one, and q, k and v in one matrix.
    "moe": {},
    "phi3": {},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
OTHER_MODELS = {
    "moe": {"model_type": "qwen3_moe", **SIZES, **EXPERTS},
    "phi3": {"model_type": "phi3", **SIZES, "num_hidden_layers": 3},
}
LATER = 2
TENSOR = {"tensor_parallel": 2}
STAGES = {"pipeline_parallel": 2}
FULLER_FIRST = STAGES | {"stage_layers": (2, 1)}  # by parameters it would be 1 and 2
STAGES_3 = STAGES | {"zero_stage": 3}
TENSOR_3 = TENSOR | {"zero_stage": 3}
REPLICAS = {"zero_stage": 3, "replicas": 2}
# Legs by the number of ranks, the stage (or what else they share) and the last step.
CASES: dict[str, list[tuple[int, int | dict[str, Any], int]]] = {
    "full on 1": [(1, 0, STEPS)],
    "full on 2, stage 0": [(2, 0, STEPS)],
    "full on 2, stage 1": [(2, 1, STEPS)],
    "full on 2, stage 2": [(2, 2, STEPS)],
    "full on 2, stage 3": [(2, 3, STEPS)],
    "full from 1 to 2": [(1, 0, LATER), (2, 3, STEPS)],
    "full from 2 to 1": [(2, 3, LATER), (1, 0, STEPS)],
    "full from stage 1 to stage 3": [(2, 1, LATER), (2, 3, STEPS)],
    "full from stage 3 to stage 0": [(2, 3, LATER), (2, 0, STEPS)],
    "full on 2, tensor parallel": [(2, TENSOR, STEPS)],
    "full from tensor parallel to 1": [(2, TENSOR, LATER), (1, 0, STEPS)],
    "full from stage 3 to tensor parallel": [(2, 3, LATER), (2, TENSOR, STEPS)],
    "lora from tensor parallel to stage 3": [(2, TENSOR, LATER), (2, 3, STEPS)],
    "8bit from tensor parallel to 1": [(2, TENSOR, LATER), (1, 0, STEPS)],
    "full in stages": [(2, STAGES, STEPS)],
    "full from stages to 1": [(2, STAGES, LATER), (1, 0, STEPS)],
    "full from stage 3 to stages": [(2, 3, LATER), (2, STAGES, STEPS)],
    "full from stages to stage 1": [(2, STAGES, LATER), (2, 1, STEPS)],
    "8bit from stages to 1": [(2, STAGES, LATER), (1, 0, STEPS)],
    "lora in stages": [(2, STAGES, STEPS)],
    "lora from stages to 1": [(2, STAGES, LATER), (1, 0, STEPS)],
    "full from stages and stage 3 to 1": [(4, STAGES_3, LATER), (1, 0, STEPS)],
    "full from 1 to stages and stage 3": [(1, 0, LATER), (4, STAGES_3, STEPS)],
    "full from stages and tensor to 1": [(4, STAGES | TENSOR, LATER), (1, 0, STEPS)],
    "full from stages and stage 3 to stages and tensor": [
        (4, STAGES_3, LATER),
        (4, STAGES | TENSOR, STEPS),
    ],
    "lora from stages and tensor to stages and stage 3": [
        (4, STAGES | TENSOR, LATER),
        (4, STAGES_3, STEPS),
    ],
    "away in stages": [(2, STAGES, STEPS)],
    "lora on 1": [(1, 0, STEPS)],
    "lora on 2, stage 3": [(2, 3, STEPS)],
    "lora on 2, stage 0": [(2, 0, STEPS)],
    "lora on 2, stage 1": [(2, 1, STEPS)],
    "dora on 1": [(1, 0, STEPS)],
    "dora from 1 to 2": [(1, 0, LATER), (2, 0, STEPS)],
    "dora from stages to 1": [(2, STAGES, LATER), (1, 0, STEPS)],
    "whole on 1": [(1, 0, STEPS)],
    "whole from 1 to 2": [(1, 0, LATER), (2, 3, STEPS)],
    "whole from stage 2 to tensor parallel": [(2, 2, LATER), (2, TENSOR, STEPS)],
    "lora from 2 to 1": [(2, 2, LATER), (1, 0, STEPS)],
    "away on 1": [(1, 0, STEPS)],
    "away from 2 to 1": [(2, 3, LATER), (1, 0, STEPS)],
    "away from 1 to 2": [(1, 0, LATER), (2, 3, STEPS)],
    "uneven on 1": [(1, 0, STEPS)],
    "uneven on 2, stage 0": [(2, 0, STEPS)],
    "uneven on 2, stage 2": [(2, 2, STEPS)],
    "uneven on 2, stage 3": [(2, 3, STEPS)],
    "uneven on 2, tensor parallel": [(2, TENSOR, STEPS)],
    "held on 1": [(1, 0, STEPS)],
    "held on 2, stage 1": [(2, 1, STEPS)],
    "held on 2, stage 3": [(2, 3, STEPS)],
    "full from tensor and stage 3 to 1": [(4, TENSOR_3, LATER), (1, 0, STEPS)],
    "full from 1 to tensor and stage 3": [(1, 0, LATER), (4, TENSOR_3, STEPS)],
    "full from replicas to stages": [(4, REPLICAS, LATER), (2, STAGES, STEPS)],
    "full from stages to replicas": [(2, STAGES, LATER), (4, REPLICAS, STEPS)],
    "uneven in stages": [(2, STAGES, STEPS)],
    "uneven on 4, stages and stage 3": [(4, STAGES_3, STEPS)],
    "uneven on 4, tensor and stage 3": [(4, TENSOR_3, STEPS)],
    "uneven on 4, replicas": [(4, REPLICAS, STEPS)],
    "held in stages": [(2, STAGES, STEPS)],
    "bf16 on 1": [(1, 0, STEPS)],
    "bf16 from 2 to 1": [(2, 3, LATER), (1, 0, STEPS)],
    "bf16 from stages and tensor to stage 3": [(4, STAGES | TENSOR, LATER), (2, 3, STEPS)],
    "moe on 1": [(1, 0, STEPS)],
    "moe on 2, stage 3": [(2, 3, STEPS)],
    "moe from tensor and stage 3 to 1": [(4, TENSOR_3, LATER), (1, 0, STEPS)],
    "moe from 1 to stages": [(1, 0, LATER), (2, STAGES, STEPS)],
    "moe from stages to tensor parallel": [(2, STAGES, LATER), (2, TENSOR, STEPS)],
    "phi3 on 1": [(1, 0, STEPS)],
    "phi3 from 2 to 1": [(2, 3, LATER), (1, 0, STEPS)],
    "phi3 from tensor parallel to stages": [(2, TENSOR, LATER), (2, STAGES, STEPS)],
    "phi3 from stages to others": [(2, STAGES, LATER), (2, FULLER_FIRST, STEPS)],
    "compact on 1": [(1, 0, STEPS)],
    "compact from 2 to 1": [(2, 3, LATER), (1, 0, STEPS)],
    "compact from stages to 2": [(2, STAGES, LATER), (2, 3, STEPS)],
    "8bit on 1": [(1, 0, STEPS)],
    "8bit from 2 to 1": [(2, 3, LATER), (1, 0, STEPS)],
    "8bit from 1 to 2": [(1, 0, LATER), (2, 3, STEPS)],
}
# For every day: each kind, and what ranks share where it is saved and where it is read again. Files
# hold whole tensors, so that not every pair is needed.
FEW = [
    "full on 1",
    "full on 2, stage 0",
    "full from stage 3 to tensor parallel",
    "full from stages and stage 3 to stages and tensor",
    "full from tensor and stage 3 to 1",
    "full from stages to replicas",
    "8bit from stages to 1",
    "lora from tensor parallel to stage 3",
    "lora on 2, stage 1",
    "whole from stage 2 to tensor parallel",
    "away from 1 to 2",
    "uneven on 2, stage 3",
    "uneven on 4, stages and stage 3",
    "held on 2, stage 1",
    "bf16 from 2 to 1",
    "moe on 2, stage 3",
    "phi3 from tensor parallel to stages",
    "phi3 from stages to others",
]
SEVERAL = only(FEW, [name for name in CASES if "on 1" not in name])
# Blocks of 8-bit moments begin elsewhere where a parameter is shared out.
TOLERANCE = dict.fromkeys(KINDS, 1e-5) | {"8bit": 5e-3, "compact": 5e-3, "bf16": 5e-3}


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory,
    rows: Path,
    rates: Rates,
    tokenizer: PreTrainedTokenizerFast,
    request: pytest.FixtureRequest,
) -> Path:
    """A folder of results for each case; all legs of as many ranks in one start of them."""
    names = chosen(request)
    root = tmp_path_factory.mktemp("ranks")
    job: dict[str, Any] = PLAIN | {
        "model_name_or_path": str(root / "model"),
        "dataset": str(rows),
        "train_batch_size": 4,
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "val_size": 2,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",  # of the first leg as of the whole
        "sample_prompt": "What is number 3?",
        "max_new_tokens": 2,
        "output_dir": str(root / "unused"),
    }
    jobs = {kind: job | KINDS[kind] for kind in dict.fromkeys(name.split()[0] for name in names)}
    save_model(LLAMA, tokenizer, root / "model")
    for kind in jobs.keys() & OTHER_MODELS.keys():
        folder = root / f"{kind} model"
        save_model(OTHER_MODELS[kind], tokenizer, folder)
        jobs[kind]["model_name_or_path"] = str(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared, "measure_rates", lambda device, dtype: rates)
        plans = {kind: make_plan(prepare(Job(**its))) for kind, its in jobs.items()}
    for number in (1, 2):
        _run_all([(name, number) for name in names], plans, jobs, root)
    return root


def chosen(request: pytest.FixtureRequest) -> list[str]:
    """Cases that were chosen to run, each after that of one rank."""
    names = asked_for(request, "name")
    return list(dict.fromkeys(each for n in names for each in (f"{n.split()[0]} on 1", n)))


def _run_all(
    legs: list[tuple[str, int]],
    plans: dict[str, Plan],
    jobs: dict[str, dict[str, Any]],
    root: Path,
) -> None:
    """The first, or the second, legs of all cases."""
    together: dict[int, list[tuple[Any, ...]]] = {}
    for name, number in legs:
        if len(CASES[name]) < number:
            continue
        ranks, shared, until = CASES[name][number - 1]
        kind = name.split()[0]
        sharing = shared if isinstance(shared, dict) else {"zero_stage": shared}
        leg = Leg(ranks, ShardingPolicy(ranks, **sharing), until)
        job = jobs[kind]
        if ranks == 1:
            run_leg(leg, plans[kind], job, root / name, resume=number > 1)
        else:
            work = (leg, plans[kind], job, root / name, number > 1)
            together.setdefault(ranks, []).append(work)
    for ranks, work in together.items():
        folder = root / f"legs {legs[0][1]} of {ranks}"
        folder.mkdir()
        on_ranks(ranks, work, folder)


def results(root: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / name / RESULTS).read_text())
    return found


@pytest.mark.parametrize("name", SEVERAL)
def test_the_run_is_that_of_one_rank(folders: Path, name: str) -> None:
    kind = name.split()[0]
    one, other = results(folders, f"{kind} on 1"), results(folders, name)
    tolerance = TOLERANCE[kind]
    assert [step["step"] for step in other["steps"]] == list(range(1, STEPS + 1))
    for mine, its in zip(one["steps"], other["steps"], strict=True):
        assert math.isclose(mine["loss"], its["loss"], rel_tol=tolerance)
        assert math.isclose(mine["grad_norm"], its["grad_norm"], rel_tol=10 * tolerance)
    resumed = len(CASES[name]) - 1  # whoever goes on does not evaluate first
    assert len(other["evaluations"]) == len(one["evaluations"]) + resumed
    assert math.isclose(one["evaluations"][-1], other["evaluations"][-1], rel_tol=tolerance)
    assert one["answers"][-1] == other["answers"][-1]


@pytest.mark.parametrize("name", only(FEW, [name for name in CASES if " on " in name]))
def test_ranks_wait_for_each_other_and_one_for_nobody(folders: Path, name: str) -> None:
    for step in results(folders, name)["steps"]:
        assert 0 <= step["communication_seconds"] < step["seconds"]
        assert (step["communication_seconds"] > 0) == (CASES[name][0][0] > 1)


@pytest.mark.parametrize("name", SEVERAL)
def test_what_it_saves_is_what_one_rank_saves(folders: Path, name: str) -> None:
    kind = name.split()[0]
    one, other = (folders / which / f"checkpoint-{STEPS}" for which in (f"{kind} on 1", name))
    own = {path.name for path in other.iterdir()}
    assert own == {path.name for path in one.iterdir()}
    for file in sorted(own):
        if not file.endswith(".safetensors"):
            continue
        mine, its = (as_numbers(folder / file) for folder in (one, other))
        assert mine.keys() == its.keys()
        for key, tensor in mine.items():
            assert its[key].shape == tensor.shape
            if kind not in ("8bit", "compact", "bf16"):
                torch.testing.assert_close(its[key], tensor, rtol=1e-3, atol=1e-4)


def as_numbers(path: Path) -> dict[str, torch.Tensor]:
    """All but random states and scales: those of blocks that lie otherwise."""
    return {
        name: tensor.float()
        for name, tensor in load_file(path).items()
        if not name.startswith("random_state") and not name.endswith(SCALES)
    }
