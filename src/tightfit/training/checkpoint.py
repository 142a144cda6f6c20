"""checkpoint-N folders: written whole or not at all, loadable by transformers or peft.

A checkpoint is made under a temporary name and renamed when it is complete. It holds the model
in Hugging Face's layout, the tokenizer, `trainer_state.json` and, unless only the model is saved,
`optimizer.safetensors` with the optimizer's states and the random state. No pickle.
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
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedTokenizerBase

from tightfit import ledger
from tightfit.bill.table import Phase
from tightfit.engine.engine import Engine
from tightfit.errors import ConfigError

_STATE_FILE = "trainer_state.json"
_OPTIMIZER_FILE = "optimizer.safetensors"
_ADAPTER_FILE = "adapter_model.safetensors"
_RANDOM_STATE = "random_state"
_NAME = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True)
class Progress:
    """How far a run has come.

    Attributes:
        step: optimizer steps done.
        epoch: whole epochs done.
        steps_in_epoch: optimizer steps done of the epoch that has begun.
        scheduler: the scheduler's state.
    """

    step: int
    epoch: int
    steps_in_epoch: int
    scheduler: dict[str, Any]


def save_checkpoint(
    output_dir: Path,
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    progress: Progress,
    *,
    with_optimizer: bool,
) -> Path:
    """Write `checkpoint-<step>` and return its folder."""
    folder = output_dir / f"checkpoint-{progress.step}"
    temporary = output_dir / f".{folder.name}.incomplete"
    shutil.rmtree(temporary, ignore_errors=True)
    with ledger.phase(Phase.SAVE):
        engine.model.save_pretrained(temporary)  # type: ignore[operator]
        tokenizer.save_pretrained(temporary)
        if with_optimizer:
            save_file(dict(_optimizer_tensors(engine)), temporary / _OPTIMIZER_FILE)
    (temporary / _STATE_FILE).write_text(json.dumps(asdict(progress), indent=2), encoding="utf-8")
    _flush(temporary)
    if folder.exists():
        shutil.rmtree(folder)
    temporary.rename(folder)
    return folder


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
    if is_adapter(checkpoint):
        _restore_adapter(checkpoint, engine.model)
    wanted = dict(_optimizer_tensors(engine))
    with safe_open(checkpoint / _OPTIMIZER_FILE, framework="pt") as file:
        if set(file.keys()) != set(wanted):
            raise ConfigError(f"{checkpoint} holds the optimizer of another model or method")
        for name, tensor in wanted.items():
            if name == _RANDOM_STATE:
                torch.set_rng_state(file.get_tensor(name))
            else:
                tensor.copy_(file.get_tensor(name))
    engine.optimizer.refresh_masters()


def _restore_adapter(checkpoint: Path, model: nn.Module) -> None:
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    set_peft_model_state_dict(model, load_file(checkpoint / _ADAPTER_FILE))


def _optimizer_tensors(engine: Engine) -> Iterator[tuple[str, torch.Tensor]]:
    """Named states; a master that equals its parameter is not stored twice."""
    for name, parameter in engine.model.named_parameters():
        for key, tensor in engine.optimizer.state.get(parameter, {}).items():
            if key != "master" or tensor.dtype is not parameter.dtype:
                yield f"{name}.{key}", tensor
    yield _RANDOM_STATE, torch.get_rng_state()


def _checkpoints(output_dir: Path) -> list[Path]:
    if not output_dir.is_dir():
        return []
    return [path for path in output_dir.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]


def _step_of(checkpoint: Path) -> int:
    match = _NAME.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1])


def _flush(folder: Path) -> None:
    """Force the files to the disk, so that the rename never names what is not there yet."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
