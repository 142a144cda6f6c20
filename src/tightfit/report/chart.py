"""What a picture of a bill shows: one bar per phase for each tier, and the tier's limit.

The plain data that `bars.py` draws in the terminal and `picture.py` as a page. Knows nothing of
either.
"""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.bill.table import Kind, MemoryTable, Phase
from tightfit.planner.plan import Limits
from tightfit.policies import Tier
from tightfit.units import format_bytes

_FARTHEST_LIMIT = 2  # times the peak: a limit beyond would leave the bars too short to read


@dataclass(frozen=True)
class Bar:
    """One phase of a tier.

    Attributes:
        segments: kinds that hold anything at the tier's peak in this phase, in order, with
            their bytes.
    """

    phase: Phase
    segments: tuple[tuple[Kind, int], ...]

    @property
    def total_bytes(self) -> int:
        """The whole bar."""
        return sum(count for _, count in self.segments)


@dataclass(frozen=True)
class Room:
    """The most a tier may hold.

    Attributes:
        limit_bytes: zero where other tiers alone fill what they share with this one.
        said: in words, such as `device limit 24.00 GiB`.
    """

    limit_bytes: int
    said: str


@dataclass(frozen=True)
class TierChart:
    """All phases of one tier.

    Attributes:
        room: None without a limit.
    """

    tier: Tier
    bars: tuple[Bar, ...]
    room: Room | None

    @property
    def highest(self) -> Bar:
        """The phase with the tier's peak; the first of equals."""
        return max(self.bars, key=lambda bar: bar.total_bytes)

    @property
    def scale_bytes(self) -> int:
        """What the full width stands for: the peak, or the limit unless that is far away."""
        peak = self.highest.total_bytes
        if self.room is None or self.room.limit_bytes > peak * _FARTHEST_LIMIT:
            return peak
        return max(peak, self.room.limit_bytes)

    @property
    def drawn_limit_bytes(self) -> int | None:
        """Where the limit's mark goes; None where there is none within the scale."""
        if self.room is None or self.room.limit_bytes > self.scale_bytes:
            return None
        return self.room.limit_bytes

    def over_bytes(self, bar: Bar) -> int:
        """How far `bar` is beyond the limit; zero if it fits."""
        return 0 if self.room is None else max(0, bar.total_bytes - self.room.limit_bytes)

    def heading(self) -> str:
        """The peak, its phase, the limit and what is missing or to spare, as one line."""
        peak = self.highest.total_bytes
        said = f"{self.tier}: peak {format_bytes(peak)} in {self.highest.phase}"
        if self.room is None:
            return f"{said}, no limit"
        over = self.over_bytes(self.highest)
        left = f"{format_bytes(over)} missing" if over else self._spare(peak, self.room)
        return f"{said}, {self.room.said}: {left}"

    @staticmethod
    def _spare(peak_bytes: int, room: Room) -> str:
        return f"fits, {format_bytes(room.limit_bytes - peak_bytes)} to spare"

    def kinds(self) -> list[Kind]:
        """The kinds of all bars, in order."""
        present = {kind for bar in self.bars for kind, _ in bar.segments}
        return [kind for kind in Kind if kind in present]


def tier_charts(table: MemoryTable, limits: Limits) -> list[TierChart]:
    """One chart for each tier that holds anything, with the phases that `table` knows."""
    phases = [phase for phase in Phase if phase in table.peaks]
    return [
        TierChart(
            tier,
            tuple(Bar(phase, _segments(table, phase, tier)) for phase in phases),
            _room(table, limits, tier),
        )
        for tier in table.tiers()
    ]


def _segments(table: MemoryTable, phase: Phase, tier: Tier) -> tuple[tuple[Kind, int], ...]:
    kinds = table.peaks[phase].get(tier, {})
    return tuple((kind, kinds[kind]) for kind in Kind if kinds.get(kind, 0))


def _room(table: MemoryTable, limits: Limits, tier: Tier) -> Room | None:
    """The tightest limit of `tier`, less the peaks of the tiers it shares that with.

    The sums are those of `Limits.tightest`, so that what is missing here is what is missing there.
    """
    device, host = table.peak_bytes(Tier.DEVICE), table.peak_bytes(Tier.HOST)
    pinned = table.peak_bytes(Tier.PINNED)
    shares = {
        Tier.DEVICE: [("device", limits.device_bytes, 0), ("RAM", limits.shared_bytes, host)],
        Tier.HOST: [("host", limits.host_bytes, pinned), ("RAM", limits.shared_bytes, device)],
        Tier.PINNED: [("host", limits.host_bytes, host)],
    }
    rooms = [
        _share(name, limit, others)
        for name, limit, others in shares.get(tier, [])
        if limit is not None
    ]
    return min(rooms, key=lambda room: room.limit_bytes, default=None)


def _share(name: str, limit_bytes: int, others_bytes: int) -> Room:
    if not others_bytes:
        return Room(limit_bytes, f"{name} limit {format_bytes(limit_bytes)}")
    left = max(0, limit_bytes - others_bytes)
    taken, limit = format_bytes(others_bytes), format_bytes(limit_bytes)
    return Room(left, f"{name} limit {limit} less {taken} of the other tiers")
