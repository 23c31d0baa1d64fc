"""The nodes' rendezvous, and other calls that may never return, kept from blocking the launcher for ever.

Torch's client of a store gives up waiting for a *key* after a while, but then waits without any bound for the
store's confirmation; and what it sends into a dead link is only given up by the kernel, after a quarter of an
hour. So everything that asks the store runs in a thread that the launcher can leave behind, and a request that
takes too long is known as such: then the connection is made anew.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT, create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from resilience_sdk.core.console import say, say_once
from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.core.port_holder import find_port_holder, port_in, words_of_holder
from resilience_sdk.errors import ConfigError
from resilience_sdk.system.hostinfo import host_name
from resilience_sdk.system.linux import listens_on

Answer = TypeVar("Answer")

_LOOK_S = 1.0  # how often a wait is looked after
_ASK_S = 1.0


def within(
    seconds: float,
    call: Callable[[], Answer],
    *,
    look: Callable[[float], None] = lambda _: None,
    name: str = "resilience-bounded",
) -> Answer:
    """Return what `call` returns, or raise what it raises; it runs in a thread of its own.

    `look` is called about once a second with the seconds that have passed; what it raises ends the wait, and so
    does what a signal handler raises. The thread is then left behind.

    Raises:
        TimeoutError: The time is over.
    """
    answers: list[Answer] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            answers.append(call())
        except BaseException as error:  # noqa: BLE001 - for the thread that waits
            errors.append(error)
        finally:
            done.set()

    began = time.monotonic()
    threading.Thread(target=run, name=name, daemon=True).start()
    while not done.wait(min(_LOOK_S, max(0.0, seconds - (time.monotonic() - began)))):
        passed = time.monotonic() - began
        if passed >= seconds:
            raise TimeoutError(f"no answer for {seconds:.0f} s")
        look(passed)
    if errors:
        raise errors[0]
    return answers[0]


class WaitingNodes:
    """How many nodes wait to join, as the store said last: it may take long, so a thread asks, about once a second."""

    def __init__(self, handler: RendezvousHandler) -> None:
        """Nothing is asked before the first `newest()`."""
        self._handler = handler
        self.is_given_up = False
        """Whether the rendezvous is left behind: then it is no news that its store does not answer."""
        self._answer = 0
        self._thread: threading.Thread | None = None
        self._asked_at = float("-inf")

    def newest(self) -> int:
        """Return the last answer, 0 before there is one. Never waits."""
        idle = self._thread is None or not self._thread.is_alive()
        if idle and time.monotonic() - self._asked_at >= _ASK_S:
            self._asked_at = time.monotonic()
            self._thread = threading.Thread(target=self._ask, name="resilience-asks", daemon=True)
            self._thread.start()
        return self._answer

    def settle(self) -> None:
        """Wait for a question that is out, and forget the answer."""
        if self._thread is not None:
            self._thread.join()
        self._answer = 0

    def _ask(self) -> None:
        try:
            self._answer = int(self._handler.num_nodes_waiting())
        except Exception as error:  # noqa: BLE001 - a store that does not answer must not end a running attempt
            self._answer = 0
            if not self.is_given_up:
                told = f"the rendezvous store does not answer ({first_line(error)})"
                say_once("rendezvous", f"{told}; the ranks run on without it")


_THREAD = "resilience-meeting"
_STILL_S = 120.0  # for what nodes tell one another once they have met: torch allows a minute for each word
_SAY_S = 10.0  # of waiting, until it is said
_STRANGER_S = 5.0  # a store on this host answers in milliseconds
_AGAIN_S = 1.0
_MARGIN_S = 60.0  # beyond torch's own limit
_READ_TIMEOUT_S = 60  # torch's defaults
_JOIN_TIMEOUT_S = 600


class StoreLostError(RendezvousConnectionError):
    """The store has not answered one request for too long."""


class MeetingPlace:
    """Where the nodes meet: torch's rendezvous as the options ask for it, and what is known of its store.

    `endpoint` names it for people; `patience_s` is how long nodes wait for one another, and for a store that is
    lost (torch's `join_timeout`).
    """

    def __init__(self, config: Any, journal: Journal | None = None) -> None:
        """Take torch's `LaunchConfig`; nothing is connected yet. `journal` is told why nobody answers.

        Raises:
            ConfigError: The options cannot be right.
        """
        self._journal = journal
        self.endpoint = str(config.rdzv_endpoint)
        try:
            self._parameters = RendezvousParameters(
                backend=config.rdzv_backend,
                endpoint=config.rdzv_endpoint,
                run_id=config.run_id,
                min_nodes=config.min_nodes,
                max_nodes=config.max_nodes,
                local_addr=config.local_addr,
                **config.rdzv_configs,
            )
            self.patience_s = self._seconds("join_timeout", _JOIN_TIMEOUT_S)
            if not self.may_come_again:  # the other kinds know this limit by another name
                self.patience_s = max(self.patience_s, self._seconds("timeout", 0))
            self._slow_s = self._seconds("read_timeout", _READ_TIMEOUT_S)
        except ValueError as error:
            raise self._cannot_be(config.rdzv_backend, error) from None
        self._backend: _Backend | None = None
        # Kept for good: with the last reference to one, torch waits for its thread, which may never end.
        self._handlers: list[RendezvousHandler] = []

    @property
    def may_come_again(self) -> bool:
        """Whether a new connection may find the same rendezvous again."""
        return str(self._parameters.backend) == "c10d"

    @property
    def local_port(self) -> int | None:
        """The port of the rendezvous where its host is this one; None elsewhere, and where the endpoint names none."""
        host, port = parse_rendezvous_endpoint(self.endpoint, default_port=DEFAULT_PORT)
        return port if _is_this_host(host) else None

    def reach(self, deadline: float, give_up: Callable[[], bool] = lambda: False) -> RendezvousHandler:
        """Return a new handler, trying until the deadline (monotonic) or `give_up()`; that it takes long is said.

        Main thread. Raises what `connect` raises.
        """
        while True:
            try:
                return within(2 * self._slow_s + _MARGIN_S, self.connect, look=self._say_holder)
            except (RendezvousConnectionError, TimeoutError) as error:
                if time.monotonic() > deadline or not self.may_come_again or give_up():
                    raise
                self.say_lost(error, deadline)
                time.sleep(_AGAIN_S)

    def _say_holder(self, passed_s: float) -> None:
        """Say whose port it is where a store on this host does not answer: it may be no store at all."""
        port = self.local_port if passed_s > _STRANGER_S else None
        if port is not None and not listens_on(port) and (holder := find_port_holder(port)) is not None:
            say_once(f"holder {port}", f"the rendezvous store at {self.endpoint} has not answered yet: {holder}")

    def say_lost(self, error: Exception, deadline: float) -> None:
        """Say once for each deadline that nobody answers, and for how long it will be tried."""
        why, left_s = first_line(error), max(0.0, deadline - time.monotonic())
        told = f"the rendezvous store at {self.endpoint} does not answer ({why}); trying again for up to {left_s:.0f} s"
        if say_once(f"lost {deadline}", f"{told} (--rdzv-conf join_timeout)") and self._journal is not None:
            self._journal.emit(Event.DEGRADED, what="rendezvous", why=why)

    def connect(self) -> RendezvousHandler:
        """Return a new handler; what an older one still does is refused. Blocks up to torch's `read_timeout`.

        Raises:
            ConfigError: The options cannot be right.
            RendezvousConnectionError: Nobody answers.
        """
        self.abandon()
        try:
            if self._parameters.backend != "c10d":
                return rendezvous_registry.get_rendezvous_handler(self._parameters)
            backend, store = create_backend(self._parameters)
            self._backend = _Backend(backend)
            self._handlers.append(create_handler(store, self._backend, self._parameters))
            return self._handlers[-1]
        except (ValueError, ImportError) as error:
            raise self._cannot_be(self._parameters.backend, error) from None

    @staticmethod
    def _cannot_be(backend: object, error: Exception) -> ConfigError:
        return ConfigError(f"the rendezvous {backend!r} cannot be used: {first_line(error)}")

    def _seconds(self, name: str, default: int) -> float:
        return float(self._parameters.get_as_int(name, default) or default)

    def abandon(self) -> None:
        """Refuse whatever a thread that was left behind may still ask: it must not join for this node."""
        if self._backend is not None:
            self._backend.refuse = True

    def hold(self, rendezvous: Callable[[], Answer]) -> Answer:
        """Return what `rendezvous` returns, or raise what it raises; a long wait is said.

        It runs in a thread that is left behind where the store does not answer any more: `StoreLostError`. Without
        any other limit, as torch has none: spare nodes wait for their turn. Main thread.
        """
        said = False
        if self._backend is not None:
            self._backend.moved_at = time.monotonic()

        def look(passed_s: float) -> None:
            nonlocal said
            self.check()
            if passed_s > _SAY_S and not said:
                said = True
                say(f"waiting for the other nodes at {self.endpoint}, for up to {self.patience_s:.0f} s")

        limit_s = float("inf") if self.may_come_again else self.patience_s + _MARGIN_S
        return within(limit_s, rendezvous, look=look, name=_THREAD)

    def check(self) -> None:
        """Raise `StoreLostError` where a request, or what follows the rendezvous, has gone unanswered for too long."""
        if self._backend is None:
            return
        if self._backend.waits_s() > self._slow_s:
            raise StoreLostError(f"no answer for {self._slow_s:.0f} s")
        if time.monotonic() - self._backend.moved_at > _STILL_S + self._slow_s:
            raise StoreLostError(f"no word in {_STILL_S + self._slow_s:.0f} s")


class _Backend(RendezvousBackend):
    """Torch's own backend, which is asked by several threads, and for how long it has not answered."""

    def __init__(self, inner: RendezvousBackend) -> None:
        self._inner = inner
        self._asked: dict[int, float] = {}
        self.refuse = False
        self.moved_at = time.monotonic()
        """When the thread of a rendezvous last asked, which it does every second while it waits for nodes."""

    @property
    def name(self) -> str:
        return str(self._inner.name)

    def get_state(self) -> Any:
        with self._timed():
            return self._inner.get_state()

    def set_state(self, state: bytes, token: Any = None) -> Any:
        with self._timed():
            return self._inner.set_state(state, token)

    def waits_s(self) -> float:
        return time.monotonic() - min(tuple(self._asked.values()), default=float("inf"))

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        if self.refuse:
            raise RendezvousConnectionError("this connection was given up")
        thread = threading.get_ident()
        self._asked[thread] = time.monotonic()
        if threading.current_thread().name == _THREAD:
            self.moved_at = self._asked[thread]
        try:
            yield
        finally:
            self._asked.pop(thread, None)


def _is_this_host(host: str) -> bool:
    """Tell whether a host is surely this one, without asking a name server, which may take long to answer."""
    own = host_name()
    if host in ("localhost", own, own.partition(".")[0]):
        return True
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except (ValueError, OSError):
        return False
    return True


def holder_of_taken_port(why: str) -> str:
    """Return who holds the port that an error says is in use, and what to do; empty for every other error."""
    port = port_in(why) if "EADDRINUSE" in why or "ddress already in use" in why else None
    if port is None:
        return ""
    advice = "end that process, or name another port on every node (one node alone needs none: leave it out)"
    return f": {words_of_holder(port)}; {advice}"


def first_line(error: BaseException) -> str:
    """Return kind and first line of an error, for a sentence; of what torch has wrapped, the error inside."""
    told = error.__cause__ if isinstance(error, RendezvousConnectionError) and error.__cause__ else error
    text = str(told).splitlines()
    return f"{type(told).__name__}: {text[0]}" if text else type(told).__name__
