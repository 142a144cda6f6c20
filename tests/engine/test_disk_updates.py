"""Parameters on the disk and states on the host: few buffers, and what is left of a failed step.

That the numbers are those of other placements is in test_disk_parameters.py and test_placement.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.engine.on_disk import PIECE, small_pieces
from tests.engine.test_disk_parameters import (
    HOST,
    NVME,
    SIZES,
    SMALL,
    assert_same_model,
    free_buffers,
    give_up_step,
    train,
)
from tests.engine.test_disk_states import Faults
from transformers import LlamaForCausalLM

from tightfit.bill.table import Kind
from tightfit.engine.apply import fit
from tightfit.engine.disk import DiskError
from tightfit.engine.disk_parameters import FETCH_BUFFERS
from tightfit.engine.engine import Engine
from tightfit.engine.pipeline import BUFFERS
from tightfit.ledger import Ledger
from tightfit.policies import PlacementPolicy, Policies, PrecisionPolicy, Tier

__all__ = ["small_pieces"]
pytestmark = pytest.mark.usefixtures("small_pieces")

Make = Callable[..., LlamaForCausalLM]
MakeBatch = Callable[..., tuple[torch.Tensor, torch.Tensor]]
PLACE = PlacementPolicy(HOST, HOST, NVME, lazy_step=True)
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make_policies(precision: str, place: PlacementPolicy = PLACE) -> Policies:
    return Policies(placement=place, precision=PrecisionPolicy(precision))


@pytest.mark.parametrize("precision", TYPES)
def test_states_are_in_memory_and_values_pass_through_few_buffers(
    make_model: Make, make_batch: MakeBatch, tmp_path: Path, precision: str
) -> None:
    width = TYPES[precision].itemsize
    with Ledger() as counted:
        model = make_model(TYPES[precision], **SIZES)
        counted.adopt(model, HOST)
        engine = fit(model, make_policies(precision), offload_folder=tmp_path)
        parameters = list(engine.model.parameters())
        values = sum(p.numel() for p in parameters)
        places = sum(-(-p.numel() * width // 4096) * 4096 for p in parameters)
        assert counted.kinds(NVME) == {Kind.PARAMETERS: 2 * places}
        host = counted.kinds(HOST)
        assert host[Kind.OPTIMIZER_STATES] == 8 * values + 4 * len(parameters)
        assert host.get(Kind.MASTER_WEIGHTS, 0) == (4 * values if width == 2 else 0)
        assert Kind.PARAMETERS not in host
        assert Kind.PARAMETERS not in counted.kinds(Tier.DEVICE)
        buffers = (BUFFERS + FETCH_BUFFERS) * width * PIECE
        landing = host[Kind.TRANSFER] - buffers  # of a gradient that is added up
        assert landing == max(p.numel() for p in parameters) * width
        assert engine.optimizer.written_bytes == 0
        train(engine, make_batch, 2)
        counted.set_section(*counted.section)
        before = counted.total_bytes(HOST)
        train(engine, make_batch, 1)
        assert counted.total_bytes(HOST) == before
    assert engine.optimizer.written_bytes == places


@pytest.mark.parametrize("precision", TYPES)
def test_another_model_goes_on_from_saved_states(
    make_model: Make, make_batch: MakeBatch, tmp_path: Path, precision: str
) -> None:
    def make(place: PlacementPolicy) -> Engine:
        model = make_model(TYPES[precision], **SIZES)
        return fit(model, make_policies(precision, place), offload_folder=tmp_path)

    first, second, near = make(PLACE), make(PLACE), make(PlacementPolicy(HOST, HOST, HOST))
    train(first, make_batch, 2)
    model, optimizer = first.model.state_dict(), first.optimizer.state_dict()
    for other in (second, near):
        other.model.load_state_dict(model)
        other.optimizer.load_state_dict(optimizer)
    expected = train(first, make_batch, 2, first=2)
    for other in (second, near):
        assert train(other, make_batch, 2, first=2) == expected
        assert_same_model(first.model, other.model)


@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "at once"])
@pytest.mark.parametrize(("verb", "how"), [("preadv", "EIO"), ("pwritev", "ENOSPC")])
def test_a_step_that_fails_leaves_the_parameters_of_the_one_before(
    make_model: Make, make_batch: MakeBatch, tmp_path: Path, verb: str, how: str, lazy: bool
) -> None:
    """At each request: an error, parameters as they were, all buffers free, and it can go on."""
    policies = make_policies("fp32", replace(PLACE, lazy_step=lazy))
    engine = fit(make_model(**SMALL), policies, offload_folder=tmp_path)
    train(engine, make_batch, 1)
    values, passing = engine._stream.on_disk, engine.optimizer._passing  # type: ignore[union-attr]
    assert values is not None
    assert passing is not None
    parameters = list(engine.model.parameters())
    kept = [values.read(p).clone() for p in parameters]
    with pytest.MonkeyPatch.context() as patch:
        requests = Faults(patch, verb, -1, how)
        engine.backward(engine.loss(*make_batch(1), 30))
        before_step = requests.count
        engine.discard_gradients()
    # Each of the 11 parameters is read and written once by a step.
    for failing in range(before_step, before_step + len(parameters)):
        with pytest.MonkeyPatch.context() as patch:
            faults = Faults(patch, verb, failing, how)
            with pytest.raises(DiskError):
                train(engine, make_batch, 1, first=1)
        assert faults.count > failing
        give_up_step(engine)
        assert all(map(torch.equal, map(values.read, parameters), kept))
        assert free_buffers(values._buffers) == FETCH_BUFFERS
        assert free_buffers(values._disk.buffers) == BUFFERS
    train(engine, make_batch, 1, first=1)
    assert not any(map(torch.equal, map(values.read, parameters), kept))
