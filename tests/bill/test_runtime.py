"""Constants against their sources, and the arithmetic between them."""

from __future__ import annotations

import pytest

from tightfit.bill.runtime import Link, Runtime, runtime_bytes, workspace_bytes
from tightfit.units import MIB


def test_a_rank_on_a_cpu_holds_nothing() -> None:
    assert runtime_bytes(None, ranks=4, communicators=2) == Runtime()


@pytest.mark.parametrize(
    ("capability", "measured_mib"),
    [
        ((8, 6), 256),  # RTX 3090, invoke-ai/InvokeAI#9413
        ((8, 9), 426),  # RTX 6000 Ada, unslothai/unsloth-zoo#1053
    ],
)
def test_a_bare_context_lies_within_the_uncertainty(
    capability: tuple[int, int], measured_mib: int
) -> None:
    runtime = runtime_bytes(capability)
    least = runtime.context_bytes - runtime.uncertainty_bytes
    assert least <= measured_mib * MIB <= runtime.context_bytes


@pytest.mark.parametrize(
    ("capability", "per_handle_bytes"),
    [
        ((7, 5), 8_519_680),  # :4096:2:16:8
        ((8, 0), 8_519_680),
        ((9, 0), 32 * MIB),
        ((12, 0), 32 * MIB),
    ],
)
def test_workspaces_are_those_of_cublas_in_two_threads(
    capability: tuple[int, int], per_handle_bytes: int
) -> None:
    assert workspace_bytes(capability) == 2 * (per_handle_bytes + MIB)


def test_torch_counts_workspaces_and_nvml_everything() -> None:
    runtime = runtime_bytes((8, 0), ranks=2)
    assert runtime.outside_bytes == runtime.context_bytes + runtime.communication_bytes
    assert runtime.total_bytes == runtime.outside_bytes + runtime.workspace_bytes


def test_one_rank_does_not_communicate() -> None:
    assert runtime_bytes((8, 0), ranks=1, communicators=2).communication_bytes == 0


def test_communication_grows_with_communicators_channels_and_trees() -> None:
    one = runtime_bytes((8, 0), ranks=2)
    assert (
        runtime_bytes((8, 0), ranks=2, communicators=3).communication_bytes
        == 3 * one.communication_bytes
    )
    linked = runtime_bytes((8, 0), ranks=2, link=Link.NVLINK)
    reducing = runtime_bytes((8, 0), ranks=2, link=Link.NVLINK, all_reduces=True)
    assert one.communication_bytes < linked.communication_bytes < reducing.communication_bytes
    assert one.uncertainty_bytes < linked.uncertainty_bytes


def test_nvlink_agrees_with_what_eight_h100_held_before_their_first_all_to_all() -> None:
    """NVIDIA/nccl#1685: 1.06 GB, of context and NCCL, without torch's tensors."""
    runtime = runtime_bytes((9, 0), ranks=8, link=Link.NVLINK)
    assert runtime.outside_bytes == pytest.approx(1.06e9, rel=0.1)
