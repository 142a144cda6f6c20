"""What is compared by placement.py: plain training and tightfit's placements; peers come beside.

A contender takes a model and gives a trainer with one method per phase. All train the same model
with the same numbers on the same data. Knows nothing of clocks and processes.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from placement_setting import Setting
from tightfit.bill.table import Kind
from tightfit.engine.apply import fit
from tightfit.engine.lazy import DueUpdates
from tightfit.engine.transfer import Transfer
from tightfit.ledger import Ledger
from tightfit.policies import (
    BatchPolicy,
    OptimizerPolicy,
    PlacementPolicy,
    Policies,
    ShardingPolicy,
    Tier,
)

LEARNING_RATE = 1e-4
MAX_GRAD_NORM = 1.0
BETAS, EPSILON = (0.9, 0.999), 1e-8
ADAMW: dict[str, Any] = {  # torch's
    "lr": LEARNING_RATE,
    "betas": BETAS,
    "eps": EPSILON,
    "weight_decay": 0.0,
    "fused": True,
}


class Trainer(Protocol):
    """One model in training.

    Attributes:
        loss_scale: times what `forward` gives is the mean over this rank's tokens.
    """

    loss_scale: float

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor: ...  # noqa: D102

    def backward(self, loss: torch.Tensor) -> None: ...  # noqa: D102

    def step(self) -> None: ...  # noqa: D102

    def drain(self) -> None:
        """Return when everything that steps have left for later is done."""
        ...

    def waited_seconds(self) -> float:
        """How long forwards have waited so far for updates of the step before."""
        ...

    def counting(self, counter: Ledger) -> None:
        """See to it that all of the trainer's memory is known to `counter`, tier by tier."""
        ...

    def moved_bytes(self, steps: Callable[[], object]) -> int:
        """What goes between device and host of one rank in `steps`, which are done."""
        ...


@dataclass(frozen=True)
class Contender:
    """A way to train.

    Attributes:
        build: of a model, its setting and a folder on disk makes the trainer. It is sent to other
            processes, so it is a function of a module.
        rivals: who does the same job otherwise; their time is to be beaten.
        plain_step: the same placement with the update inside the step.
    """

    name: str
    build: Callable[[PreTrainedModel, Setting, Path], Trainer]
    rivals: tuple[str, ...] = ()
    plain_step: str | None = None


class TorchTrainer:
    """A model whose loss torch differentiates; clipped by torch.

    Args:
        optimizer: torch's fused AdamW of all parameters when None.
    """

    loss_scale = 1.0

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._model = model
        self.parameters = list(model.parameters())
        self._optimizer = optimizer or torch.optim.AdamW(self.parameters, **ADAMW)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """See `Trainer`."""
        loss: torch.Tensor = self._model(input_ids=input_ids, labels=labels).loss
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        """See `Trainer`."""
        loss.backward()

    def step(self) -> None:
        """See `Trainer`."""
        nn.utils.clip_grad_norm_(self.parameters, MAX_GRAD_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def drain(self) -> None:
        """Nothing is left for later."""

    def waited_seconds(self) -> float:
        """The update is over when `step` returns."""
        return 0.0

    def counting(self, counter: Ledger) -> None:
        """Everything is on the device."""
        mark_all(counter, Tier.DEVICE)
        mark_gradients(counter, self.parameters, Tier.DEVICE)  # DDP's are views of what it made

    def moved_bytes(self, steps: Callable[[], object]) -> int:
        """Nothing."""
        steps()
        return 0


def mark_all(counter: Ledger, tier: Tier) -> None:
    """All tensors that live now are on `tier`."""
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):  # isinstance would ask lazy modules too
            counter.mark(thing.data, Kind.PARAMETERS, tier)


def mark_gradients(counter: Ledger, parameters: Iterable[nn.Parameter], tier: Tier) -> None:
    """Gradients are on `tier` from now on, from when backward has finished them."""

    def mark(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        counter.mark(parameter.grad, Kind.GRADIENTS, tier)

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(mark)


def plain(model: PreTrainedModel, setting: Setting, folder: Path) -> Trainer:
    """Every rank has everything."""
    if setting.ranks == 1:
        return TorchTrainer(model)
    return TorchTrainer(DistributedDataParallel(model, gradient_as_bucket_view=True))


class TightfitTrainer:
    """tightfit's engine."""

    _waited: ClassVar[float] = 0.0

    def __init__(
        self, model: PreTrainedModel, setting: Setting, policies: Policies, folder: Path
    ) -> None:
        self._engine = fit(model, policies, offload_folder=folder)
        self._tokens = setting.ranks * setting.sequences * (setting.length - 1)
        self.loss_scale = float(setting.ranks)
        self._in_forward = 0.0
        _time_waits()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """See `Trainer`."""
        before = TightfitTrainer._waited
        loss = self._engine.loss(input_ids, labels, self._tokens)
        self._in_forward += TightfitTrainer._waited - before
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        """See `Trainer`."""
        self._engine.backward(loss)

    def step(self) -> None:
        """See `Trainer`."""
        norm = self._engine.step()
        assert math.isfinite(norm)

    def drain(self) -> None:
        """See `Trainer`."""
        self._engine.drain()

    def waited_seconds(self) -> float:
        """See `Trainer`."""
        return self._in_forward

    def counting(self, counter: Ledger) -> None:
        """The engine tells whoever counts from the beginning."""

    def moved_bytes(self, steps: Callable[[], object]) -> int:
        """What goes through `Transfer.copy`."""
        with _counted_copies() as moved:
            steps()
        return sum(moved)


def _time_waits() -> None:
    """Add up what `DueUpdates.wait` takes, once per process."""
    plain_wait = DueUpdates.wait

    def wait(due: DueUpdates, unit: Any) -> None:
        start = perf_counter()
        plain_wait(due, unit)
        TightfitTrainer._waited += perf_counter() - start

    DueUpdates.wait = wait  # type: ignore[method-assign,assignment]


@contextmanager
def _counted_copies() -> Iterator[list[int]]:
    moved: list[int] = []
    plain_copy = Transfer.copy

    def copy(self: Transfer, destination: torch.Tensor, source: torch.Tensor, **how: Any) -> Any:
        moved.append(source.numel() * source.element_size())
        return plain_copy(self, destination, source, **how)

    Transfer.copy = copy  # type: ignore[method-assign]
    try:
        yield moved
    finally:
        Transfer.copy = plain_copy  # type: ignore[method-assign]


def tightfit(
    model: PreTrainedModel, setting: Setting, folder: Path, *, zero_stage: int = 3, **placement: Any
) -> Trainer:
    """tightfit's engine; several ranks share the model states out as `zero_stage` says."""
    policies = Policies(
        batch=BatchPolicy(setting.sequences),
        placement=PlacementPolicy(**placement),
        optimizer=OptimizerPolicy(
            learning_rate=LEARNING_RATE,
            betas=BETAS,
            epsilon=EPSILON,
            max_grad_norm=MAX_GRAD_NORM,
        ),
        sharding=ShardingPolicy(setting.ranks, 0 if setting.ranks == 1 else zero_stage),
    )
    return TightfitTrainer(model, setting, policies, folder)


HOST_STATES = {"gradients": Tier.HOST, "optimizer_states": Tier.HOST}
DISK_STATES = {"gradients": Tier.HOST, "optimizer_states": Tier.NVME}
FSDP, DEEPSPEED_CPU = "FSDP2, CPUOffloadPolicy", "DeepSpeed ZeRO-3, CPU offload"
DEEPSPEED_NVME = "DeepSpeed ZeRO-3, NVMe offload"
PLAIN = "plain torch, resident"

OURS = (
    Contender(PLAIN, plain),
    Contender("tightfit, resident", tightfit, rivals=(PLAIN,)),
    Contender("tightfit, optimizer on host", partial(tightfit, **HOST_STATES)),
    Contender(
        "tightfit, optimizer on host, lazy",
        partial(tightfit, **HOST_STATES, lazy_step=True),
        plain_step="tightfit, optimizer on host",
    ),
    Contender(
        "tightfit, parameters and optimizer on host",
        partial(tightfit, **HOST_STATES, parameters=Tier.HOST),
        rivals=(FSDP, DEEPSPEED_CPU),
    ),
    Contender(
        "tightfit, parameters and optimizer on host, lazy",
        partial(tightfit, **HOST_STATES, parameters=Tier.HOST, lazy_step=True),
        rivals=(FSDP, DEEPSPEED_CPU),
        plain_step="tightfit, parameters and optimizer on host",
    ),
    Contender(
        "tightfit, parameters on host, optimizer on NVMe",
        partial(tightfit, **DISK_STATES, parameters=Tier.HOST),
        rivals=(DEEPSPEED_NVME,),
    ),
    Contender(
        "tightfit, parameters on host, optimizer on NVMe, lazy",
        partial(tightfit, **DISK_STATES, parameters=Tier.HOST, lazy_step=True),
        rivals=(DEEPSPEED_NVME,),
        plain_step="tightfit, parameters on host, optimizer on NVMe",
    ),
)
