"""The rendezvous of a job that has one node and was given none: nobody to wait for.

Torch's `--standalone` starts a store server, a heartbeat thread and a state machine that now and then sleeps
a whole second. With one node all of it agrees with itself.
"""

from __future__ import annotations

import socket
from typing import Any

from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo


class LocalRendezvous(RendezvousHandler):
    """Gives this node rank 0 of 1, and each attempt a free port for a store of its own."""

    def __init__(self, run_id: str, address: str) -> None:
        """Use `address` (of this host, as its ranks reach it) as MASTER_ADDR."""
        self._run_id = run_id
        self._address = address
        self._closed = False

    @property
    def use_agent_store(self) -> bool:
        """Ranks make their own store, so that none outlives its attempt."""
        return False

    def get_backend(self) -> str:
        """Return the backend's name for torch's records."""
        return "local"

    def get_run_id(self) -> str:
        """Return the id of the run."""
        return self._run_id

    def next_rendezvous(self) -> Any:
        """Return at once: one node, a new port, an empty store."""
        master = RendezvousStoreInfo(self._address, free_port(self._address))
        return RendezvousInfo(HashStore(), 0, 1, master)

    def is_closed(self) -> bool:
        """Tell whether the job is over."""
        return self._closed

    def set_closed(self) -> None:
        """Note that the job is over."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Return 0: nobody can come."""
        return 0

    def shutdown(self) -> bool:
        """Do nothing, successfully."""
        return True


def free_port(address: str = "") -> int:
    """Return a port of this host that nobody listens on now."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((address, 0))
        except OSError:  # the name is for others to reach us by; any address has the same ports
            probe.bind(("", 0))
        return int(probe.getsockname()[1])
