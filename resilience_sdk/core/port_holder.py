"""The holder of a TCP port: which process of this host listens there, in words for whoever finds the port in use.

/proc shows the sockets of this network namespace and the processes of this PID namespace: a holder in another
container, or one of another user, is known by its user alone.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs

from resilience_sdk.core.console import printable
from resilience_sdk.core.redaction import redact_argv

_STATES = {"0A": "listens", "01": "is connected", "06": "closes"}  # of proc(5): LISTEN, ESTABLISHED, TIME_WAIT
_TABLES = ("net/tcp", "net/tcp6")
_MAX_COMMAND = 120


@attrs.frozen
class PortHolder:
    """Who has a port of this host. `pid` is None where /proc does not show the process."""

    port: int
    state: str
    """`listens`, `is connected` or `closes`: a port that is only connected or closing can be taken by nobody, too."""
    uid: int | None
    pid: int | None = None
    command: str = ""

    def __str__(self) -> str:
        """Return a sentence without a full stop."""
        user = user_name(self.uid)
        by = f"of user {user}" if user else "of an unknown user"
        if self.pid is not None:
            does = "listens there" if self.state == "listens" else f"has a connection from there that {self.state}"
            return f"port {self.port} is held by process {self.pid} {by} ({self.command}), which {does}"
        if self.state == "closes":
            return f"port {self.port} still has a closing connection of an earlier program; the kernel frees it in 60 s"
        return (
            f"port {self.port} is held by a process {by} that is not visible from here "
            "(it runs in another container, or belongs to somebody else; as root: ss -ltnp)"
        )


def find_port_holder(port: int, *, root: Path = Path("/proc")) -> PortHolder | None:
    """Return who has the TCP port of this host, whoever listens before whoever is connected.

    None where nobody has it, or it cannot be known. Never raises.
    """
    rows = sorted(
        (row for table in _TABLES for row in _rows(_lines(root / "self" / table), port)),
        key=lambda row: list(_STATES.values()).index(row[0]),
    )
    if not rows:
        return None
    best = rows[0][0]
    inodes = {inode: uid for state, uid, inode in rows if state == best and inode != "0"}
    for pid, inode in _owners(root, set(inodes)):
        return PortHolder(port, best, inodes[inode], pid, _command(root, pid))
    return PortHolder(port, best, rows[0][1] if best != "closes" else None)


def words_of_holder(port: int) -> str:
    """Return who holds a port, as a sentence without a full stop that can be shown wherever the port was refused."""
    holder = find_port_holder(port)
    if holder is not None:
        return str(holder)
    return f"nobody on {os.uname().nodename} has port {port} any more, or /proc does not show who"


_PORT = re.compile(
    r"(?i)\bport[:=\s]+(?P<a>\d{2,5})\b"  # torch: `port: 29500`
    r"|\[[0-9a-f:.]+\]:(?P<b>\d{2,5})\b|(?:\d{1,3}\.){3}\d{1,3}:(?P<c>\d{2,5})\b"  # [::]:29500, 0.0.0.0:29500
    r"|\(['\"][^'\"]*['\"],\s*(?P<d>\d{2,5})\)"  # asyncio: ('127.0.0.1', 29500)
)


def port_in(text: str) -> int | None:
    """Return the port that the text of an error names, None where it names none."""
    for found in _PORT.finditer(text):
        number = int(next(filter(None, found.groups())))
        if 0 < number < 1 << 16:
            return number
    return None


def user_name(uid: int | None) -> str:
    """Return the name of a user, the number where it has none, an empty text where it is not known."""
    if uid is None:
        return ""
    try:
        import pwd

        return pwd.getpwuid(uid).pw_name
    except (ImportError, KeyError, OSError):
        return str(uid)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _rows(table: Iterable[str], port: int) -> Iterator[tuple[str, int, str]]:
    """Yield state, user and inode of the rows of a table of sockets that have `port` as their own."""
    ends_with = f":{port:04X}"
    for row in map(str.split, table):
        if len(row) > 9 and row[1].endswith(ends_with) and row[3] in _STATES and row[7].isdecimal():
            yield _STATES[row[3]], int(row[7]), row[9]


def _owners(root: Path, inodes: set[str]) -> Iterator[tuple[int, str]]:
    """Yield each process that has one of these sockets open, with its inode, the oldest process first."""
    if not inodes:
        return
    with contextlib.suppress(OSError):
        for pid in sorted(int(name) for name in os.listdir(root) if name.isdecimal()):
            with contextlib.suppress(OSError):
                for number in os.listdir(root / str(pid) / "fd"):
                    with contextlib.suppress(OSError):
                        target = os.readlink(root / str(pid) / "fd" / number)
                        if target.startswith("socket:[") and target[8:-1] in inodes:
                            yield pid, target[8:-1]


def _command(root: Path, pid: int) -> str:
    try:
        words = (root / str(pid) / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        words = []
    text = printable(" ".join(redact_argv(word.decode(errors="replace") for word in words if word)))
    if not text:
        text = printable("".join(_lines(root / str(pid) / "comm"))) or "?"
    text = " ".join(text.split())
    return text if len(text) <= _MAX_COMMAND else text[: _MAX_COMMAND - 3] + "..."
