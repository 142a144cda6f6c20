"""Whole runs: what they save can be loaded, resumed and trusted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.taken import every, only

from tightfit import ledger
from tightfit.bill.table import Kind, Phase
from tightfit.engine.engine import Engine
from tightfit.errors import ConfigError, DoesNotFitError, InputError
from tightfit.facts.job import Job
from tightfit.monitor.records import EvaluationRecord, StepRecord
from tightfit.policies import Tier
from tightfit.training import leg as leg_module
from tightfit.training.loop import TrainingLoop
from tightfit.training.run import make_plan, prepare, train

MakeJob = Callable[..., Job]
RunJob = Callable[..., Any]
Keys = dict[str, Any]

LORA = {"finetuning_type": "lora", "lora_rank": 4, "lora_dropout": 0.3, "learning_rate": 2e-2}

LOAD_AND_ANSWER = """
import sys, torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
kind, checkpoint, base, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(checkpoint if kind == "full" else base)
if kind == "lora":
    from peft import PeftModel
    model = PeftModel.from_pretrained(model, checkpoint)
tokenizer = AutoTokenizer.from_pretrained(checkpoint)
ids = tokenizer("What is number 3?", return_tensors="pt")["input_ids"]
with torch.no_grad():
    logits = model.eval()(input_ids=ids).logits
weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
save_file({**weights, "ids": ids, "logits": logits}, out)
"""


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """The engines that runs made, in order."""
    made: list[Engine] = []
    fit = leg_module.fit

    def remember(*arguments: Any, **keys: Any) -> Engine:
        made.append(fit(*arguments, **keys))
        return made[-1]

    monkeypatch.setattr(leg_module, "fit", remember)
    return made


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    names = ("model.safetensors", "adapter_model.safetensors")
    return load_file(next(checkpoint / name for name in names if (checkpoint / name).exists()))


def assert_same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]
    assert not different


# What is saved


@pytest.mark.parametrize(("kind", "keys"), every(2, [("lora", LORA), ("full", {})]))
def test_the_output_loads_in_a_fresh_process(
    kind: str, keys: Keys, run_job: RunJob, engines: list[Engine], tmp_path: Path
) -> None:
    run = run_job(**keys, max_steps=8)
    assert run.losses[-1] < run.losses[0] - 0.1
    out = tmp_path / "logits.safetensors"
    base = run.prepared.job.model_name_or_path
    subprocess.run(
        [sys.executable, "-c", LOAD_AND_ANSWER, kind, run.result.checkpoint, base, out],
        check=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    loaded = load_file(out)
    model = engines[0].model.eval()
    ids, logits = loaded.pop("ids"), loaded.pop("logits")
    assert_same_bits(loaded, dict(model.named_parameters()))
    with torch.no_grad():
        trained = model(input_ids=ids).logits
    # Processors differ in whether a product's last bit depends on where its factors lie in memory.
    torch.testing.assert_close(trained, logits, rtol=1e-5, atol=1e-5)


def test_what_a_run_leaves(run_job: RunJob) -> None:
    run = run_job(save_strategy="steps", save_steps=2)
    left = {path.name for path in run.prepared.output_dir.iterdir()}
    assert left == {"checkpoint-2", "checkpoint-4", "plan.yaml", "trainer_log.jsonl"}
    names = {path.name for path in run.result.checkpoint.iterdir()}
    assert {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja", "trainer_state.json", "optimizer.safetensors",
    } <= names  # fmt: skip
    assert not [name for name in names if name.endswith((".bin", ".pt", ".pth", ".pkl"))]
    state = json.loads((run.result.checkpoint / "trainer_state.json").read_text())
    assert (state["step"], state["global_batch_size"], state["train_samples"]) == (4, 2, 11)


def test_save_total_limit_keeps_the_last(run_job: RunJob) -> None:
    run = run_job(save_strategy="steps", save_steps=1, save_total_limit=2)
    found = {path.name for path in run.prepared.output_dir.glob("checkpoint-*")}
    assert found == {"checkpoint-3", "checkpoint-4"}


def test_save_only_model_cannot_be_resumed_and_says_so(run_job: RunJob, job: MakeJob) -> None:
    run = run_job(save_only_model=True)
    assert not (run.result.checkpoint / "optimizer.safetensors").exists()
    with pytest.raises(ConfigError, match="save_only_model"):
        prepare(job(resume=True))


# The numbers


@pytest.mark.parametrize("keys", every(2, [LORA | {"lora_dropout": 0.0}, {}]), ids=["lora", "full"])
def test_the_tight_plan_trains_like_the_plain_one(
    run_job: RunJob, tight: Keys, tmp_path: Path, keys: Keys
) -> None:
    """To 2e-5: only the order in which products are summed differs (chunks, micro-batches)."""
    plain = run_job(**keys, max_steps=8)
    other = run_job(**keys, **tight, max_steps=8, output_dir=str(tmp_path / "tight"))
    assert other.plan.policies != plain.plan.policies
    assert other.losses == pytest.approx(plain.losses, abs=2e-5)
    norms = [[record.grad_norm for record in run.result.records] for run in (plain, other)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)
    assert len(set(plain.losses)) == 8


@pytest.mark.parametrize("micro", only([1, 3], [1, 2, 3]))
def test_the_loss_does_not_depend_on_the_micro_batch(
    run_job: RunJob, micro: int, tmp_path: Path
) -> None:
    """Rows have different numbers of trained tokens, so a mean of means would differ."""
    keys = {"train_batch_size": 6, "max_steps": 4, "val_size": 2, "num_train_epochs": 2}
    whole = run_job(**keys, per_device_train_batch_size=6)
    split = run_job(
        **keys, per_device_train_batch_size=micro, output_dir=str(tmp_path / f"micro-{micro}")
    )
    assert split.plan.policies.batch.accumulation_steps == 6 // micro
    assert split.losses == pytest.approx(whole.losses, abs=2e-6)
    held_out = [[e.loss for e in run.result.evaluations] for run in (whole, split)]
    assert held_out[1] == pytest.approx(held_out[0], abs=2e-6)


def test_the_last_step_of_an_epoch_may_be_smaller(run_job: RunJob, job: MakeJob) -> None:
    run = run_job(train_batch_size=4, per_device_train_batch_size=2, max_steps=-1,
                  num_train_epochs=2)  # fmt: skip
    assert len(run.losses) == 6, "11 rows in steps of 4, twice"
    epochs = [record.epoch for record in run.result.records]
    assert epochs == pytest.approx([1 / 3, 2 / 3, 1, 4 / 3, 5 / 3, 2])
    assert all(torch.isfinite(torch.tensor(run.losses)))


def test_evaluation_does_not_depend_on_its_batch(run_job: RunJob, tmp_path: Path) -> None:
    held_out = [
        [e.loss for e in run_job(
            val_size=5, per_device_eval_batch_size=size, output_dir=str(tmp_path / f"e{size}")
        ).result.evaluations]
        for size in (1, 3)
    ]  # fmt: skip
    assert held_out[1] == pytest.approx(held_out[0], abs=2e-6)
    assert held_out[0][-1] < held_out[0][0]


# Resuming


class StopAfter:
    """An observer that presses Ctrl-C, so to speak, in one step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def step(self, record: StepRecord) -> None:
        if record.step == self._step:
            signal_self()

    def evaluation(self, record: EvaluationRecord) -> None:
        pass


def signal_self() -> None:
    import signal

    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("keys", "stop"),
    [
        ({}, 2),
        ({"offload_optimizer": "cpu"}, 6),
        (LORA, 8),
        (LORA | {"offload_optimizer": "cpu", "gradient_checkpointing": "true"}, 2),
        ({"precision": "bf16", "offload_optimizer": "cpu"}, 8),
        ({"optim": "adafactor", "offload_optimizer": "cpu"}, 2),
        ({"optim": "adamw_compact", "optim_master": "split_8", "precision": "bf16"}, 5),
        # Overflows before and after, and the second of two forgiven in between.
        ({"precision": "fp16", "initial_scale_power": 20, "loss_scale_window": 2}, 5),
    ],
    ids=[
        "full",
        "host, end of epoch",
        "lora, next epoch",
        "lora, host",
        "bf16, host, next epoch",
        "adafactor, host",
        "seven bytes",
        "fp16",
    ],
)
def test_a_resumed_run_is_the_same_run(
    run_job: RunJob, job: MakeJob, plain: Keys, tmp_path: Path, keys: Keys, stop: int
) -> None:
    """Losses, learning rates and final weights, bit for bit."""
    from tightfit.errors import Interrupted

    keys = plain | {"max_steps": 10, "lr_scheduler_type": "cosine", "warmup_steps": 4} | keys
    whole = run_job(**keys, output_dir=str(tmp_path / "whole"))
    prepared = prepare(job(**keys))
    with pytest.raises(Interrupted, match=rf"after step {stop}.*--resume.*checkpoint-{stop}"):
        train(prepared, make_plan(prepared), [StopAfter(stop)])
    torch.manual_seed(1234)  # what a fresh process would have is not what the run had
    rest = run_job(**keys, resume=True)
    assert [record.step for record in rest.result.records] == list(range(stop + 1, 11))
    assert rest.losses == whole.losses[stop:]
    for name in ("learning_rate", "epoch", "grad_norm", "loss_scale"):
        values = [[getattr(record, name) for record in run.result.records] for run in (whole, rest)]
        assert str(values[1]) == str(values[0][stop:])  # nan is not nan
    assert_same_bits(weights(rest.result.checkpoint), weights(whole.result.checkpoint))


class InterruptTwice:
    """Presses Ctrl-C twice after a step."""

    def __init__(self, step: int) -> None:
        self.at = step

    def step(self, record: StepRecord) -> None:
        if record.step == self.at:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    def evaluation(self, record: EvaluationRecord) -> None:
        pass


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, r"^stopped at once; nothing was saved"),
        ({"save_strategy": "steps", "save_steps": 2},
         r"^stopped at once; the last checkpoint is .*checkpoint-2; continue .* with --resume$"),
        ({"save_strategy": "steps", "save_steps": 2, "save_only_model": True},
         r"^stopped at once; the last checkpoint is .*checkpoint-2$"),
    ],
)  # fmt: skip
def test_a_second_interrupt_stops_at_once_and_says_what_there_is(
    job: MakeJob, plain: Keys, no_measuring: None, keys: Keys, said: str
) -> None:
    from tightfit.errors import Interrupted

    prepared = prepare(job(**plain, **keys))
    with pytest.raises(Interrupted, match=said) as raised:
        train(prepared, make_plan(prepared), [InterruptTwice(3)])
    assert raised.value.exit_code == 130
    assert not list(prepared.output_dir.glob("checkpoint-3"))


def test_dropout_is_really_drawn(run_job: RunJob, tmp_path: Path) -> None:
    """Else the test above would not see a random state that was lost."""
    one = run_job(**LORA)
    two = run_job(**LORA, seed=43, output_dir=str(tmp_path / "other"))
    none = run_job(**LORA | {"lora_dropout": 0.0}, output_dir=str(tmp_path / "none"))
    assert one.losses != two.losses
    assert one.losses[1:] != none.losses[1:]


def test_a_resumed_run_keeps_its_plan(run_job: RunJob, job: MakeJob, tight: Keys) -> None:
    """Rates are measured anew; another micro-batch would change the bits."""
    from tightfit.errors import Interrupted

    prepared = prepare(job(**tight))
    plan = make_plan(prepared)
    with pytest.raises(Interrupted):
        train(prepared, plan, [StopAfter(1)])
    again = make_plan(prepare(job(resume=True)))
    assert again.policies == plan.policies
    half = plan.bill.peak_bytes(Tier.DEVICE) // 2
    few = {"gradient_checkpointing": "false", "loss": "chunked", "offload_optimizer": "none"}
    with pytest.raises(DoesNotFitError, match="nothing fits"):
        make_plan(prepare(job(**few, resume=True, memory_limit=str(half))))


def test_a_longer_run_goes_on_with_the_rates_of_its_length(run_job: RunJob, tmp_path: Path) -> None:
    """Not with the zero at which the shorter schedule ended."""
    run_job(max_steps=4)
    longer = run_job(max_steps=8, resume=True)
    whole = run_job(max_steps=8, output_dir=str(tmp_path / "whole"))
    rates = [[record.learning_rate for record in run.result.records] for run in (longer, whole)]
    assert rates[0] == rates[1][4:]
    assert min(rates[0]) > 0


def test_a_finished_run_has_nothing_left_to_do(run_job: RunJob) -> None:
    first = run_job(val_size=2)
    again = run_job(val_size=2, resume=True)
    assert again.losses == []
    assert again.result.checkpoint == first.result.checkpoint
    assert again.result.evaluations[-1].loss == first.result.evaluations[-1].loss


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        ({}, {"train_batch_size": 4, "per_device_train_batch_size": 2}, "train_batch_size was 2"),
        ({}, {"seed": 7}, "seed was 42"),
        ({}, {"val_size": 2}, "number of training samples was 11 and is 9"),
        ({}, LORA, "another model or method"),
        (LORA, {}, "another model or method"),
        (LORA, LORA | {"lora_rank": 2}, "another model or method"),
        ({}, {"precision": "bf16"}, "another model or method"),
    ],
)
def test_resuming_another_job_is_refused(
    run_job: RunJob, first: Keys, then: Keys, said: str
) -> None:
    run = run_job(**first)
    # Without the plan the job's own keys decide.
    (run.prepared.output_dir / "plan.yaml").unlink()
    before = weights(run.result.checkpoint)
    with pytest.raises(InputError, match=said):
        run_job(**then, resume=True, max_steps=6)
    assert_same_bits(weights(run.result.checkpoint), before)


@pytest.mark.parametrize("file", ["trainer_state.json", "optimizer.safetensors"])
def test_a_damaged_checkpoint_is_named(run_job: RunJob, file: str) -> None:
    run = run_job()
    (run.result.checkpoint / file).write_bytes(b"{ half")
    with pytest.raises(InputError, match=r"checkpoint-4.*(cannot be read|is broken)"):
        run_job(resume=True, max_steps=6)


# Memory


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"loss": "chunked"},
        {"gradient_checkpointing": "true"},
        {"offload_optimizer": "cpu"},
        {"per_device_train_batch_size": 1},
        LORA | {"lora_dropout": 0.0},
        {"precision": "bf16"},
        {"precision": "bf16", "offload_optimizer": "cpu", "loss": "chunked"},
        {"loss": "chunked", "gradient_checkpointing": "true", "offload_optimizer": "cpu",
         "per_device_train_batch_size": 1},
    ],
    ids=lambda keys: ",".join(map(str, keys.values())) or "plain",
)  # fmt: skip
def test_the_peak_is_as_predicted_and_never_above(
    run_job: RunJob, job: MakeJob, plain: Keys, keys: Keys
) -> None:
    # Cut to one length: the bill is for the longest sample in any place of a global batch.
    keys = {"val_size": 3, "sample_prompt": "What is 1?", "max_new_tokens": 5} | keys
    keys["cutoff_len"] = 50
    prediction = make_plan(prepare(job(**(plain | keys))))
    limit = prediction.bill.peak_bytes(Tier.DEVICE)
    run = run_job(**keys, memory_limit=str(limit))
    measured = run.result.measured
    assert measured.peak_bytes(Tier.DEVICE) <= limit
    assert limit <= 1.03 * measured.peak_bytes(Tier.DEVICE)
    host = run.plan.bill.peak_bytes(Tier.HOST), measured.peak_bytes(Tier.HOST)
    assert host[0] >= host[1]
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.STEP, Phase.EVAL):
        assert run.plan.bill.phase_peak_bytes(phase, Tier.DEVICE) >= measured.phase_peak_bytes(
            phase, Tier.DEVICE
        ), phase
    states = measured.peaks[Phase.STEP][Tier.DEVICE]
    assert states[Kind.PARAMETERS] == run.plan.bill.peaks[Phase.STEP][Tier.DEVICE][Kind.PARAMETERS]


def test_crossing_the_limit_stops_the_run(
    run_job: RunJob, job: MakeJob, plain: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepare(job(**plain, memory_limit="64MiB"))
    plan = make_plan(prepared)
    limit = plan.bill.peak_bytes(Tier.DEVICE) * 3 // 4
    monkeypatch.setattr(leg_module, "enforced_bytes", lambda job, plan: limit)
    with pytest.raises(torch.OutOfMemoryError, match="device tier over its limit"):
        train(prepared, plan, [])
    assert ledger.active() is None, "the ledger must not stay on"


def test_the_watch_is_off_between_the_first_steps_and_the_save(
    run_job: RunJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs time; yet the first evaluation and the save are counted."""
    counting: list[bool] = []
    step = TrainingLoop._one_step

    def observed(self: TrainingLoop, *arguments: Any) -> None:
        counting.append(ledger.active() is not None)
        step(self, *arguments)

    monkeypatch.setattr(TrainingLoop, "_one_step", observed)
    run = run_job(max_steps=5, val_size=2)
    assert counting == [True, True, False, False, False]
    assert [record.device_bytes is None for record in run.result.records] == [
        False, False, True, True, True,
    ]  # fmt: skip
    assert Phase.SAVE in run.result.measured.peaks
    assert Phase.EVAL in run.result.measured.peaks
    save = run.result.measured.phase_peak_bytes(Phase.SAVE, Tier.DEVICE)
    assert 0 < save <= run.plan.bill.phase_peak_bytes(Phase.SAVE, Tier.DEVICE)
    assert save >= 0.97 * run.plan.bill.phase_peak_bytes(Phase.SAVE, Tier.DEVICE)


def test_with_a_limit_the_watch_stays_on(run_job: RunJob) -> None:
    run = run_job(memory_limit="64MiB")
    assert all(record.device_bytes is not None for record in run.result.records)


# Before anything is written


def test_nothing_is_written_by_preparing_and_planning(job: MakeJob, no_measuring: None) -> None:
    made = job()
    make_plan(prepare(made))
    assert made.output_dir is not None
    assert not Path(made.output_dir).exists()


def test_overwriting_deletes_the_run_and_nothing_else(run_job: RunJob) -> None:
    first = run_job(save_strategy="steps", save_steps=1)
    folder = first.prepared.output_dir
    (folder / "notes.txt").write_text("mine")
    (folder / "checkpoint-notes.txt").write_text("mine")
    (folder / "checkpoint-best").mkdir()
    run_job(overwrite_output_dir=True, max_steps=2)
    assert {path.name for path in folder.iterdir()} == {
        "checkpoint-2", "plan.yaml", "trainer_log.jsonl",
        "notes.txt", "checkpoint-notes.txt", "checkpoint-best",
    }  # fmt: skip
    assert len((folder / "trainer_log.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("key", ["model_name_or_path", "dataset"])
def test_overwriting_never_deletes_what_the_job_reads(
    run_job: RunJob, job: MakeJob, rows: Path, key: str
) -> None:
    run = run_job()
    needed = run.result.checkpoint
    if key == "dataset":
        needed = needed / "rows.jsonl"
        needed.write_bytes(rows.read_bytes())
    with pytest.raises(ConfigError, match=rf"would delete .*\({key}\)"):
        prepare(job(overwrite_output_dir=True, **{key: str(needed)}))
    assert needed.exists()
