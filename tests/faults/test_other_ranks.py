"""Ranks that are not the same find it at the start, before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.faults.driver import Fault, named, run, run_each


def test_another_key_and_other_data_are_named_by_every_rank(
    job: dict[str, Any], tmp_path: Path
) -> None:
    rows = Path(job["dataset"]).read_text().splitlines(keepends=True)
    changed = tmp_path / "rows.jsonl"
    changed.write_text("".join(rows[:-1]))
    mine = {**job, "output_dir": str(tmp_path / "run")}
    found = run_each(tmp_path, [mine, {**mine, "seed": 7, "dataset": str(changed)}])
    for rank, (code, said) in enumerate(found):
        assert code == 2, said
        assert said.startswith(named(Fault("versions", rank=rank)))
        assert "the ranks are not the same" in said
        assert "seed: 42 on rank 0, 7 on rank 1" in said
        assert "training samples: 9 on rank 0, 8 on rank 1" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_another_version_is_a_mistake_that_no_restart_mends(
    job: dict[str, Any], tmp_path: Path
) -> None:
    words = ["--output_dir", str(tmp_path / "run"), "--max_restarts", "1"]
    ended = run(tmp_path, job, *words, fault=Fault("versions", "other", after=0))
    assert (ended.code, len(ended.errors), ended.left_behind) == (2, 1, [])
    assert "another one on rank 1" in ended.err
    assert not (tmp_path / "run").exists()
