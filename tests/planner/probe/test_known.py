"""The rates of one rank by a probe: whose figures count, and how a machine is shared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.planner.probe.machines import accelerator, card_figures, host_figures, link_figures

from tightfit.facts.hardware import Hardware
from tightfit.planner.probe import known
from tightfit.planner.probe.figures import DiskFigures, Probe
from tightfit.planner.probe.kept import write_probe
from tightfit.planner.probe.known import (
    RankShare,
    disk_identity,
    host_of_rank,
    probed_disk,
    probed_rates,
    rates_of,
    threads_of_rank,
)
from tightfit.planner.rates import Collective

MakeProbe = Callable[..., Probe]
CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)


def share(ranks: int = 1, threads: int = 2, precision: str = "fp32") -> RankShare:
    return RankShare(CPU, precision, ranks, threads)


@pytest.mark.parametrize(
    ("ranks", "threads", "speed"),
    [
        (1, 1, 1.0),  # as it was measured
        (1, 2, 1.5),
        (2, 1, 0.9),  # as it was measured with both at once
        (4, 1, 2 * 0.9 / 4),  # a quarter of the most that the machine has been seen to do
        (2, 2, 1.8 / 2),
    ],
)
def test_ranks_share_a_cpu(make_probe: MakeProbe, ranks: int, threads: int, speed: float) -> None:
    found = host_of_rank(make_probe(), threads, ranks)
    assert found.memory == pytest.approx(2e9 * speed)
    assert found.optimizer == pytest.approx(7e8 * speed)
    assert found.matmul[1024] == pytest.approx(80e9 * speed)


def test_ranks_nobody_has_measured_get_their_part_of_the_machine(make_probe: MakeProbe) -> None:
    probe = make_probe(link=None)
    assert host_of_rank(probe, 1, 2).memory == pytest.approx(2e9 * 1.5 / 2)
    four = dataclasses.replace(
        probe, cores=8, host=(host_figures(1, 1.0), host_figures(4, 4.0), host_figures(8, 8.0))
    )
    assert host_of_rank(four, 2, 1).memory == pytest.approx(2e9 * 2)  # between 1 and 4
    assert host_of_rank(four, 2, 4).memory == pytest.approx(2e9 * 2)  # a quarter of 8
    assert host_of_rank(four, 2, 8).memory == pytest.approx(2e9 * 1)


def test_two_threads_that_were_disturbed_are_no_slower_than_one(make_probe: MakeProbe) -> None:
    """As measured on a busy machine: 82 GFLOP/s with one thread and 0.1 with two, and no widths
    but the first."""
    late = dataclasses.replace(host_figures(2, 0.001), matmul={64: 1e8})
    probe = make_probe(link=None, host=(host_figures(1, 1.0), late))
    found = host_of_rank(probe, 2, 1)
    assert found.matmul == {64: 40e9, 1024: 80e9}
    assert found.memory == 2e9


def test_rates_on_a_cpu(make_probe: MakeProbe, hardware: Hardware) -> None:
    rates = rates_of(make_probe(), share(ranks=2, threads=1), hardware)
    assert rates is not None
    assert rates.link is not None
    assert rates.link.all_reduce == Collective(4e-4, 5e8)
    assert rates.matmul_flops_per_second == 80e9 * 0.9
    assert rates.at_width(64).matmul_flops_per_second == pytest.approx(40e9 * 0.9)
    assert rates.at_width(256).matmul_flops_per_second == pytest.approx(60e9 * 0.9)
    assert rates.at_width(4096).matmul_flops_per_second == pytest.approx(80e9 * 0.9)
    alone = rates_of(make_probe(), share(), hardware)
    assert alone is not None
    assert alone.link is None


def test_more_ranks_wait_for_more_hops(make_probe: MakeProbe, hardware: Hardware) -> None:
    rates = rates_of(make_probe(), share(ranks=4, threads=1), hardware)
    assert rates is not None
    assert rates.link is not None
    assert rates.link.all_gather == Collective(3 * 4e-4, 5e8)


def with_cards(hardware: Hardware, *uuids: str) -> Hardware:
    return dataclasses.replace(hardware, accelerators=tuple(map(accelerator, uuids)))


def test_rates_on_a_card(make_probe: MakeProbe, hardware: Hardware) -> None:
    probe = make_probe(cards=(card_figures("GPU-a"),), link=None)
    rates = rates_of(probe, RankShare(CARD, "bf16", 1, 2), with_cards(hardware, "GPU-a"))
    assert rates is not None
    assert rates.matmul_flops_per_second == 150e12
    assert rates.copy_bytes_per_second == 20e9  # the slower direction
    assert rates.device_optimizer_parameters_per_second == 30e9
    assert rates.host_optimizer_parameters_per_second == 7e8  # one core feeds the card
    assert rates.memory_bytes_per_second == 900e9


def test_all_wait_for_the_slowest_card(make_probe: MakeProbe, hardware: Hardware) -> None:
    slow = card_figures("GPU-b", matmul={"bf16": {4096: 60e12}})
    probe = make_probe(cards=(card_figures("GPU-a"), slow), link=link_figures(backend="nccl"))
    machine = with_cards(hardware, "GPU-a", "GPU-b")
    rates = rates_of(probe, RankShare(CARD, "bf16", 2, 1), machine)
    assert rates is not None
    assert rates.matmul_flops_per_second == 60e12
    assert rates.link is not None
    one = rates_of(probe, RankShare(CARD, "bf16", 1, 1), machine)
    assert one is not None
    assert one.matmul_flops_per_second == 150e12


def test_gloo_says_nothing_of_cards(make_probe: MakeProbe, hardware: Hardware) -> None:
    probe = make_probe(cards=(card_figures("GPU-a"), card_figures("GPU-b")))
    machine = with_cards(hardware, "GPU-a", "GPU-b")
    rates = rates_of(probe, RankShare(CARD, "bf16", 2, 1), machine)
    assert rates is not None
    assert rates.link is None


@pytest.mark.parametrize(("uuid", "precision"), [("GPU-other", "bf16"), ("GPU-a", "fp16")])
def test_an_unknown_card_or_type_is_not_guessed(
    make_probe: MakeProbe, hardware: Hardware, uuid: str, precision: str
) -> None:
    probe = make_probe(cards=(card_figures("GPU-a"),))
    share = RankShare(CARD, precision, 1, 1)
    assert rates_of(probe, share, with_cards(hardware, uuid)) is None


def test_what_is_said(
    make_probe: MakeProbe, hardware: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known.psutil, "cpu_percent", lambda seconds: 3.0)
    rates, said = probed_rates(hardware, share())
    assert rates is None
    assert said == "rates measured in a moment; run `tightfit probe` for better step times"
    write_probe(make_probe())
    rates, said = probed_rates(hardware, share())
    assert rates is not None
    assert said == "rates of the probe of 2026-12-01"
    monkeypatch.setattr(known.psutil, "cpu_percent", lambda seconds: 60.0)
    _, said = probed_rates(hardware, share())
    assert "other processes keep 60% of the processors busy now" in said
    busy = make_probe()
    write_probe(dataclasses.replace(busy, busy_cores=0.5 * busy.identity.processors))
    _, said = probed_rates(hardware, share())
    assert "made while other processes kept 50%" in said


def test_a_disk_is_known_again_by_its_file_system(
    make_probe: MakeProbe, hardware: Hardware, tmp_path: Path
) -> None:
    device, total = disk_identity(tmp_path)
    disk = DiskFigures(str(tmp_path), device, total, 2**26, 3e9, 1e9)
    write_probe(make_probe(disk=disk))
    found = probed_disk(hardware, tmp_path)
    assert found is not None
    assert (found.read_bytes_per_second, found.write_bytes_per_second) == (3e9, 1e9)
    write_probe(make_probe(disk=dataclasses.replace(disk, device=device + 1)))
    assert probed_disk(hardware, tmp_path) is None
    write_probe(make_probe())
    assert probed_disk(hardware, tmp_path) is None


def test_threads_of_ranks_that_are_not_there_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(known, "threads_of", lambda rank, ranks, allowed, quota: 8 // ranks)
    assert [threads_of_rank(ranks) for ranks in (1, 2, 4)] == [8, 4, 2]
