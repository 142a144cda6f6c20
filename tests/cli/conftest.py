"""A job file on the tiny model, and a command line that needs no measuring."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

Rows = list[dict[str, Any]]


def conversation(question: str, answer: str) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps(conversation(f"What is {n}?", f"It is {n}.")) for n in range(8)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def job_file(tmp_path: Path, tiny_model_folder: Path, rows: Path) -> Callable[..., str]:
    """Writes job.yaml: plain training, two steps of two conversations, unless keys say else."""

    def write(**keys: Any) -> str:
        settings = {
            "model_name_or_path": str(tiny_model_folder),
            "dataset": str(rows),
            "output_dir": str(tmp_path / "run"),
            "per_device_train_batch_size": 2,
            "max_steps": 2,
            "loss": "full",
            "gradient_checkpointing": False,
            "offload_optimizer": "none",
        }
        settings |= keys
        path = tmp_path / "job.yaml"
        given = {key: value for key, value in settings.items() if value is not ...}
        path.write_text(yaml.safe_dump(given))
        return str(path)

    return write


@pytest.fixture
def no_measuring() -> Iterator[None]:
    from tightfit.planner import prepared
    from tightfit.planner.rates import Rates

    rates = Rates(
        **{
            field.name: 1e-6 if field.name.endswith("operation_seconds") else 1e10
            for field in dataclasses.fields(Rates)
            if field.type == "float"
        }
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared, "measure_rates", lambda device, dtype: rates)
        yield
