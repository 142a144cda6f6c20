"""The quick mode of fake tensors makes what torch's own does, known before or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3MoeConfig

from tightfit.dry_run.fake_mode import QuickFakes
from tightfit.dry_run.fakes import fake_tensors
from tightfit.ledger import Ledger
from tightfit.policies import Tier

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS: list[PretrainedConfig] = [
    LlamaConfig(**SIZES),
    Qwen3MoeConfig(
        **SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
]


class _Noting(TorchDispatchMode):
    """Writes down what every operation has made, and of which arguments' memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
        for made in tree_leaves(result):
            if isinstance(made, FakeTensor):
                storage = made.untyped_storage()
                shared = [one.untyped_storage()._cdata == storage._cdata for one in given]
                self.made.append(
                    (
                        str(func), made.shape, made.stride(), made.storage_offset(), made.dtype,
                        made.device, made.requires_grad, storage.nbytes(), shared,
                        [one is made for one in given],
                    )
                )  # fmt: skip
        return result


def made_in(
    mode: Callable[[], FakeTensorMode], program: Callable[[], None]
) -> list[tuple[Any, ...]]:
    noting = _Noting()
    with mode(), noting:
        program()
    return noting.made


def training(config: PretrainedConfig, length: int) -> Callable[[], None]:
    def program() -> None:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False, fused=True)
        ids = torch.zeros((2, length), dtype=torch.long)
        positions = torch.arange(length)[None]
        model(input_ids=ids, labels=ids, position_ids=positions, use_cache=False).loss.backward()
        optimizer.step()

    return program


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_what_training_makes(config: PretrainedConfig) -> None:
    """Other lengths in between, so that what is remembered of one is not taken for another."""
    for length in (8, 16, 8):
        program = training(config, length)
        own = made_in(QuickFakes, program)
        assert len(own) > 200
        assert own == made_in(FakeTensorMode, program)
        assert own == made_in(QuickFakes, program)


def test_equal_numbers_of_other_types_are_told_apart() -> None:
    def program() -> None:
        whole = torch.zeros(3, dtype=torch.long)
        for number in (1, 1.0, True, 2, 2.0):
            whole * number
            whole.new_full((2,), number)
        for place in (0, 1, 0):
            torch.zeros(2, 3).select(place, 1)
            torch.zeros(2, 3)[place:].t()

    assert made_in(QuickFakes, program) == made_in(FakeTensorMode, program)
    assert made_in(QuickFakes, program) == made_in(FakeTensorMode, program)


def test_freed_storages_are_no_others() -> None:
    """As in shards that are gathered and let go of."""

    def program() -> None:
        whole = torch.zeros(8)
        for size in (32, 0, 32):
            whole.untyped_storage().resize_(size)
            whole.detach()
            whole * 2

    assert made_in(QuickFakes, program) == made_in(FakeTensorMode, program)
    assert made_in(QuickFakes, program) == made_in(FakeTensorMode, program)


def test_values_are_answered() -> None:
    with QuickFakes():
        assert torch.zeros(1).item() == 1
        assert bool(torch.zeros(1, dtype=torch.bool))
        experts, tokens = torch.zeros(4, 16, 8), torch.zeros(6, 16)
        ends = torch.zeros(4, dtype=torch.int32)
        product = torch.nn.functional.grouped_mm(tokens, experts, offs=ends)
        assert (product.shape, product.dtype) == ((6, 8), torch.float32)


def test_a_ledger_may_ask_for_what_was_done_before_and_counts_the_same() -> None:
    def peak(*, shortcut: bool) -> tuple[int, int]:
        asked = 0
        with fake_tensors() as fakes, Ledger() as counting:

            def known(*operation: Any) -> Any:
                nonlocal asked
                found = fakes.shortcut(*operation)
                asked += found is not NotImplemented
                return found

            if shortcut:
                counting.shortcut = known
            left, right = torch.zeros(7, 5, requires_grad=True), torch.zeros(5, 3)
            for _ in range(2):
                values, places = (left @ right).view(-1)[2:].topk(3)
                values.add_(1).sum().backward()
            assert values.shape == places.shape == (3,)
            assert left.grad is not None
            assert left.grad.shape == left.shape
            return counting.peak_bytes(Tier.DEVICE), asked

    plain, none = peak(shortcut=False)
    short, asked = peak(shortcut=True)
    assert none == 0
    assert asked > 10
    assert short == plain
