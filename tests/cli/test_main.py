"""The command: verbs, exit codes, what goes where, and what is not imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tightfit.cli.main import main
from tightfit.errors import DataError, DoesNotFitError, TightfitError
from tightfit.facts.job import Job


class Verbs:
    """Stands in for the files of the verbs and remembers the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Job, dict[str, Any]]] = []
        self.raises: BaseException | None = None

    def module(self, verb: str) -> ModuleType:
        def run(job: Job, **options: Any) -> int:
            self.calls.append((verb, job, options))
            if self.raises is not None:
                raise self.raises
            return 0

        module = ModuleType(f"tightfit.cli.{verb}")
        module.run = run  # type: ignore[attr-defined]
        return module


@pytest.fixture
def verbs(monkeypatch: pytest.MonkeyPatch) -> Verbs:
    fake = Verbs()
    for verb in ("train", "plan", "estimate"):
        monkeypatch.setitem(sys.modules, f"tightfit.cli.{verb}", fake.module(verb))
    monkeypatch.setattr("tightfit.cli.main.load_model_spec", lambda name: None)
    monkeypatch.setattr("tightfit.cli.main.check_output_dir", lambda job: None)
    return fake


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "job.yaml"
    path.write_text("model_name_or_path: m\nseed: 7\n")
    return str(path)


def test_train(verbs: Verbs, config: str) -> None:
    assert main(["train", config, "--learning-rate", "1e-3", "--resume"]) == 0
    (verb, job, options) = verbs.calls[0]
    assert (verb, options) == ("train", {})
    assert (job.seed, job.learning_rate, job.resume) == (7, 1e-3, True)


def test_flags_may_stand_before_the_file(verbs: Verbs, config: str) -> None:
    assert main(["train", "--resume", config]) == 0
    assert verbs.calls[0][1].resume


@pytest.mark.parametrize("as_json", [False, True])
def test_plan_and_estimate(verbs: Verbs, config: str, as_json: bool) -> None:
    flags = ["--json"] * as_json
    assert main(["plan", config, *flags]) == 0
    assert main(["plan", "--model_name_or_path", "m", *flags]) == 0
    assert main(["estimate", "Qwen/Qwen3-8B", "--cutoff_len", "512", *flags]) == 0
    assert [verb for verb, _, _ in verbs.calls] == ["plan", "plan", "estimate"]
    assert all(options["as_json"] is as_json for _, _, options in verbs.calls)
    assert verbs.calls[2][2] == {
        "as_json": as_json,
        "compare": False,
        "picture": None,
        "reading": None,
    }
    assert verbs.calls[2][1].model_name_or_path == "Qwen/Qwen3-8B"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TightfitError("it broke"), 1),
        (DataError("rows.jsonl, row 3: broken"), 2),
        (DoesNotFitError("120 MiB are missing", 120), 3),
    ],
)
def test_errors_become_messages_and_exit_codes(
    verbs: Verbs, config: str, capsys: pytest.CaptureFixture[str], error: TightfitError, code: int
) -> None:
    verbs.raises = error
    assert main(["train", config]) == code
    captured = capsys.readouterr()
    assert captured.err == f"error: {error}\n"
    assert captured.out == ""


def test_interrupt(verbs: Verbs, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    verbs.raises = KeyboardInterrupt()
    assert main(["train", config]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_faults_of_tightfit_are_not_hidden(verbs: Verbs, config: str) -> None:
    verbs.raises = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        main(["train", config])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "nowhere.yaml"], "there is no file nowhere.yaml"),
        (["train", "--lerning_rate", "1"], "Did you mean --learning_rate?"),
        (["train"], "model_name_or_path is missing"),
        (["train", "--model", "m", "a.yaml", "b.yaml"], "unexpected argument 'b.yaml'"),
        (["estimate", "nowhere.yml"], "there is no file nowhere.yml"),
        (["estimate"], "model_name_or_path is missing"),
        (["plan", "--model", "m", "--json", "--seed", "x"], "--seed: 'x' is not accepted"),
        (["train", "--seed"], "--seed has no value; it must be a whole number from 0"),
        (["train", "--nvme_limit", "--resume"], "--nvme_limit has no value; it must be text"),
        (["plan", "m", "--nvme_limit", "-5GiB"], "--nvme_limit: '-5GiB' is not a size"),
        (["plan", "m", "--nvme-limit=-5GiB"], "--nvme_limit: '-5GiB' is not a size"),
        (["plan", "m", "--learning_rate", "-1"], "--learning_rate: '-1' is not accepted; it must"),
        (["plan", "m", "--offload_activations", "maybe"],
         "--offload_activations: 'maybe' is not accepted; it must be auto | true | false"),
        (["plan", "--offload_activations", "maybe", "m"],
         "--offload_activations: 'maybe' is not accepted; it must be auto | true | false"),
        (["plan", "m", "--resume", "2"], "--resume: '2' is not accepted; it must be true | false"),
    ],
)  # fmt: skip
def test_wrong_arguments(
    verbs: Verbs, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert not verbs.calls


@pytest.mark.parametrize("words", [[], ["fly"]])
def test_what_argparse_refuses(words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2


@pytest.mark.parametrize("verb", ["plan", "estimate"])
def test_job_is_a_file_or_a_model(verbs: Verbs, config: str, verb: str) -> None:
    assert main([verb, config, "--seed", "7"]) == 0
    assert main([verb, "Qwen/Qwen3-8B", "--seed", "7"]) == 0
    from_file, from_model = [job for _, job, _ in verbs.calls]
    assert from_file.model_name_or_path != "Qwen/Qwen3-8B" == from_model.model_name_or_path
    assert from_file.seed == from_model.seed == 7


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("tightfit 0.")


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"]])
def test_help_is_quick_because_it_imports_little(words: list[str]) -> None:
    code = (
        "import sys\n"
        "from tightfit.cli.main import main\n"
        "try:\n"
        f"    main({words!r})\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'huggingface_hub', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "tightfit" in result.stdout


@pytest.mark.parametrize("verb", ["plan", "estimate", "train"])
def test_a_model_that_nobody_knows_is_refused_before_slow_imports(verb: str) -> None:
    program = (
        "import sys; from tightfit.cli.main import main; code = main(sys.argv[1:]);"
        "assert not {'torch', 'transformers'} & sys.modules.keys(); sys.exit(code)"
    )
    words = [verb, "--model_name_or_path", "Qwen/Qwen2.5-7"]
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    found = subprocess.run(
        [sys.executable, "-c", program, *words], env=offline, capture_output=True, text=True
    )
    assert (found.returncode, found.stdout) == (2, "")
    assert "there is no model 'Qwen/Qwen2.5-7'" in found.stderr
    assert "nearest: Qwen/Qwen2.5-7B" in found.stderr


def test_a_run_that_is_there_is_told_before_slow_imports(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "checkpoint-3").mkdir()
    program = (
        "import sys; from tightfit.cli.main import main; code = main(sys.argv[1:]);"
        "assert not {'torch', 'transformers'} & sys.modules.keys(); sys.exit(code)"
    )
    words = ["train", "--model_name_or_path", tiny_model_folder, "--num_gpus", "2",
             "--dataset", "rows.jsonl", "--output_dir", tmp_path]  # fmt: skip
    found = subprocess.run(
        [sys.executable, "-c", program, *map(str, words)], capture_output=True, text=True
    )
    assert (found.returncode, found.stdout) == (2, "")
    assert "already holds a run (checkpoint-3); give --resume" in found.stderr


def test_help_names_the_keys(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--learning_rate X Highest learning rate. [5e-05]" in text
    assert all(f"--{key}" in text for key in Job.model_fields)
    assert "--evaluation_strategy" not in text


def test_presets_are_listed_without_heavy_imports(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets"]) == 0
    out = capsys.readouterr().out
    assert "rtx-4090" in out
    assert max(map(len, out.splitlines()[:-1])) <= 80
    program = (
        "import sys; from tightfit.cli.main import main; assert main(['presets', '--json']) == 0;"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    cards = json.loads(found.stdout)
    assert cards["h100"]["flops_per_second"]["bf16"] == 989.4e12
    assert cards["rtx-4090"]["fabric"] is None


def test_nobody_trains_on_a_described_machine(
    verbs: Verbs, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", config, "--gpu", "2xrtx-4090", "--ram", "64GiB"]) == 2
    assert "gpu, ram: a described machine can be planned for" in capsys.readouterr().err
    assert main(["plan", config, "--gpu", "2xrtx-4090", "--nodes", "2", "--network", "25Gb"]) == 0
    (_, job, _) = verbs.calls[0]
    assert (job.num_gpus, job.nnodes, job.network) == (2, 2, "25Gb")
