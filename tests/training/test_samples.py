"""Nothing happens to a row without a count in the report; the split depends on the seed only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tightfit.errors import DataError
from tightfit.facts.job import Job
from tightfit.training.samples import PreparedData, prepare_data


def qa(answer: str, question: str = "q") -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


def write(file: Path, rows: list[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture
def rows_file(tmp_path: Path) -> str:
    """20 answers of 1 to 20 words; every row is longer than the one before."""
    return write(tmp_path / "rows.jsonl", [qa("x " * count) for count in range(1, 21)])


def job(dataset: str, **keys: Any) -> Job:
    return Job.model_validate({"model_name_or_path": "m", "dataset": dataset, **keys})


def rows_of(samples: list[Any]) -> list[int]:
    return [sample.row for sample in samples]


def length_of_row(data: PreparedData, row: int) -> int:
    return next(len(sample.input_ids) for sample in data.train if sample.row == row)


def test_all_rows_become_samples(rows_file: str, tokenizer: PreTrainedTokenizerFast) -> None:
    data = prepare_data(job(rows_file), tokenizer)
    report = data.report
    assert rows_of(data.train) == list(range(1, 21))
    assert data.held_out == []
    assert (report.rows, report.train_samples, report.held_out_samples) == ({"messages": 20}, 20, 0)
    assert report.longest == max(len(sample.input_ids) for sample in data.train)
    assert report.tokens == sum(len(sample.input_ids) for sample in data.train)
    assert report.trained_tokens == sum(sample.trained_tokens for sample in data.train)
    assert report.length_quantiles == {
        50: length_of_row(data, 10),
        90: length_of_row(data, 18),
        99: length_of_row(data, 20),
    }


def test_lines_of_the_report(rows_file: str, tokenizer: PreTrainedTokenizerFast) -> None:
    plain = prepare_data(job(rows_file), tokenizer).report
    assert "rows: 20 (20 messages)" in plain.lines()
    assert not any("cutoff_len" in line for line in plain.lines())
    limit = plain.length_quantiles[50]
    cut = prepare_data(job(rows_file, cutoff_len=limit), tokenizer).report
    [line] = [line for line in cut.lines() if "truncated" in line]
    assert line == f"truncated to cutoff_len {limit}: 10 ({rows_file} row 11, 12, 13, 14, 15, ...)"


def test_overlong_drop(rows_file: str, tokenizer: PreTrainedTokenizerFast) -> None:
    limit = length_of_row(prepare_data(job(rows_file), tokenizer), 17)
    data = prepare_data(job(rows_file, cutoff_len=limit, overlong="drop"), tokenizer)
    assert rows_of(data.train) == list(range(1, 18))
    assert data.report.dropped.total == 3
    assert data.report.dropped.first == tuple((rows_file, row) for row in (18, 19, 20))
    assert data.report.truncated.total == data.report.cut_away.total == 0


def test_overlong_truncate(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    file = write(tmp_path / "d.jsonl", [qa("x"), qa("x " * 50), qa("x", question="word " * 50)])
    data = prepare_data(job(file, cutoff_len=40), tokenizer)
    assert rows_of(data.train) == [1, 2]
    assert len(data.train[1].input_ids) == len(data.train[1].labels) == 40
    assert data.report.truncated.first == ((file, 2),)
    assert data.report.cut_away.first == ((file, 3),)
    assert data.report.longest == 40


def test_overlong_error(rows_file: str, tokenizer: PreTrainedTokenizerFast) -> None:
    limit = length_of_row(prepare_data(job(rows_file), tokenizer), 13)
    with pytest.raises(DataError) as caught:
        prepare_data(job(rows_file, cutoff_len=limit, overlong="error"), tokenizer)
    message = str(caught.value)
    assert f"{rows_file}: of 20 rows, these are longer than cutoff_len {limit}: 7 (" in message
    assert "row 14, 15, 16, 17, 18, ...)" in message
    assert "raise cutoff_len" in message


@pytest.mark.parametrize("overlong", ["drop", "truncate"])
def test_no_rows_left(rows_file: str, tokenizer: PreTrainedTokenizerFast, overlong: str) -> None:
    with pytest.raises(DataError, match=r"no rows left: all 20 .* cutoff_len 2 .*raise cutoff_len"):
        prepare_data(job(rows_file, cutoff_len=2, overlong=overlong), tokenizer)


@pytest.mark.parametrize(("val_size", "count"), [(0.1, 2), (0.001, 1), (0.5, 10), (1, 1), (7, 7)])
def test_split_sizes(
    rows_file: str, tokenizer: PreTrainedTokenizerFast, val_size: float, count: int
) -> None:
    data = prepare_data(job(rows_file, val_size=val_size), tokenizer)
    assert len(data.held_out) == data.report.held_out_samples == count
    assert sorted(rows_of(data.train) + rows_of(data.held_out)) == list(range(1, 21))


def test_split_depends_on_the_seed_only(rows_file: str, tokenizer: PreTrainedTokenizerFast) -> None:
    def held_out(**keys: Any) -> list[int]:
        return rows_of(prepare_data(job(rows_file, val_size=5, **keys), tokenizer).held_out)

    assert held_out() == held_out() == held_out(seed=42, train_batch_size=3)
    assert held_out() == [2, 4, 5, 16, 17], "the split of a seed changed: old runs differ"
    assert len({tuple(held_out(seed=seed)) for seed in range(6)}) > 3


def test_eval_dataset(tmp_path: Path, rows_file: str, tokenizer: PreTrainedTokenizerFast) -> None:
    other = write(tmp_path / "eval.jsonl", [qa("held out"), {"text": "free text"}])
    data = prepare_data(job(rows_file, eval_dataset=other, val_size=0.5), tokenizer)
    assert len(data.train) == 20
    assert [(sample.file, sample.row) for sample in data.held_out] == [(other, 1), (other, 2)]
    assert data.report.rows == {"messages": 21, "text": 1}


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ({"val_size": 20}, "leaves nothing to train"),
        ({"val_size": 0.99}, "leaves nothing to train"),
        ({"val_size": 1.5}, "neither a share below 1 nor a number"),
        ({"train_batch_size": 21}, "20 samples to train on are fewer than one global batch of 21"),
        (
            {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "val_size": 5},
            "15 samples to train on are fewer than one global batch of 16",
        ),
        ({"dataset": None}, "set dataset"),
        ({"eval_dataset": "gone.jsonl"}, "'gone.jsonl' does not exist"),
    ],
)
def test_too_little_data(
    rows_file: str, tokenizer: PreTrainedTokenizerFast, keys: dict[str, Any], part: str
) -> None:
    with pytest.raises(DataError) as caught:
        prepare_data(job(**{"dataset": rows_file, **keys}), tokenizer)
    assert part in str(caught.value)
