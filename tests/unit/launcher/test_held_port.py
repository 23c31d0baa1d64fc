"""The port of the ranks' store: nobody else is given it between its choice and its use."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest

from resilience_sdk.launcher.agent import HeldPort


def test_a_held_port_is_taken_by_a_store_and_by_nobody_else():
    """Torch's store listens on it; who asks for it otherwise, or for any port, does not get it."""
    from torch.distributed import TCPStore

    held = HeldPort()
    port = held.take("127.0.0.1")
    assert held.port == port
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", port))
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    store.set("key", "value")
    assert store.get("key") == b"value"
    del store
    others = [HeldPort() for _ in range(64)]
    ports = [one.take() for one in others]
    assert len({port, *ports}) == 65
    again = held.take("127.0.0.1")
    assert again not in ports
    for one in (held, *others):
        one.close()
    assert held.port is None


def test_a_name_that_is_not_ours_still_gets_a_port():
    """MASTER_ADDR is what others reach this host by."""
    held = HeldPort()
    assert held.take("192.0.2.1") > 0
    port = held.port
    held.close()
    held.keep(port or 0)
    assert held.port == port
    held.close()
