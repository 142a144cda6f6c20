"""What is short is named with its size, the smallest plan is the smallest, and what is said to fit
does; without more dry runs than that takes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.planner.conftest import make_job
from tests.taken import only
from transformers import PretrainedConfig

import tightfit.planner.pricing
from tightfit.bill.table import Kind, MemoryTable, Phase
from tightfit.dry_run import DryRun
from tightfit.errors import DoesNotFitError, UnsupportedError
from tightfit.facts.hardware import Hardware
from tightfit.facts.job import Job
from tightfit.facts.reached import usable_ram
from tightfit.facts.workload import Workload
from tightfit.planner import fitting, prepared
from tightfit.planner.fitting import possible
from tightfit.planner.more_ram import USUAL_GIB
from tightfit.planner.options import options_of
from tightfit.planner.plan import Limits, Plan
from tightfit.planner.pricing import Pricing
from tightfit.planner.rates import Rates
from tightfit.planner.search import plan_job
from tightfit.policies import Policies, Tier
from tightfit.units import GIB, format_bytes, parse_bytes

Planner = Callable[..., Plan]
LEANEST = {
    "per_device_train_batch_size": 1, "loss": "chunked", "gradient_checkpointing": "true",
}  # fmt: skip


def advice(error: DoesNotFitError) -> dict[str, str]:
    """What the error says would fit, by kind of advice."""
    text = str(error)
    found = {
        "cutoff_len": re.search(r"would fit: cutoff_len: (\d+) instead of 128", text),
        "lora": re.search(r"would fit: LoRA \(allow: \[lora\]\): (.+) on the device", text),
        "qlora": re.search(r"would fit: QLoRA \(allow: \[qlora\]\): (.+) on the dev", text),
        "8bit": re.search(r"would fit: 8-bit optimizer states \(allow: .+\): (.+) on t", text),
        "memory_limit": re.search(r"would fit: the same plan with memory_limit: (\w+)$", text),
        "ram": re.search(r"would fit: a machine with (\d+) GiB of RAM: ", text),
    }
    assert text.count("would fit:") == sum(match is not None for match in found.values())
    return {name: match[1] for name, match in found.items() if match}


def test_the_message_says_how_much_is_missing(plan: Planner, peaks: list[int]) -> None:
    with pytest.raises(DoesNotFitError) as raised:
        plan(memory_limit=peaks[0] - 5000)
    assert raised.value.missing_bytes == 5000
    assert "4.9 KiB more than the limit" in str(raised.value)
    assert format_bytes(peaks[0]) in str(raised.value)
    assert raised.value.exit_code == 3


def test_what_the_message_names_would_fit(plan: Planner, peaks: list[int]) -> None:
    """By planning again with exactly the change that is named."""
    limit = peaks[0] - 5000
    with pytest.raises(DoesNotFitError) as raised:
        plan(memory_limit=limit, lora_rank=2, **LEANEST)
    said = advice(raised.value)
    assert set(said) - {"8bit"} == {"cutoff_len", "lora", "qlora", "memory_limit"}
    shorter = Workload(int(said["cutoff_len"]), 2)
    assert plan(workload=shorter, memory_limit=limit, **LEANEST).fits
    with_lora = plan(memory_limit=limit, lora_rank=2, allow=["lora"], **LEANEST)
    assert with_lora.fits
    assert with_lora.policies.adapter is not None
    quantised = plan(memory_limit=limit, lora_rank=2, allow=["qlora"], **LEANEST)
    assert quantised.fits
    assert quantised.policies.quantisation is not None
    assert plan(memory_limit=said["memory_limit"], **LEANEST).fits


def test_lora_is_not_advised_where_the_jobs_own_rank_would_not_fit(
    plan: Planner, peaks: list[int]
) -> None:
    """Rank 2 fits; what is asked about is rank 512, which is larger than the model."""
    limit = peaks[0] - 5000
    keys = {"memory_limit": limit, "lora_rank": 512, "offload_optimizer": "none"}
    with pytest.raises(DoesNotFitError) as raised:
        plan(**keys)
    assert "lora" not in advice(raised.value)
    with pytest.raises(DoesNotFitError):
        plan(**keys, allow=["lora"])


@pytest.mark.parametrize("allow", [[], ["lora"]])
def test_a_limit_below_the_model_states_names_the_smallest_plan(
    plan: Planner, peaks: list[int], allow: list[str]
) -> None:
    """No candidate is priced then; the smallest one must be found nevertheless."""
    with pytest.raises(DoesNotFitError) as raised:
        plan(memory_limit="1KiB", allow=allow)
    said = advice(raised.value)
    assert set(said) == {"memory_limit"}
    assert plan(memory_limit=said["memory_limit"], allow=allow).fits
    if allow:
        assert raised.value.missing_bytes < peaks[0] - 1024
        assert "LoRA" in str(raised.value)
    else:
        assert raised.value.missing_bytes == peaks[0] - 1024


def test_raising_the_device_limit_is_not_advised_where_the_ram_is_short(
    plan: Planner, peaks: list[int]
) -> None:
    with pytest.raises(DoesNotFitError) as raised:
        plan(ram_bytes=peaks[0] // 4)
    assert "memory_limit" not in advice(raised.value)


@pytest.mark.parametrize("ram_share", only([0.6], [0.9, 0.6, 0.3]))
def test_what_is_missing_is_the_least_of_all_candidates(
    plan: Planner, peaks: list[int], pricing: Pricing, ram_share: float
) -> None:
    """The plan with the smallest device peak may miss the RAM by more than another."""
    ram = int(peaks[0] * ram_share)
    with pytest.raises(DoesNotFitError) as raised:
        plan(ram_bytes=ram)
    options = options_of(
        Job(model_name_or_path="m", train_batch_size=2), precision="fp32", chunked_loss=True
    )
    limits = Limits(ram, ram, ram)
    candidates = [policies for policies in options.candidates() if possible(policies)]
    least = min(limits.missing_bytes(pricing.bill(p)) for p in candidates)
    assert raised.value.missing_bytes == least


# Several tiers


@pytest.fixture
def whole_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks_nothing(policies: Policies) -> Iterator[str]:
        yield from ()

    monkeypatch.setattr(fitting, "engine_lacks", lacks_nothing)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Policies]:
    """All policies that a dry run is made for."""
    honest, made = tightfit.planner.pricing.dry_run, []

    def run(
        config: PretrainedConfig, policies: Policies, workload: Workload, **options: Any
    ) -> DryRun:
        made.append(policies)
        return honest(config, policies, workload, **options)

    monkeypatch.setattr(tightfit.planner.pricing, "dry_run", run)
    return made


SMALL = {"memory_limit": "100KiB", "host_memory_limit": "100KiB", "nvme_limit": "1GiB"}


@pytest.mark.slow
def test_every_tier_that_is_short_is_named_and_what_would_do(
    plan: Planner, whole_engine: None
) -> None:
    with pytest.raises(DoesNotFitError) as raised:
        plan(**SMALL)
    text = str(raised.value)
    short = dict(
        re.findall(r"^  (\w+): (.+) more than the limit of 100.0 KiB \(\w+\)$", text, re.M)
    )
    assert [*short] == ["device", "host"]
    assert format_bytes(raised.value.missing_bytes) in short.values()
    found = re.search(r"same plan with memory_limit: (\w+) and host_memory_limit: (\w+)$", text)
    assert found is not None
    raised_limits = {"memory_limit": found[1], "host_memory_limit": found[2]}
    assert plan(**{**SMALL, **raised_limits}).fits


@pytest.mark.usefixtures("whole_engine")
def test_that_nothing_fits_is_known_without_pricing_every_candidate(
    config: PretrainedConfig,
    hardware: Hardware,
    rates: Rates,
    runs: list[Policies],
    job: Callable[..., Job],
) -> None:
    """Closed forms turn all of them down; what is priced then is to say by how much. The model is
    larger than a disk's buffers, as those are that do not fit."""
    wide = {"vocab_size": 65536, "hidden_size": 1024, "intermediate_size": 2048}
    large = type(config).from_dict({**config.to_dict(), **wide})
    keys = {"memory_limit": "100MiB", "host_memory_limit": "100MiB", "nvme_limit": "100GiB"}
    with pytest.raises(DoesNotFitError, match=r"\n  device: .*\n  host: "):
        plan_job(job(train_batch_size=4, **keys), large, Workload(128, 4), hardware, rates)
    options = options_of(job(train_batch_size=4), precision="fp32", chunked_loss=True)
    assert len(list(options.candidates())) > 250
    plain, *others = runs
    assert plain == options.plain()
    lean = [p for p in others if p.adapter is None]
    assert set(lean) <= set(options.leanest()), "the search itself asks for no bill"
    assert len(runs) <= 12


@pytest.mark.usefixtures("whole_engine")
def test_no_candidate_misses_by_less_than_the_smallest_plan(
    plan: Planner, pricing: Pricing, job: Callable[..., Job]
) -> None:
    """Of those with the smallest batch and checkpointing, on every placement."""
    keys = {"loss": "sliced", "offload_activations": "false", **SMALL}
    with pytest.raises(DoesNotFitError) as raised:
        plan(**keys)
    limits = Limits(parse_bytes("100KiB"), parse_bytes("100KiB"), None, nvme_bytes=2**30)
    options = options_of(job(**keys), precision="fp32", chunked_loss=True)
    misses = [limits.missing_bytes(pricing.bill(policies)) for policies in options.leanest()]
    assert len(misses) >= 7
    assert raised.value.missing_bytes == min(misses)


@pytest.mark.slow
@pytest.mark.usefixtures("whole_engine")
def test_adapters_are_advised_with_a_placement_of_their_own(plan: Planner) -> None:
    """All parameters need more of the host than adapters do whose base stays on the device."""
    keys = {"memory_limit": "2MiB", "host_memory_limit": "600KiB", "nvme_limit": "1KiB"}
    with pytest.raises(DoesNotFitError) as raised:
        plan(lora_rank=2, **keys)
    text = str(raised.value)
    assert re.search(r"^  would fit: LoRA \(allow: \[lora\]\): .* on the device \(", text, re.M)
    assert plan(lora_rank=2, allow=["lora"], **keys).policies.adapter is not None


@pytest.mark.usefixtures("whole_engine")
def test_a_base_of_few_bits_is_advised_where_its_library_is(
    plan: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"memory_limit": "2MiB", "host_memory_limit": "600KiB", "nvme_limit": "1KiB"}
    with pytest.raises(DoesNotFitError, match=r"would fit: QLoRA \(allow: \[qlora\]\)"):
        plan(lora_rank=2, **keys)
    monkeypatch.setattr(prepared, "find_spec", lambda name: None)
    with pytest.raises(DoesNotFitError) as raised:
        plan(lora_rank=2, **keys)
    assert "QLoRA" not in str(raised.value)


@pytest.mark.parametrize("allow", [[], ["qlora"]])
def test_a_base_that_the_engine_cannot_pack_is_neither_advised_nor_in_the_way(
    plan: Planner, peaks: list[int], monkeypatch: pytest.MonkeyPatch, allow: list[str]
) -> None:
    """It is looked at once, however many placements there are."""
    honest = tightfit.planner.pricing.dry_run
    refused: list[Policies] = []

    def run(
        config: PretrainedConfig, policies: Policies, workload: Workload, **options: Any
    ) -> DryRun:
        if policies.quantisation is not None:
            refused.append(policies)
            raise UnsupportedError("4 bits do not work for this model")
        return honest(config, policies, workload, **options)

    monkeypatch.setattr(tightfit.planner.pricing, "dry_run", run)
    with pytest.raises(DoesNotFitError) as raised:
        plan(memory_limit=peaks[0] - 5000, lora_rank=2, allow=allow, **LEANEST)
    assert "lora" in advice(raised.value)
    assert "QLoRA" not in str(raised.value)
    assert len(refused) == 1


# The machine itself


CARD = {"gpu": "rtx-3060", "train_batch_size": 1}
LARGE = {"vocab_size": 65536, "hidden_size": 4096, "intermediate_size": 32768}


@pytest.fixture
def large(config: PretrainedConfig) -> PretrainedConfig:
    """17 GiB of model states: more than the card has, and than 8 GiB of RAM."""
    return type(config).from_dict({**config.to_dict(), **LARGE})


@pytest.fixture
def plan_large(large: PretrainedConfig, rates: Rates, hardware: Hardware) -> Planner:
    def run(**keys: Any) -> Plan:
        return plan_job(make_job(**(CARD | keys)), large, Workload(128, 1), hardware, rates)

    return run


def test_more_ram_is_named_and_no_limit_that_the_card_has_not(plan_large: Planner) -> None:
    """The nearest plan lacks bytes of the device alone; what would do is RAM."""
    with pytest.raises(DoesNotFitError) as raised:
        plan_large(ram="8GiB@40GB/s")
    found = [line for line in raised.value.advice if line.startswith("ram: ")]
    assert len(found) == 1, raised.value
    size = re.match(r"ram: (\d+GiB) instead of 8GiB: .+ on the device \(", found[0])
    assert size is not None
    assert plan_large(ram=f"{size[1]}@40GB/s").fits
    assert not any("memory_limit" in line for line in raised.value.advice)
    smaller = max(n for n in USUAL_GIB if n < int(size[1].removesuffix("GiB")))
    if smaller > 8:
        with pytest.raises(DoesNotFitError):
            plan_large(ram=f"{smaller}GiB@40GB/s", offload_optimizer_fraction=1)


def test_a_limit_below_what_the_card_has_may_be_raised(plan_large: Planner) -> None:
    keys = {"ram": "32GiB", "memory_limit": "1GiB"}
    with pytest.raises(DoesNotFitError) as raised:
        plan_large(**keys)
    (line,) = [line for line in raised.value.advice if "memory_limit" in line]
    limit = line.removeprefix("the same plan with memory_limit: ")
    assert plan_large(**(keys | {"memory_limit": limit})).fits


def test_of_this_machine_more_ram_is_said_in_words(
    plan: Planner, peaks: list[int], make_machine: Callable[[int], Hardware]
) -> None:
    """Device and host are both RAM there, and what others hold of it is no limit of a larger."""
    with pytest.raises(DoesNotFitError) as raised:
        plan(ram_bytes=peaks[0] // 4)
    found = [re.match(r"a machine with (\d+) GiB of RAM: ", line) for line in raised.value.advice]
    (size,) = [int(match[1]) for match in found if match]
    assert size == USUAL_GIB[0]
    assert plan(ram_bytes=usable_ram(size * GIB)).fits


@pytest.mark.parametrize("keys", [{"memory_limit": "1KiB"}, {"host_memory_limit": "1KiB"}])
def test_more_ram_is_not_named_where_it_changes_nothing(
    plan: Planner, keys: dict[str, Any]
) -> None:
    with pytest.raises(DoesNotFitError) as raised:
        plan(**({"memory_limit": "1KiB", "offload_optimizer": "cpu"} | keys))
    assert not any("of RAM" in line for line in raised.value.advice)


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        (Limits(), []),
        (Limits(10, 10), ["device", "host"]),
        (Limits(10, 30, nvme_bytes=1), ["device", "nvme"]),
        (Limits(30, 30, 30), ["RAM"]),
        (Limits(10, 30, 30), ["device", "RAM"]),
        (Limits(5, 5, 5, nvme_bytes=5), ["RAM", "nvme"]),
    ],
)
def test_the_limits_that_are_short(limits: Limits, named: list[str]) -> None:
    counts = {Tier.DEVICE: 20, Tier.HOST: 20, Tier.NVME: 20}
    table = {tier: {Kind.PARAMETERS: count} for tier, count in counts.items()}
    bill = MemoryTable({Phase.STEP: table})
    assert [use.name for use in limits.short(bill)] == named
