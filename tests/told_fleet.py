"""Run directories with journals of a fleet, written by the journal itself: launchers that start, fail and end."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.incidents import Culprit, Evidence, Incident, IncidentStore
from resilience_sdk.incidents.record import event_fields

_pids = itertools.count(1000)


@attrs.define
class ToldFleetRun:
    """One run directory, told at times of the test's choice. The first node's launcher tells for all."""

    path: Path
    nodes: Sequence[str]
    script: str = "train.py"
    at: float = 1_000_000.0
    ranks_per_node: int = 8
    job: str = "job"
    aliases: Mapping[str, str] = attrs.field(factory=dict)
    """Of hosts that their scheduler calls otherwise."""
    _incidents: int = 0
    _attempt: int = 0
    _journals: dict[tuple[str, str], Journal] = attrs.field(factory=dict)

    @classmethod
    def make(cls, path: Path, nodes: Sequence[str], **facts: Any) -> ToldFleetRun:
        """Make the directory."""
        RunDirectory.create(path)
        return cls(path, nodes, **facts)

    def tell(self, host: str, event: Event, /, *, writer: str = "launcher", **fields: Any) -> None:
        """Journal an event of a host's launcher, or other writer, at the run's time."""
        journal = self._journals.get((host, writer))
        if journal is None:
            with _standing(os, "getpid", next(_pids)):
                journal = Journal(self.path / "journal", writer=writer, host=host, boot_id=f"boot-{host}", job=self.job)
            self._journals[host, writer] = journal
        with _standing(time, "time", self.at), _standing(time, "monotonic_ns", int(self.at * 1e9)):
            journal.emit(event, attempt=self._attempt, **fields)

    def start(self, **facts: Any) -> None:
        """A job begins on all nodes, and so does its first attempt."""
        self.close()
        self._attempt = 0
        for node in self.nodes:
            self.tell(node, Event.RUN_START, argv=["--nproc-per-node=8", self.script], **facts)
        self._start_attempt()

    def _start_attempt(self) -> None:
        for number, node in enumerate(self.nodes):
            first = number * self.ranks_per_node
            self.tell(
                node, Event.ATTEMPT_START, ranks=list(range(first, first + self.ranks_per_node)), node=number,
                nodes=len(self.nodes), node_name=node, world_size=len(self.nodes) * self.ranks_per_node,
                scheduler_node=self.aliases.get(node),
            )  # fmt: skip

    def fail(
        self,
        node: str | Sequence[str],
        cause: str,
        category: str,
        *,
        action: str = "restart",
        evidence: Sequence[Evidence] = (),
    ) -> None:
        """A rank of a node fails, or one of each of several; all others are its victims, the next attempt begins."""
        self._incidents += 1
        name = f"{self._incidents:04}-crash"
        incident = attrs.evolve(self._incident(node, cause, category, action, evidence), id=name)
        self.tell(self.nodes[0], Event.INCIDENT, **event_fields(incident))
        for one in self.nodes:
            self.tell(one, Event.ATTEMPT_END, ended_by="ranks")
        self._attempt += 1
        self._start_attempt()

    def report(self, node: str, cause: str, category: str) -> None:
        """A rank of a node fails, and its report is written as well."""
        incident = attrs.evolve(self._incident(node, cause, category, "restart", ()), detected_at=self.at)
        written = IncidentStore(self.path).create("crash", incident)
        self.tell(self.nodes[0], Event.INCIDENT, **event_fields(written))

    def _incident(
        self, node: str | Sequence[str], cause: str, category: str, action: str, evidence: Sequence[Evidence]
    ) -> Incident:
        names = [node] if isinstance(node, str) else node
        ranks = {list(self.nodes).index(name) * self.ranks_per_node: name for name in names}
        return Incident(
            kind="crash", attempt=self._attempt, culprits=tuple(Culprit(rank, name) for rank, name in ranks.items()),
            victims=tuple(sorted(set(range(len(self.nodes) * self.ranks_per_node)) - set(ranks))), category=category,
            cause=cause, action=action, confidence=0.9, evidence=tuple(evidence),
        )  # fmt: skip

    def end(self) -> None:
        """The job ends well."""
        for node in self.nodes:
            self.tell(node, Event.ATTEMPT_END, ended_by="ranks")
        self.close()

    def close(self) -> None:
        """Let go of the files; what follows is told by other processes."""
        for journal in self._journals.values():
            journal.close()
        self._journals.clear()


@contextlib.contextmanager
def _standing(module: Any, name: str, value: Any) -> Iterator[None]:
    """Have a clock or a number stand; by hand, since `mock` takes longer for it than the journal for its line."""
    moving = getattr(module, name)
    setattr(module, name, lambda: value)
    try:
        yield
    finally:
        setattr(module, name, moving)
