"""The catalogue: names, and that its models have the published numbers of parameters."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest

from tightfit.dry_run.config import load_config
from tightfit.facts import catalogue
from tightfit.facts.catalogue import (
    catalogue_names,
    family_of,
    find_in_catalogue,
    nearest_names,
)
from tightfit.facts.config_checks import check_config
from tightfit.facts.model_spec import ModelSpec
from tightfit.facts.parameter_count import ParameterCounts

CASES = Path(__file__).parents[1] / "cases" / "public_parameter_counts.json"
PUBLISHED = json.loads(CASES.read_text(encoding="utf-8"))


def spec(name: str) -> ModelSpec:
    entry = find_in_catalogue(name)
    assert entry is not None
    return ModelSpec(entry.name, "catalogue", entry.config, entry.assumptions)


def counts_of(name: str) -> ParameterCounts:
    counts = spec(name).parameter_counts()
    assert counts is not None
    return counts


def is_published(count: int, published: int | str) -> bool:
    """An exact count, or one such as `30.5B`: right to one unit of its last digit."""
    if isinstance(published, int):
        return count == published
    unit = {"B": 10**9, "M": 10**6}[published[-1]]
    number = Decimal(published[:-1])
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int)
    return abs(Decimal(count) / unit - number) < Decimal(10) ** exponent


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row["model"])
def test_totals_are_the_published_ones(row: dict[str, int | str]) -> None:
    total = counts_of(str(row["model"])).total
    assert is_published(total, row["total"]), f"{total:,}, published: {row}"


@pytest.mark.parametrize(
    "row", [row for row in PUBLISHED if "active" in row], ids=lambda row: row["model"]
)
def test_active_parameters_are_the_published_ones(row: dict[str, int | str]) -> None:
    counts = counts_of(str(row["model"]))
    active = counts.active - (0 if row["active_counts_embedding"] else counts.embedding)
    assert active < counts.total
    assert is_published(active, row["active"]), f"{active:,}, published: {row}"


def test_every_original_has_a_published_total() -> None:
    originals = {
        name
        for file in Path(catalogue.__file__).with_name("models").glob("*.json")
        for name, fields in json.loads(file.read_text()).items()
        if "like" not in fields
    }
    assert originals <= {row["model"] for row in PUBLISHED}
    assert all(row["source"] for row in PUBLISHED)


@pytest.mark.parametrize("name", catalogue_names())
def test_transformers_accepts_every_config(name: str) -> None:
    known = spec(name)
    check_config(known)
    loaded = load_config(known.config)
    assert (loaded.num_hidden_layers, loaded.vocab_size) == (known.num_layers, known.vocab_size)
    assert loaded.hidden_size == known.hidden_size
    assert loaded.tie_word_embeddings == known.tied
    saved = ModelSpec(name, "folder", loaded.to_dict())
    check_config(saved)
    assert saved.parameter_counts() == known.parameter_counts()
    assert known.max_positions
    assert known.config["architectures"]


def test_names_are_unique_in_any_case() -> None:
    names = [name.casefold() for name in catalogue_names()]
    assert len(names) == len(set(names)) > 400


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen/qwen2.5-7b", "Qwen/Qwen2.5-7B"),
        ("QWEN2.5-7B", "Qwen/Qwen2.5-7B"),
        ("gpt2", "openai-community/gpt2"),
        ("THUDM/GLM-4-9B-0414", "THUDM/GLM-4-9B-0414"),
        ("phi-2", "microsoft/phi-2"),
        ("Llama-2-7b-hf", "meta-llama/Llama-2-7b-hf"),
        ("Qwen-7B-Chat", "Qwen/Qwen-7B-Chat"),
    ],
)
def test_finds_full_names_and_last_parts(name: str, expected: str) -> None:
    found = find_in_catalogue(name)
    assert found is not None
    assert found.name == expected


def test_what_is_not_there() -> None:
    assert find_in_catalogue("nobody/gpt2") is None
    assert find_in_catalogue("") is None
    assert nearest_names("Qwen/Qwen2.5-8B")[0].startswith("Qwen/Qwen2.5")
    assert nearest_names("zzzzzzzz") == []


def test_a_config_is_a_copy() -> None:
    found = find_in_catalogue("gpt2")
    assert found is not None
    found.config["n_layer"] = 99
    assert spec("gpt2").num_layers == 12


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Qwen/Qwen-14B-Chat", "no 'qwen' architecture.* a qwen2 model with the same parameters"),
        ("google/gemma-3-12b-it", "only the text part of this gemma3 model"),
        ("openai/gpt-oss-20b", "published in mxfp4"),
    ],
)
def test_what_is_not_the_published_model_is_said(name: str, said: str) -> None:
    (assumption,) = spec(name).assumptions
    assert re.search(said, assumption)
    assert not {"equivalent_of", "text_part_of", "published_in", "like"} & spec(name).config.keys()


def test_most_models_need_no_assumption() -> None:
    assert spec("Qwen/Qwen3-8B").assumptions == ()


def test_the_catalogue_is_read_when_it_is_asked_for_and_without_torch() -> None:
    program = (
        "import sys, tightfit.facts.model_spec as m, tightfit.facts.catalogue as c;"
        "assert c._entries.cache_info().currsize == 0;"
        "assert m.load_model_spec('gpt2').parameter_counts().total == 124439808;"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("name", "has", "lacks"),
    [
        ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2-7B"),
        ("qwen3-32b", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen2.5-32B"),
        ("meta-llama/Llama-2-70b-hf", "meta-llama/Llama-2-7b-hf", "meta-llama/Llama-3.1-8B"),
        ("Mixtral-8x22B-v0.1", "mistralai/Mixtral-8x7B-v0.1", "mistralai/Mistral-7B-v0.1"),
        ("HuggingFaceTB/SmolLM2-1.7B", "HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM3-3B"),
    ],
)
def test_a_family_is_one_name_in_several_sizes(name: str, has: str, lacks: str) -> None:
    names = [entry.name for entry in family_of(name)]
    own = find_in_catalogue(name)
    assert own is not None
    assert {own.name, has} <= set(names)
    assert lacks not in names


def test_a_folder_has_no_family() -> None:
    assert family_of("path/to/model") == []
