"""A program: the same training on several ranks, on one, and on fake ones, for other tests.

    python sharded_runs.py FOLDER CASES [STEPS [DEVICE]]

CASES is JSON: for each number of ranks a list. Starts one process per rank, on gloo or where DEVICE
is cuda on NCCL, which run all cases of as many ranks one after the other, and meanwhile runs the
same alone and on fake tensors. For each run FOLDER gets `NAME.json` (losses, norms, device bytes
after each step and the ledger's table of it) and `NAME.safetensors` (the parameters afterwards,
whole). The processes are forked after the imports, which take longer than everything else.

A case is a stage followed by words, such as "3 accumulate lora". Beside techniques these are
families of models, `tp2` (ranks that share matrices), `pp2` (stages of a pipeline), `chunks2`
(interleaved ones), `cut2-1` (how many layers each has), `hsdp2` (replicas), `untied`, `deep` (more
layers), `empty` (the model has no values until it is shared out), `short` (steps of fewer
micro-batches than planned) and what happens in one of the steps: `peek` (an evaluation between
backward and step), `discard` (a backward that is given up), `fail` (one that breaks off in the
middle), `inf` (one rank's gradients are not finite) and `off` (the ledger is off). `read` looks at
parameters that are away, at the end.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from tightfit import ledger
from tightfit.bill.table import Kind, Phase
from tightfit.dry_run.config import load_config
from tightfit.dry_run.fakes import fake_tensors
from tightfit.dry_run.ranks import fake_ranks
from tightfit.engine.adapter import import_library
from tightfit.engine.apply import fit
from tightfit.engine.engine import Engine
from tightfit.engine.layers import decoder_layers
from tightfit.engine.precision import DTYPES
from tightfit.engine.quantisation import apply_quantisation
from tightfit.engine.quantisation import import_library as import_quantisation
from tightfit.engine.regions import Region
from tightfit.engine.unloaded import Fill
from tightfit.ledger import Ledger, local_part, table_of_sections
from tightfit.policies import (
    AdapterPolicy,
    AttentionKernel,
    AttentionPolicy,
    BatchPolicy,
    CheckpointingPolicy,
    LossKind,
    LossPolicy,
    LossScalePolicy,
    OptimizerPolicy,
    PipelineSchedule,
    PlacementPolicy,
    Policies,
    PrecisionPolicy,
    QuantisationPolicy,
    ShardingPolicy,
    Tier,
)

PROGRAM = Path(__file__)
CPU = torch.device("cpu")
VOCABULARY = 61  # not a multiple of the ranks: shards are padded
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LENGTH, MICRO_BATCH = 11, 2
STEPS, FAKE_STEPS = 5, 2
UNUSUAL = 1  # the in this step, which fakes leave out, `discard`, `inf` and the like happen
TRAINED_TOKENS = 40  # any number does, as long as all ranks divide by the same
OPTIMIZER = OptimizerPolicy(
    learning_rate=3e-3,
    weight_decay=0.1,
    max_grad_norm=0.7,
    loss_scale=LossScalePolicy(initial_power=10),
)
TECHNIQUES: dict[str, dict[str, Any]] = {
    "accumulate": {"batch": BatchPolicy(MICRO_BATCH, 2)},
    "four": {"batch": BatchPolicy(MICRO_BATCH, 4)},
    "five": {"batch": BatchPolicy(MICRO_BATCH, 5)},
    "checkpoint": {"checkpointing": CheckpointingPolicy(True)},
    "chunk": {"loss": LossPolicy(LossKind.CHUNKED, 5)},
    "slice": {"loss": LossPolicy(LossKind.SLICED, slice_rows=7)},
    "smooth": {"loss": LossPolicy(LossKind.CHUNKED, 5, label_smoothing=0.1, z_loss=1e-2)},
    "smooth-slice": {
        "loss": LossPolicy(LossKind.SLICED, slice_rows=7, label_smoothing=0.1, z_loss=1e-2)
    },
    "host": {"placement": PlacementPolicy(Tier.HOST, Tier.HOST)},
    "late": {"placement": PlacementPolicy(Tier.DEVICE, Tier.HOST, lazy_step=True)},
    "away": {"placement": PlacementPolicy(*[Tier.HOST] * 4, lazy_step=True)},
    "kept": {"placement": PlacementPolicy(activations=Tier.HOST)},
    "half": {"placement": PlacementPolicy(*[Tier.HOST] * 3, parameter_fraction=0.5)},
    "disk": {"placement": PlacementPolicy(*[Tier.NVME] * 2, Tier.HOST, lazy_step=True)},
    "far": {"placement": PlacementPolicy(*[Tier.NVME] * 3, lazy_step=True)},
    "lora": {"adapter": AdapterPolicy(rank=2)},
    "narrow": {"adapter": AdapterPolicy(rank=2, targets=("q_proj", "v_proj", "o_proj"))},
    "dropping": {"adapter": AdapterPolicy(rank=2, dropout=0.3)},
    "whole-lora": {"adapter": AdapterPolicy(rank=2, modules_to_save=("tokens", "head", "norm"))},
    "dora-lora": {"adapter": AdapterPolicy(rank=2, dora=True)},
    "qlora": {"adapter": AdapterPolicy(rank=2), "quantisation": QuantisationPolicy()},
    "bf16": {"precision": PrecisionPolicy("bf16")},
    "fp16": {"precision": PrecisionPolicy("fp16")},
    "eager": {"attention": AttentionPolicy(AttentionKernel.EAGER)},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "biased": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 8},
    "moe": {"model_type": "qwen3_moe", "head_dim": 8, **EXPERTS},
    "phi3": {"model_type": "phi3"},
    "droppy": {"model_type": "phi3", "resid_pdrop": 0.2},  # whole values that are dropped
    "gemma2": {"model_type": "gemma2", "head_dim": 8},  # scaled embedding, capped logits
    "wide": {"hidden_size": 256, "intermediate_size": 256},  # whole blocks of 4-bit weights
    "smollm2": {
        "hidden_size": 36, "intermediate_size": 96, "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
}  # fmt: skip
# What is shared, by the number of ranks: some cases for every day, more for the long proof.
SHARDING = {
    2: [
        "0",
        "0 chunk untied inf",
        "1",
        "1 accumulate chunk untied",
        "1 accumulate checkpoint host short inf",
        "2 accumulate untied fail",
        "2 checkpoint lora peek",
        "2 chunk host bf16 off",
        "3",
        "1 qlora accumulate bf16",
        "3 empty lora bf16",
        "0 late accumulate untied",
        "2 disk accumulate inf",
        "3 away checkpoint slice discard",
        "3 half accumulate fail",
        "3 far accumulate untied read",
        "3 fp16 chunk accumulate",
        "3 whole-lora empty chunk accumulate",
        "0 dora-lora empty accumulate checkpoint",
    ],
    4: [
        "3 accumulate untied",
        "3 hsdp2 accumulate lora",
    ],
}
MORE_SHARDING = {
    2: [
        "0 host checkpoint accumulate",
        "3 checkpoint host untied fail",
        "3 chunk lora discard peek",
        "3 far qlora",
        "0 fail",
        "0 accumulate lora short discard",
        "1 peek",
        "1 accumulate fail",
        "1 accumulate discard",
        "3 accumulate inf",
        "3 qlora checkpoint",
        "3 accumulate bf16 host",
        "3 lora bf16 checkpoint off",
        "0 away accumulate slice",
        "0 empty lora",
        "1 empty accumulate untied",
        "2 empty away checkpoint",
        "3 empty far",
        "1 away accumulate checkpoint read",
        "1 late accumulate",
        "2 away untied peek",
        "2 slice accumulate",
        "3 disk chunk bf16",
        "2 far checkpoint inf",
        "3 away qlora read",
        "3 late lora off",
        "0 whole-lora slice host accumulate",
        "1 whole-lora untied checkpoint",
        "0 dora-lora bf16 host",
        "2 whole-lora away bf16 slice",
    ],
    4: [
        "1 accumulate lora",
        "2 hsdp2 fail",
        "0 accumulate",
        "2 chunk checkpoint",
        "3 host lora inf",
        "3 empty accumulate",
        "3 away accumulate untied read",
        "1 hsdp2 accumulate untied",
        "3 hsdp2 host bf16",
    ],
}
TENSOR = {
    2: [
        "0 tp2 accumulate checkpoint chunk untied",
        "0 tp2 away slice accumulate inf",
        "0 tp2 qwen3 chunk fail",
        "0 tp2 empty moe checkpoint",
        "0 tp2 dropping chunk",
        "0 tp2 bf16 chunk untied",
        "0 tp2 whole-lora chunk",
    ],
    3: [
        "0 tp3 smollm2 lora chunk",
    ],
    4: [
        "0 tp4 empty wide qlora",
        "0 tp2 accumulate slice",
        "2 tp2 checkpoint inf",
        "3 tp2 empty moe accumulate untied",
        "3 tp2 empty lora away",
    ],
}
MORE_TENSOR = {
    2: [
        "0 tp2",
        "0 tp2 biased",
        "0 tp2 empty qwen2",
        "0 tp2 empty droppy",
        "0 tp2 whole-lora untied slice",
    ],
    3: [
        "0 tp3 smollm2 slice host",
    ],
    4: [
        "0 tp4 eager accumulate",
        "1 tp2 accumulate slice",
        "0 tp2 accumulate smooth late",
        "3 tp2 qwen2 host chunk discard",
    ],
}
# Every model in every way of sharing it, for the long proof.
EVERY_MODEL = ["", "qwen2", "qwen3 chunk", "moe", "phi3 checkpoint", "gemma2 eager", "moe narrow"]
TWO_BY_TWO = ["0 tp2", "1 tp2 accumulate", "2 tp2", "3 tp2", "3 hsdp2"]
GRID = {
    2: [f"0 tp2 {model}" for model in [*EVERY_MODEL, "droppy", "wide qlora", "lora far"]],
    3: [f"0 tp3 smollm2 {words}" for words in ("", "chunk", "smooth-slice accumulate", "lora")],
    4: [
        *(f"{sharing} {model}" for sharing in TWO_BY_TWO for model in EVERY_MODEL),
        *(f"0 tp4 {words}" for words in ("", "qwen2 slice", "qwen3 chunk", "lora", "wide qlora")),
        "3 tp2 wide qlora chunk accumulate",
        "3 tp2 far checkpoint untied",
    ],
    8: ["3 tp2 hsdp2", "1 tp2 hsdp2 accumulate chunk", "3 tp4 qwen3 chunk"],
}
PIPELINE = {
    2: [
        "0 pp2 four gpipe chunk",
        "0 pp2 away four untied",
        "0 pp2 lora four empty",
        "0 pp2 cut2-1 four empty",
        "0 pp2 four fp16",
        "0 pp2 whole-lora four untied bf16",
        "0 pp2 chunks3 deep five untied empty chunk peek",
    ],
    3: [
        "0 pp3 empty four untied chunk late",
    ],
    4: [
        "0 pp2 four untied checkpoint peek",
        "3 pp2 chunks2 deep four checkpoint host peek",
        "0 pp2 tp2 four checkpoint",
    ],
}
MORE_PIPELINE = {
    2: [
        "0 pp2 four untied checkpoint peek",
        "0 pp2 host four slice short",
        "0 pp2 moe four empty",
        "0 pp2 wide qlora four empty",
        "0 pp2 whole-lora four untied empty host",
        "0 pp2 dora-lora four empty late",
    ],
    3: [
        "0 pp3 chunks2 deep five gemma2 eager",
        "0 pp3 cut1-5-1 deep four untied lora",
    ],
    4: [
        "1 pp2 four empty",
        "2 pp2 four untied peek discard",
        "3 pp2 chunks2 cut3-1-1-2 deep four chunk",
    ],
}
# On cards: kernels whose operations a fake tensor shows, so that bytes can be held against it.
RANKS_OF_CARDS = 2
CARDS = {
    RANKS_OF_CARDS: [
        "0 eager accumulate",
        "1 eager accumulate",
        "2 eager checkpoint",
        "3 eager accumulate untied",
        "3 eager bf16",
        "0 tp2 eager accumulate chunk",
        "0 pp2 eager four untied",
    ]
}
# What is in none of the others, for the long proof.
STAGES = {
    2: [
        "0 pp2 accumulate",
        "0 pp2 gemma2 eager four",
        "0 pp2 chunks2 deep four peek",
        "0 pp2 chunks2 deep five checkpoint away short",
        "0 pp2 chunks2 deep moe lora accumulate empty",
        "0 pp2 chunks2 deep wide qlora five",
    ],
    3: ["0 pp3 four", "0 pp3 chunks2 deep five far untied"],
    4: [
        "0 pp2 accumulate",
        "3 pp2 four empty checkpoint",
        "3 pp2 four gpipe host",
        "3 pp2 wide qlora four",
        "0 pp2 tp2 accumulate chunk untied",
        "0 pp2 tp2 wide qlora four empty",
        "0 pp2 chunks2 deep four",
        "1 pp2 chunks2 deep four",
        "2 pp2 chunks2 deep five untied empty",
        "3 pp2 chunks2 deep five lora empty",
        "0 pp2 chunks2 tp2 deep four untied",
    ],
    8: ["3 pp2 hsdp2 four untied", "3 pp2 chunks2 tp2 deep four checkpoint"],
}
# Every mode there is, by its name: how many ranks, and a case. SmolLM2's 9 heads go to 3 ranks.
MODES = {
    "DP (ZeRO-0)": (2, "0"),
    "ZeRO-1": (2, "1"),
    "ZeRO-2": (2, "2"),
    "ZeRO-3": (2, "3"),
    "HSDP": (4, "3 hsdp2"),
    "TP": (2, "0 tp2"),
    "PP": (2, "0 pp2 four"),
    "DP + TP": (4, "0 tp2"),
    "DP + PP": (4, "0 pp2 four"),
    "TP + PP": (4, "0 tp2 pp2 four"),
    "ZeRO-3 + TP": (4, "3 tp2"),
    "ZeRO-3 + PP": (4, "3 pp2 four"),
    "ZeRO-3 + TP + PP": (8, "3 tp2 pp2 four"),
    "PP, interleaved": (2, "0 pp2 chunks2 deep four"),
    "ZeRO-3 + PP, interleaved": (4, "3 pp2 chunks2 deep four"),
}
MODELS = {
    "Llama": "untied",
    "Qwen2, tied": "qwen2",
    "Qwen3-MoE": "moe untied",
    "SmolLM2": "smollm2",
}
WAYS = ["checkpoint", "accumulate", "lora", "wide qlora", "host", "away", "bf16"]


def of_mode(mode: str, words: str) -> tuple[int, str]:
    """How many ranks a model, or a way, takes in a mode, and the case."""
    ranks, case = MODES[mode]
    if words == "smollm2" and "tp2" in case:
        ranks, case = ranks * 3 // 2, case.replace("tp2", "tp3")
    return ranks, f"{case} {words}"


def of_every_model(mode: str) -> dict[int, list[str]]:
    """Cases of a mode with every model, by the number of ranks."""
    cases: dict[int, list[str]] = {}
    for model in MODELS.values():
        ranks, case = of_mode(mode, model)
        cases.setdefault(ranks, []).append(case)
    return cases


def main(folder: Path, sets: Mapping[int, Sequence[str]], kind: str = "cpu") -> None:
    """Run cases, by the number of ranks, and write what they give to `folder`.

    Args:
        kind: of devices: cpu, or cuda with a card for each rank.
    """
    torch.set_num_threads(1)
    import_library()
    import_quantisation()
    processes = [
        process for ranks, cases in sets.items() for process in started(ranks, cases, folder, kind)
    ]
    for ranks, cases in sets.items():
        for case in cases:
            for rank, who in fake_names(case, ranks).items():
                with fake_ranks(ranks, rank), fake_tensors():
                    write(folder / file_name(case, ranks, who), *run(case, ranks, None, folder))
            alone = run(case, ranks, None, folder, torch.device(kind))
            write(folder / file_name(case, ranks, "alone"), *alone)
    finish(processes)


def fake_names(case: str, ranks: int) -> dict[int, str]:
    """The ranks that are faked: the first of each stage of a pipeline."""
    stages = policies_of(case, ranks).sharding.pipeline_parallel
    first = {stage * ranks // stages: f"fake {stage}" for stage in range(stages)}
    return first if stages > 1 else {0: "fake"}


def file_name(case: str, ranks: int, who: str) -> str:
    return f"{case} of {ranks} {who}"


def later_steps() -> list[str]:
    """Names of those after the unusual one, which are all alike."""
    return [str(step) for step in range(UNUSUAL + 1, STEPS)]


def started(ranks: int, cases: Sequence[str], folder: Path, kind: str) -> list[BaseProcess]:
    context = multiprocessing.get_context("fork" if kind == "cpu" else "spawn")  # CUDA's wish
    processes: list[BaseProcess] = [
        context.Process(target=one_rank, args=(rank, ranks, cases, folder, kind, STEPS))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    return processes


def finish(processes: list[BaseProcess]) -> None:
    """Wait for all; when one fails the others, which would wait for it, are ended."""
    while processes:
        wait([process.sentinel for process in processes])
        if any(process.exitcode for process in processes):
            for process in processes:
                process.terminate()
            sys.exit("a rank failed; its message stands above")
        processes = [process for process in processes if process.exitcode is None]


def one_rank(
    rank: int, ranks: int, cases: Sequence[str], folder: Path, kind: str, steps: int
) -> None:
    """All cases of so many ranks on one of them."""
    global STEPS
    STEPS = steps  # here and below: of what was not forked
    import_library()
    device, backend, card = torch.device(kind), "gloo", None
    if kind == "cuda":
        device = card = torch.device(kind, rank)
        backend = "nccl"
        torch.cuda.set_device(card)
    store = dist.FileStore(str(folder / f"store of {ranks}"), ranks)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=ranks,
        timeout=timedelta(minutes=3),
        device_id=card,
    )
    for case in cases:
        write(folder / file_name(case, ranks, str(rank)), *run(case, ranks, rank, folder, device))
    dist.destroy_process_group()


def write(
    path: Path,
    counting: Ledger,
    numbers: dict[str, list[float]],
    parameters: dict[str, torch.Tensor],
) -> None:
    sections = counting.sections()
    tables = {
        chapter: table_of_sections({k: v for k, v in sections.items() if k[1] == chapter}).to_json()
        for chapter in {name for _, name in sections}
    }
    path.with_name(f"{path.name}.json").write_text(json.dumps({**numbers, "tables": tables}))
    save_file(parameters, path.with_name(f"{path.name}.safetensors"))


def run(
    case: str, ranks: int, rank: int | None, folder: Path, device: torch.device = CPU
) -> tuple[Ledger, dict[str, list[float]], dict[str, torch.Tensor]]:
    """A few steps; `rank` None is a rank of a fake group, if there is one, else one alone.

    Who is alone gets the whole global batch at once. The ledger's sections are named by the step.
    """
    words = case.split()
    fake = dist.is_initialized() and rank is None
    policies = policies_of(case, ranks)
    micro_batches = 1 if "short" in words else policies.batch.accumulation_steps
    data_ranks = policies.sharding.data_parallel
    if not dist.is_initialized():
        policies = replace(policies, sharding=ShardingPolicy(), batch=BatchPolicy())
        policies = replace(policies, placement=PlacementPolicy())
    if fake:  # no ledger sees another thread
        policies = replace(policies, placement=replace(policies.placement, lazy_step=False))
    model = make_model(policies, words)
    if policies.adapter is None:  # adapters are drawn while the model is fitted
        torch.manual_seed(rank or 0)
    counting, losses, norms, rest = Ledger(device), [], [], []
    with counting:
        on_host = policies.placement.parameters is not Tier.DEVICE
        values = None
        if "empty" in words:
            model, values = without_values(model)
        else:
            if device != CPU:
                model = model.to(device)
            counting.adopt(model, Tier.HOST if on_host else None)
            apply_quantisation(model, policies.quantisation)
        disk = folder / "disk"
        engine = fit(model, policies, device=device, offload_folder=disk, values=values)
    for step in range(FAKE_STEPS if fake else STEPS):
        counting.chapter = str(step)
        unusual = words if step == UNUSUAL and not fake else []
        with nullcontext() if "off" in unusual else counting:
            counting.set_section(Phase.FORWARD)  # the step before is over
            data_rank = None if rank is None else engine.data_rank
            batches = list(pieces(step, data_ranks, data_rank, micro_batches, device))
            loss, norm = one_step(engine, unusual, batches)
            del batches
        losses.append(loss)
        norms.append(norm)
        rest.append(counting.total_bytes(Tier.DEVICE))
    if "read" in words and dist.is_initialized() and not fake:
        read_what_is_away(engine)
    numbers = {"losses": losses, "norms": norms, "rest": rest}
    return counting, numbers, {} if fake else whole_parameters(engine)


def policies_of(case: str, ranks: int) -> Policies:
    stage, *words = case.split()
    techniques = [TECHNIQUES[word] for word in words if word in TECHNIQUES]
    chosen = {key: value for technique in techniques for key, value in technique.items()}
    chosen.setdefault("batch", BatchPolicy(MICRO_BATCH))
    tensor, replicas, pipeline, chunks = (
        next((int(word.removeprefix(name)) for word in words if word.startswith(name)), 1)
        for name in ("tp", "hsdp", "pp", "chunks")
    )
    order = "interleaved" if chunks > 1 else "gpipe" if "gpipe" in words else "1f1b"
    schedule = PipelineSchedule(order)
    cut = next((word.removeprefix("cut") for word in words if word.startswith("cut")), None)
    layers = tuple(map(int, cut.split("-"))) if cut else ()
    degrees = (tensor, pipeline, replicas, schedule, chunks, layers)
    sharding = ShardingPolicy(ranks, int(stage), *degrees)
    return Policies(**chosen, optimizer=OPTIMIZER, sharding=sharding)


def make_model(policies: Policies, words: list[str]) -> PreTrainedModel:
    torch.manual_seed(0)
    dtype = DTYPES[policies.precision.parameters]
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config_of(words), dtype=dtype)
    return model


def config_of(words: list[str]) -> PretrainedConfig:
    changes = next((FAMILIES[word] for word in words if word in FAMILIES), {})
    fields = {"model_type": "llama", **SIZES, "tie_word_embeddings": "untied" not in words}
    if "deep" in words:
        fields["num_hidden_layers"] = 7
    return load_config({**fields, **changes})


def without_values(model: PreTrainedModel) -> tuple[PreTrainedModel, Fill]:
    """The model on the meta device, and what fills it."""
    values = dict(model.named_parameters(remove_duplicate=False))

    def fill(name: str, tensor: torch.Tensor, region: Region) -> None:
        tensor.copy_(values[name].detach()[region])

    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(model.config, dtype=model.dtype)
    return empty, fill


def pieces(
    step: int, ranks: int, rank: int | None, micro_batches: int, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Input ids and labels `[micro-batch, seq]` of a step: one rank's, or the whole batch."""
    size = MICRO_BATCH if dist.is_initialized() else MICRO_BATCH * ranks * micro_batches
    for piece in range(micro_batches if dist.is_initialized() else 1):
        with ledger.labelled(Kind.BUFFERS):
            ids = torch.zeros((size, LENGTH), dtype=torch.long, device=device)
            labels = torch.zeros((size, LENGTH), dtype=torch.long, device=device)
        everything = whole_batch(step, MICRO_BATCH * ranks * micro_batches)
        if dist.is_initialized() and rank is None:
            yield ids, labels
            continue
        first = (piece * ranks + (rank or 0)) * MICRO_BATCH
        ids.copy_(everything[0][first : first + size])
        labels.copy_(everything[1][first : first + size])
        yield ids, labels


def whole_batch(step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input ids and labels `[size, seq]`, some of them -100, of all ranks' micro-batches."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, VOCABULARY, (size, LENGTH), generator=generator)
    ignored = torch.rand(ids.shape, generator=generator) < 0.3
    return ids, ids.masked_fill(ignored, -100)


def one_step(
    engine: Engine, unusual: list[str], batches: list[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[float, float]:
    """Loss and norm."""
    total = 0.0
    if "discard" in unusual:
        if engine.is_stage:
            engine.forward_backward(batches, TRAINED_TOKENS)
        else:
            engine.backward(engine.loss(*batches[0], TRAINED_TOKENS))
        engine.discard_gradients()
    if "fail" in unusual:
        fail_midway(engine, *batches[0])
        engine.discard_gradients()
    if engine.is_stage:
        total = engine.forward_backward(batches, TRAINED_TOKENS)
    for ids, labels in () if engine.is_stage else batches:
        loss = engine.loss(ids, labels, TRAINED_TOKENS)
        last_rank = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
        if "inf" in unusual and last_rank:
            loss = loss * torch.inf
        total += loss.item()
        engine.backward(loss)
        del loss
    if "peek" in unusual:
        engine.evaluation_loss(*batches[0])
    return total, engine.step()


def fail_midway(engine: Engine, ids: torch.Tensor, labels: torch.Tensor) -> None:
    """A backward that ends with an error, on all ranks at the middle layer."""

    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("as planned")

    def leave(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(fail)

    handle = decoder_layers(engine.model)[1].register_forward_hook(leave)
    loss = engine.loss(ids, labels, TRAINED_TOKENS)
    with pytest.raises(ValueError, match="as planned"):
        engine.backward(loss)
    handle.remove()


def read_what_is_away(engine: Engine) -> None:
    """Parameters have no values between steps: they read as NaN, or as 0 where there is none."""
    engine.drain()
    for name, parameter in engine.model.named_parameters():
        whole = parameter.detach()
        local = local_part(parameter).detach()
        assert str(parameter), name
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        wanted = float("nan") if parameter.is_floating_point() else 0.0
        for values in (whole, local, parameter.detach().sum().reshape(1)):
            assert torch.equal(values.isnan(), torch.full_like(values, wanted).isnan()), name
    state = engine.model.state_dict()
    assert all(bool(local_part(value).isfinite().all()) for value in state.values())


def whole_parameters(engine: Engine) -> dict[str, torch.Tensor]:
    """Copies of the parameters, shards put together again; of 4-bit ones a rank's part."""
    parameters = {}
    state = engine.model.state_dict()
    for name, _ in engine.model.named_parameters():
        value = state[name].detach()
        parameters[name] = (
            value.full_tensor() if isinstance(value, DTensor) else value.clone()
        ).contiguous()
    return parameters


if __name__ == "__main__":
    if len(sys.argv) > 3:
        STEPS = int(sys.argv[3])
    by_ranks = {int(ranks): cases for ranks, cases in json.loads(sys.argv[2]).items()}
    main(Path(sys.argv[1]), by_ranks, *sys.argv[4:])
