"""Prints `docs/machines.md` from the presets: `python -m tightfit.cli.document_machines`."""

from __future__ import annotations

from collections.abc import Iterator

from tightfit.cli.presets import tflops
from tightfit.facts import reached
from tightfit.facts.disk import ASSUMED_DISK
from tightfit.facts.presets import Card, Pcie, presets
from tightfit.units import GIB

_INTRODUCTION = """\
# Machines that one does not sit at

<!-- Made by `python -m tightfit.cli.document_machines` from src/tightfit/facts/cards/*.json. -->

`tightfit plan` and `tightfit estimate` work for a machine that is only described. No card is needed
for it, here or anywhere:

    tightfit plan Qwen/Qwen2.5-7B --gpu 2xrtx-4090 --ram 64GiB --nvme 1TB@3.5GB/s
    tightfit plan Qwen/Qwen2.5-7B --gpu 8xh100 --ram 2TB --nodes 4 --network 8x400Gb
    tightfit presets                                  # the cards

| key | written like | says | without it |
|---|---|---|---|
| `gpu` | `2xrtx-4090`, `RTX 4090`, `a100-80g`, a driver's name | the card, and how many each machine has | it is this machine |
| `ram` | `64GiB`, `64GiB@80GB/s` | RAM of a machine, and its modules' rate | no limit on the host; the rate below |
| `nvme` | `1TB`, `1TB@3.5GB/s`, `1TB@3.5GB/s:1.7GB/s` | disk of a machine, read, written | nothing goes to nvme |
| `interconnect` | `pcie4`, `pcie4x8`, `nvlink`, `nvlink,pcie4x8` | the cards' slots, and what joins cards | the card's own PCIe; NVLink where it is built in |
| `nodes` | `4` | how many machines (`nnodes`) | one |
| `network` | `25Gb`, `8x400Gb` (bits), `3GB/s` (bytes) | what leaves a machine, all adapters together | 10Gb, with a note |

- `num_gpus` says how many of the cards are used; without it all are. More than there are is an error.
  `gpu: rtx-4090` without a number has as many as `num_gpus`.
- `memory_limit`, `host_memory_limit` and `nvme_limit` take something off the machine; more than it has
  is an error.
- Sizes and rates that no machine of the next years has are an error that asks for the unit: above 64 TiB
  of RAM or 10 TB/s of it, 1024 TiB or 100 GB/s of disk, 20 Tb/s of network.
- A slot and a card agree on what both can: an RTX 4090 in `pcie5` runs at PCIe 4. Boards for home use
  often give two cards 8 lanes each: `--interconnect pcie4x8`.
- Cards without a link of their own send over PCIe. Drivers of GeForce cards do not let them read each
  other's memory, so what they send goes through the host's.
- Where a display hangs on the card, its memory is less: lower `memory_limit`.
- `tightfit train` refuses these keys: it runs on the machine that it is on, and measures it.

## What is reckoned with

Published rates are not reached. `src/tightfit/facts/reached.py` has every share with where it was
measured; times of a described machine are no better than these.
"""  # noqa: E501

_TABLE = """
## Cards

Memory is what torch can have of it. Rates are dense and add up in fp32 (GeForce cards add up in fp16
at twice the rate, which training does not use); fp32 is that of ordinary cores, as torch's products are
by default. GB/s of links are of one direction; a bridge is bought apart.
`tests/facts/test_presets.py` works out bandwidths from the bus and its rate, and matrix rates from
multiprocessors and clocks.

| gpu | card | memory GiB | memory GB/s | fp32 | tf32 | fp16 | bf16 | fp8 | int8 | PCIe | between cards |
|---|---|---|---|---|---|---|---|---|---|---|---|"""  # noqa: E501

_SOURCES = """
## Sources

The makers' documents, by title. Chips (multiprocessors, clocks, memory) and usable memory were
compared with published tables and with what programs print; `not compared` names the fields of
`src/tightfit/facts/cards/*.json` that were typed from memory and compared with no text. Matrix
rates follow from the chip and what an architecture's whitepaper says of a multiprocessor.

| gpu | documents | not compared | note |
|---|---|---|---|"""


def document() -> str:
    """The whole page."""
    lines = [_INTRODUCTION, *_assumptions(), _TABLE]
    lines += [_row(_figures(card)) for card in presets()]
    lines.append(_SOURCES)
    lines += [_row(_provenance(card)) for card in presets()]
    return "\n".join(lines) + "\n"


def _assumptions() -> Iterator[str]:
    yield "| what | reckoned with |"
    yield "|---|---|"
    yield _row(("matrix products of 16 and 8 bits", _products("bf16", "fp16")))
    yield _row(("matrix products in fp32", _products("fp32")))
    yield _row(("memory of a card", f"{reached.MEMORY_SHARE:.2f} of its rate"))
    yield _row(("pinned copies to and from the host", ", ".join(_copies())))
    through = reached.THROUGH_HOST_SHARE
    yield _row(("cards that send through the host's memory", f"{through:.2f} of those copies"))
    yield _row(("NVLink and its like", f"{reached.FABRIC_SHARE:.2f} of its rate"))
    yield _row(("network", f"{reached.NETWORK_SHARE:.2f} of its rate (assumed)"))
    read, write = ASSUMED_DISK.read_bytes_per_second, ASSUMED_DISK.write_bytes_per_second
    yield _row(
        ("disk without a rate", f"{read / 1e9:.1f} GB/s read, {write / 1e9:.1f} GB/s written")
    )
    yield _row(("the host's memory (assumed)", _host_memory()))
    yield _row(
        (
            "AdamW in fp32, on cards and hosts",
            f"{reached.OPTIMIZER_BYTES_PER_PARAMETER} bytes of memory traffic for a parameter",
        )
    )
    yield _row(("starting an operation", f"{reached.OPERATION_SECONDS * 1e6:.0f} microseconds"))
    yield _row(
        (
            "RAM that jobs can have (assumed)",
            f"all but 1/64 and 2 GiB: {reached.usable_ram(64 * GIB) / GIB:.0f} of 64 GiB",
        )
    )


def _products(*precisions: str) -> str:
    """Shares of each architecture, of the first type that its cards have."""
    shares: dict[str, float] = {}
    for card in presets():
        for precision in precisions:
            reached_rate = reached.product_flops_per_second(card, precision)
            if reached_rate is not None:
                share = reached_rate / card.flops_per_second[precision]
                shares.setdefault(card.architecture, share)
                break
    if len({round(share, 3) for share in shares.values()}) == 1:
        return f"{next(iter(shares.values())):.2f} of the rate"
    return ", ".join(f"{name} {share:.2f}" for name, share in shares.items())


def _copies() -> Iterator[str]:
    for generation in (3, 4, 5):
        pcie = Pcie(generation, 16)
        rate, nominal = reached.copy_bytes_per_second(pcie), pcie.bytes_per_second
        yield f"{pcie} {rate / 1e9:.1f} of {nominal / 1e9:.1f} GB/s"


def _host_memory() -> str:
    examples = []
    for kind in ("consumer", "workstation", "datacentre"):
        card = next(card for card in presets() if card.kind == kind)
        rates = (
            reached.assumed_host_memory(card, Pcie(generation, 16), 1) / 1e9
            for generation in (4, 5)
        )
        older, newer = rates
        examples.append(f"{kind} {older:.0f} GB/s (PCIe 5: {newer:.0f})")
    share = reached.HOST_MEMORY_SHARE
    return f"{share:.2f} of {', '.join(examples)}; twice that for more than 4 datacentre cards"


def _figures(card: Card) -> tuple[str, ...]:
    types = ("fp32", "tf32", "fp16", "bf16", "fp8", "int8")
    return (
        f"`{card.key}`",
        card.name,
        f"{card.usable_bytes / GIB:.1f}",
        f"{card.memory_bytes_per_second / 1e9:.0f}",
        *(tflops(card, name) for name in types),
        f"{card.pcie.generation} x{card.pcie.lanes}",
        _fabric(card),
    )


def _fabric(card: Card) -> str:
    if card.fabric is None:
        return "PCIe"
    rate = f"{card.fabric.bytes_per_second / 1e9:.4g}"
    return f"{card.fabric.name} {rate}, {card.fabric.cards} cards"


def _provenance(card: Card) -> tuple[str, ...]:
    return (
        f"`{card.key}`",
        "; ".join(card.sources) or "none",
        ", ".join(card.unchecked),
        card.note or "",
    )


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(document(), end="")
