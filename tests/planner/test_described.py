"""Plans and estimates for a machine that is only described: nothing here is measured."""

from __future__ import annotations

from typing import Any

import pytest
from tests.planner.conftest import WORKLOAD, make_hardware, make_job
from transformers import PretrainedConfig

from tightfit.bill.runtime import Link, runtime_bytes
from tightfit.bill.table import Kind
from tightfit.errors import ConfigError, DoesNotFitError, UnsupportedError
from tightfit.planner import fitting, prepared
from tightfit.planner.estimate import estimate_job
from tightfit.planner.plan import Plan
from tightfit.planner.search import plan_job
from tightfit.policies import Tier
from tightfit.units import GIB


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("measure_rates", "measure_disk"):
        monkeypatch.setattr(prepared, name, lambda *arguments: pytest.fail("measured"))


# Nothing to choose: a plan needs one dry run.
PLAIN = {
    "loss": "full",
    "gradient_checkpointing": False,
    "offload_optimizer": "none",
    "offload_param": "none",
    "offload_activations": False,
    "per_device_train_batch_size": 1,
}


def planned(config: PretrainedConfig, **keys: Any) -> Plan:
    return plan_job(make_job(**(PLAIN | keys)), config, WORKLOAD, make_hardware())


def test_a_plan_without_the_card(config: PretrainedConfig) -> None:
    plan = planned(config, gpu="4090", ram="64GiB")
    assert plan.limits.device_bytes == round(23.51 * GIB)
    assert plan.policies.precision.parameters == "bf16"
    runtime = runtime_bytes((8, 9)).total_bytes
    assert plan.bill.kinds_at_peak(Tier.DEVICE)[Kind.RUNTIME] == runtime
    assert plan.step_time.total > 0
    assert plan.rates.source == "published"
    assert "times are for a described machine" in plan.notes[0]
    assert any("ram is not given" in note for note in planned(config, gpu="4090").notes)


def test_cards_of_a_machine_are_the_ranks_of_the_plan(config: PretrainedConfig) -> None:
    plan = planned(config, gpu="2x4090", ram="64GiB", zero_stage=0)
    assert plan.policies.sharding.ranks == 2
    pcie = runtime_bytes((8, 9), ranks=2, link=Link.PCIE, all_reduces=True).total_bytes
    nvlink = runtime_bytes((8, 9), ranks=2, link=Link.NVLINK, all_reduces=True).total_bytes
    assert plan.bill.kinds_at_peak(Tier.DEVICE)[Kind.RUNTIME] <= pcie < nvlink


def test_what_does_not_fit_names_the_described_limit(config: PretrainedConfig) -> None:
    with pytest.raises(DoesNotFitError, match="memory_limit"):
        planned(config, gpu="4090", memory_limit="1MiB")


def test_a_disk_must_be_described(
    config: PretrainedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of this machine, which may be no disk, is of no matter."""
    keys = {"gpu": "4090", "offload_optimizer": "nvme", "offload_folder": "/proc/no-disk"}
    with pytest.raises(ConfigError, match="the machine is described without a disk"):
        planned(config, **keys)
    monkeypatch.setattr(fitting, "engine_lacks", lambda policies: iter(()))
    plan = planned(config, **keys, nvme="1TB@3GB/s")
    assert plan.policies.placement.optimizer_states is Tier.NVME
    assert plan.limits.nvme_bytes == 95 * 10**10
    assert plan.step_time.disk > 0


def test_a_precision_without_a_rate(config: PretrainedConfig) -> None:
    with pytest.raises(UnsupportedError, match="no rate of T4 is known for bf16"):
        planned(config, gpu="t4", precision="bf16")


def test_an_estimate_is_for_the_described_card(config: PretrainedConfig) -> None:
    job = make_job(gpu="8xa100-80g", interconnect="pcie4", train_batch_size=8)
    found = estimate_job(job, config, WORKLOAD, make_hardware())
    assert (found.card, found.link) == ((8, 0), Link.PCIE)
    assert found.limits.device_bytes == round(79.151 * GIB)
    runtime = runtime_bytes((8, 0), ranks=8, link=Link.PCIE, all_reduces=True).total_bytes
    assert found.bill.kinds_at_peak(Tier.DEVICE)[Kind.RUNTIME] == runtime
    assert not any("no card here" in note for note in found.notes)
    assert any("ram is not given" in note for note in found.notes)


def test_another_makers_card_is_priced_as_an_ampere_and_says_so(config: PretrainedConfig) -> None:
    found = estimate_job(make_job(gpu="mi300x"), config, WORKLOAD, make_hardware())
    assert found.card == (8, 0)
    assert any("nothing was measured on others" in note for note in found.notes)
