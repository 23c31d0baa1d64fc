"""The logs of one job's ranks as one: what each file gave away, put in one order. Pure.

Clocks order lines of different files where the lines have any; a line without one belongs to the moment of the last
before it in its file. Where no file has clocks, only what a file says of itself has an order, which is still enough to
tell those who failed from those who merely lost them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from resilience_sdk.attribution.root_cause import find_root
from resilience_sdk.attribution.sightings import LogFacts, Sighting
from resilience_sdk.attribution.verdict import Quote, Verdict

_Numbered = tuple[int, str]


@attrs.frozen
class _Place:
    """A line of one of the logs."""

    log: int
    line: int


def judge_together(logs: Sequence[LogFacts], ranks: Sequence[int | None]) -> Verdict:
    """Return one verdict on the logs of several ranks of one job; evidence is quoted from the log it stands in.

    `ranks`: who wrote each of them. One who wrote of no trouble is among those whom the others may have missed.
    """
    order = _order(logs)
    numbers = {place: number for number, place in enumerate(order, 1)}
    merged = _merge(logs, numbers)
    for log, (facts, rank) in enumerate(zip(logs, ranks, strict=True)):
        if rank is not None and rank not in merged.said and facts.last is not None:
            merged.said[rank] = numbers[_Place(log, facts.last[0])], facts.last[1]
    known = [rank for rank in ranks if rank is not None]
    if merged.world is None and known:
        merged = attrs.evolve(merged, world=max(known) + 1)
    found = find_root(merged)
    return attrs.evolve(found, evidence=tuple(_located(quoted, order, logs) for quoted in found.evidence))


def _located(quoted: Quote, order: Sequence[_Place], logs: Sequence[LogFacts]) -> Quote:
    if quoted.line is None:
        return quoted
    place = order[quoted.line - 1]
    return Quote(logs[place.log].name, place.line, quoted.text)


def _order(logs: Sequence[LogFacts]) -> list[_Place]:
    """Return every line that matters, the oldest first as far as clocks tell; each file keeps its own order."""
    timed: list[tuple[float, int, int]] = []
    for log, facts in enumerate(logs):
        clocks = {s.number: s.time_s for s in facts.sightings if s.time_s is not None}
        now = min(clocks.values(), default=0.0)
        for line in sorted(set(_lines(facts))):
            now = max(now, clocks.get(line, now))
            timed.append((now, log, line))
    return [_Place(log, line) for _, log, line in sorted(timed)]


def _lines(facts: LogFacts) -> Iterator[int]:
    for sighting in facts.sightings:
        yield sighting.number
        yield sighting.line
    yield from (end.number for end in facts.exits)
    for number, _ in (*facts.said.values(), *facts.done.values(), *facts.fragments):
        yield number
    for one in (facts.finished, facts.failed, facts.last):
        if one is not None:
            yield one[0]


def _merge(logs: Sequence[LogFacts], numbers: dict[_Place, int]) -> LogFacts:
    steps = max(facts.progress for facts in logs)
    sightings: list[Sighting] = []
    merged = LogFacts(name="", progress=steps, world=max((facts.world or 0 for facts in logs), default=0) or None)
    finished: list[_Numbered] = []
    failed: list[_Numbered] = []
    last: list[_Numbered] = []
    for log, facts in enumerate(logs):

        def at(one: _Numbered, log: int = log) -> _Numbered:
            return numbers[_Place(log, one[0])], one[1]

        for s in facts.sightings:
            sightings.append(
                attrs.evolve(
                    s,
                    number=numbers[_Place(log, s.number)],
                    quoted=None if s.quoted is None else numbers[_Place(log, s.quoted)],
                    progress=steps - (facts.progress - s.progress),  # what counts is how much came after it
                )
            )
        merged.troubled.update(facts.troubled)
        merged.said.update({rank: at(words) for rank, words in facts.said.items()})
        merged.done.update({rank: at(words) for rank, words in facts.done.items()})
        for kept, one in ((finished, facts.finished), (failed, facts.failed), (last, facts.last)):
            if one is not None:
                kept.append(at(one))
        merged = attrs.evolve(
            merged,
            exits=(*merged.exits, *(attrs.evolve(e, number=numbers[_Place(log, e.number)]) for e in facts.exits)),
            deaf=merged.deaf | facts.deaf,
            stepped=merged.stepped or facts.stepped,
            cut_short=merged.cut_short or facts.cut_short,
            fragments=(*merged.fragments, *map(at, facts.fragments)),
        )
    everyone_finished = len(finished) == len(logs)
    return attrs.evolve(
        merged,
        sightings=tuple(sorted(sightings, key=lambda s: s.number)),
        finished=max(finished) if everyone_finished and finished else None,
        failed=max(failed, default=None),
        last=max(last, default=None),
    )
