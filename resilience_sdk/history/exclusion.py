"""Nodes that a job had better not run on: what its own last verdict blames, and what the history suspects.

For batch scripts and supervisors, between two jobs of a run. It is advice: whatever fails here leaves nothing out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.core.journal import CURVES, Event, read_journal
from resilience_sdk.errors import ConfigError, ResilienceError
from resilience_sdk.history.indexer import Index
from resilience_sdk.history.questions import History
from resilience_sdk.history.schema import default_path
from resilience_sdk.history.suspects import hostlist
from resilience_sdk.incidents import InjectedFaults

DATABASE = "RESILIENCE_DB"
_HARDWARE = "hardware"
_EXCLUDE = "exclude_node"


@attrs.frozen
class LeftOut:
    """Nodes by their scheduler's names, with the reason of each; `problem`: what could not be asked, in words.

    `warnings` are findings of now that precede failures by the history; their nodes are not left out for that.
    """

    reasons: Mapping[str, str]
    problem: str | None = None
    warnings: tuple[str, ...] = ()

    @property
    def hostlist(self) -> str:
        """The list in Slurm's form; empty for none."""
        return hostlist(self.reasons)

    @property
    def told(self) -> str:
        """One line for people."""
        return "; ".join(f"{node}: {why}" for node, why in self.reasons.items())


def database_of(run_dir: Path, env: Mapping[str, str], named: str | None = None) -> str | None:
    """Return the index that a run is in: the named one, that of the environment, else the file beside it; or None."""
    if chosen := named or env.get(DATABASE):
        return chosen
    beside = default_path(run_dir.resolve().parent)
    return str(beside) if beside.exists() else None


def nodes_to_leave_out(run_dir: Path, env: Mapping[str, str], *, since: float, named: str | None = None) -> LeftOut:
    """Return the nodes that the next job of a run leaves out; `since` (Unix seconds) for the history. Never raises."""
    reasons: dict[str, str] = {}
    problem = None
    try:
        reasons |= blamed(read_journal(run_dir / "journal", without=CURVES).events)
        database = database_of(run_dir, env, named)
        if database is None:
            return LeftOut(reasons)
        try:
            _take_in(database, run_dir)
        except ConfigError as error:  # it may be one that we only read
            problem = f"the history was not told of this run: {error}"
        history = History(database, since=since)
        try:
            records = history.nodes()
            warnings = tuple(omen.text for omen in history.omens(records, time.time()))
        finally:
            history.close()
        suspects = {record.name: f"suspect: {record.why}" for record in records if record.suspect}
        return LeftOut(suspects | reasons, problem, warnings)
    except (OSError, ResilienceError) as error:
        why = str(error)
    except Exception as error:  # noqa: BLE001 - a database's many kinds, and our own mistakes
        why = f"{type(error).__name__}: {error}"
    return LeftOut(reasons, f"the history was not asked which nodes are suspect: {why}")


def _take_in(database: str, run_dir: Path) -> None:
    if (run_dir / "journal").is_dir() and os.listdir(run_dir / "journal"):
        index = Index(database)
        try:
            index.add([run_dir])
        finally:
            index.close()


def blamed(events: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the nodes, as schedulers call them, whose hardware the newest job was ended for; injected faults aside."""
    names: dict[Any, str] = {}
    incident: Mapping[str, Any] | None = None
    found: dict[str, str] = {}
    injected = InjectedFaults()
    for event in events:
        name, is_injected = event["event"], injected.led_to(event)
        if name == Event.RUN_START.value:
            incident, found = None, {}
        elif name == Event.ATTEMPT_START.value and isinstance(event.get("scheduler_node"), str):
            names[event.get("node_name")] = event["scheduler_node"]
        elif name == Event.INCIDENT.value and event.get("action") == _EXCLUDE:
            incident = None if is_injected else event
        elif name == Event.DECISION.value and event.get("verdict") == _HARDWARE and incident is not None:
            nodes = incident.get("nodes")
            why = f"{incident.get('cause')} in this run ({incident.get('id')})"
            found = {names.get(node, str(node)): why for node in nodes} if isinstance(nodes, list) else {}
    return found
