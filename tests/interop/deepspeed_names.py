"""Prints `deepspeed_names.txt` from the deepspeed that is installed: `python deepspeed_names.py`.

Fields come from its pydantic models and constants; top-level keys are those that its reader asks a
config for.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

VERSION = "0.19.8"
_MODELS = {
    "zero_optimization": ("runtime.zero.config", "DeepSpeedZeroConfig"),
    "zero_optimization.offload_param": (
        "runtime.zero.offload_config",
        "DeepSpeedZeroOffloadParamConfig",
    ),
    "zero_optimization.offload_optimizer": (
        "runtime.zero.offload_config",
        "DeepSpeedZeroOffloadOptimizerConfig",
    ),
    "bf16": ("runtime.precision_config", "DeepSpeedBF16Config"),
    "fp16": ("runtime.precision_config", "DeepSpeedFP16Config"),
    "tensor_parallel": ("runtime.tensor_parallel.config", "TPTrainingConfig"),
    "tensor_parallel.tp": ("runtime.tensor_parallel.config", "TPConfig"),
}
_CONSTANTS = {
    "aio": ("runtime.swap_tensor.constants", "AIO_"),
    "activation_checkpointing": ("runtime.activation_checkpointing.config", "ACT_CHKPT_"),
    "scheduler.params": ("runtime.lr_schedules", ("WARMUP_", "TOTAL_NUM", "COS_MIN", "CYCLE_",
                                                 "DECAY_", "LR_RANGE_TEST_")),
}  # fmt: skip
_NO_KEYS = {"log", "linear", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"}


class _Asked(dict[str, Any]):
    """A config that remembers what it was asked for."""

    names: set[str] = set()  # noqa: RUF012 - of all copies

    def __contains__(self, key: object) -> bool:
        self.names.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.names.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.names.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        return self


def names_of_deepspeed() -> list[str]:
    """Every key, with dots between blocks."""
    return sorted({*_of_models(), *_of_constants(), *_at_the_top()})


def _module(path: str) -> Any:
    return importlib.import_module(f"deepspeed.{path}")


def _of_models() -> Iterator[str]:
    for block, (path, name) in _MODELS.items():
        for key, field in getattr(_module(path), name).model_fields.items():
            yield f"{block}.{field.alias or key}"


def _of_constants() -> Iterator[str]:
    for block, (path, prefix) in _CONSTANTS.items():
        for name, value in vars(_module(path)).items():
            is_key = name.startswith(prefix) and not name.endswith(("_DEFAULT", "_FORMAT"))
            if is_key and isinstance(value, str) and value not in _NO_KEYS:
                yield f"{block}.{value}"


def _at_the_top() -> Iterator[str]:
    _module("runtime.config").DeepSpeedConfig(_Asked(train_batch_size=1))
    yield from _Asked.names


if __name__ == "__main__":
    print(f"# Keys of ds_config.json that deepspeed {VERSION} knows; made by deepspeed_names.py.")
    print("\n".join(names_of_deepspeed()))
