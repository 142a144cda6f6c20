"""From YAML and flags to a Job, and what a person reads when something in them is wrong."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightfit.cli.arguments import (
    add_job_flags,
    complain_about,
    load_job,
    overrides_of,
    prepare_arguments,
)
from tightfit.cli.document_config import document
from tightfit.errors import ConfigError
from tightfit.facts.job import Job
from tightfit.facts.job_values import accepted_by
from tightfit.interop.other_names import NOT_YET, OTHER_NAMES, RENAMED, SWITCHES


def from_yaml(tmp_path: Path, text: str, **flags: Any) -> Job:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return load_job(path, flags)


def from_flags(*words: str) -> Job:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_job_flags(parser)
    arguments, unknown = parser.parse_known_args(prepare_arguments(words))
    complain_about(unknown)
    return load_job(None, {"model_name_or_path": "m"} | overrides_of(arguments))


def complaint(settings: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_job(None, {"model_name_or_path": "m", **settings})
    assert caught.value.exit_code == 2
    return str(caught.value)


def refusal(settings: dict[str, Any]) -> str:
    """The complaint about settings that may be good; empty when they are."""
    try:
        load_job(None, {"model_name_or_path": "m"} | settings)
    except ConfigError as error:
        return str(error)
    return ""


# What is accepted


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    text = "model_name_or_path: m\nlearning_rate: 1e-4\nseed: 7\nbf16: true\n"
    job = from_yaml(tmp_path, text, learning_rate="2e-4", precision="fp32")
    assert (job.learning_rate, job.seed, job.precision) == (2e-4, 7, "fp32")


# Keys that are accepted only beside another one.
BESIDE = {
    "adapt": ("--save_strategy", "steps"),
    "quantization_bit": ("--finetuning_type", "lora"),
    "tensor_parallel_size": ("--num_gpus", "3"),
    "node_rank": ("--nnodes", "99"),
    "pipeline_parallel_size": ("--num_gpus", "3"),
    "data_parallel_replicas": ("--num_gpus", "3"),
    "ram": ("--gpu", "4090"),
    "nvme": ("--gpu", "4090"),
    "interconnect": ("--gpu", "4090"),
    "network": ("--gpu", "4090", "--nnodes", "2"),
    "virtual_pipeline_stages": (
        *("--num_gpus", "2", "--pipeline_parallel_size", "2"),
        *("--pipeline_schedule", "interleaved"),
    ),
    "pipeline_layers": ("--num_gpus", "2", "--pipeline_parallel_size", "2"),
}
# Text that not just any text will do for.
WORDS = {
    "gpu": "2x4090", "interconnect": "pcie4", "network": "25gb", "pipeline_layers": "9,7",
}  # fmt: skip


def test_every_key_is_a_flag_with_underscores_or_dashes() -> None:
    samples = {"boolean": "true", "integer": "3", "number": "0.5", "array": "lora", "object": "{}"}
    for key, schema in Job.model_json_schema()["properties"].items():
        options = schema.get("anyOf", [schema])
        choices = options[0].get("enum") or [options[0].get("const")]
        kind = options[0]["type"] if not choices[0] else None
        value = str(choices[0] or WORDS.get(key) or samples.get(kind, "24gb"))
        for flag in (f"--{key}", f"--{key.replace('_', '-')}"):
            words = (flag, value), (f"{flag}={value}",)
            first, second = (from_flags(*pair, *BESIDE.get(key, ())) for pair in words)
            assert first == second
            found = str(getattr(first, key)).lower().strip("[']").replace(", ", ",")
            assert found in (value, f"{value}.0")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--resume"], True),
        (["--resume", "false"], False),
        (["--resume=false"], False),
        (["--resume", "--seed", "3"], True),
        (["--resume", "FALSE"], False),
        ([], False),
    ],
)
def test_switches(words: list[str], expected: bool) -> None:
    assert from_flags(*words).resume is expected


def test_switches_leave_the_next_word_alone() -> None:
    assert prepare_arguments(["--resume", "job.yaml"]) == ["--resume=true", "job.yaml"]
    assert prepare_arguments(["--gradient-checkpointing", "auto"]) == [
        "--gradient_checkpointing=auto"
    ]
    assert prepare_arguments(["--bf16"]) == ["--bf16=true"]


def test_none_and_lists() -> None:
    job = from_flags("--lora_alpha", "none", "--allow", "lora", "--save_total_limit", "null")
    assert (job.lora_alpha, job.allow, job.save_total_limit) == (None, ["lora"], None)
    assert from_flags("--allow", "none").allow == []


def test_yaml_of_other_tools(tmp_path: Path) -> None:
    text = """
    base_model: m
    do_not: &anchor 3
    """
    with pytest.raises(ConfigError, match="do_not is not a known key"):
        from_yaml(tmp_path, text)
    job = from_yaml(
        tmp_path,
        """
        base_model: m
        stage: sft
        finetuning_type: lora
        lora_target: [q_proj, v_proj]
        evaluation_strategy: steps
        gradient_accumulation: 4
        warmup_ratio: 0.1
        warmup_steps: 0
        optim: adamw_torch
        bf16: true
        fp16: false
        quantization_bit: null
        report_to: none
        zero_stage: 0
        packing: no
        """,
    )
    assert job.model_name_or_path == "m"
    assert job.lora_target == "q_proj,v_proj"
    assert (job.eval_strategy, job.gradient_accumulation_steps) == ("steps", 4)
    assert (job.warmup_steps, job.optim, job.precision) == (0.1, "adamw", "bf16")


@pytest.mark.parametrize(
    ("settings", "key", "expected"),
    [
        ({"bf16": "false"}, "precision", "auto"),
        ({"bf16": True}, "precision", "bf16"),
        ({"warmup_ratio": 0}, "warmup_steps", 0),
        ({"warmup_ratio": "0.25"}, "warmup_steps", 0.25),
        ({"resume_from_checkpoint": True}, "resume", True),
        ({"activation_checkpointing": True}, "gradient_checkpointing", "true"),
        ({"adapter": "lora"}, "finetuning_type", "lora"),
        ({"lr": "1e-3", "learning_rate": "1e-3"}, "learning_rate", 1e-3),
        ({"save_steps": 5.0}, "save_steps", 5),
    ],
)
def test_other_names(settings: dict[str, Any], key: str, expected: Any) -> None:
    job = load_job(None, {"model_name_or_path": "m", **settings})
    assert getattr(job, key) == expected


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_no_other_name_is_ever_unknown(name: str) -> None:
    message = refusal({name: "perhaps"})
    assert "known key" not in message
    assert not message or f"--{name}" in message or f"--{RENAMED.get(name)}" in message


def test_tables_of_names_agree() -> None:
    assert not set(OTHER_NAMES) & set(Job.model_fields)
    assert set(RENAMED.values()) <= set(Job.model_fields)
    assert set(SWITCHES) <= set(OTHER_NAMES)
    assert len(set(OTHER_NAMES)) == len(OTHER_NAMES)


# What is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lerning_rate": 1}, "--lerning_rate is not a known key. Did you mean learning_rate?"),
        ({"zzzzz": 1}, "`tightfit train --help` lists the keys"),
        ({"learning_rate": "fast"}, "--learning_rate: 'fast' is not accepted; it must be a number"),
        ({"learning_rate": 0}, "0 is not accepted; it must be a number above 0"),
        ({"learning_rate": float("inf")}, "inf is not accepted"),
        ({"learning_rate": "nan"}, "'nan' is not accepted"),
        ({"max_steps": True}, "--max_steps: true is not accepted; it must be a whole number"),
        ({"cutoff_len": 1.5}, "1.5 is not accepted; it must be a whole number above 0"),
        ({"lora_dropout": 1}, "it must be a number of at least 0 and below 1"),
        ({"train_batch_size": "many"}, "it must be a whole number from 1 to 65536 or auto"),
        ({"overlong": "ignore"}, "it must be drop | truncate | error"),
        ({"resume": "perhaps"}, "it must be true | false"),
        ({"allow": "lora,anything"}, "it must be a comma-separated list of: split-master |"),
        ({"dataset": 3}, "it must be text or none; put it in quotes"),
        ({"dataset": {"a": 1}}, "it must be text or none"),
        ({"memory_limit": "a lot"}, "--memory_limit: 'a lot' is not a size; write it like 900MiB"),
        ({"optim": "prodigy"}, "it must be adamw | adamw_8bit | adamw_compact | lion"),
        ({"zero_stage": 4}, "4 is not accepted; it must be auto | 0 | 1 | 2 | 3"),
        ({"quantization_bit": 3}, "3 is not accepted; it must be 4 | 8 or none"),
        ({"gpu": "2xh10"}, "gpu: 'h10' is no card that tightfit knows; the nearest are h100,"),
        ({"gpu": "2x4090", "num_gpus": 4}, "num_gpus 4, but gpu 2x4090 is 2 cards"),
        ({"gpu": "4090", "nodes": 2, "network": "25GB"}, "network: '25GB' is no rate of a network"),
        ({"num_gpus": 0}, "0 is not accepted; it must be a whole number from 1 to"),
        (
            {"num_gpus": 6, "tensor_parallel_size": 4},
            "num_gpus 6 is not a multiple of tensor_parallel_size 4; give --num_gpus 4, or a",
        ),
        ({"num_gpus": 4, "data_parallel_replicas": 3}, "3 does not divide the 4 data-parallel"),
        ({"adapt": True}, "save_strategy: no saves none before the end; set save_strategy"),
        (
            {"adapt": True, "save_strategy": "steps", "save_only_model": True},
            "which save_only_model leaves out",
        ),
        ({"adapt": True, "save_strategy": "steps", "plan": "p"}, "plan names the one to use"),
        (
            {"num_gpus": 3, "nnodes": 2, "tensor_parallel_size": 4},
            "num_gpus 3 x nnodes 2 is not a multiple of tensor_parallel_size 4; give --num_gpus 2,",
        ),
        (
            {"pipeline_schedule": "interleaved", "pipeline_parallel_size": 1},
            "needs pipeline_parallel_size 2 or more",
        ),
        ({"virtual_pipeline_stages": 1}, "1 is not accepted; it must be a whole number"),
        (
            {"num_gpus": 2, "pipeline_parallel_size": 2, "virtual_pipeline_stages": 2},
            "virtual_pipeline_stages 2 is for pipeline_schedule interleaved, and it is 1f1b",
        ),
        ({"pipeline_layers": "2,x"}, "['2', 'x'] is not accepted; it must be a comma-separated"),
        ({"pipeline_layers": "2,1"}, "2,1 is for a pipeline; set pipeline_parallel_size to"),
        (
            {"num_gpus": 2, "pipeline_parallel_size": 2, "pipeline_layers": [1, 2, 1]},
            "pipeline_layers 1,2,1 has 3 numbers, and pipeline_parallel_size 2 needs 2",
        ),
        (
            {
                "num_gpus": 2,
                "pipeline_parallel_size": 2,
                "pipeline_schedule": "interleaved",
                "pipeline_layers": [1, 2],
            },
            "pipeline_parallel_size 2 x virtual_pipeline_stages 2 needs 4",
        ),
        (
            {"nnodes": 2, "node_rank": 2},
            "node_rank 2: machines are counted from 0, and nnodes is 2",
        ),
        ({"nnodes": 2, "train_batch_size": 3}, "not a multiple of the 2 data-parallel ranks"),
        ({"num_gpus": 2, "train_batch_size": 3}, "not a multiple of the 2 data-parallel ranks"),
        (
            {"num_gpus": 2, "train_batch_size": 8, "per_device_train_batch_size": 3},
            "train_batch_size 8 is not a multiple of per_device_train_batch_size 3 x 2 ranks; the "
            "nearest that are 6 and 12",
        ),
        (
            {"train_batch_size": 8, "per_device_train_batch_size": 3},
            "train_batch_size 8 is not a multiple of per_device_train_batch_size 3; the nearest "
            "that are 6 and 9",
        ),
        (
            {"gpu": "8xh100", "train_batch_size": 16, "gradient_accumulation_steps": 3},
            "train_batch_size 16 is not a multiple of gradient_accumulation_steps 3 x 8 ranks; the "
            "nearest that is 24",
        ),
        # What nears 8 must be a multiple of the micro-batch too.
        (
            {"num_gpus": 4, "train_batch_size": 10, "per_device_train_batch_size": 3},
            "per_device_train_batch_size 3 x 4 ranks; the nearest that is 12",
        ),
        (
            {
                "num_gpus": 2,
                "train_batch_size": 8,
                "per_device_train_batch_size": 3,
                "gradient_accumulation_steps": 2,
            },
            "per_device_train_batch_size 3 x gradient_accumulation_steps 2 x 2 ranks, which is 12",
        ),
        ({"quantization_bit": 4}, "quantization_bit: 4 needs finetuning_type: lora"),
        ({"qlora": True, "finetuning_type": "full"}, "contradict: both set finetuning_type"),
        ({"finetuning_type": "freeze"}, "freeze is not available yet; use full or lora"),
        ({"warmup_ratio": 3}, "3 is not a share of all steps"),
        ({"warmup_ratio": "some"}, "'some' is not a share of all steps"),
        ({"batch_size": 4}, "can mean two things"),
        ({"bf16": "perhaps"}, "'perhaps' is neither true nor false"),
        ({"resume_from_checkpoint": "out/checkpoint-5"}, "give `resume: true`"),
        ({"bf16": True, "precision": "fp32"}, "contradict: both set precision"),
        ({"lr": "1e-3", "learning_rate": "1e-4"}, "contradict: both set learning_rate"),
    ],
)
def test_complaints(settings: dict[str, Any], message: str) -> None:
    assert message in complaint(settings)


def test_all_complaints_at_once() -> None:
    lines = complaint({"seed": "x", "cutoff_len": 0, "overlong": "y"}).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["--cutoff_len", "--overlong", "--seed"]


def test_missing_model() -> None:
    with pytest.raises(ConfigError, match="model_name_or_path is missing; give it in"):
        load_job(None, {})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lerning-rate", "3"], "unknown flag --lerning_rate. Did you mean --learning_rate?"),
        (["stray"], "unexpected argument 'stray'"),
    ],
)
def test_unknown_flags(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_flags(*words)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "job.yaml is empty"),
        ("- a\n- b\n", "job.yaml holds a list; it must hold lines like"),
        ("just words", "job.yaml holds a str"),
        ("seed: 1\nseed: [\n", "job.yaml, line 3: "),
        ("seed: 1\nlr: 2\nseed: 3\n", "job.yaml, line 3: the key 'seed' is there twice"),
        ("seed: !!python/object:os.system 1\n", "job.yaml, line 1: "),
        ("seed: 2024-13-45\n", "job.yaml cannot be read: month must be"),
        ("output_dir: 2024-01-01\n", "it must be text or none; put it in quotes"),
        ("optimiser: {name: adamw}\n", "job.yaml: optimiser is not a known key."),
        ("seed: fast\nmodel_name_or_path: m\n", "job.yaml: seed: 'fast' is not accepted"),
        ("seed: 1\x00\n", "job.yaml: "),
        ("1: 2\n", "job.yaml: 1 is not a known key."),
    ],
)
def test_broken_yaml(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_yaml(tmp_path, text)
    assert message in str(caught.value)


def test_yaml_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file .*nowhere\.yaml"):
        load_job(tmp_path / "nowhere.yaml", {})
    with pytest.raises(ConfigError, match="cannot be read"):
        load_job(tmp_path, {})
    (tmp_path / "latin.yaml").write_bytes(b"dataset: \xe9")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_job(tmp_path / "latin.yaml", {})


@given(
    st.sampled_from([*Job.model_fields, *OTHER_NAMES]),
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.lists(st.integers() | st.text(max_size=3), max_size=2)
    | st.dictionaries(st.text(max_size=3), st.integers(), max_size=1),
)
def test_any_value_gives_a_job_or_a_complaint_that_names_its_key(key: str, value: Any) -> None:
    message = refusal({key: value})
    meant = "quantization_bit" if key.startswith("load_in_") else RENAMED.get(key, key)
    assert not message or key in message or meant in message


# Documentation


def test_the_page_of_keys_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "config.md"
    assert page.read_text() == document(), "run: python -m tightfit.cli.document_config"


def test_the_page_names_every_key() -> None:
    for key in (*Job.model_fields, *RENAMED, *NOT_YET):
        assert f"| `{key}` |" in document()


def test_accepted_values_are_told_for_every_key() -> None:
    assert all(accepted_by(key) for key in Job.model_fields)


def test_a_launchers_counts_are_what_neither_file_nor_flags_say(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("model_name_or_path: m\nnnodes: 3\n")
    job = load_job(path, {"tp": "4"}, {"num_gpus": 8, "nnodes": 2})
    assert (job.num_gpus, job.nnodes, job.tensor_parallel_size) == (8, 3, 4)
