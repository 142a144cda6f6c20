"""The network interface that leads to the other machines.

gloo takes the one of the machine's own name, which many systems resolve to the loopback: then no
other machine reaches it. Knows no ranks.
"""

from __future__ import annotations

import socket

import psutil


def interface_towards(address: str, port: int) -> str | None:
    """The name of the interface by which `address` is reached, of this machine's own address the
    one that has it; None where there is no way or it has no name. Sends nothing.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # of a datagram socket: only looks the route up
            own = probe.getsockname()[0]
    except OSError:
        return None
    interfaces = psutil.net_if_addrs().items()
    found = (name for name, known in interfaces if any(own == each.address for each in known))
    return next(found, None)
