"""What must be the same on all ranks, compared in words."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from threading import Thread

import pytest
import torch
from safetensors.torch import save_file
from torch._C._distributed_c10d import HashStore

from tightfit.errors import ConfigError, RankError
from tightfit.facts.job import Job
from tightfit.launch.agreement import check_agreement, differences, facts_of

SOON = timedelta(milliseconds=200)


def test_nothing_to_say_of_what_is_the_same() -> None:
    assert differences([{"torch": "2.13", "seed": "1"}] * 3) == ""


def test_each_difference_names_its_ranks() -> None:
    said = differences(
        [
            {"torch": "2.13", "seed": "1"},
            {"torch": "2.12", "seed": "1"},
            {"torch": "2.13", "seed": "1", "extra": "x" * 99},
            {"torch": "2.13", "seed": "1"},
        ]
    )
    assert said.splitlines()[1:] == [
        "  torch: 2.13 on ranks 0, 2-3, 2.12 on rank 1",
        f"  extra: nothing on ranks 0-1, 3, {'x' * 60}... on rank 2",
    ]


@pytest.mark.parametrize("other", ["1", "2"])
def test_every_rank_hears_the_same(other: str) -> None:
    store, heard = HashStore(), {}

    def rank(number: int, seed: str) -> None:
        try:
            check_agreement(store, number, 2, {"seed": seed}, timedelta(seconds=20))
            heard[number] = ""
        except ConfigError as error:
            # Rank 0, whose store may end with it, is the last to leave.
            heard[number] = str(error) if store.check(["heard1"]) else "too early"

    threads = [Thread(target=rank, args=(0, "1")), Thread(target=rank, args=(1, other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard[0] == heard[1]
    assert ("seed: 1 on rank 0, 2 on rank 1" in heard[0]) == (other == "2")


@pytest.mark.parametrize(("rank", "said"), [(0, "missing: ranks 1-2"), (1, "rank 0 did not come")])
def test_those_who_do_not_come_are_named(rank: int, said: str) -> None:
    with pytest.raises(RankError, match=said):
        check_agreement(HashStore(), rank, 3, {}, SOON)


def test_facts_of_a_job(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("12345")
    job = Job(model_name_or_path="m", dataset=str(data), node_rank=0, seed=7)
    facts = facts_of(job, {"layers": 2})
    assert (facts["seed"], facts[f"bytes of {data}"]) == ("7", "5")
    assert {"python", "torch", "transformers", "peft", "tightfit"} <= set(facts)
    assert not {"node_rank", "master_addr", "master_port"} & set(facts)
    assert facts["the model's config"] != facts_of(job, {"layers": 3})["the model's config"]
    data.unlink()
    assert facts_of(job, {})[f"bytes of {data}"] == "no file"


def test_weights_of_another_training_are_others(tmp_path: Path) -> None:
    """Of the same names and shapes, so that only values differ, near either end of the file."""

    def weights(number: int, at: int) -> str:
        folder = tmp_path / f"{number} at {at}"
        folder.mkdir()
        values = torch.zeros(300_000)
        values[at] = number
        save_file({"weight": values}, folder / "model.safetensors")
        return facts_of(Job(model_name_or_path=str(folder)), {})["the model's weights"]

    assert weights(0, 0) == weights(0, 7)
    assert len({weights(0, 1), weights(1, 2), weights(1, -2)}) == 3
    assert facts_of(Job(model_name_or_path="no/such"), {})["the model's weights"] == "no folder"
