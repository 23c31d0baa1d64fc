"""The rendezvous of a job that has one node and was given none: nobody to wait for.

Torch's `--standalone` starts a store server, a heartbeat thread and a state machine that now and then sleeps
a whole second. With one node all of it agrees with itself.

Of torch's agent the parts are used that are its contract with the user's scripts: how nodes meet, how ranks
are numbered, which variables they find. Its loop is not: it polls, waits a hard-coded 30 s for a worker that
ignores SIGTERM, and restarts whatever happened.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import socket
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import attrs
from torch.distributed import DistNetworkError, DistStoreError, HashStore
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from resilience_sdk.cluster.membership import NodeMissingError, Peer, introduce
from resilience_sdk.core.console import say, say_once
from resilience_sdk.core.journal import Journal
from resilience_sdk.launcher.attempt import AttemptFiles
from resilience_sdk.launcher.env import RankLogs
from resilience_sdk.launcher.forkserver import WorkerStarter
from resilience_sdk.launcher.forkserver_wire import Script
from resilience_sdk.launcher.last_lines import JobOutcome
from resilience_sdk.launcher.ranks import RankProcesses
from resilience_sdk.launcher.rendezvous import MeetingPlace, StoreLostError, WaitingNodes, first_line, within
from resilience_sdk.launcher.signals import LeaveRequested, SignalInbox
from resilience_sdk.system.hostinfo import host_name
from resilience_sdk.system.linux import listens_on


class LocalRendezvous(RendezvousHandler):
    """Gives this node rank 0 of 1, and each attempt a free port for a store of its own."""

    def __init__(self, run_id: str, address: str) -> None:
        """Use `address` (of this host, as its ranks reach it) as MASTER_ADDR."""
        self._run_id = run_id
        self._address = address
        self._closed = False
        self._held = HeldPort()

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
        master = RendezvousStoreInfo(self._address, self._held.take(self._address))
        return RendezvousInfo(HashStore(), 0, 1, master)

    @property
    def port(self) -> int | None:
        """The port that was picked last."""
        return self._held.port

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


class HeldPort:
    """A port that is kept for a store which another process makes on it later: nobody is given it meanwhile.

    It is bound, and nobody listens on it here. Whoever allows to share addresses that nobody listens on (SO_REUSEADDR),
    as torch's store does, can listen on it; the kernel gives it to nobody who asks for any port.
    """

    def __init__(self) -> None:
        """Hold none yet."""
        self.port: int | None = None
        self._socket: socket.socket | None = None

    def take(self, address: str = "") -> int:
        """Find a port of this host that nobody uses, hold it in the place of the one before, and return it."""
        port = self._bind(address, 0)
        return free_port(address) if port is None else port

    def keep(self, port: int) -> None:
        """Hold this port, if that can be."""
        self._bind("", port)

    def close(self) -> None:
        """Let it go."""
        if self._socket is not None:
            self._socket.close()
        self._socket = self.port = None

    def __del__(self) -> None:
        self.close()

    def _bind(self, address: str, port: int) -> int | None:
        self.close()
        for place in dict.fromkeys((address, "")):  # the name is for others to reach us by; any address has these ports
            held = socket.socket(socket.AF_INET6 if ":" in place else socket.AF_INET)
            try:
                if port:
                    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                held.bind((place, port))
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # not before: it might share one
            except OSError:
                held.close()
                continue
            self._socket, self.port = held, int(held.getsockname()[1])
            return self.port
        return None


def free_port(address: str = "") -> int:
    """Return a port of this host that nobody listens on now."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((address, 0))
        except OSError:  # the name is for others to reach us by; any address has the same ports
            probe.bind(("", 0))
        return int(probe.getsockname()[1])


_LET_READ_S = 5.0
_LAST_READ_S = 0.1
_LEAVE_S = 10.0
_FINISHED_KEY = "resilience/finished"
_PORT_KEY = "resilience/port"


@attrs.frozen
class _Met:
    """What a rendezvous came to."""

    group: WorkerGroup
    attempt: int
    peers: tuple[Peer, ...]


class Agent(LocalElasticAgent):
    """Starts attempts on this node. Main thread only."""

    _worker_group: WorkerGroup

    def __init__(
        self,
        config: Any,
        script: Script,
        logs: RankLogs,
        starter: WorkerStarter,
        *,
        local: bool = False,
        preflight: bool = False,
        journal: Journal | None = None,
        outcome: JobOutcome | None = None,
    ) -> None:
        """Make the agent for torch's `LaunchConfig`; no rank is started yet.

        `local`: one node and no rendezvous given, so none is held. Otherwise the first `meet` connects to it.
        `preflight`: this node asks the others for a preflight across nodes, see `preflight_nodes`.
        `journal` is told why the store of the rendezvous does not answer, when that is said; it is not waited for
        once `outcome` stands: it may have been with the node that ended the job.
        """
        self._place = None if local else MeetingPlace(config, journal)
        self._connected = local
        super().__init__(
            spec=_worker_spec(config, script, local=local),
            logs_specs=logs,
            start_method="spawn",
            log_line_prefix_template=config.log_line_prefix_template,
        )
        self._config = config
        self._outcome = outcome
        self._preflight = preflight
        self.cleared = False
        """Whether this node has been through a preflight across nodes."""
        self._logs = logs
        self._starter = starter
        self._quiet_events = getattr(config, "event_log_handler", "null") == "null"
        self._waiting = WaitingNodes(self._rdzv_handler)
        self._held = HeldPort()
        self.attempt = 0
        self.peers: tuple[Peer, ...] = ()
        """The nodes of the attempt by their numbers, known once they have met."""
        self.rendezvous_s = 0.0
        """How long the newest rendezvous has taken."""

    @property
    def node_name(self) -> str:
        """How this node is called: its host, with its number where several launchers run on one."""
        return self.peers[self.node].name if self.peers else host_name()

    @property
    def ranks(self) -> dict[int, int]:
        """Global ranks by local rank, known once nodes have met."""
        return {worker.local_rank: worker.global_rank for worker in self._worker_group.workers}

    @property
    def world_size(self) -> int:
        """Number of ranks on all nodes, known once nodes have met."""
        return int(self._worker_group.workers[0].world_size)

    @property
    def nodes(self) -> int:
        """Number of nodes, known once they have met."""
        return int(self._worker_group.group_world_size or 1)

    @property
    def elastic(self) -> bool:
        """Whether nodes may come and go."""
        return int(self._config.max_nodes) > 1

    @property
    def spare_nodes(self) -> int:
        """How many nodes fewer could go on."""
        return max(0, self.nodes - int(self._config.min_nodes)) if self.elastic else 0

    @property
    def holds_store(self) -> bool:
        """Whether the store of the rendezvous is in this process, so that it ends with it."""
        if self._place is None:
            return False
        return listens_on(parse_rendezvous_endpoint(self._place.endpoint, default_port=DEFAULT_PORT)[1])

    @property
    def store(self) -> Any:
        """The store of this rendezvous; to be cloned for use in another thread."""
        return self._worker_group.store

    @property
    def store_host(self) -> str:
        """Where the store of the rendezvous is, as the options name it; empty where there is none."""
        return "" if self._place is None else parse_rendezvous_endpoint(self._place.endpoint, default_port=-1)[0]

    @property
    def node(self) -> int:
        """Number of this node, known once nodes have met."""
        return int(self._worker_group.group_rank or 0)

    def meet(self, attempt: int) -> int:
        """Meet the other nodes, agree on ranks and on the attempt's number, and return that number.

        Blocks until enough nodes have come, and tries as long to reach a store that is lost; both are said.
        Raises what torch's rendezvous raises, and ConfigError where it cannot be as the options say.
        """
        began_s = time.monotonic()
        met = self._meet(self._worker_group, attempt) if self._place is None else self._meet_at(self._place, attempt)
        self.rendezvous_s = time.monotonic() - began_s
        self._worker_group = met.group
        self.attempt, self.peers = met.attempt, met.peers
        # torch derives its restart count from this; ours has no upper end.
        self._remaining_restarts = self._worker_group.spec.max_restarts - self.attempt
        return self.attempt

    def _meet_at(self, place: MeetingPlace, attempt: int) -> _Met:
        deadline = time.monotonic() + place.patience_s
        while True:
            try:
                if not self._connected:
                    self._connect(place, deadline)
                return self._meet_once(place, attempt)
            except (RendezvousConnectionError, NodeMissingError) as error:
                if time.monotonic() > deadline or not place.may_come_again or self._job_is_over():
                    raise
                if isinstance(error, NodeMissingError):
                    say(f"{error}; meeting again")
                    continue
                place.say_lost(error, deadline)
                self._connected = False

    def _connect(self, place: MeetingPlace, deadline: float) -> None:
        self._worker_group.spec.rdzv_handler = self._rdzv_handler = place.reach(deadline, self._job_is_over)
        self._waiting.is_given_up = True
        self._waiting = WaitingNodes(self._rdzv_handler)
        self._connected = True

    def _meet_once(self, place: MeetingPlace, attempt: int) -> _Met:
        """Hold one rendezvous, with a record that nobody else uses: its thread may be left behind.

        Once its old connection gets through again, that thread goes on. With the handler of then, which refuses it;
        with the one that was made since, it would take this node out of the attempt that runs.
        """
        waiting, group = self._waiting, WorkerGroup(copy.copy(self._worker_group.spec))

        def rendezvous() -> _Met:
            waiting.settle()
            return self._meet(group, attempt)

        return place.hold(rendezvous)

    def _meet(self, group: WorkerGroup, attempt: int) -> _Met:
        try:
            self._rendezvous(group)
            ranks = tuple(worker.global_rank for worker in group.workers)
            me = Peer(host_name(), ranks, uuid.uuid4().hex if self._preflight else "", self.cleared)
            nodes = int(group.group_world_size or 1)
            attempt, peers = introduce(group.store, int(group.group_rank or 0), nodes, attempt, me)
        except DistStoreError as error:
            raise NodeMissingError(f"a node came to the rendezvous and was gone ({first_line(error)})") from None
        except DistNetworkError as error:
            raise StoreLostError(first_line(error)) from None
        if group.spec.rdzv_handler.get_backend() == "static" and attempt > 0:
            _change_port(group, attempt)
        return _Met(group, attempt, peers)

    @property
    def own_port(self) -> int | None:
        """The port of the ranks' store where it was picked here, and not by the user; None elsewhere."""
        handler = self._rdzv_handler
        return handler.port if isinstance(handler, LocalRendezvous) else self._held.port

    def start(self, inbox: SignalInbox, files: AttemptFiles) -> RankProcesses:
        """Start the ranks of this node, which leave what they leave in `files`; `meet` came before.

        Raises LeaveRequested as long as none of them runs, where `inbox` is raising; then it only notes.
        """
        group = self._worker_group
        self._logs.attempt = self.attempt
        # A rendezvous that shares its store with the ranks is right for its first attempt only.
        self._logs.own_store = self.attempt > 0 or not self._worker_group.spec.rdzv_handler.use_agent_store
        if self._place is not None and self.node == 0 and self._logs.own_store:
            self._held.keep(int(group.master_port))
        try:
            with self._starter.serving_elastic(inbox):
                pids = self._start_workers(group)
        except SignalException as error:  # of torch's own handlers, in the moment before they are replaced by ours
            inbox.note(error.sigval)
            raise LeaveRequested from None
        for local_rank, pid in pids.items():
            group.workers[local_rank].id = pid
        return RankProcesses(self._pcontext, self.ranks, wakeup=inbox.wakeup, files=files, attempt=self.attempt)

    def _job_is_over(self) -> bool:
        return self._outcome is not None and self._outcome.exit_code() is not None

    def nodes_waiting(self) -> int:
        """Return how many nodes want to join, as was known a second ago. Asks no store itself, so it never waits."""
        return self._waiting.newest()

    def leave(self, *, closed: bool) -> None:
        """Leave the rendezvous; `closed` tells the other nodes that the job is over."""
        if closed:
            with contextlib.suppress(Exception):
                within(_LEAVE_S, self._rdzv_handler.shutdown)

    def all_nodes_finished(self, limit_s: float | None = None) -> bool:
        """Say that this node's ranks exited with 0, and wait until all nodes said so; at most torch's limit."""
        limit_s = self._exit_barrier_timeout if limit_s is None else limit_s
        store, prefix = self._worker_group.store, f"{_FINISHED_KEY}/{self.attempt}"
        keys = [f"{prefix}/{node}" for node in range(self.nodes)]

        def tell_and_wait() -> None:
            store.set(f"{prefix}/{self.node}", "1")
            store.wait(keys, timedelta(seconds=limit_s))

        try:
            within(limit_s + _LEAVE_S, tell_and_wait)
        except Exception as error:  # noqa: BLE001 - a store that went away proves nothing
            say_once("finish", f"not all nodes said that they finished ({first_line(error)})")
            return False
        self._let_others_read(store, prefix)
        return True

    def _let_others_read(self, store: Any, prefix: str) -> None:
        """Wait a moment until all nodes know that all have finished: the store may be in this very process."""
        deadline = time.monotonic() + _LET_READ_S
        with contextlib.suppress(Exception):
            store.set(f"{prefix}/read/{self.node}", "1")
            while not store.check([f"{prefix}/read/{node}" for node in range(self.nodes)]):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.02)
            time.sleep(_LAST_READ_S)  # nobody knows who has the store: the others read this last key, too

    @contextlib.contextmanager
    def record_duration(self, state: str) -> Iterator[None]:
        """Record how long something took, where somebody reads it.

        Torch looks up the host's full name for each record; without a working DNS that takes seconds.
        """
        if self._quiet_events:
            yield
        else:
            with super().record_duration(state):
                yield


def _change_port(group: WorkerGroup, attempt: int) -> None:
    """Give this attempt a store of its own where the rendezvous has a fixed one.

    The agent's store lives as long as the agent and still holds the addresses of the dead attempt.
    """
    store, key = group.store, f"{_PORT_KEY}/{attempt}"
    if group.group_rank == 0:
        store.set(key, str(free_port()))
    group.master_port = int(store.get(key))


def _worker_spec(config: Any, script: Script, *, local: bool) -> WorkerSpec:
    values: dict[str, Any] = {
        "local_world_size": config.nproc_per_node,
        "entrypoint": script.target,
        "args": script.args,
        "rdzv_handler": LocalRendezvous(config.run_id, config.local_addr),
    }
    if config.rdzv_backend == "static" and not local:
        values["master_addr"], _ = parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=-1)
    # Fields that came with one torch or another: whatever both sides know is passed on.
    for field in dataclasses.fields(WorkerSpec):
        if field.name not in values and field.name != "fn" and hasattr(config, field.name):
            values[field.name] = getattr(config, field.name)
    return WorkerSpec(**values)
