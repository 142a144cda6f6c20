"""Documents that nobody would write: any value under any key of a format, or under none."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tightfit.interop.entries import Table
from tightfit.interop.formats import FORMATS

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        [
            "auto", "cpu", "nvme", "none", "true", "AdamW", "WarmupLR", "FSDP", "DEEPSPEED",
            "FULL_SHARD", "bf16", "sft", "lora", 0, 1, 2, 3, 8, 16, 1e8, "1e-3", [0.9, 0.999],
        ]
    )
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)


def nested(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A document from dotted keys; what stands in the way of a block gives way."""
    content: dict[str, Any] = {}
    for key, value in pairs:
        *blocks, name = key.split(".")
        place = content
        for block in blocks:
            inner = place.get(block)
            if not isinstance(inner, dict):
                inner = place[block] = {}
            place = inner
        place[name] = value
    return content


def of_table(table: Table) -> st.SearchStrategy[dict[str, Any]]:
    keys = st.sampled_from(sorted(table)) if table else st.text(max_size=8)
    # Most documents have no unknown key, or readers would never get past it.
    pairs = st.lists(st.tuples(keys, SCALARS | VALUES), max_size=8)
    strange = st.lists(st.tuples(st.text(max_size=8), VALUES), max_size=1)
    return st.builds(lambda a, b: nested([*a, *b]), pairs, strange)


def any_document(name: str) -> st.SearchStrategy[dict[str, Any]]:
    """For the format `name`."""
    plain = of_table(FORMATS[name].table)
    if name != "accelerate":
        return plain
    blocks = {
        "deepspeed_config": of_table(
            dict.fromkeys(
                ("zero_stage", "offload_optimizer_device", "gradient_clipping",
                 "offload_param_nvme_path", "zero3_init_flag", "gradient_accumulation_steps"),
            )  # type: ignore[arg-type]  # names alone are looked at
        ) | VALUES,
        "fsdp_config": of_table({f"fsdp_{key}": e for key, e in FORMATS["fsdp"].table.items()})
        | VALUES,
        "distributed_type": st.sampled_from(["FSDP", "DEEPSPEED", "MULTI_GPU", "NO"]),
    }  # fmt: skip
    return st.builds(lambda a, b: {**a, **b}, plain, st.fixed_dictionaries({}, optional=blocks))
