"""Weights are those of the model's config, or the message says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tightfit.bill.table import Kind
from tightfit.engine.apply import fit
from tightfit.errors import InputError, ModelNotFoundError
from tightfit.ledger import Ledger
from tightfit.policies import Policies, PrecisionPolicy, Tier
from tightfit.training.model import check_weights, open_model

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@pytest.fixture
def folder(tiny_model_folder: Path, tmp_path: Path) -> Path:
    for path in tiny_model_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_comes_in_the_type_asked_for_and_is_counted(folder: Path, dtype: torch.dtype) -> None:
    with Ledger() as ledger:
        model, weights = open_model(folder, dtype)
        engine = fit(model, Policies(precision=PrecisionPolicy(NAMES[dtype])), values=weights)
    parameters = list(engine.model.parameters())
    assert {parameter.dtype for parameter in parameters} == {dtype}
    size = sum(parameter.nbytes for parameter in parameters)
    assert ledger.kinds(Tier.DEVICE)[Kind.PARAMETERS] == size


def test_how_it_generates_comes_with_it(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    model, _ = open_model(folder, torch.float32)
    assert model.generation_config is not None
    assert model.generation_config.eos_token_id == 7
    assert model.name_or_path == str(folder)


@pytest.mark.parametrize("change", ["missing", "deeper", "reshaped"])
def test_weights_of_another_model(folder: Path, change: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    if change == "missing":
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    elif change == "deeper":
        config["num_hidden_layers"] += 1
    else:
        config["intermediate_size"] *= 2
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"not those of its config\.json"):
        open_model(folder, torch.float32)


def test_broken_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"half a")
    with pytest.raises(InputError, match="is broken"):
        open_model(folder, torch.float32)


def test_pickles_are_never_read(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(ModelNotFoundError, match="pickles, which are never read"):
        check_weights(folder)
    with pytest.raises(ModelNotFoundError, match="no weights"):
        open_model(folder, torch.float32)


def test_folders_with_weights_and_names_pass(folder: Path) -> None:
    check_weights(folder)
    check_weights(Path("org/name"))
