"""The ledger's counts, held against exact numbers, against `gc` and against a plain model of it."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import AutoModelForCausalLM

from tightfit import ledger
from tightfit.bill.table import Kind, Phase
from tightfit.dry_run.ranks import fake_ranks
from tightfit.engine.apply import fit
from tightfit.ledger import Ledger, local_part
from tightfit.policies import Policies, Tier

DEVICE, HOST = Tier.DEVICE, Tier.HOST


def test_allocation_and_free() -> None:
    with Ledger() as counting:
        assert counting.total_bytes(DEVICE) == 0
        tensor = torch.zeros(100)
        assert counting.total_bytes(DEVICE) == 400
        other = torch.zeros(10, dtype=torch.bfloat16)
        assert counting.total_bytes(DEVICE) == 420
        del tensor
        assert counting.total_bytes(DEVICE) == 20
        del other
        assert counting.total_bytes(DEVICE) == 0
    assert counting.peak_bytes(DEVICE) == 420
    assert counting.peak_bytes(HOST) == 0


def test_views_and_in_place_operations_allocate_nothing() -> None:
    with Ledger() as counting:
        tensor = torch.zeros(10, 10)
        views = [tensor[2:], tensor.T, tensor.view(-1), tensor.detach(), *tensor.unbind()]
        views += [tensor.reshape(5, 20), tensor.expand(3, 10, 10), *tensor.split(3), tensor.data]
        tensor.add_(1).mul_(2)
        torch.add(tensor, 1, out=tensor)
        assert counting.total_bytes(DEVICE) == 400
        del tensor
        assert counting.total_bytes(DEVICE) == 400, "a view keeps the storage"
        views.clear()
        assert counting.total_bytes(DEVICE) == 0


def test_the_whole_storage_is_counted_behind_a_small_output() -> None:
    with Ledger() as counting:
        row = torch.zeros(10, 10)[0]
        assert row.numel() == 10
        assert counting.total_bytes(DEVICE) == 400


def test_tensors_made_from_data_are_counted() -> None:
    with Ledger() as counting:
        tensor = torch.tensor([1.0, 2.0])
        assert counting.total_bytes(DEVICE) == 8
        del tensor
        assert counting.total_bytes(DEVICE) == 0


def test_nested_outputs_are_counted() -> None:
    with Ledger() as counting:
        tensor = torch.zeros(8, 4)
        copies = torch._foreach_add([tensor, tensor], 1.0)
        assert counting.total_bytes(DEVICE) == 3 * 128
        values, indices = tensor.max(dim=1)
        assert counting.total_bytes(DEVICE) == 3 * 128 + 8 * 4 + 8 * 8
        del copies, values, indices
        assert counting.total_bytes(DEVICE) == 128


def test_storages_that_grow_and_shrink_are_counted_again() -> None:
    with Ledger() as counting:
        tensor = torch.zeros(10)
        tensor.resize_(100)
        assert counting.total_bytes(DEVICE) == 400
        out = torch.empty(0)
        torch.add(torch.ones(25), 1, out=out)
        assert counting.total_bytes(DEVICE) == 500
        tensor.untyped_storage().resize_(0)
        assert counting.total_bytes(DEVICE) == 100
        tensor.untyped_storage().resize_(800)
        assert counting.total_bytes(DEVICE) == 900
        del tensor, out
        assert counting.total_bytes(DEVICE) == 0
    assert counting.peak_bytes(DEVICE) == 900


def test_growing_over_the_limit_raises() -> None:
    with Ledger(limits={DEVICE: 100}) as counting:
        tensor = torch.zeros(10)
        with pytest.raises(torch.OutOfMemoryError, match="device tier over its limit"):
            tensor.untyped_storage().resize_(200)
        del tensor
        assert counting.total_bytes(DEVICE) == 0


def test_resize_is_plain_again_after_the_ledger() -> None:
    plain = torch.UntypedStorage.resize_
    with Ledger(), Ledger():
        assert torch.UntypedStorage.resize_ is not plain
    assert torch.UntypedStorage.resize_ is plain


def test_marks_move_between_kinds_and_tiers() -> None:
    with Ledger() as counting:
        tensor = torch.zeros(100)
        assert counting.kinds(DEVICE) == {Kind.TEMPORARIES: 400}
        counting.mark(tensor[3:], Kind.PARAMETERS)
        assert counting.kinds(DEVICE) == {Kind.PARAMETERS: 400}
        counting.mark(tensor, Kind.OPTIMIZER_STATES, HOST)
        assert counting.kinds(DEVICE) == {}
        assert counting.kinds(HOST) == {Kind.OPTIMIZER_STATES: 400}
        counting.mark(tensor, Kind.MASTER_WEIGHTS)
        assert counting.kinds(HOST) == {Kind.MASTER_WEIGHTS: 400}, "a mark without a tier stays"
        del tensor
        assert counting.kinds(HOST) == {}


def test_marking_counts_what_was_made_before_and_follows_it() -> None:
    tensor = torch.zeros(100)
    with Ledger() as counting:
        tensor.add_(1)
        counting.mark(tensor, Kind.BUFFERS)
        counting.mark(tensor, Kind.BUFFERS)
        assert counting.total_bytes(DEVICE) == 400
        del tensor
        assert counting.total_bytes(DEVICE) == 0


def test_a_mark_renames_the_bytes_of_the_peak_it_makes() -> None:
    with Ledger() as counting:
        counting.mark(torch.zeros(100), Kind.LOGITS)
        assert counting.sections()[Phase.LOAD, ""][DEVICE] == {Kind.LOGITS: 400}


def test_labels() -> None:
    with Ledger() as counting:
        with counting.labelled(Kind.GRADIENTS, HOST):
            first = torch.zeros(1)
            with counting.labelled(Kind.BUFFERS, None):
                second = torch.zeros(2)
            third = torch.zeros(3)
        fourth = torch.zeros(4)
        assert counting.kinds(HOST) == {Kind.GRADIENTS: 16}
        assert counting.kinds(DEVICE) == {Kind.BUFFERS: 8, Kind.TEMPORARIES: 16}
        del first, second, third, fourth


def test_a_label_ends_with_an_exception() -> None:
    with Ledger() as counting:
        with pytest.raises(ValueError, match="inside"), counting.labelled(Kind.BUFFERS, HOST):
            raise ValueError("inside")
        tensor = torch.zeros(1)
        assert counting.kinds(DEVICE) == {Kind.TEMPORARIES: tensor.nbytes}


def test_storages_of_the_other_device_are_on_the_host() -> None:
    with Ledger(torch.device("cuda")) as counting:
        tensor = torch.zeros(10)
        with counting.labelled(Kind.BUFFERS, None):
            labelled = torch.zeros(1)
        assert (counting.total_bytes(DEVICE), counting.total_bytes(HOST)) == (0, 44)
        del tensor, labelled


def test_meta_tensors_take_nothing() -> None:
    with Ledger() as counting:
        tensor = torch.zeros(1000, device="meta")
        counting.mark(tensor + 1, Kind.BUFFERS)
        counting.adopt(nn.Linear(10, 10, device="meta"))
        assert [counting.total_bytes(tier) for tier in Tier] == [0] * len(Tier)


def test_fake_tensors_count_as_real_ones_do() -> None:
    def program() -> int:
        with Ledger() as counting:
            layer = nn.Linear(20, 30)
            out = layer(torch.ones(5, 20)).relu().sum()
            out.backward()
            tensor = torch.tensor([1.0, 2.0, 3.0])
            tensor.resize_(50)
        return counting.peak_bytes(DEVICE)

    real = program()
    with FakeTensorMode():
        assert program() == real


def test_adopt_counts_shared_parameters_once() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    module[1].weight = module[0].weight
    module[0].weight.grad = torch.zeros(4, 4)
    with Ledger() as counting:
        counting.adopt(module)
        assert counting.kinds(DEVICE) == {
            Kind.PARAMETERS: (16 + 4 + 4 + 4 + 4) * 4,
            Kind.GRADIENTS: 64,
            Kind.BUFFERS: 4 * 4 + 4 * 4 + 8,
        }


def test_what_lives_when_a_section_begins_is_in_its_peak() -> None:
    with Ledger() as counting:
        tensor = torch.zeros(100)
        before = counting.set_section(Phase.STEP)
        assert before == (Phase.LOAD, "")
        del tensor
        counting.set_section(Phase.SAVE, "files")
        small = torch.zeros(5)
        counting.set_section(Phase.STEP)
        table = counting.table()
        del small
    assert table.phase_peak_bytes(Phase.LOAD, DEVICE) == 400
    assert table.phase_peak_bytes(Phase.STEP, DEVICE) == 400
    assert table.phase_peak_bytes(Phase.SAVE, DEVICE) == 20
    assert counting.sections()[Phase.SAVE, "files"][DEVICE] == {Kind.TEMPORARIES: 20}


def test_a_phase_ends_where_it_began() -> None:
    with Ledger() as counting:
        counting.set_section(Phase.FORWARD, "head")
        with ledger.phase(Phase.EVAL):
            assert counting.section == (Phase.EVAL, "")
        assert counting.section == (Phase.FORWARD, "head")
        with pytest.raises(KeyError, match="inside"), ledger.phase(Phase.EVAL):
            raise KeyError("inside")
        assert counting.section == (Phase.FORWARD, "head")


def test_kinds_of_what_forward_makes_depend_on_gradients() -> None:
    with Ledger() as counting:
        counting.set_section(Phase.FORWARD)
        kept = torch.zeros(1)
        with torch.no_grad():
            passing = torch.zeros(2)
        assert counting.kinds(DEVICE) == {Kind.ACTIVATIONS: 4, Kind.TEMPORARIES: 8}
        del kept, passing


def test_the_peak_of_each_tier_has_its_own_moment() -> None:
    with Ledger() as counting:
        first = torch.zeros(100)
        del first
        with counting.labelled(Kind.BUFFERS, HOST):
            second = torch.zeros(10)
        third = torch.zeros(1)
        del second, third
    assert counting.table().peaks[Phase.LOAD][DEVICE] == {Kind.TEMPORARIES: 400}
    assert counting.table().peaks[Phase.LOAD][HOST] == {Kind.BUFFERS: 40}


def test_without_a_ledger_everything_does_nothing() -> None:
    assert ledger.active() is None
    tensor = torch.zeros(1)
    ledger.mark(tensor, Kind.BUFFERS)
    ledger.set_phase(Phase.STEP)
    with ledger.labelled(Kind.BUFFERS), ledger.phase(Phase.EVAL):
        assert ledger.active() is None


def test_nested_ledgers_both_count_and_marks_go_to_the_inner() -> None:
    with Ledger() as outer:
        first = torch.zeros(10)
        with Ledger() as inner:
            assert ledger.active() is inner
            second = torch.zeros(5)
            ledger.mark(second, Kind.BUFFERS)
            assert inner.kinds(DEVICE) == {Kind.BUFFERS: 20}
        assert ledger.active() is outer
        assert outer.kinds(DEVICE) == {Kind.TEMPORARIES: 60}
        del first, second
        assert (outer.total_bytes(DEVICE), inner.total_bytes(DEVICE)) == (0, 0)


def test_an_exception_leaves_no_ledger_behind() -> None:
    with pytest.raises(ValueError, match="inside"), Ledger() as counting:
        raise ValueError("inside")
    tensor = torch.zeros(10)
    assert ledger.active() is None
    assert counting.total_bytes(DEVICE) == 0
    del tensor


def test_storages_are_followed_after_the_ledger_is_left() -> None:
    with Ledger() as counting:
        tensor = torch.zeros(10)
    uncounted = torch.zeros(10)
    assert counting.total_bytes(DEVICE) == 40
    del tensor
    assert counting.total_bytes(DEVICE) == 0
    with counting:
        again = torch.zeros(2)
        assert counting.total_bytes(DEVICE) == 8
    del uncounted, again


def test_sizes_that_changed_while_the_ledger_was_away_are_caught_up_with() -> None:
    tensor = torch.zeros(10)
    with Ledger() as counting:
        counting.mark(tensor, Kind.COLLECTIVES)
    tensor.untyped_storage().resize_(0)
    assert counting.total_bytes(DEVICE) == 40
    with counting:
        assert counting.total_bytes(DEVICE) == 0
        tensor.untyped_storage().resize_(80)
        assert counting.kinds(DEVICE) == {Kind.COLLECTIVES: 80}


def test_of_a_shared_tensor_this_ranks_part_counts() -> None:
    module = nn.Linear(6, 12, bias=False)
    with fake_ranks(4):
        mesh = init_device_mesh("cpu", (4,))
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(0)]))
        module.weight.grad = DTensor.from_local(torch.ones(3, 6), mesh, [Shard(0)])
        with Ledger() as counting:
            counting.adopt(module)
            part = 4 * 3 * 6  # 12 rows over 4 ranks
            assert counting.kinds(DEVICE) == {Kind.PARAMETERS: part, Kind.GRADIENTS: part}
    assert local_part(module.weight).shape == (3, 6)
    plain = torch.zeros(1)
    assert local_part(plain) is plain


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_operations_on_shared_tensors_count_what_this_rank_makes(fake: bool) -> None:
    """torch finds out the shape of a result from whole fake tensors, which take nothing."""
    with fake_ranks(4):
        mesh = init_device_mesh("cpu", (4,))
        with FakeTensorMode() if fake else nullcontext(), Ledger() as counting:  # type: ignore[no-untyped-call]
            rows = 50 if fake else 100  # torch remembers the shapes it has found out
            shared = DTensor.from_local(torch.ones(rows), mesh, [Shard(0)])
            before = counting.total_bytes(DEVICE)
            tripled = shared * 3.25
            assert tripled.shape == (4 * rows,)
            assert counting.total_bytes(DEVICE) == before + 4 * rows
            assert counting.peak_bytes(DEVICE) == before + 4 * rows


def test_chapters_keep_what_comes_twice_apart() -> None:
    with Ledger() as counting:
        for chapter, size in (("", 10), ("again ", 5)):
            counting.chapter = chapter
            ledger.set_phase(Phase.FORWARD)
            counting.set_section(Phase.FORWARD, "head")
            tensor = torch.zeros(size)
            del tensor
    totals = {
        section: sum(tiers[DEVICE].values())
        for section, tiers in counting.sections().items()
        if section[0] is Phase.FORWARD
    }
    assert totals[Phase.FORWARD, "head"] == 40
    assert totals[Phase.FORWARD, "again head"] == 20
    assert counting.table().phase_peak_bytes(Phase.FORWARD, DEVICE) == 40


def test_addresses_that_are_used_again_are_not_confused() -> None:
    addresses: set[int] = set()
    with Ledger() as counting:
        for size in range(1, 200):
            tensor = torch.empty(size)
            addresses.add(tensor.untyped_storage()._cdata)
            assert counting.total_bytes(DEVICE) == 4 * size
            del tensor
    assert len(addresses) < 199, "no address was used twice: this test shows nothing"


def test_garbage_cycles_are_counted_until_they_are_collected() -> None:
    gc.collect()
    with Ledger() as counting:
        cycle: list[object] = [torch.zeros(10)]
        cycle.append(cycle)
        del cycle
        assert counting.total_bytes(DEVICE) == 40
        gc.collect()
        assert counting.total_bytes(DEVICE) == 0


def test_the_limit_is_the_last_byte_that_fits() -> None:
    with Ledger(limits={DEVICE: 400}) as counting:
        tensor = torch.zeros(100)
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(1)
        assert counting.total_bytes(DEVICE) == 400, "what did not fit is gone"
        del tensor


def test_the_message_says_what_did_not_fit() -> None:
    with Ledger(limits={DEVICE: 2**20}) as counting:
        counting.set_section(Phase.FORWARD)
        message = (
            r"device tier over its limit: 2\.0 MiB > 1\.0 MiB after 2\.0 MiB of activations "
            r"in aten\.zeros\.default \(forward\)"
        )
        with pytest.raises(torch.OutOfMemoryError, match=message):
            torch.zeros(2**19)


def test_each_tier_has_its_own_limit() -> None:
    with Ledger(limits={HOST: 100}) as counting:
        tensor = torch.zeros(1000)
        with (
            pytest.raises(torch.OutOfMemoryError, match="host tier"),
            counting.labelled(Kind.BUFFERS, HOST),
        ):
            torch.zeros(26)
        with pytest.raises(torch.OutOfMemoryError, match="host tier"):
            counting.mark(tensor, Kind.GRADIENTS, HOST)
        del tensor
        assert (counting.total_bytes(DEVICE), counting.total_bytes(HOST)) == (0, 0)


def _limit_program(counting: Ledger, model: nn.Module, batch: torch.Tensor) -> None:
    counting.set_section(Phase.FORWARD)
    loss = model(batch).square().sum()
    counting.set_section(Phase.BACKWARD)
    loss.backward()


def test_the_limit_unwinds_through_forward_and_backward() -> None:
    """A failure is injected at every allocation that makes a new peak, as in SQLite's tests."""
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    batch = torch.ones(8, 16)
    failed_in: set[Phase] = set()
    with Ledger() as counting:
        counting.adopt(model)
        counting.mark(batch, Kind.BUFFERS)
        before = counting.total_bytes(DEVICE)
        _limit_program(counting, model, batch)
        peak = counting.peak_bytes(DEVICE)
        gradients = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
        expected_after = counting.total_bytes(DEVICE)
        for limit in range(before, peak, 128):
            model.zero_grad()
            counting.limits[DEVICE] = limit + counting.total_bytes(DEVICE) - before
            with pytest.raises(torch.OutOfMemoryError):
                _limit_program(counting, model, batch)
            failed_in.add(counting.section[0])
        assert failed_in == {Phase.FORWARD, Phase.BACKWARD}
        counting.limits.clear()
        model.zero_grad()
        _limit_program(counting, model, batch)
        assert counting.total_bytes(DEVICE) == expected_after
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            assert torch.equal(parameter.grad, gradient)
        model.zero_grad()
        gradients.clear()
        del parameter, gradient
        assert counting.total_bytes(DEVICE) == before


def test_a_training_run_equals_what_gc_sees(tiny_model_folder: Path) -> None:
    """The sum of all live storages, found without the ledger, after each part of three steps."""
    gc.collect()
    others = _live_storages()
    with Ledger() as counting:
        model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
        counting.adopt(model)
        engine = fit(model, Policies())
        for _ in range(3):
            ids = torch.randint(3, 300, (2, 16))
            loss = engine.loss(ids, ids, ids.numel())
            assert _seen_by_gc(others) == counting.total_bytes(DEVICE) - _hidden_bytes(loss)
            engine.backward(loss)
            del loss
            assert _seen_by_gc(others) == counting.total_bytes(DEVICE)
            engine.step()
            assert _seen_by_gc(others) == counting.total_bytes(DEVICE)


def _live_storages() -> dict[int, int]:
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}


def _seen_by_gc(others: dict[int, int]) -> int:
    gc.collect()
    return sum(size for key, size in _live_storages().items() if key not in others)


def _hidden_bytes(loss: torch.Tensor) -> int:
    """What the graph saved has no Python object that gc knows; walk the graph to find it."""
    seen: dict[int, int] = {}
    queue = [loss.grad_fn]
    known = set(_live_storages())
    visited = set()
    while queue:
        node = queue.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        for name in dir(node):
            if name.startswith("_saved_"):
                value = getattr(node, name)
                for tensor in value if isinstance(value, tuple) else (value,):
                    if isinstance(tensor, torch.Tensor):
                        storage = tensor.untyped_storage()
                        seen[storage._cdata] = storage.nbytes()
        queue += [parent for parent, _ in node.next_functions]
    return sum(size for key, size in seen.items() if key not in known)


class LedgerMachine(RuleBasedStateMachine):
    """Random programs against a dictionary that says what must be counted."""

    def __init__(self) -> None:
        super().__init__()
        self.counting = Ledger()
        self.counting.__enter__()
        self.tensors: list[torch.Tensor] = []
        self.expected: dict[int, tuple[int, Kind, Tier]] = {}  # by position in `tensors`
        self.owner: list[int] = []  # position of the tensor whose storage each one shares
        self.peaks = {DEVICE: 0, HOST: 0}

    def teardown(self) -> None:
        self.tensors.clear()
        assert self.counting.total_bytes(DEVICE) == self.counting.total_bytes(HOST) == 0
        self.counting.__exit__(None, None, None)

    def _add(self, tensor: torch.Tensor, kind: Kind, tier: Tier) -> None:
        self.owner.append(len(self.tensors))
        self.expected[len(self.tensors)] = (tensor.untyped_storage().nbytes(), kind, tier)
        self.tensors.append(tensor)

    @rule(size=st.integers(0, 500))
    def allocate(self, size: int) -> None:
        self._add(torch.empty(size, dtype=torch.uint8), Kind.TEMPORARIES, DEVICE)

    @rule(
        size=st.integers(0, 500), kind=st.sampled_from(Kind), tier=st.sampled_from((DEVICE, HOST))
    )
    def allocate_labelled(self, size: int, kind: Kind, tier: Tier) -> None:
        with self.counting.labelled(kind, tier):
            self._add(torch.empty(size, dtype=torch.uint8), kind, tier)

    @precondition(lambda self: self.tensors)
    @rule(data=st.data())
    def view(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tensors) - 1))
        self.owner.append(self.owner[index])
        # Of no elements: torch refuses to make others once the storage was made smaller.
        self.tensors.append(self.tensors[index][:0])

    @precondition(lambda self: self.tensors)
    @rule(data=st.data(), kind=st.sampled_from(Kind), tier=st.sampled_from((None, DEVICE, HOST)))
    def mark(self, data: st.DataObject, kind: Kind, tier: Tier | None) -> None:
        index = data.draw(st.integers(0, len(self.tensors) - 1))
        self.counting.mark(self.tensors[index], kind, tier)
        size, _, before = self.expected[self.owner[index]]
        self.expected[self.owner[index]] = (size, kind, tier or before)

    @precondition(lambda self: self.tensors)
    @rule(data=st.data(), size=st.integers(0, 800))
    def resize(self, data: st.DataObject, size: int) -> None:
        index = data.draw(st.integers(0, len(self.tensors) - 1))
        self.tensors[index].untyped_storage().resize_(size)
        _, kind, tier = self.expected[self.owner[index]]
        self.expected[self.owner[index]] = (size, kind, tier)

    @precondition(lambda self: self.tensors)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """Replace by nothing, so that positions stay."""
        index = data.draw(st.integers(0, len(self.tensors) - 1))
        owner = self.owner[index]
        for position, other in enumerate(self.owner):
            if other == owner:
                self.tensors[position] = torch.empty(0, dtype=torch.uint8)
                self.owner[position] = position
                self.expected[position] = (0, Kind.TEMPORARIES, DEVICE)

    @invariant()
    def counts_agree(self) -> None:
        for tier in (DEVICE, HOST):
            kinds: dict[Kind, int] = {}
            for size, kind, where in self.expected.values():
                if where is tier and size:
                    kinds[kind] = kinds.get(kind, 0) + size
            assert self.counting.kinds(tier) == kinds
            assert self.counting.total_bytes(tier) == sum(kinds.values())
            self.peaks[tier] = max(self.peaks[tier], sum(kinds.values()))
            assert self.counting.peak_bytes(tier) == self.peaks[tier]


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
