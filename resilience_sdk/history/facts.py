"""The rows that events make in the index: a pure function of the lines of a run's journal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from resilience_sdk.core.journal import Event

Key = tuple[Any, ...]
_MOST_TEXT = 400
_MOST = 1e15
_KINDS = ("crash", "hang", "slow", "numerics")  # a preemption is no failure
_FLAT = 4  # levels of settings that are compared one by one
_SELDOM = frozenset(
    event.value
    for event in (
        Event.RUN_START, Event.ATTEMPT_START, Event.ATTEMPT_END, Event.RANK_START, Event.RANK_EXIT, Event.INCIDENT,
        Event.RECOVERED, Event.HEALTH, Event.FAULT_INJECTED,
    )
)  # fmt: skip


@attrs.define
class Rows:
    """The rows of one run's files, by the keys of their tables without the run's."""

    file: str = ""
    """Of which the next events are."""
    events: int = 0
    first_at: float | None = None
    last_at: float | None = None
    launched: bool = False
    starts: dict[Key, dict[str, Any]] = attrs.field(factory=dict)
    attempts: dict[Key, dict[str, Any]] = attrs.field(factory=dict)
    failures: dict[Key, dict[str, Any]] = attrs.field(factory=dict)
    culprits: dict[Key, dict[str, Any]] = attrs.field(factory=dict)
    strikes: dict[Key, dict[str, Any]] = attrs.field(factory=dict)
    recoveries: dict[Key, dict[str, Any]] = attrs.field(factory=dict)
    findings: dict[Key, dict[str, Any]] = attrs.field(factory=dict)

    @property
    def by_table(self) -> Mapping[str, dict[Key, dict[str, Any]]]:
        """The rows by the names of their tables."""
        return {
            "starts": self.starts, "attempts": self.attempts, "failures": self.failures, "culprits": self.culprits,
            "strikes": self.strikes, "recoveries": self.recoveries, "findings": self.findings,
        }  # fmt: skip

    def add(self, event: Mapping[str, Any], offset: int) -> None:
        """Take one event that ends at `offset` of the file; what cannot be understood is left out."""
        at = float(event["t"])
        self.events += 1
        self.first_at = at if self.first_at is None else min(at, self.first_at)
        self.last_at = at if self.last_at is None else max(at, self.last_at)
        name = event["event"]
        if name not in _SELDOM:
            return
        host, job, attempt = _text(event.get("host")), _text(event.get("job")), _whole(event.get("attempt")) or 0
        if name == Event.RUN_START.value:
            self.launched = True
            facts = json.dumps(dict(start_facts(event)), sort_keys=True)
            start = {
                "file": self.file,
                "at": at,
                "job": job,
                "host": host,
                "script": _text(script_of(event.get("argv"))),
            }
            unheld_s = _number(event.get("unheld_s"))
            start["alive_at"] = None if unheld_s is None or unheld_s < 0 else at - unheld_s
            self.starts[self.file, at] = start | {"facts": facts}
        elif name == Event.ATTEMPT_START.value:
            row = self._attempt(job, attempt, host, at, launched=True)
            node = _text(event.get("node_name")) or host
            row |= {"world_size": _whole(event.get("world_size")), "nodes": _whole(event.get("nodes"))}
            row |= {"node": node, "alias": _text(event.get("scheduler_node")) or node}
        elif name == Event.ATTEMPT_END.value:
            self._attempt(job, attempt, host, None, launched=True)["ended_at"] = at
        elif name == Event.RANK_START.value:  # counts where no launcher of ours tells of attempts
            row = self._attempt(job, attempt, host, at, launched=False)
            row |= {"world_size": _whole(event.get("world_size")), "node": host, "alias": host}
        elif name == Event.RANK_EXIT.value and event.get("local_rank") is None:
            self._attempt(job, attempt, host, None, launched=False)["ended_at"] = at
        elif name == Event.INCIDENT.value and event.get("kind") in _KINDS and event.get("action") != "none":
            self._failure(event, at, host, job, attempt)
        elif name == Event.FAULT_INJECTED.value:
            strike = {"file": self.file, "offset": offset, "job": job, "attempt": attempt}
            self.strikes[self.file, offset] = strike
        elif name == Event.RECOVERED.value and (again := _text(event.get("id"))):
            recovery_s, lost = _number(event.get("recovery_s")), _whole(event.get("lost_steps"))
            self.recoveries[again,] = {"incident": again, "recovery_s": recovery_s, "lost_steps": lost}
        elif name == Event.HEALTH.value and event.get("ok") is False and isinstance(event.get("check"), str):
            self.findings[self.file, offset] = {
                "file": self.file, "offset": offset, "at": at, "host": host, "check": _text(event.get("check")),
                "status": _text(event.get("status")), "what": _text(event.get("what")),
                "evidence": _text(event.get("evidence")) or _text(event.get("why")),
            }  # fmt: skip

    def _attempt(self, job: str, attempt: int, host: str, at: float | None, *, launched: bool) -> dict[str, Any]:
        # Ranks and the monitor write files of their own: a host's rows of one attempt are one.
        file = self.file if launched else f"ranks of {host}"
        row = self.attempts.setdefault(
            (file, job, attempt),
            {
                "file": file, "job": job, "attempt": attempt, "host": host, "launched": launched, "world_size": None,
                "nodes": None, "node": None, "alias": None, "began_at": at, "ended_at": None,
            },
        )  # fmt: skip
        if at is not None:
            row["began_at"] = at if row["began_at"] is None else min(at, row["began_at"])
        return row

    def _failure(self, event: Mapping[str, Any], at: float, host: str, job: str, attempt: int) -> None:
        name, nodes = _text(event.get("id")), event.get("nodes")
        known = sorted({_text(str(node)) for node in nodes}) if isinstance(nodes, list) else []
        for node in known:
            self.culprits[name, host, node] = {"incident": name, "host": host, "node": node}
        cause, injected = _text(event.get("cause")) or "unknown", event.get("injected")
        self.failures[name, host] = {
            "incident": name, "host": host, "at": at, "job": job, "attempt": attempt,
            "kind": _text(event.get("kind")), "category": _text(event.get("category")) or "unknown", "cause": cause,
            "action": _text(event.get("action")),
            "confidence": _number(event.get("confidence")),
            "signature": _text(event.get("signature")) or cause, "world_size": _whole(event.get("world_size")),
            "nodes": json.dumps(known), "summary": _text(event.get("summary")) or None,
            "injected": injected if isinstance(injected, bool) else None,
        }  # fmt: skip


def start_facts(event: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Return what a job was started with, one value by one: versions, settings, script and nodes."""
    for key in ("versions", "settings"):
        yield from _flat(key, event.get(key), _FLAT)
    yield "python", event.get("python")
    argv = event.get("argv")
    yield "argv", " ".join(map(str, argv))[:_MOST_TEXT] if isinstance(argv, list) else None


def script_of(argv: object) -> str:
    """Return the name of the script, or module, in the arguments of `resilience run`; empty where none is told."""
    words = [str(word) for word in argv] if isinstance(argv, list) else []
    for before, word in zip(["", *words], words, strict=False):
        if before in ("-m", "--module"):
            return word
        if word.endswith(".py") and not word.startswith("-"):
            return word.rpartition("/")[2]
    return next((word.rpartition("/")[2] for word in words if not word.startswith("-")), "")


def _flat(name: str, value: Any, levels: int) -> Iterable[tuple[str, Any]]:
    if isinstance(value, Mapping) and levels:
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner, levels - 1)
    elif isinstance(value, (dict, list)):
        yield name, json.dumps(value, sort_keys=True)[:_MOST_TEXT]
    elif value is not None:
        yield name, value


def _text(value: object) -> str:
    """Return a text that every database takes: without zeros and halves of characters."""
    text = value if isinstance(value, str) else ""
    return text.replace("\0", "").encode("utf-8", "replace").decode()[:_MOST_TEXT]


def _number(value: object) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < _MOST else None  # type: ignore[arg-type]


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 31 else None
