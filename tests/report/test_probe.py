"""A probe and the history as people see them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from rich.console import Console
from tests.monitor.test_history import entry
from tests.planner.probe.machines import card_figures, host_figures, link_figures

from tightfit.facts.presets import Card, find_card
from tightfit.monitor.history import History
from tightfit.planner.probe.figures import DiskFigures, Identity, PcieFigures, Probe
from tightfit.report.probe import pcie_remarks, show_history, show_probe
from tightfit.units import GIB

NOMINAL = find_card("rtx-4090")


def probe(card: str = "NVIDIA GeForce RTX 4090") -> Probe:
    return Probe(
        schema=1,
        identity=Identity("a CPU", 2, None, ("GPU-a",), "580", "2.13"),
        made="2026-12-01T10:00:00+00:00",
        busy_cores=0.0,
        nodes=((0,), (1,)),
        cores=2,
        host=(host_figures(1, 1.0), host_figures(2, 1.5)),
        matmul={"bf16": {64: 1e9}},
        cards=(card_figures("GPU-a", name=card),),
        disk=DiskFigures("/data", 1, 10**12, 2**29, 3.5e9, 1.7e9),
        link=link_figures(),
        notes=("something disturbed it",),
    )


def shown(probe: Probe) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        show_probe(console, probe)
    return capture.get()


def row(text: str, start: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.strip().startswith(start))
    return line.split()


def test_every_figure_has_its_unit_and_its_share_of_what_is_published() -> None:
    text = shown(probe())
    assert "2 cores usable, 2 NUMA nodes (0: 1 processor; 1: 1 processor)" in text
    assert row(text, "fp32 products, 1024 wide")[-4:] == ["80.0", "GFLOP/s", "120.0", "GFLOP/s"]
    assert row(text, "fused AdamW")[-4:] == ["700", "Mparam/s", "1,050", "Mparam/s"]
    assert row(text, "bf16 products, 4096 wide")[-1] == "91%"
    assert row(text, "memory, element-wise ")[-1] == "GB/s"
    assert row(text, "host to card, page-locked")[-5:] == ["24.00", "GB/s", "31.51", "GB/s", "76%"]
    assert row(text, "both at once, together")[-1] == "63%"
    assert "all-gather: 400 us and 0.50 GB/s of what each rank sends" in text
    assert "each of 2 ranks while all compute, with 1 thread:" in text
    assert "disk at /data: 3.50 GB/s read, 1.70 GB/s written (512.0 MiB" in text
    assert "note: something disturbed it" in text


def test_nodes_have_cores_and_memory() -> None:
    """The second has memory alone, as expanders on PCIe do."""
    known = dataclasses.replace(
        probe(), nodes=((0, 1), ()), node_cores=(1, 0), node_bytes=(64 * GIB, 2 * GIB)
    )
    assert (
        "2 NUMA nodes (0: 1 core, 2 processors, 64.00 GiB; 1: 0 cores, 0 processors, 2.00 GiB)"
        in shown(known)
    )
    single = dataclasses.replace(known, nodes=((0, 1),), node_cores=(2,), node_bytes=(GIB,))
    assert "1 NUMA node (0: 2 cores, 2 processors, 1.00 GiB)" in shown(single)
    assert "2 cores usable, 1 NUMA node\n" in shown(dataclasses.replace(probe(), nodes=()))


def test_an_unknown_card_has_no_nominal_figures() -> None:
    text = shown(probe("A card that nobody knows"))
    assert row(text, "host to card, page-locked")[-4:] == ["24.00", "GB/s", "-", "-"]


@pytest.mark.parametrize(
    ("pcie", "rate", "nominal", "said"),
    [
        (PcieFigures(4, 16, 4, 16), 25e9, NOMINAL, []),
        (PcieFigures(4, 16, 4, 16), 25e9, None, []),
        (PcieFigures(4, 4, 4, 16), 6e9, None, ["PCIe runs at x4 of x16"]),
        # What the driver says is the most that card and slot can together.
        (PcieFigures(4, 4, 4, 4), 6e9, NOMINAL, ["PCIe runs at x4 of x16", "copies reach 19%"]),
        (PcieFigures(1, 16, 4, 16), 3e9, None, ["runs at generation 1 of 4"]),
        (None, 6e9, NOMINAL, ["copies reach 19% of what PCIe 4 x16 carries"]),
        (None, 6e9, None, []),
    ],
)
def test_what_is_wrong_with_a_slot(
    pcie: PcieFigures | None, rate: float, nominal: Card | None, said: Sequence[str]
) -> None:
    card = card_figures("GPU-a", pcie=pcie)
    card = dataclasses.replace(
        card, copies=dataclasses.replace(card.copies, to_card=rate, to_host=rate)
    )
    remarks = list(pcie_remarks(card, nominal))
    assert len(remarks) == len(said)
    assert all(part in remark for part, remark in zip(said, remarks, strict=True))


def history_text(history: History, width: int = 200) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        show_history(console, history)
    return capture.get()


def test_history_shows_each_error_the_median_and_where_it_leans() -> None:
    quick = [entry(predicted, 2.0, rates="quick") for predicted in (1.0, 1.2, 1.1)]
    probed = [entry(predicted, 2.0) for predicted in (1.8, 1.9)]
    text = history_text(History((*quick, *probed), unread=1))
    assert "-50%" in text
    assert "100 ms / 200 ms" in text  # communication, predicted and measured
    assert "5 runs: median error -40%, median without its sign 40%" in text
    assert "too short in 5 of 5 runs. Nothing is corrected by this" in text
    assert "with a probe 8% off in the middle, without one 45%" in text
    assert "1 lines of the history could not be read" in text


def test_history_breaks_no_word_of_a_narrow_terminal() -> None:
    plan = (
        "micro-batch 1 x 8, LoRA rank 8, 4-bit base, chunked loss, selective checkpointing, "
        "49% of gradients + optimizer on host, lazy step"
    )
    run = entry(0.1234, 0.9876, model="meta-llama/Llama-3.1-70B", policies=plan)
    words = history_text(History((run,), 0), 80).split()
    assert not [word for word in f"{plan} {run.model}".split() if word not in words]


def test_history_of_nothing() -> None:
    assert "no training run has been recorded yet" in history_text(History((), 0))
    text = history_text(History((entry(1.0, None),), 0))
    assert "median" not in text
