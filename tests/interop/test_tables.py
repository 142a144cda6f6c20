"""Tables of keys are complete: every name of the tools themselves stands in them."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.interop.deepspeed_names import names_of_deepspeed
from transformers import TrainingArguments

from tightfit.facts.job import Job
from tightfit.interop.accelerate import ACCELERATE_TABLE, PLUGIN_TABLE
from tightfit.interop.deepspeed_keys import DEEPSPEED_TABLE
from tightfit.interop.formats import FORMATS
from tightfit.interop.fsdp import FSDP_TABLE
from tightfit.interop.huggingface import SPECIAL_KEYS
from tightfit.interop.llamafactory_keys import LLAMAFACTORY_TABLE
from tightfit.interop.other_names import OTHER_NAMES
from tightfit.interop.transformers_keys import TRANSFORMERS_TABLE

HERE = Path(__file__).parent


def names_in(file: str) -> list[str]:
    lines = (HERE / file).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def is_known(name: str) -> bool:
    return name in DEEPSPEED_TABLE or any(key.startswith(f"{name}.") for key in DEEPSPEED_TABLE)


def test_every_key_of_deepspeed_has_an_entry() -> None:
    names = names_in("deepspeed_names.txt")
    assert len(names) > 130
    unknown = [name for name in names if not is_known(name) and name != "bfloat16"]
    assert not unknown, f"give {unknown} an entry in deepspeed_keys.py"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_the_list_of_names_is_that_of_deepspeed_itself() -> None:
    assert set(names_of_deepspeed()) == set(names_in("deepspeed_names.txt"))


def test_every_argument_of_llamafactory_has_an_entry() -> None:
    known = {*LLAMAFACTORY_TABLE, *TRANSFORMERS_TABLE, *Job.model_fields}
    unknown = set(names_in("llamafactory_names.txt")) - known
    assert not unknown, f"give {unknown} an entry in llamafactory_keys.py"


def test_every_training_argument_has_an_entry() -> None:
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    unknown = fields - TRANSFORMERS_TABLE.keys()
    assert not unknown, f"give {unknown} an entry in transformers_keys.py"


def test_every_key_of_accelerate_has_an_entry() -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    fields = {field.name for field in dataclasses.fields(config_args.ClusterConfig)}
    blocks = {"deepspeed_config", "fsdp_config", "parallelism_config"}
    unknown = fields - blocks - ACCELERATE_TABLE.keys()
    assert not unknown, f"give {unknown} an entry in accelerate.py"


def test_every_flag_of_accelerate_launch_has_an_entry() -> None:
    launch = pytest.importorskip("accelerate.commands.launch")
    flags = {
        option.lstrip("-").replace("-", "_")
        for action in launch.launch_command_parser()._actions
        for option in action.option_strings
    }
    fsdp = {flag.removeprefix("fsdp_") for flag in flags if flag.startswith("fsdp_")}
    assert not fsdp - FSDP_TABLE.keys()
    deepspeed = {flag for flag in flags if flag.startswith(("deepspeed_", "zero", "offload_"))}
    assert not deepspeed - PLUGIN_TABLE.keys()
    parallel = {flag for flag in flags if flag.startswith("parallelism_config_")}
    assert not {f"parallelism_config.{flag}" for flag in parallel} - ACCELERATE_TABLE.keys()


@pytest.mark.parametrize("name", FORMATS)
def test_entries_say_what_happens(name: str) -> None:
    for key, entry in FORMATS[name].table.items():
        assert key == entry.key
        says = entry.becomes or entry.here or entry.usual
        assert says, f"{key} becomes nothing and says nothing"
        for own in entry.becomes.split(", ") if entry.becomes else ():
            known = {*Job.model_fields, *OTHER_NAMES}
            assert own in known or " " in own, f"{key} becomes {own}, which is no key of a job"
        assert not entry.here.endswith(".")


def test_what_has_a_meaning_of_its_own_is_in_a_table() -> None:
    assert {*TRANSFORMERS_TABLE, *LLAMAFACTORY_TABLE} >= set(SPECIAL_KEYS)
