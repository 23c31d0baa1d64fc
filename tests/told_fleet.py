"""Run directories with journals of a fleet, written by the journal itself: launchers that start, fail and end."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

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
    _incidents: int = 0
    _attempt: int = 0
    _journals: dict[str, Journal] = attrs.field(factory=dict)

    @classmethod
    def make(cls, path: Path, nodes: Sequence[str], **facts: Any) -> ToldFleetRun:
        """Make the directory."""
        RunDirectory.create(path)
        return cls(path, nodes, **facts)

    def tell(self, host: str, event: Event, /, **fields: Any) -> None:
        """Journal an event of a host's launcher at the run's time."""
        journal = self._journals.get(host)
        if journal is None:
            with mock.patch("os.getpid", return_value=next(_pids)):
                journal = Journal(
                    self.path / "journal", writer="launcher", host=host, boot_id=f"boot-{host}", job=self.job
                )
            self._journals[host] = journal
        steady = mock.patch.object(time, "monotonic_ns", return_value=int(self.at * 1e9))
        with steady, mock.patch.object(time, "time", return_value=self.at):
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
            )  # fmt: skip

    def fail(
        self, node: str, cause: str, category: str, *, action: str = "restart", evidence: Sequence[Evidence] = ()
    ) -> None:
        """A rank of a node fails, all others are its victims, and the next attempt begins."""
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

    def _incident(self, node: str, cause: str, category: str, action: str, evidence: Sequence[Evidence]) -> Incident:
        rank = list(self.nodes).index(node) * self.ranks_per_node
        return Incident(
            kind="crash", attempt=self._attempt, culprits=(Culprit(rank, node),),
            victims=tuple(set(range(len(self.nodes) * self.ranks_per_node)) - {rank}), category=category, cause=cause,
            action=action, confidence=0.9, evidence=tuple(evidence),
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
