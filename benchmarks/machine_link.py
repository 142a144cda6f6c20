"""Two "machines" on this host: network namespaces joined by a veth pair of a limited rate.

Needs root and iproute2. The rate is enforced by `tbf` at both ends; there is no added latency.
Knows nothing of what runs in the namespaces.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from types import TracebackType
from typing import Self

ADDRESSES = ("10.203.0.1", "10.203.0.2")
_INTERFACE = "link0"
_BURST_BYTES = 256 * 1024
_LONGEST_QUEUE = "50ms"


def why_not() -> str | None:
    """What is missing here; None where nothing is."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "it makes network namespaces, which needs root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found; install iproute2"
    return None


class Link:
    """Both machines and what joins them; a context manager that takes all away again."""

    def __init__(self) -> None:
        self._names = [f"tightfit-{os.getpid()}-{number}" for number in range(2)]

    def __enter__(self) -> Self:
        first, other = self._names
        try:
            for name in self._names:
                _run("ip", "netns", "add", name)
            _run(
                *("ip", "link", "add", _INTERFACE, "netns", first, "type", "veth"),
                *("peer", "name", _INTERFACE, "netns", other),
            )
            for number, address in enumerate(ADDRESSES):
                self._ip(number, "addr", "add", f"{address}/24", "dev", _INTERFACE)
                self._ip(number, "link", "set", "lo", "up")
                self._ip(number, "link", "set", _INTERFACE, "up")
        except subprocess.CalledProcessError as error:
            self._take_away()
            sys.exit(f"{' '.join(error.cmd)}: {error.stderr.strip()}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._take_away()

    def limit(self, bits_per_second: int) -> None:
        """What either machine may send to the other from now on."""
        for name in self._names:
            _run(
                *("ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", _INTERFACE),
                *("root", "tbf", "rate", f"{bits_per_second}bit"),
                *("burst", str(_BURST_BYTES), "latency", _LONGEST_QUEUE),
            )

    def cut(self) -> None:
        """Nothing arrives any more, and nobody is told."""
        self._ip(0, "link", "set", _INTERFACE, "down")

    def mend(self) -> None:
        """Undo `cut`."""
        self._ip(0, "link", "set", _INTERFACE, "up")

    def sent_bytes(self) -> tuple[int, int]:
        """By each machine to the other since they are there, with the headers of packets."""
        first, other = (self._count(number) for number in range(2))
        return first, other

    def command(self, number: int, words: list[str]) -> list[str]:
        """What runs `words` on a machine."""
        return ["ip", "netns", "exec", self._names[number], *words]

    def _count(self, number: int) -> int:
        file = f"/sys/class/net/{_INTERFACE}/statistics/tx_bytes"
        return int(_run("ip", "netns", "exec", self._names[number], "cat", file))

    def _ip(self, number: int, *words: str) -> None:
        _run("ip", "-n", self._names[number], *words)

    def _take_away(self) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout
