"""Ranks that raised and do not end: what they raised is the cause of the hang, not where they stand now.

A rank with an uncaught exception may hang in its teardown (a DataLoader worker that does not end, a process
group that cannot be destroyed), and its peers wait for it as for any other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.attribution.first_death import Death, find_first_death
from resilience_sdk.core.plain_file import read_text
from resilience_sdk.errors import EXIT_PREEMPTED
from resilience_sdk.hang.culprit import CulpritFinding
from resilience_sdk.incidents import Evidence
from resilience_sdk.monitor.ranks import WatchedRank

_SHELL_SIGNAL_BASE = 128  # a shell in between reports death by signal n as 128 + n


def blame_exceptions(finding: CulpritFinding, ranks: Sequence[WatchedRank]) -> CulpritFinding:
    """Return the finding with what its culprits raised as the cause, where they did and are still there.

    What only a thread of them raised is told beside it: the rank may wait for something else.
    """
    finding = attrs.evolve(finding, evidence=(*finding.evidence, *_of_threads(finding, ranks)))
    deaths = [
        Death(watched.rank, None, record, written_ns)
        for watched in ranks
        if watched.alive and watched.rank in finding.culprits and watched.snapshot.exit_state == "error"
        for record, written_ns in _record_of(watched)
    ]
    first = find_first_death(deaths) if deaths else None
    if first is None or not first.culprits:
        return finding
    known = first.classification
    raised = [item for item in known.evidence if item.source == "exception"]
    stays = [
        Evidence("exit", f"rank {rank} has raised it, and its process does not come to an end")
        for rank in first.culprits
    ]
    others = [rank for rank in finding.culprits if rank not in first.culprits]
    return attrs.evolve(
        finding,
        culprits=first.culprits,
        victims=tuple(sorted({*finding.victims, *others})),
        category=known.category,
        cause=known.cause,
        confidence=known.confidence,
        evidence=(*raised, *stays, *finding.evidence),
    )


def read_exception(stem: Path, exit_code: int | None = None) -> Mapping[str, Any] | None:
    """Return the exception that a rank left behind, or None; with its exit code, also that of a thread of its."""
    found = _read(Path(f"{stem}.error.json"))
    return read_thread_exception(stem) if found is None and may_be_of_thread(exit_code) else found


def read_thread_exception(stem: Path) -> Mapping[str, Any] | None:
    """Return the newest exception that ended a thread of a rank other than the main one, or None."""
    return _read(Path(f"{stem}.thread.json"))


def may_be_of_thread(exit_code: int | None) -> bool:
    """Tell whether a rank that ended so may have ended for what a thread of it raised: by a code of its own."""
    return exit_code is not None and 0 < exit_code < _SHELL_SIGNAL_BASE and exit_code != EXIT_PREEMPTED


def _read(path: Path) -> Mapping[str, Any] | None:
    try:
        record = json.loads(read_text(path))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def _of_threads(finding: CulpritFinding, ranks: Sequence[WatchedRank]) -> list[Evidence]:
    blamed = [watched for watched in ranks if watched.alive and watched.rank in finding.culprits]
    found = [(watched.rank, record) for watched in blamed if (record := read_thread_exception(watched.stem))]
    return [
        Evidence(
            "exception",
            f"a thread of rank {rank} has raised {record.get('type')}: {str(record.get('message'))[:500]} "
            f"at {record.get('user_frame')}",
        )
        for rank, record in found
    ]


def _record_of(watched: WatchedRank) -> list[tuple[Mapping[str, Any], int]]:
    """Return the record and when it was written; empty when there is none."""
    record = read_exception(watched.stem)
    try:
        written_ns = Path(f"{watched.stem}.error.json").stat().st_mtime_ns
    except OSError:
        return []
    return [] if record is None else [(record, written_ns)]
