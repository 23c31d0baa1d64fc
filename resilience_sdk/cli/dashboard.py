"""`resilience dashboard`: a page with many runs, and the live report of each, for people with a browser."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from resilience_sdk.cli.common import CommandParser
from resilience_sdk.core import environ
from resilience_sdk.core.console import say
from resilience_sdk.core.port_holder import words_of_holder
from resilience_sdk.core.run_directory import DEFAULT_ROOT
from resilience_sdk.errors import ConfigError, MissingExtraError
from resilience_sdk.system.hostinfo import host_name

if TYPE_CHECKING:
    from resilience_sdk.dashboard.runs import RunSource

LOOPBACK = "127.0.0.1"
PORT = 8484
_LAST_PORT = 65535
_UNTAKEN_MS = 30_000  # what a client does not take within so long ends its connection


def main(argv: Sequence[str]) -> int:
    """Serve until somebody ends it; return 0, or 130 after Ctrl-C. Raises ConfigError and MissingExtraError."""
    parser = CommandParser("dashboard", "Show many runs, and the live report of each, in a browser. It only reads.")
    parser.add_argument(
        "dirs", nargs="*", metavar="DIR", help=f"run directories, or folders of them (default ./{DEFAULT_ROOT})"
    )
    parser.add_argument("--db", metavar="URL", help="the runs of this index of `resilience history` instead")
    parser.add_argument("--host", metavar="HOST", default=LOOPBACK, help=f"address to serve at (default {LOOPBACK})")
    parser.add_argument(
        "--port", metavar="PORT", default=str(PORT), help=f"port to serve at (default {PORT}; 0: any that is free)"
    )
    parser.add_argument(
        "--allow-host", metavar="NAME", action="append", default=[],
        help="a name by which browsers reach it, such as that of a proxy; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--no-token", action="store_true",
        help="show the runs to whoever reaches the address, all users of this machine among them",
    )  # fmt: skip
    options = parser.parse_args(argv)
    _check_extra()
    source = _source(options)
    listening = _listen(options.host, _port(options.port))
    try:
        return _serve(source, listening, options)
    finally:
        listening.close()


def _check_extra() -> None:
    try:
        import jinja2  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            f"the dashboard needs what is not installed ({error}): pip install 'resilience-sdk[dashboard]'"
        ) from None


def _source(options: Any) -> RunSource:
    from resilience_sdk.dashboard.runs import FoundRuns, IndexedRuns

    if options.db is not None and options.dirs:
        raise ConfigError(f"DIR or --db, not both: the index knows its runs itself; leave out {options.dirs[0]}")
    if options.db is not None:
        return IndexedRuns(options.db)
    missing = [folder for folder in options.dirs if not os.path.isdir(folder)]
    if missing and missing == options.dirs:
        raise ConfigError(f"there is no directory {', '.join(missing)}; name a run directory, or a folder of them")
    for folder in missing:
        say(f"there is no directory {folder}: the others are shown, and its runs once it is there")
    return FoundRuns(options.dirs or [DEFAULT_ROOT])


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) <= _LAST_PORT):
        raise ConfigError(f"--port {text}: expected 0 to {_LAST_PORT} (0: any that is free)")
    return int(text)


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that is bound and does not listen yet; raises ConfigError."""
    try:
        (family, _, _, _, address), *_ = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        made = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"--host {host} is no address of this machine: {error.strerror or error}") from None
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # who stops reading is let go by the kernel, whatever is still to send
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNTAKEN_MS)
        made.bind(address)
    except OSError as error:
        made.close()
        holder = f" ({words_of_holder(port)})" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(
            f"cannot serve at {host}:{port}: {error.strerror}{holder}; --port 0 takes any port that is free"
        ) from None
    return made


def _serve(source: RunSource, listening: socket.socket, options: Any) -> int:
    from resilience_sdk.dashboard.access import Hosts, token_of
    from resilience_sdk.dashboard.app import Dashboard, serve
    from resilience_sdk.dashboard.runs import RunBook

    address, port = listening.getsockname()[:2]
    is_loopback = ipaddress.ip_address(address).is_loopback
    told = environ.environment().get(environ.DASHBOARD_TOKEN)
    token = None if options.no_token else token_of(told)
    own = [] if is_loopback else [options.host, host_name(), host_name().partition(".")[0]]
    dashboard = Dashboard(RunBook(source), hosts=Hosts.of(*own, *options.allow_host), token=token)
    shown = f"http://[{address}]:{port}/" if ":" in address else f"http://{address}:{port}/"
    if token is not None and told:
        shown += ", for who has RESILIENCE_DASHBOARD_TOKEN"
    elif token is not None:
        shown += f"?token={token}"
    # Not wrapped: the address is to be copied.
    return serve(dashboard, listening, lambda: say(f"dashboard at {shown} (Ctrl-C ends it)", wrap=False))
