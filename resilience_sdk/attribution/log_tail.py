"""What the end of one rank's log, or of the kernel's, says about a death. Pure: the bytes are the caller's.

The same reader and the same rules as `diagnose`, on the last part of a log, so that it takes a fraction of a second.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping

import attrs

from resilience_sdk.attribution.exits import Classification, classification
from resilience_sdk.attribution.log_reader import LogReader
from resilience_sdk.attribution.log_scan import scan
from resilience_sdk.attribution.root_cause import find_root
from resilience_sdk.attribution.signatures import read_line
from resilience_sdk.incidents.record import Evidence

MOST_BYTES = 64 << 10
"""How much of the end of a log is read: hundreds of lines, a tenth of a second at worst."""
_NOTHING = frozenset({"unknown", "no_fault"})
_MOST_QUOTED = 3
_MOST_KERNEL_LINES = 5000
_OOM = "host_oom_kill"
# How the kernel names a process: `Killed process 71 (python)`, `python[71]: segfault at 0`, `Xid ...: 31, pid=71`.
_PROCESS = re.compile(r"[Kk]illed process (\d+)\b|\w\[(\d+)\]: |\bpid[= ](\d+)\b")


@attrs.frozen
class KernelFindings:
    """What the kernel's log says: of the processes that were asked for, and of the node as a whole."""

    processes: Mapping[int, tuple[Classification, ...]] = attrs.field(factory=dict)
    node: tuple[Classification, ...] = ()


@attrs.frozen
class LogFindings:
    """What the end of a log says. `ranks`: whom it says it of; empty where its lines name nobody."""

    known: Classification
    ranks: frozenset[int] = frozenset()


def read_tail(data: bytes, name: str, rank: int | None = None) -> LogFindings | None:
    """Return what the last part of a log says, None where it tells of no fault.

    `rank`: who wrote it, where one rank alone did.
    """
    reader = LogReader(name, rank)
    scan(io.BytesIO(data[-MOST_BYTES:]), reader)
    facts = reader.facts()
    found = find_root(facts)
    if found.cause in _NOTHING or not any(sighting.cause == found.cause for sighting in facts.sightings):
        return None
    roles = {sighting.role for sighting in facts.sightings if sighting.cause == found.cause}
    quoted = tuple(Evidence(name, quote.text) for quote in found.evidence[:_MOST_QUOTED])
    known = classification(found.cause, found.confidence, *quoted, symptom=roles <= {"symptom"})
    return LogFindings(known, frozenset(who.rank for who in found.culprits if who.rank is not None))


def read_kernel(lines: Iterable[str], pids: Iterable[int], *, oom_seen: bool | None) -> KernelFindings:
    """Return what the messages of the kernel and its drivers say about these processes and about the node.

    `oom_seen`: whether the job's control group counted a kill for memory. Process ids in the kernel's log are
    the host's: seen from inside a container, that count alone tells that a kill for memory was of this job.
    """
    ours = frozenset(pids)
    processes: dict[int, list[Classification]] = {}
    node: dict[str, Classification] = {}
    for _, text in zip(range(_MOST_KERNEL_LINES), lines, strict=False):
        reading = read_line(text)
        if reading is None or reading.role != "proof":
            continue
        found = classification(reading.cause, reading.confidence, Evidence("kernel", text.strip()[:500]))
        named = {int(next(filter(None, groups))) for groups in _PROCESS.findall(text)}
        for pid in named & ours:
            processes.setdefault(pid, []).append(found)
        is_foreign = named and not named & ours
        if not named or (is_foreign and reading.cause == _OOM and oom_seen):
            node.setdefault(reading.cause, found)
    return KernelFindings({pid: tuple(found) for pid, found in processes.items()}, tuple(node.values()))
