"""The elastic agent: torch's rendezvous, ranks and worker environment, with a life of the attempt of our own.

Of torch's agent the parts are used that are its contract with the user's scripts: how nodes meet, how ranks
are numbered, which variables they find. Its loop is not: it polls, waits a hard-coded 30 s for a worker that
ignores SIGTERM, and restarts whatever happened.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from resilience_sdk.console import say_once
from resilience_sdk.errors import ConfigError
from resilience_sdk.hostinfo import host_name
from resilience_sdk.launcher.env import RankLogs
from resilience_sdk.launcher.local_rendezvous import LocalRendezvous, free_port
from resilience_sdk.launcher.processes import WorkerStarter
from resilience_sdk.launcher.ranks import RankProcesses
from resilience_sdk.launcher.script import Script
from resilience_sdk.launcher.signals import SignalInbox

_LET_READ_S = 5.0
_LAST_READ_S = 0.1
_AGREE_S = 60.0  # how long nodes wait for one another's attempt number after they have met
_ATTEMPT_KEY = "resilience/attempt"
_FINISHED_KEY = "resilience/finished"
_PORT_KEY = "resilience/port"


class Agent(LocalElasticAgent):
    """Starts attempts on this node. Main thread only."""

    def __init__(
        self, config: Any, script: Script, logs: RankLogs, starter: WorkerStarter, *, local: bool = False
    ) -> None:
        """Make the agent for torch's `LaunchConfig`; no rank is started yet.

        `local`: one node and no rendezvous given, so none is held.
        """
        super().__init__(
            spec=_worker_spec(config, script, local=local),
            logs_specs=logs,
            start_method="spawn",
            log_line_prefix_template=config.log_line_prefix_template,
        )
        self._config = config
        self._logs = logs
        self._starter = starter
        self._quiet_events = getattr(config, "event_log_handler", "null") == "null"
        self.attempt = 0
        self.node_name = host_name()

    @property
    def group(self) -> WorkerGroup:
        """Torch's record of this node's ranks."""
        return self._worker_group

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
    def store(self) -> Any:
        """The store of this rendezvous; to be cloned for use in another thread."""
        return self._worker_group.store

    @property
    def node(self) -> int:
        """Number of this node, known once nodes have met."""
        return int(self._worker_group.group_rank or 0)

    def meet(self, attempt: int) -> int:
        """Meet the other nodes, agree on ranks and on the attempt's number, and return that number.

        Blocks until enough nodes have come; raises what torch's rendezvous raises.
        """
        self.attempt = attempt
        self._rendezvous(self._worker_group)
        self.node_name = host_name()
        if self.nodes > 1:
            self.attempt = self._agree_on_attempt(attempt)
        if self._rdzv_handler.get_backend() == "static" and self.attempt > 0:
            self._change_port()
        # torch derives its restart count from this; ours has no upper end.
        self._remaining_restarts = self._worker_group.spec.max_restarts - self.attempt
        return self.attempt

    def start(self, inbox: SignalInbox) -> RankProcesses:
        """Start the ranks of this node; `meet` came before."""
        group = self._worker_group
        self._logs.attempt = self.attempt
        # A rendezvous that shares its store with the ranks is right for its first attempt only.
        self._logs.own_store = self.attempt > 0 or not self._worker_group.spec.rdzv_handler.use_agent_store
        try:
            with self._starter.serving_elastic():
                pids = self._start_workers(group)
        finally:
            inbox.retake()
        for local_rank, pid in pids.items():
            group.workers[local_rank].id = pid
        return RankProcesses(self._pcontext, self.ranks, wakeup=inbox.wakeup)

    def nodes_waiting(self) -> int:
        """Return how many nodes want to join. A store that does not answer must not end a running attempt."""
        try:
            return int(self._rdzv_handler.num_nodes_waiting())
        except Exception as error:  # noqa: BLE001 - whatever it is, the ranks run
            told = f"the rendezvous store does not answer ({_first_line(error)})"
            say_once("rendezvous", f"{told}; the ranks run on without it")
            return 0

    def leave(self, *, closed: bool) -> None:
        """Leave the rendezvous; `closed` tells the other nodes that the job is over."""
        if closed:
            with contextlib.suppress(Exception):
                self._rdzv_handler.shutdown()

    def all_nodes_finished(self) -> bool:
        """Say that this node's ranks exited with 0, and wait until all nodes said so (torch's limit)."""
        if self.nodes == 1:
            return True
        store, prefix = self._worker_group.store, f"{_FINISHED_KEY}/{self.attempt}"
        try:
            store.set(f"{prefix}/{self.node}", "1")
            keys = [f"{prefix}/{node}" for node in range(self.nodes)]
            store.wait(keys, timedelta(seconds=self._exit_barrier_timeout))
        except Exception as error:  # noqa: BLE001 - a store that went away proves nothing
            say_once("finish", f"not all nodes said that they finished ({_first_line(error)})")
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

    def _agree_on_attempt(self, own: int) -> int:
        """Return the highest attempt number that any node counts: nodes that joined late take it over."""
        store = self._worker_group.store
        try:
            store.set(f"{_ATTEMPT_KEY}/{self.node}", f"{own} {host_name()}")
            keys = [f"{_ATTEMPT_KEY}/{node}" for node in range(self.nodes)]
            store.wait(keys, timedelta(seconds=_AGREE_S))
            words = [store.get(key).decode().partition(" ") for key in keys]
            if [host for _, _, host in words].count(host_name()) > 1:  # several launchers on one host
                self.node_name = f"{host_name()}#{self.node}"
            return max(int(number) for number, _, _ in words)
        except Exception as error:  # noqa: BLE001 - only the label of the attempt is at stake
            told = f"the nodes could not agree on the attempt's number ({_first_line(error)})"
            say_once("attempt", f"{told}; this node counts {own}")
            return own

    def _change_port(self) -> None:
        """Give this attempt a store of its own where the rendezvous has a fixed one.

        The agent's store lives as long as the agent and still holds the addresses of the dead attempt.
        """
        store, key = self._worker_group.store, f"{_PORT_KEY}/{self.attempt}"
        if self.node == 0:
            store.set(key, str(free_port()))
        self._worker_group.master_port = int(store.get(key))


def _worker_spec(config: Any, script: Script, *, local: bool) -> WorkerSpec:
    values: dict[str, Any] = {
        "local_world_size": config.nproc_per_node,
        "entrypoint": script.target,
        "args": script.args,
    }
    if local:
        values["rdzv_handler"] = LocalRendezvous(config.run_id, config.local_addr)
    else:
        values["rdzv_handler"] = _torch_rendezvous(config)
        if config.rdzv_backend == "static":
            values["master_addr"], _ = parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=-1)
    # Fields that came with one torch or another: whatever both sides know is passed on.
    for field in dataclasses.fields(WorkerSpec):
        if field.name not in values and field.name != "fn" and hasattr(config, field.name):
            values[field.name] = getattr(config, field.name)
    return WorkerSpec(**values)


def _torch_rendezvous(config: Any) -> Any:
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    try:
        return rendezvous_registry.get_rendezvous_handler(parameters)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"the rendezvous {config.rdzv_backend!r} cannot be used: {_first_line(error)}") from None


def _first_line(error: BaseException) -> str:
    text = str(error).splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
