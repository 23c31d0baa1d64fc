"""Hosts made of network namespaces: each with a name and an address of its own, joined by a switch.

What runs in one resolves the names of all, cannot see the others' loopback, and loses them when a cable is pulled.
Processes and files are shared: a run directory that all hosts see needs nothing more. Needs root and `ip`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import attrs

_ETC = Path("/etc/netns")  # what stands there for a namespace is mounted over /etc by `ip netns exec`
_PORT = "eth0"
_DEADLINE_S = 20


def why_not() -> str | None:
    """Return why no hosts can be made here, None when they can."""
    missing = [name for name in ("ip", "unshare", "hostname") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} missing (Debian: apt-get install iproute2 util-linux hostname)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = f"probe-{uuid.uuid4().hex[:8]}"
    try:
        _ip("netns", "add", probe)
    except RuntimeError as error:
        return f"no network namespace can be made here: {error}"
    _ip("netns", "delete", probe)
    return None


@attrs.frozen
class Host:
    """One host of a `network`."""

    name: str
    address: str
    namespace: str
    switch: str

    @property
    def within(self) -> tuple[str, ...]:
        """The words that run a command on this host; its process id stays that of the command."""
        rename = 'hostname "$0" && exec "$@"'
        return ("ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", rename, self.name)

    def cut(self) -> None:
        """Pull the cable: nothing gets in or out, and nobody is told."""
        _ip("-n", self.switch, "link", "set", self.name, "down")

    def restore(self) -> None:
        """Plug the cable in again."""
        _ip("-n", self.switch, "link", "set", self.name, "up")


@contextlib.contextmanager
def network(count: int) -> Iterator[tuple[Host, ...]]:
    """Make that many hosts, `host0` and so on, which reach one another; whatever happens, nothing is left."""
    mark = uuid.uuid4().hex[:6]
    switch = f"switch-{mark}"
    hosts = tuple(Host(f"host{n}", f"10.199.8.{n + 1}", f"host{n}-{mark}", switch) for n in range(count))
    names = "".join(f"{host.address} {host.name}\n" for host in hosts)
    with contextlib.ExitStack() as made:
        _add(made, switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for host in hosts:
            _add(made, host.namespace)
            etc = _ETC / host.namespace
            etc.mkdir(parents=True)
            made.callback(_forget, etc)
            (etc / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
            _ip("-n", switch, "link", "add", host.name, "type", "veth", "peer", "name", _PORT, "netns", host.namespace)
            _ip("-n", switch, "link", "set", host.name, "master", "bridge", "up")
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", _PORT)
            for device in ("lo", _PORT):
                _ip("-n", host.namespace, "link", "set", device, "up")
        yield hosts


def _add(made: contextlib.ExitStack, namespace: str) -> None:
    _ip("netns", "add", namespace)
    made.callback(_ip, "netns", "delete", namespace)


def _forget(etc: Path) -> None:
    shutil.rmtree(etc)
    with contextlib.suppress(OSError):  # others may use it
        _ETC.rmdir()


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip() or done.returncode}")
