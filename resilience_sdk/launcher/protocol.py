"""What launcher and fork server say to each other: JSON messages with a length in front, over one socket
pair.

Both ends are ours and the pair has no name, so nobody else can speak on it; JSON all the same, never a
pickle.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

import attrs

from resilience_sdk.launcher.script import Script

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
        return {"op": "start", **attrs.asdict(self)}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Order:
        """Build the order that `to_message` took apart."""
        fields = {name: message[name] for name in attrs.fields_dict(cls)}
        script = fields["script"]
        fields["script"] = Script(script["kind"], script["target"], script["args"])
        fields["command"] = None if fields["command"] is None else tuple(fields["command"])
        return cls(**fields)


@attrs.frozen
class Readiness:
    """What the server found when it had preloaded: `problem` is why it must not fork workers, or None."""

    problem: str | None
    missing: tuple[str, ...]  # "module: reason" for each preload that failed
    seconds: float  # how long the preload took


class Channel:
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
