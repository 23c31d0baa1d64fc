"""Facts of a log, as plain values: what was seen in its lines, in order, and the verdict that follows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import attrs

from resilience_sdk.attribution.taxonomy import lookup, meaning
from resilience_sdk.attribution.tracebacks import Stack
from resilience_sdk.core.json_records import to_values


@attrs.frozen
class Suspect:
    """Whom the evidence names: a rank, a node, or both. `stack`: `file:line function`, innermost first."""

    rank: int | None = None
    node: str | None = None
    step: int | None = None
    section: str | None = None
    stack: tuple[str, ...] = ()


@attrs.frozen
class Quote:
    """One line of the evidence: the file it is from, its number (from 1; None where there are none), its words."""

    source: str
    line: int | None
    text: str


@attrs.frozen
class Verdict:
    """Cause, place in the taxonomy, next action, confidence of 0 to 1, whom it names and why.

    `culprits` may be empty: that nobody can be named is an answer, as is the cause `unknown`.
    """

    category: str
    cause: str
    action: str
    confidence: float
    culprits: tuple[Suspect, ...] = ()
    evidence: tuple[Quote, ...] = ()

    @property
    def meaning(self) -> str:
        """The sentence of the taxonomy."""
        return meaning(self.cause)

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as JSON values: every key of the documented schema, null for what is not known."""
        return to_values(self) | {"confidence": round(self.confidence, 3)}


def verdict(
    cause: str,
    confidence: float,
    culprits: tuple[Suspect, ...] = (),
    evidence: tuple[Quote, ...] = (),
    *,
    action: str | None = None,
) -> Verdict:
    """Build a verdict with the taxonomy's category of `cause`, and its default action where none is given."""
    entry = lookup(cause)
    return Verdict(entry.category, entry.cause, action or entry.action, confidence, culprits, evidence)


_MOST_FIRST = 8
_MOST_LAST = 24
_MOST_KINDS = 2000


@attrs.frozen
class Sighting:
    """One statement about a fault.

    `number`: its first line; `quoted`: the one with `text`, where that is another. `role`: as in `signatures`, or
    `handled`: the program said that it would go on. `kind`: `line`, `exception`, or `exit` for an exit code that
    a launcher reports. `progress`: lines that told of a step, counted up to here: a fault that many of them
    follow was survived. `place`, `code`: innermost frame of the user's program and its source line.
    `aftermath`: an exception from where the program reports failures, or cleans up after them.
    `hearsay`: words that are the program's own and no system's.
    """

    number: int
    text: str
    cause: str
    role: str
    confidence: float
    kind: str = "line"
    rank: int | None = None
    node: str | None = None
    time_s: float | None = None
    progress: int = 0
    place: str | None = None
    code: str | None = None
    frames: tuple[str, ...] = ()
    quoted: int | None = None
    aftermath: bool = False
    hearsay: bool = False

    @property
    def line(self) -> int:
        """The line that holds `text`."""
        return self.number if self.quoted is None else self.quoted


@attrs.define
class _Kept:
    first: list[Sighting] = attrs.field(factory=list)
    last: deque[Sighting] = attrs.field(factory=lambda: deque(maxlen=_MOST_LAST))


class Sightings:
    """A bounded collection: of each cause, role and rank the first few and the newest few."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str, int | None], _Kept] = {}

    def add(self, sighting: Sighting) -> bool:
        """Keep a sighting; tell whether it is among the first of its kind."""
        key = (sighting.cause, sighting.role, sighting.rank)
        kept = self._kept.get(key)
        if kept is None:
            if len(self._kept) >= _MOST_KINDS:
                return False
            kept = self._kept[key] = _Kept()
        if len(kept.first) < _MOST_FIRST:
            kept.first.append(sighting)
            return True
        kept.last.append(sighting)
        return False

    def __iter__(self) -> Iterator[Sighting]:
        """Yield them in the order of the log."""
        return iter(sorted((s for kept in self._kept.values() for s in (*kept.first, *kept.last)), key=_position))

    def replace(self, old: Sighting, new: Sighting) -> None:
        """Put `new` in the place of `old`: what was learned later about the same lines."""
        kept = self._kept.get((old.cause, old.role, old.rank))
        if kept is not None and old in kept.first:
            kept.first.remove(old)
        elif kept is not None and old in kept.last:
            kept.last.remove(old)
        self.add(new)


@attrs.frozen
class Exit:
    """How a rank ended, as a launcher reports it. `rank` may be unknown; `code` is negative for a signal."""

    number: int
    code: int
    rank: int | None = None
    node: str | None = None
    text: str = ""
    pid: int | None = None


@attrs.frozen
class Took:
    """The longest duration that a rank told of work of its own, with the line that says so."""

    seconds: float
    number: int
    text: str


@attrs.frozen
class LogFacts:
    """Everything that one log gave away.

    `troubled`: ranks that wrote of some trouble. `said`: the last words of each rank before the first fault.
    `done`: ranks that said that they had finished. `finished`: the log ends with the words of a finished run.
    `failed`: something in it says that the job as a whole failed. `deaf`: processes that the launcher had to
    kill because they did not react when it asked them to leave. `progress`: lines that told of a step, as far as
    they were read; `stepped`: whether any did, before the first fault as well. `cut_short`: it ends inside a
    traceback. `last`: its last line that is not empty; `ends_well`: a program at work wrote it, that had not failed.
    `fragments`: frames outside of any traceback. `stacks`: where processes were when somebody dumped them.
    `took`: the longest work of each rank that tells how long it took.
    """

    name: str
    sightings: tuple[Sighting, ...] = ()
    exits: tuple[Exit, ...] = ()
    troubled: dict[int, str | None] = attrs.field(factory=dict)
    said: dict[int, tuple[int, str]] = attrs.field(factory=dict)
    done: dict[int, tuple[int, str]] = attrs.field(factory=dict)
    deaf: frozenset[int] = frozenset()
    world: int | None = None
    finished: tuple[int, str] | None = None
    failed: tuple[int, str] | None = None
    progress: int = 0
    stepped: bool = False
    cut_short: bool = False
    fragments: tuple[tuple[int, str], ...] = ()
    last: tuple[int, str] | None = None
    ends_well: bool = False
    stacks: tuple[Stack, ...] = ()
    took: dict[int, Took] = attrs.field(factory=dict)


def _position(sighting: Sighting) -> int:
    return sighting.number
