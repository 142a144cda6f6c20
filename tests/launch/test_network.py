"""The interface to another machine, of the addresses that every machine has."""

from __future__ import annotations

import socket

import psutil
import pytest

from tightfit.launch.network import interface_towards


@pytest.mark.parametrize("interface", psutil.net_if_addrs())
def test_an_own_address_is_on_its_interface(interface: str) -> None:
    for known in psutil.net_if_addrs()[interface]:
        if known.family == socket.AF_INET:
            assert interface_towards(known.address, 29500) == interface


def test_a_machine_that_nobody_knows_is_on_none() -> None:
    assert interface_towards("no.such.machine.invalid", 29500) is None
