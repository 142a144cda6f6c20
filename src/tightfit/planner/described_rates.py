"""Rates of a machine that one does not sit at: published ones, and what programs reach of them.

Counterpart of `rates.py`, which measures. The shares are `facts/reached.py`'s. Knows nothing of
models.
"""

from __future__ import annotations

from tightfit.errors import UnsupportedError
from tightfit.facts import reached
from tightfit.facts.machine import Link as DescribedLink
from tightfit.facts.machine import Machine
from tightfit.planner.rates import Link, Rates


def described_rates(machine: Machine, precision: str) -> Rates:
    """What one rank has while all of its node are busy: they share the host's memory and its disk.

    Args:
        precision: of parameters and computation.

    Raises:
        UnsupportedError: nobody has published how fast the card is in this precision.
    """
    card, ranks = machine.card, machine.cards_per_node
    products = reached.product_flops_per_second(card, precision)
    if products is None:
        raise UnsupportedError(
            f"no rate of {card.name} is known for {precision}; those of "
            f"{', '.join(card.flops_per_second)} are (precision: ...)"
        )
    memory = card.memory_bytes_per_second * reached.MEMORY_SHARE
    return Rates(
        matmul_flops_per_second=products,
        memory_bytes_per_second=memory,
        copy_bytes_per_second=min(
            machine.host_link_bytes_per_second, machine.host_memory_bytes_per_second / ranks
        ),
        host_memory_bytes_per_second=machine.host_memory_bytes_per_second / ranks,
        device_optimizer_parameters_per_second=memory / reached.OPTIMIZER_BYTES_PER_PARAMETER,
        host_optimizer_parameters_per_second=machine.host_optimizer_parameters_per_second / ranks,
        operation_seconds=reached.OPERATION_SECONDS,
        disk_read_bytes_per_second=machine.disk.read_bytes_per_second / ranks,
        disk_write_bytes_per_second=machine.disk.write_bytes_per_second / ranks,
        link=_link(machine.cards),
        network=None if machine.network is None else _link(machine.network),
    )


def _link(described: DescribedLink) -> Link:
    return Link.of(described.latency_seconds, described.bytes_per_second)


def rates_notes(machine: Machine, precision: str) -> list[str]:
    """What a time for a described machine is reckoned with, in a sentence."""
    nominal = machine.card.flops_per_second.get(precision)
    products = reached.product_flops_per_second(machine.card, precision)
    if nominal is None or products is None:
        return []
    return [
        f"times are for a described machine and measured nowhere: {precision} products at "
        f"{products / 1e12:.0f} of {nominal / 1e12:.0f} TFLOP/s, memory at "
        f"{reached.MEMORY_SHARE:.0%} of its rate (docs/machines.md)"
    ]
