"""The wire between launcher and fork server.

JSON messages with a length in front, and the script that ranks run, as one value.

Both ends are ours and the pair has no name, so nobody else can speak on it; JSON all the same, never a
pickle.
"""

from __future__ import annotations

import difflib
import json
import os
import shutil
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

from resilience_sdk.core.json_records import from_values, to_values
from resilience_sdk.errors import ConfigError

Kind = Literal["file", "module", "binary"]


def _strings(values: Sequence[object]) -> tuple[str, ...]:
    return tuple(str(value) for value in values)


@attrs.frozen
class Script:
    """A program and its arguments, as torchrun understands them. Immutable, picklable, JSON-able.

    `file`: a Python file, or a directory or zip archive with a `__main__.py`. `module`: `-m package.module`.
    `binary`: `--no-python`, anything that can be executed.
    """

    kind: Kind = attrs.field(validator=attrs.validators.in_(("file", "module", "binary")))
    target: str = attrs.field(validator=attrs.validators.instance_of(str))
    args: tuple[str, ...] = attrs.field(default=(), converter=_strings)

    @classmethod
    def parse(cls, target: str, args: Sequence[str] = (), *, module: bool = False, no_python: bool = False) -> Script:
        """Build the value from torchrun's positional arguments and its `-m` and `--no-python`.

        Raises:
            ConfigError: the two options exclude one another, or there is no target.
        """
        if module and no_python:
            raise ConfigError("-m and --no-python exclude one another: a module needs Python; drop one of them")
        if not target:
            raise ConfigError("no script given; usage: resilience run [options] script.py [arguments]")
        kind: Kind = "module" if module else "binary" if no_python else "file"
        return cls(kind, target, tuple(args))

    def check(self) -> None:
        """Refuse what cannot be started, before any rank exists.

        A module is not looked up here: that would import its parent packages into the launcher.

        Raises:
            ConfigError: names what was given and the nearest match that exists.
        """
        if self.kind == "file" and not os.path.exists(self.target):
            raise ConfigError(f"script {self.target!r} does not exist{_nearest(self.target)}")
        if self.kind == "binary" and shutil.which(self.target) is None:
            raise ConfigError(
                f"--no-python {self.target!r} cannot be executed: no such program in PATH, "
                "or the file is not executable (chmod +x)"
            )

    def with_args(self, args: Sequence[str]) -> Script:
        """Return the same program with other arguments (elastic substitutes `${local_rank}` per rank)."""
        return attrs.evolve(self, args=tuple(args))

    def command(self, python: str) -> list[str]:
        """Return the command line that torchrun would execute for this script."""
        if self.kind == "binary":
            return [self.target, *self.args]
        switch = ["-m"] if self.kind == "module" else []
        return [python, "-u", *switch, self.target, *self.args]


def _nearest(path: str) -> str:
    folder, name = os.path.split(path)
    try:
        there = os.listdir(folder or ".")
    except OSError:
        return f": there is no folder {folder!r}"
    matches = difflib.get_close_matches(name, there, n=1)
    return f"; did you mean {os.path.join(folder, matches[0])!r}?" if matches else f" in {os.path.abspath(folder)!r}"


_LENGTH = struct.Struct("!I")


@attrs.frozen
class Order:
    """One worker to start: the server's child becomes it, or executes `command` where there is one."""

    number: int
    script: Script
    environment: Mapping[str, str]  # the whole of it, not only what differs
    directory: str
    stdout: str  # path to redirect to; "" keeps the launcher's stream
    stderr: str
    command: tuple[str, ...] | None = None

    def to_message(self) -> dict[str, Any]:
        """Return the order as a JSON-able message."""
        return {"op": "start", **to_values(self)}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Order:
        """Build the order that `to_message` took apart."""
        return from_values(cls, message)


@attrs.frozen
class Readiness:
    """What the server found when it had preloaded: `problem` is why it must not fork workers, or None."""

    problem: str | None
    missing: tuple[str, ...]  # "module: reason" for each preload that failed
    seconds: float  # how long the preload took


class WireEnd:
    """One end of the socket pair. Not thread-safe; each side uses it from one thread."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._unread = bytearray()
        self.open = True

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._end.fileno()

    def close(self) -> None:
        """Close this end; the other one sees the end of the stream."""
        self.open = False
        self._end.close()

    def send(self, message: Mapping[str, Any]) -> bool:
        """Send one message, blocking while the other side is behind; False when it is gone."""
        data = json.dumps(message).encode()
        try:
            self._end.sendall(_LENGTH.pack(len(data)) + data)
        except OSError:
            self.open = False
        return self.open

    def receive(self, timeout_s: float | None = 0.0) -> list[dict[str, Any]]:
        """Return every complete message, waiting up to `timeout_s` for one; at the end `open` is False."""
        messages = self._complete()
        while not messages and self.open:
            self._end.settimeout(timeout_s)
            try:
                data = self._end.recv(1 << 20)
            except (BlockingIOError, TimeoutError):
                break
            except OSError:
                data = b""
            finally:
                # Sending blocks: the socket's timeout holds for both directions.
                self._end.settimeout(None)
            if not data:
                self.open = False
            self._unread += data
            try:
                messages = self._complete()
            except ValueError:
                # A signal handler that raised between reading and keeping lost a piece: nothing here makes
                # sense now.
                self.open = False
        return messages

    def _complete(self) -> list[dict[str, Any]]:
        messages = []
        while len(self._unread) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._unread)
            if len(self._unread) < _LENGTH.size + length:
                break
            messages.append(json.loads(bytes(self._unread[_LENGTH.size : _LENGTH.size + length])))
            del self._unread[: _LENGTH.size + length]
        return messages
