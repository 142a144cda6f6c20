"""The figures of a probe: plain data, checked when they are read from a file.

Rates are bytes, operations or parameters per second, all above zero and finite. No torch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(gt=0)]
# Width of a layer -> operations per second of its products.
ByWidth = Annotated[dict[Count, Rate], Field(min_length=1)]
CollectiveName = Literal["all_gather", "reduce_scatter", "all_reduce"]

_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_STRICT)
class Identity:
    """What a probe is of; where any of it is another one, its figures are not believed.

    Attributes:
        processors: of the machine, whether this process may use them or not.
        quota: cores that its container may take; None is no limit.
        cards: UUIDs of those that this process sees, sorted.
        driver: of the cards.
    """

    cpu: str
    processors: Count
    quota: Rate | None
    cards: tuple[str, ...]
    driver: str | None
    torch: str


@dataclass(frozen=True, config=_STRICT)
class HostFigures:
    """One process that computes on the CPU with so many threads.

    Attributes:
        matmul: fp32.
        memory: read and written by element-wise operations that make a tensor.
        copy: copied from one place to another.
        optimizer: parameters per second of fused AdamW in fp32.
    """

    threads: Count
    matmul: ByWidth
    memory: Rate
    copy: Rate
    optimizer: Rate
    operation_seconds: Rate


@dataclass(frozen=True, config=_STRICT)
class CopyFigures:
    """Between a card and its host; see `measure.CopyRates`."""

    to_card: Rate
    to_host: Rate
    both: Rate
    pageable_to_card: Rate
    pageable_to_host: Rate


@dataclass(frozen=True, config=_STRICT)
class PcieFigures:
    """A link as it was right after it had copied, and at most; see `hardware.PcieLink`."""

    generation: Count
    lanes: Count
    most_generation: Count
    most_lanes: Count


@dataclass(frozen=True, config=_STRICT)
class CardFigures:
    """One card.

    Attributes:
        matmul: by type: `fp32`, `tf32`, `bf16`, `fp16`.
        pcie: None where the driver does not tell.
    """

    uuid: str
    name: str
    matmul: dict[str, ByWidth]
    memory: Rate
    optimizer: Rate
    operation_seconds: Rate
    copies: CopyFigures
    pcie: PcieFigures | None


@dataclass(frozen=True, config=_STRICT)
class DiskFigures:
    """The disk under a folder, past the kernel's cache.

    Attributes:
        device, total_bytes: by which the same file system is known again.
    """

    folder: str
    device: int
    total_bytes: Count
    written_bytes: Count
    read: Rate
    write: Rate


@dataclass(frozen=True, config=_STRICT)
class LinkSample:
    """One collective of one size; `whole_bytes` is the tensor that is gathered, scattered or
    summed."""

    collective: CollectiveName
    whole_bytes: Count
    seconds: Rate


@dataclass(frozen=True, config=_STRICT)
class CollectiveFigures:
    """The line through the samples of a collective, over the bytes that each rank sends."""

    latency_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    bytes_per_second: Rate


@dataclass(frozen=True, config=_STRICT)
class LinkFigures:
    """Between the ranks of this machine.

    Attributes:
        together: what each rank has of the CPU while all compute; None on cards.
    """

    ranks: Annotated[int, Field(gt=1)]
    backend: Literal["gloo", "nccl"]
    samples: tuple[LinkSample, ...]
    lines: Annotated[dict[CollectiveName, CollectiveFigures], Field(min_length=3)]  # of all
    together: HostFigures | None


@dataclass(frozen=True, config=_STRICT)
class Probe:
    """All that is known of a machine.

    Attributes:
        schema: of this file; another number is another version's.
        made: when, as ISO 8601 has it, in UTC.
        busy_cores: what other processes took of the cores meanwhile, on average.
        nodes: processors of each NUMA node; empty where the machine does not say.
        cores: that this process may use.
        host: by threads, rising.
        matmul: of the CPU with all cores, by type.
        disk, link: None where they were not measured.
        notes: what could not be measured, and what disturbed it.
        node_cores, node_bytes: of each NUMA node, its memory; empty where the machine does not say,
            and in files of versions that did not ask.
    """

    schema: Literal[1]
    identity: Identity
    made: str
    busy_cores: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    nodes: tuple[tuple[int, ...], ...]
    cores: Count
    host: Annotated[tuple[HostFigures, ...], Field(min_length=1)]
    matmul: dict[str, ByWidth]
    cards: tuple[CardFigures, ...]
    disk: DiskFigures | None
    link: LinkFigures | None
    notes: tuple[str, ...]
    node_cores: tuple[Annotated[int, Field(ge=0)], ...] = ()
    node_bytes: tuple[Annotated[int, Field(ge=0)], ...] = ()


ADAPTER = TypeAdapter(Probe)
