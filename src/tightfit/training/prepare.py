"""What is known of a training job before anything is decided: checked keys, data, machine.

Reads everything but the weights, changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from tightfit.dry_run.config import load_config
from tightfit.errors import ConfigError, ModelNotFoundError
from tightfit.facts.config_checks import check_length
from tightfit.facts.hardware import Hardware
from tightfit.facts.job import Job
from tightfit.facts.model_spec import ModelSpec, load_model_spec
from tightfit.facts.workload import Workload
from tightfit.planner.machine import usable_hardware
from tightfit.training.adapting import check_boundaries
from tightfit.training.batches import average_padded_length
from tightfit.training.checkpoint import read_progress
from tightfit.training.evaluation import prompt_tokens
from tightfit.training.long_context import scaled_positions
from tightfit.training.loop import Schedule, check_scheduler
from tightfit.training.model import check_weights
from tightfit.training.new_tokens import grow_vocabulary
from tightfit.training.output import check_output_dir
from tightfit.training.samples import PreparedData, Sample, prepare_data
from tightfit.training.tokenizer import load_tokenizer


@dataclass(frozen=True)
class PreparedRun:
    """Everything that is known before anything is decided.

    Attributes:
        positions: fields of the config that the job has changed for longer sequences.
        too_long: what must be said about the longest one; None where nothing.
    """

    job: Job
    spec: ModelSpec
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    data: PreparedData
    workload: Workload
    positions: Mapping[str, Any]
    too_long: str | None
    hardware: Hardware
    output_dir: Path
    resume_from: Path | None
    steps_done: int
    total_steps: int


def prepare(job: Job) -> PreparedRun:
    """Check and read everything but the weights.

    Raises:
        InputError: any mistake in the job, its files or its output folder.
    """
    output_dir, resume_from = check_output_dir(job)
    _check_prompt(job)
    spec = load_model_spec(job.model_name_or_path)
    if spec.source in ("catalogue", "file", "hub"):
        raise ModelNotFoundError(
            f"{job.model_name_or_path} is known by its config only; training needs its weights: "
            "download it and give the folder, or put it into the Hub cache (HF_HOME)"
        )
    check_weights(Path(job.model_name_or_path).expanduser())
    tokenizer = load_tokenizer(job.model_name_or_path)
    data = prepare_data(job, tokenizer)
    config = load_config(spec.config)
    grow_vocabulary(job, config, tokenizer, data)
    positions = scaled_positions(job, spec, config)
    config.get_text_config().update(positions)
    workload = workload_of(job, data, tokenizer)
    schedule = Schedule.of(job, len(data.train))
    check_scheduler(job, schedule.total_steps)
    check_boundaries(job, schedule)
    steps_done = 0
    if resume_from is not None:
        progress = read_progress(resume_from)
        progress.check(job, len(data.train))
        steps_done = progress.step
    return PreparedRun(
        job=job,
        spec=spec,
        config=config,
        tokenizer=tokenizer,
        data=data,
        workload=workload,
        positions=positions,
        too_long=check_length(spec, workload.sequence_length, scaled=job.rope_scaling is not None),
        hardware=usable_hardware(output_dir),
        output_dir=output_dir,
        resume_from=resume_from,
        steps_done=steps_done,
        total_steps=schedule.total_steps,
    )


def workload_of(job: Job, data: PreparedData, tokenizer: PreTrainedTokenizerBase) -> Workload:
    """The shapes that this data will really have."""
    question = job.sample_prompt
    return Workload(
        sequence_length=_longest(data.train),
        global_batch_size=job.global_batch_size,
        evaluation_sequence_length=_longest(data.held_out),
        evaluation_batch_size=min(job.per_device_eval_batch_size, max(1, len(data.held_out))),
        prompt_length=0 if question is None else prompt_tokens(tokenizer, question).shape[1],
        max_new_tokens=job.max_new_tokens,
        average_sequence_length=average_padded_length(data.train, job.global_batch_size, job.seed),
    )


def _longest(samples: list[Sample]) -> int:
    return max((len(sample.input_ids) for sample in samples), default=0)


def _check_prompt(job: Job) -> None:
    if job.sample_prompt is not None and not job.sample_prompt.strip():
        raise ConfigError("sample_prompt is empty; write a question, or leave it out")
