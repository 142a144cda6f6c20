"""checkpoint-N folders: written whole or not at all, loadable by transformers or peft.

A checkpoint is made under a temporary name and renamed when it is complete. It holds the model
in Hugging Face's layout, the tokenizer, `trainer_state.json` and, unless only the model is saved,
`optimizer.safetensors` with the optimizer's states and the random state. No pickle. Does not know
when to save or what data there is.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedTokenizerBase

from tightfit import ledger
from tightfit.bill.table import Kind, Phase
from tightfit.engine.engine import Engine
from tightfit.errors import ConfigError, TrainingError
from tightfit.facts.job import Job
from tightfit.policies import Tier
from tightfit.training.tensor_file import Entry, write_tensors

_STATE_FILE = "trainer_state.json"
_OPTIMIZER_FILE = "optimizer.safetensors"
_ADAPTER_FILE = "adapter_model.safetensors"
_RANDOM_STATE = "random_state"
_DEVICE_RANDOM_STATE = "device_random_state"
_NAME = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True)
class Progress:
    """How far a run has come.

    Attributes:
        step: optimizer steps done.
        epoch: whole epochs done.
        steps_in_epoch: optimizer steps done of the epoch that has begun.
        global_batch_size, train_samples, seed: what the order of the data depends on.
    """

    step: int
    epoch: int
    steps_in_epoch: int
    global_batch_size: int
    train_samples: int
    seed: int

    def check(self, job: Job, train_samples: int) -> None:
        """See that `job` goes through the data as the run did.

        Raises:
            ConfigError: it does not, so samples would be skipped or trained twice.
        """
        for name, before, now in (
            ("train_batch_size", self.global_batch_size, job.global_batch_size),
            ("seed", self.seed, job.seed),
            ("number of training samples", self.train_samples, train_samples),
        ):
            if before != now:
                raise ConfigError(
                    f"the run cannot be resumed: its {name} was {before} and is {now} now, which "
                    "changes the order of the data; set it back, or start another run"
                )


def save_checkpoint(
    output_dir: Path,
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    progress: Progress,
    *,
    with_optimizer: bool,
) -> Path:
    """Write `checkpoint-<step>` and return its folder.

    Raises:
        TrainingError: it could not be written; earlier checkpoints are as they were.
    """
    folder = output_dir / f"checkpoint-{progress.step}"
    temporary = output_dir / f".{folder.name}.incomplete"
    try:
        _write(temporary, engine, tokenizer, progress, with_optimizer=with_optimizer)
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
        _flush([output_dir])
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        before = latest_checkpoint(output_dir)
        kept = "there is no earlier one" if before is None else f"{before} is the last one"
        raise TrainingError(
            f"{folder} could not be written ({error}); {kept}. Make room or see to the folder"
        ) from error
    return folder


def _write(
    temporary: Path,
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    progress: Progress,
    *,
    with_optimizer: bool,
) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    engine.drain()
    with ledger.phase(Phase.SAVE):
        engine.model.save_pretrained(temporary)  # type: ignore[operator]
        tokenizer.save_pretrained(temporary)
        if with_optimizer:
            write_tensors(
                temporary / _OPTIMIZER_FILE, _optimizer_entries(engine), _optimizer_tensors(engine)
            )
    (temporary / _STATE_FILE).write_text(json.dumps(asdict(progress), indent=2), encoding="utf-8")
    _flush([*temporary.iterdir(), temporary])


def latest_checkpoint(output_dir: Path) -> Path | None:
    """The complete checkpoint with the highest step, if any."""
    return max(_checkpoints(output_dir), key=_step_of, default=None)


def prune_checkpoints(output_dir: Path, keep: int | None) -> None:
    """Delete all but the last `keep` checkpoints; None keeps all."""
    if keep is not None:
        for folder in sorted(_checkpoints(output_dir), key=_step_of)[:-keep]:
            shutil.rmtree(folder)


def read_progress(checkpoint: Path) -> Progress:
    """How far the run had come.

    Raises:
        ConfigError: the checkpoint has no optimizer or no readable state.
    """
    if not (checkpoint / _OPTIMIZER_FILE).exists():
        raise ConfigError(
            f"{checkpoint} cannot be resumed: it has no {_OPTIMIZER_FILE} "
            "(it was saved with save_only_model)"
        )
    try:
        content = json.loads((checkpoint / _STATE_FILE).read_text(encoding="utf-8"))
        return Progress(**content)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{checkpoint / _STATE_FILE} cannot be read: {error}") from None


def is_adapter(checkpoint: Path) -> bool:
    """Whether the checkpoint holds adapters instead of a model."""
    return (checkpoint / _ADAPTER_FILE).exists()


@torch.no_grad()
def restore(checkpoint: Path, engine: Engine) -> None:
    """Put the checkpoint's adapters, optimizer and random state into a fresh engine.

    Raises:
        ConfigError: the checkpoint is of another model.
    """
    ledger.set_phase(Phase.RESUME)
    # What is read lies on the host until it is copied, one tensor at a time.
    on_host = ledger.labelled(Kind.BUFFERS, Tier.HOST)
    try:
        with on_host, safe_open(checkpoint / _OPTIMIZER_FILE, framework="pt") as file:
            _check_same(checkpoint, file, _optimizer_entries(engine))
            if is_adapter(checkpoint):
                _restore_adapter(checkpoint, engine.model)
            for name, parameter in engine.model.named_parameters():
                _restore_states(engine, name, parameter, file)
            _restore_random(file)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{checkpoint} cannot be read: {error}") from None
    engine.optimizer.refresh_masters()


def _check_same(checkpoint: Path, file: Any, entries: list[Entry]) -> None:
    """The file has exactly the states that the engine has; a run may go on on another device.

    Raises:
        ConfigError: it has others.
    """
    shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    expected = {name: list(shape) for name, _, shape in entries}
    for each in (shapes, expected):
        each.pop(_DEVICE_RANDOM_STATE, None)
    if shapes != expected:
        raise ConfigError(
            f"{checkpoint} holds the optimizer of another model or method; resume with the "
            "finetuning_type, precision, optim and lora settings that the run had"
        )


def _restore_states(engine: Engine, name: str, parameter: nn.Parameter, file: Any) -> None:
    for key in _saved_states(engine, parameter):
        engine.optimizer.load_states(parameter, {key: file.get_tensor(f"{name}.{key}")})


def _restore_random(file: Any) -> None:
    torch.set_rng_state(file.get_tensor(_RANDOM_STATE))
    if _DEVICE_RANDOM_STATE in file.keys() and torch.cuda.is_available():  # noqa: SIM118
        torch.cuda.set_rng_state(file.get_tensor(_DEVICE_RANDOM_STATE))


def _restore_adapter(checkpoint: Path, model: nn.Module) -> None:
    from peft import set_peft_model_state_dict  # takes a second to import, only LoRA needs it

    set_peft_model_state_dict(model, load_file(checkpoint / _ADAPTER_FILE))


def _saved_states(
    engine: Engine, parameter: nn.Parameter
) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Types and shapes of what is saved; a master that equals its parameter is not stored twice."""
    return {
        key: (dtype, shape)
        for key, (dtype, shape) in engine.optimizer.state_entries(parameter).items()
        if key != "master" or dtype is not parameter.dtype
    }


def _optimizer_entries(engine: Engine) -> list[Entry]:
    """Name, type and shape of all that `_optimizer_tensors` gives, in its order."""
    states: list[Entry] = [
        (f"{name}.{key}", dtype, tuple(shape))
        for name, parameter in engine.model.named_parameters()
        for key, (dtype, shape) in _saved_states(engine, parameter).items()
    ]
    return states + [(name, t.dtype, tuple(t.shape)) for name, t in _random_states(engine).items()]


def _optimizer_tensors(engine: Engine) -> Iterator[torch.Tensor]:
    """States, one parameter's in memory at a time, then the random states."""
    for _, parameter in engine.model.named_parameters():
        saved = _saved_states(engine, parameter)
        if saved:
            states = engine.optimizer.states_of(parameter)
            yield from (states[key] for key in saved)
    yield from _random_states(engine).values()


def _random_states(engine: Engine) -> dict[str, torch.Tensor]:
    states = {_RANDOM_STATE: torch.get_rng_state()}
    if engine.device.type == "cuda":
        states[_DEVICE_RANDOM_STATE] = torch.cuda.get_rng_state()
    return states


def _checkpoints(output_dir: Path) -> list[Path]:
    if not output_dir.is_dir():
        return []
    return [path for path in output_dir.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]


def _step_of(checkpoint: Path) -> int:
    match = _NAME.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1])


def _flush(paths: list[Path]) -> None:
    """Force files and folders to the disk, so that a name never stands for what is not there."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
