"""Steps that are not like others, in every placement: the same numbers as resident."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.engine.test_placement import (
    OPTIMIZERS,
    PLACEMENTS,
    assert_same,
    postponed,  # noqa: F401  # both are fixtures
    run,  # noqa: F401
)
from torch import nn

from tightfit.engine import apply
from tightfit.engine.engine import Engine
from tightfit.policies import (
    BatchPolicy,
    CheckpointingPolicy,
    LossKind,
    LossPolicy,
    Master,
    OptimizerName,
    Policies,
    PrecisionPolicy,
    Tier,
)

Make = Callable[..., Any]
Change = Callable[[nn.Module, int], None]
LAYERS = 3
SOME = ("gradients late", "all on host", "some parameters", "parameters on nvme")
PLAIN = Policies(optimizer=OPTIMIZERS[OptimizerName.ADAMW], batch=BatchPolicy(2, 2))


def skip_the_last_layer_in_some_steps(model: nn.Module, step: int) -> None:
    model.config.num_hidden_layers = LAYERS - (step == 1)  # type: ignore[union-attr]


def pass_by_the_middle_layer_in_some_steps(model: nn.Module, step: int) -> None:
    layer = model.model.layers[1]  # type: ignore[index, union-attr]
    vars(layer).pop("forward", None)
    if step == 1:
        layer.forward = lambda hidden, *args, **kwargs: hidden


def use_a_layer_twice(model: nn.Module, step: int) -> None:
    """Its own forward is gone through twice, with its hooks."""
    layer = model.model.layers[1]  # type: ignore[index, union-attr]
    if step == 1:
        plain = layer.forward

        def twice(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            del layer.forward
            try:
                return layer(plain(hidden, *args, **kwargs), *args, **kwargs)  # type: ignore[no-any-return]
            finally:
                layer.forward = twice

        layer.forward = twice


def look_between_steps(model: nn.Module, step: int) -> None:
    """An evaluation, and a state dict, while updates may be waiting."""
    model.eval()
    with torch.no_grad():
        model(input_ids=torch.arange(3, 12).view(1, -1))
    model.train()
    model.state_dict()


CHANGES: list[Change] = [
    skip_the_last_layer_in_some_steps,
    pass_by_the_middle_layer_in_some_steps,
    use_a_layer_twice,
    look_between_steps,
]


@pytest.mark.parametrize("placement", SOME)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_step_like_no_other(run: Make, placement: str, change: Change) -> None:  # noqa: F811
    sizes = {"num_hidden_layers": LAYERS}
    placed = replace(PLAIN, placement=PLACEMENTS[placement])
    expected = run(PLAIN, steps=3, change=change, **sizes)
    assert_same(run(placed, steps=3, change=change, **sizes), expected)


VARIANTS: dict[str, dict[str, Any]] = {
    "untied": {"tie_word_embeddings": False},
    "checkpointing": {"checkpointing": CheckpointingPolicy(True)},
    "selective": {"checkpointing": CheckpointingPolicy(True, every=2)},
    "chunked": {"loss": LossPolicy(LossKind.CHUNKED, 5)},
    "bf16": {"precision": PrecisionPolicy("bf16")},
    "split master": {
        "precision": PrecisionPolicy("bf16"),
        "optimizer": replace(OPTIMIZERS[OptimizerName.ADAMW], master=Master.SPLIT),
    },
    "seven bytes": {
        "precision": PrecisionPolicy("bf16"),
        "optimizer": replace(OPTIMIZERS[OptimizerName.ADAMW_COMPACT], master=Master.SPLIT_8),
    },
}


@pytest.mark.parametrize("placement", SOME)
@pytest.mark.parametrize("variant", VARIANTS)
def test_other_techniques_go_with_it(run: Make, placement: str, variant: str) -> None:  # noqa: F811
    keys = dict(VARIANTS[variant])
    sizes = {"num_hidden_layers": LAYERS}
    if variant == "seven bytes":
        sizes["hidden_size"] = 64  # of matrices of 4096 values moments have 8 bits
    if "tie_word_embeddings" in keys:
        sizes["tie_word_embeddings"] = keys.pop("tie_word_embeddings")
    resident = replace(PLAIN, **keys)
    chosen = PLACEMENTS[placement]
    if resident.optimizer.split_master and (
        chosen.parameters is Tier.DEVICE or chosen.parameter_fraction < 1
    ):
        pytest.skip("a split master goes where its parameter is")
    assert_same(
        run(replace(resident, placement=chosen), steps=3, **sizes), run(resident, steps=3, **sizes)
    )


@pytest.mark.parametrize("placement", SOME)
def test_parameters_without_gradients_stay_as_they_are(
    run: Make,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    placement: str,
) -> None:
    """One that nothing uses, and one that is frozen."""
    plain_fit = apply.fit

    def fit(model: Any, *arguments: Any, **keys: Any) -> Engine:
        model.model.layers[0].extra = nn.Parameter(torch.arange(5.0))
        model.model.layers[1].mlp.up_proj.weight.requires_grad_(False)
        return plain_fit(model, *arguments, **keys)

    monkeypatch.setattr("tests.engine.test_placement.fit", fit)
    placed = replace(PLAIN, placement=PLACEMENTS[placement])
    assert_same(run(placed, steps=3), run(PLAIN, steps=3))
