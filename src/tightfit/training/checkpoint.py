"""checkpoint-N folders: written whole or not at all, loadable by transformers or peft.

A checkpoint is made under a temporary name and renamed when it is complete. It holds the model
in Hugging Face's layout, the tokenizer, `trainer_state.json` and, unless only the model is saved,
`optimizer.safetensors` with the optimizer's states and the random state. Ranks write it together,
and nothing in it depends on how many there are. No pickle. Does not know when to save or what data
there is.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase

from tightfit import ledger
from tightfit.bill.table import Kind, Phase
from tightfit.engine.engine import Engine
from tightfit.engine.whole_modules import ADAPTER_FILE
from tightfit.errors import ConfigError, OtherRankError, TrainingError
from tightfit.facts.disk import writing
from tightfit.facts.job import Job
from tightfit.policies import Tier
from tightfit.training import together
from tightfit.training.checkpoint_folders import (
    checkpoints,
    flush,
    latest_checkpoint,
    unfinished,
)
from tightfit.training.layout import WEIGHTS_FILE, all_entries, split_files, write_index
from tightfit.training.saved_model import (
    SavedModel,
    adapters_by_saved_name,
    is_adapted,
    save_configs,
)
from tightfit.training.saved_states import (
    load_random_states,
    load_states,
    random_entries,
    random_parts,
    state_entries,
    state_parts,
)
from tightfit.training.tensor_file import Entry, TensorReader, TensorWriter, lay_out

_STATE_FILE = "trainer_state.json"
_OPTIMIZER_FILE = "optimizer.safetensors"


@dataclass(frozen=True)
class Progress:
    """How far a run has come.

    Attributes:
        step: optimizer steps done.
        epoch: whole epochs done.
        steps_in_epoch: optimizer steps done of the epoch that has begun.
        global_batch_size, train_samples, seed: what the order of the data depends on.
        loss_scale: what the engine's, if it has one, has to go on from.
    """

    step: int
    epoch: int
    steps_in_epoch: int
    global_batch_size: int
    train_samples: int
    seed: int
    loss_scale: Mapping[str, float] | None = None

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
    temporary = unfinished(folder)
    try:
        _write(temporary, engine, tokenizer, progress, with_optimizer=with_optimizer)
        with together.failing_together(OSError):
            if together.rank() == 0:
                flush([*temporary.iterdir(), temporary])
                _put_in_place(temporary, folder)
    except (OSError, SafetensorError, OtherRankError) as error:
        if together.rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        before = latest_checkpoint(output_dir)
        kept = "there is no earlier one" if before is None else f"{before} is the last one"
        kind = OtherRankError if isinstance(error, OtherRankError) else TrainingError
        raise kind(
            f"{folder} could not be written ({error}); {kept}. Make room or see to the folder"
        ) from error
    return folder


def _put_in_place(temporary: Path, folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    temporary.rename(folder)
    flush([folder.parent])


def _write(
    temporary: Path,
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    progress: Progress,
    *,
    with_optimizer: bool,
) -> None:
    """Rank 0 makes the folder and lays the files out; then every rank writes its parts."""
    engine.drain()
    saved = SavedModel.of(engine)
    entries = {
        ADAPTER_FILE if is_adapted(engine) else WEIGHTS_FILE: all_entries(saved.entries),
        **({_OPTIMIZER_FILE: all_entries(_kept_entries(engine))} if with_optimizer else {}),
    }
    files = {temporary / name: laid for name, laid in split_files(entries).items()}
    with together.failing_together(OSError, SafetensorError):
        if together.rank() == 0:
            _prepare_folder(temporary, engine, tokenizer, progress)
            write_index(temporary, files)
            for path, its_own in files.items():
                lay_out(path, its_own)
    with ExitStack() as stack:
        # Before anybody writes: ranks may wait for each other in what is written.
        with together.failing_together(OSError):
            writer = stack.enter_context(TensorWriter(files))
        stack.enter_context(together.failing_together(OSError, SafetensorError))
        stack.enter_context(ledger.phase(Phase.SAVE))
        writer.write(saved.parts())
        if with_optimizer:
            writer.write(state_parts(engine))
            writer.write(random_parts(engine))


def _prepare_folder(
    temporary: Path, engine: Engine, tokenizer: PreTrainedTokenizerBase, progress: Progress
) -> None:
    """Everything but tensors."""
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_configs(engine, temporary)
    tokenizer.save_pretrained(temporary)
    (temporary / _STATE_FILE).write_text(json.dumps(asdict(progress), indent=2), encoding="utf-8")


def _kept_entries(engine: Engine) -> list[Entry]:
    return [*state_entries(engine), *random_entries(engine)]


def prune_checkpoints(output_dir: Path, keep: int | None) -> None:
    """Delete all but the last `keep` checkpoints; None keeps all.

    What is being deleted has another name, so that a checkpoint is whole as long as it has its own.

    Raises:
        TrainingError: one cannot be deleted.
    """
    if keep is not None:
        for folder in checkpoints(output_dir)[:-keep]:
            with writing(folder, "deleted, as save_total_limit asks"):
                shutil.rmtree(folder.rename(unfinished(folder)))


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
    return (checkpoint / ADAPTER_FILE).exists()


@torch.no_grad()
def restore(checkpoint: Path, engine: Engine, progress: Progress) -> None:
    """Put the checkpoint's adapters, optimizer and random state into a fresh engine.

    Raises:
        ConfigError: the checkpoint is of another model.
    """
    ledger.set_phase(Phase.RESUME)
    # What is read lies on the host until it is copied, one tensor at a time.
    with ledger.labelled(Kind.BUFFERS, Tier.HOST):
        files = TensorReader([checkpoint / _OPTIMIZER_FILE])
        load_states(engine, files, checkpoint)
        if is_adapter(checkpoint):
            _restore_adapter(checkpoint, engine)
        load_random_states(engine, files, progress.seed, progress.step)
    if engine.loss_scale is not None and progress.loss_scale is not None:
        engine.loss_scale.load(progress.loss_scale)
    engine.optimizer.refresh_masters()


def _restore_adapter(checkpoint: Path, engine: Engine) -> None:
    files = TensorReader([checkpoint / ADAPTER_FILE])
    for name, parameter in adapters_by_saved_name(engine.model).items():
        engine.load_values(parameter, files.read_part(name, parameter))
