"""Every mode of sharing with every model over twenty steps: one process's numbers, and its bill.

Most modes have a short test too (`test_sharding.py`, `test_tensor_parallel.py`, `test_stages.py`);
`benchmarks/modes.py` makes the table of them all, techniques included.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.engine import sharded_runs as runs
from tests.engine.compared_runs import losses, made, read

STEPS = 20
LOSS, NORM = 1e-5, 5e-4  # relative; each step's differences grow in the next
BYTES = 0.03


@pytest.mark.slow
@pytest.mark.parametrize("mode", runs.MODES)
def test_a_mode_is_one_process_in_numbers_and_its_bill_in_bytes(mode: str, tmp_path: Path) -> None:
    sets = runs.of_every_model(mode)
    made(tmp_path, sets, str(STEPS))
    for ranks, cases in sets.items():
        for case in cases:
            check(tmp_path, ranks, case)


def check(folder: Path, ranks: int, case: str) -> None:
    def numbers(who: str) -> Any:
        return read(folder, case, ranks, who)[0]

    alone = numbers("alone")
    found = [numbers(str(rank)) for rank in range(ranks)]
    assert losses(folder, case, ranks) == pytest.approx(alone["losses"], rel=LOSS), case
    for own in found:
        assert own["norms"] == pytest.approx(alone["norms"], rel=NORM), case
    for rank, who in runs.fake_names(case, ranks).items():
        billed, own = numbers(who), found[rank]
        assert billed["rest"][-1] == pytest.approx(min(own["rest"][2:]), rel=BYTES), case
        assert peak([billed["tables"]["1"]]) == pytest.approx(
            peak([own["tables"][str(step)] for step in range(runs.UNUSUAL + 1, STEPS)]), rel=BYTES
        ), case


def peak(steps: list[dict[str, Any]]) -> int:
    """Device bytes at the highest moment of a step; gloo's thread may hold a buffer in some."""
    return max(
        min(sum(table[phase]["device"].values()) for table in steps)
        for phase in ("forward", "backward", "step")
    )
