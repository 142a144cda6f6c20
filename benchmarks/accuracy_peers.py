"""Asks other estimators about the grid's jobs; writes benchmarks/results/accuracy_peers.json.

    python benchmarks/accuracy_peers.py
    python benchmarks/accuracy.py --page_only

Run it with a Python that has tightfit and, for its column, DeepSpeed, which is no dependency of the
project (`pip install deepspeed==0.19.8` needs no compiler with DS_BUILD_OPS=0); an estimator that
is not there is left out. Takes half an hour, almost all of it in torch's trackers.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from importlib.metadata import version
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from accuracy_grid import EVALUATED_SEQUENCES, Row, grid
from accuracy_results import PEERS
from accuracy_runs import STEPS, in_processes
from tightfit.bill.table import Kind
from tightfit.dry_run.fakes import fake_tensors
from tightfit.dry_run.ranks import fake_ranks
from tightfit.engine.adapter import apply_adapter, import_library
from tightfit.engine.apply import fit
from tightfit.engine.checkpointing import apply_checkpointing
from tightfit.engine.layers import decoder_layers
from tightfit.engine.precision import DTYPES
from tightfit.engine.quantisation import apply_quantisation

DEEPSPEED = "DeepSpeed `estimate_zero*`"
MODEL_STATES = (
    Kind.PARAMETERS,
    Kind.GRADIENTS,
    Kind.MASTER_WEIGHTS,
    Kind.OPTIMIZER_STATES,
)


@dataclass(frozen=True)
class Estimate:
    """What an estimator says of a row.

    Attributes:
        bytes: on the device of one rank.
        described: whether the row is what the estimator says it is for.
        kinds: what it counts; empty: everything.
    """

    bytes: int
    described: bool
    seconds: float = 0.0
    kinds: tuple[Kind, ...] = ()


Estimator = Callable[[Row], Estimate | None]
Answer = dict[str, Any] | None  # an estimate as JSON, or how it failed; None: no number for it


def main() -> int:
    """Ask all that are there, and keep the answers of each as soon as it has given them."""
    rows = grid()
    packages = [name for name in ("accelerate", "deepspeed", "torch") if _is_there(name)]
    estimates: dict[str, list[Answer]] = {}
    results = {
        "date": str(date.today()),
        "versions": {name: version(name) for name in packages},
        "rows": [asdict(row) for row in rows],
        "estimates": estimates,
    }
    for name, estimator in estimators().items():
        with ThreadPoolExecutor(2) as two:
            answers = list(two.map(partial(_ask, name, estimator), rows))
        estimates[name] = answers
        if name == DEEPSPEED:
            states = [answer and {**answer, "kinds": MODEL_STATES} for answer in answers]
            estimates[f"{name}, against model states"] = states
        PEERS.write_text(json.dumps(results) + "\n", encoding="utf-8")
    return 0


def estimators() -> dict[str, Estimator]:
    """All whose packages are installed, by name."""
    found: dict[str, Estimator] = {}
    if _is_there("accelerate"):
        found["accelerate `estimate-memory`"] = accelerate_estimate
    if _is_there("deepspeed"):
        found[DEEPSPEED] = deepspeed_estimate
    found["torch's trackers, tightfit's engine"] = tracked_engine
    found["torch's trackers, plain torch"] = tracked_plain_torch
    return found


def _is_there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _ask(name: str, estimator: Estimator, row: Row) -> Answer:
    answer: Answer
    try:
        (estimate,) = in_processes(1, partial(_timed, estimator, row))
        answer = None if estimate is None else asdict(estimate)
    except Exception as error:  # noqa: BLE001  # an estimator that fails is part of the result
        answer = {"failed": f"{type(error).__name__}: {error}"}
    print(f"{name}: {row}: {answer}", file=sys.stderr, flush=True)
    return answer


def _timed(estimator: Estimator, row: Row, rank: int) -> Estimate | None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    start = perf_counter()
    estimate = estimator(row)
    if estimate is None:
        return None
    return Estimate(**{**asdict(estimate), "seconds": round(perf_counter() - start, 3)})


def accelerate_estimate(row: Row) -> Estimate:
    """What `accelerate estimate-memory` prints, without the Hub: it makes `AutoModel` of the config
    and takes the largest of its four figures."""
    from accelerate import init_empty_weights
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    with init_empty_weights():
        model = AutoModel.from_config(row.config, dtype=torch.float32)
    size, _ = calculate_maximum_sizes(model)
    dtype = {"fp32": "float32", "bf16": "float16"}[row.precision]
    shares_nothing = row.ranks[1] == 0
    return Estimate(
        max(estimate_training_usage(size, dtype).values()),
        row.tuning == "full" and shares_nothing and row.optimizer == "device",
    )


def deepspeed_estimate(row: Row) -> Estimate | None:
    """DeepSpeed's closed forms for one machine with a card for each rank."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    ranks, stage = row.ranks
    if stage == 0:
        return None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(row.config)
    total = sum(parameter.numel() for parameter in model.parameters())
    offload = row.optimizer == "host"
    if stage < 3:
        _, device_bytes = estimate_zero2_model_states_mem_needs(total, ranks, cpu_offload=offload)
    else:
        largest = max(
            sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules()
        )
        _, device_bytes, _ = estimate_zero3_model_states_mem_needs(
            total, largest, ranks, cpu_offload=offload, cpu_offload_params=False
        )
    described = row.tuning == "full" and row.precision == "bf16" and stage > 1
    return Estimate(device_bytes, described)


def tracked_plain_torch(row: Row) -> Estimate | None:
    """A loop in plain torch under torch's tracker; None where plain torch does something else."""
    ranks, stage = row.ranks
    same_program = (
        row.loss == "full"
        and row.optimizer == "device"
        and row.precision == "fp32"
        and row.tuning != "qlora"
        and (ranks == 1 or stage > 1 or (stage == 1 and row.accumulation == 1))
    )
    if not same_program:
        return None
    with _fake_model(row) as model:
        trained = apply_adapter(model, row.policies.adapter)
        apply_checkpointing(model, row.policies.checkpointing)  # transformers' own
        if ranks > 1:
            _fully_shard(trained, decoder_layers(model), ranks, reshard=stage == 3)
        optimizer = torch.optim.AdamW(
            [p for p in trained.parameters() if p.requires_grad], fused=True
        )
        tracker = _tracker(trained.train(), optimizer)
        with tracker:
            for _ in range(STEPS):
                for _ in range(row.accumulation):
                    _plain_loss(trained, row).backward()
                    tracker.reset_mod_stats()
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                _plain_loss(trained.eval(), row, EVALUATED_SEQUENCES)
        return Estimate(_peak(tracker), True)


def tracked_engine(row: Row) -> Estimate | None:
    """tightfit's engine under torch's tracker: only who counts differs from the measurement."""
    if row.optimizer != "device":
        return None
    with _fake_model(row) as model:
        apply_quantisation(model, row.policies.quantisation)
        engine = fit(model, row.policies)
        tracker = _tracker(engine.model, engine.optimizer)
        with tracker:  # once: the optimizer's states are there from the beginning
            for _ in range(row.accumulation):
                batch = _batch(row, row.micro_batch)
                engine.backward(engine.loss(*batch, row.workload.tokens_per_step))
                tracker.reset_mod_stats()
            engine.step()
            engine.evaluation_loss(*_batch(row, EVALUATED_SEQUENCES))
        return Estimate(_peak(tracker), True)


@contextmanager
def _fake_model(row: Row) -> Iterator[PreTrainedModel]:
    if row.policies.adapter is not None:
        import_library()
    with ExitStack() as stack:
        stack.enter_context(fake_ranks(row.policies.sharding.ranks))
        stack.enter_context(fake_tensors())  # with it transformers runs on fake tensors
        dtype = DTYPES[row.policies.precision.parameters]
        model = AutoModelForCausalLM.from_config(row.config, dtype=dtype)
        model.set_attn_implementation(row.attention)
        yield model


def _fully_shard(root: nn.Module, layers: nn.ModuleList, ranks: int, *, reshard: bool) -> None:
    with unset_fake_temporarily():
        mesh = init_device_mesh("cpu", (ranks,))
    for module in (*layers, root):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard)


def _tracker(model: nn.Module, optimizer: torch.optim.Optimizer) -> MemTracker:
    if isinstance(model, FSDPModule):
        return FSDPMemTracker(model, optimizer)  # type: ignore[arg-type]
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    return tracker


def _plain_loss(model: nn.Module, row: Row, sequences: int | None = None) -> torch.Tensor:
    input_ids, labels = _batch(row, sequences or row.micro_batch)
    loss: torch.Tensor = model(input_ids=input_ids, labels=labels, use_cache=False).loss
    return loss


def _batch(row: Row, sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (sequences, row.sequence)
    return torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)


def _peak(tracker: MemTracker) -> int:
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


if __name__ == "__main__":
    sys.exit(main())
