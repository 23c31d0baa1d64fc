"""Who made the others wait, when a log holds nothing but symptoms. Pure.

A rank that waits in a collective says so when it gives up. The one that it waited for says nothing, so the
silent rank is the suspect and its last words are the evidence. Where every rank complains, they were all there:
at one place of the program the network did not carry it, at different places the program's order is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from resilience_sdk.attribution.sightings import LogFacts, Sighting
from resilience_sdk.attribution.verdict import Quote, Suspect, Verdict, verdict

_TIMEOUT = re.compile(r"(?i)timed? ?out|timeout")
_GLOO = frozenset({"network_partition"})
_SAVING = re.compile(r"(?i)\b(sav|writ|upload|flush|dump|stor)\w*\b.{0,40}(checkpoint|ckpt|snapshot|state|\.pth?\b)")
_READING = re.compile(
    r"(?i)\b(read|open|load|fetch|download|scan|stat|list|mmap)\w*\b.{0,60}"
    r"(data|shard|file|sample|index|bucket|s3|nfs|/|\.(bin|idx|tar|arrow|parquet|jsonl?)\b)"
)
_BUSY = re.compile(r"(?i)\b(preprocess|tokeni[sz]|build|compil|index|evaluat|validat|warm|prepar|comput|convert)\w*")
_POINT_TO_POINT = re.compile(r"\b(recv|send|irecv|isend|batch_isend_irecv)\(")
_METRIC = re.compile(r"(?i)torchmetrics|/metrics?/|validation|evaluat|\bcompute\b.*metric|auroc|accuracy")
_SCALAR = re.compile(r"OpType=ALL(REDUCE|GATHER)\w*, NumelIn=1, NumelOut=[1-9]\b")
_MOST_QUOTES = 5


def judge_symptoms(symptoms: Sequence[Sighting], facts: LogFacts) -> Verdict:
    """Return the verdict on a log in which every rank only misses another one. `symptoms` is not empty."""
    telling = max(symptoms, key=lambda s: (s.confidence, -s.number))
    if any(s.cause not in _GLOO and s.confidence >= telling.confidence for s in symptoms):
        return _as_said(telling, symptoms, facts)
    timed_out = any(_TIMEOUT.search(s.text) for s in symptoms)
    silent = _silent(facts)
    done = {rank: words for rank, words in facts.done.items() if rank in silent}
    if done and len(done) < (facts.world or len(facts.said) or 1 << 30):
        return _blame("user_uneven_inputs", 0.7, done, symptoms, facts)
    if silent and len(silent) * 2 <= _world(facts):
        return _blame_silent(silent, symptoms, facts, timed_out=timed_out)
    if timed_out:
        return _all_there(symptoms, facts)
    return verdict("network_partition", 0.3, (), _quotes(symptoms, facts))


def _as_said(telling: Sighting, symptoms: Sequence[Sighting], facts: LogFacts) -> Verdict:
    """A watchdog or a remote error, with nothing that tells who did not come."""
    if telling.cause == "nccl_watchdog_timeout":
        texts = [s.text for s in symptoms]
        metric = next((said for said in _context(facts) if _METRIC.search(said[1])), None)
        if metric is not None and any(_SCALAR.search(text) for text in texts):
            evidence = (Quote(facts.name, *metric), *_quotes(symptoms, facts))
            return verdict("user_collective_mismatch", 0.4, (), evidence[:_MOST_QUOTES])
    nodes = dict.fromkeys(s.node for s in symptoms if s.cause == telling.cause and s.node)  # peers that were missed
    culprits = tuple(Suspect(node=node) for node in nodes)
    return verdict(telling.cause, min(0.5, telling.confidence), culprits, _quotes([telling, *symptoms], facts))


def _context(facts: LogFacts) -> list[tuple[int, str]]:
    return [*facts.said.values(), *facts.fragments]


def _silent(facts: LogFacts) -> set[int]:
    """Ranks of the job that wrote nothing of any trouble."""
    complained = {s.rank for s in facts.sightings if s.rank is not None} | set(facts.troubled)
    everyone = set(range(facts.world)) if facts.world and facts.world <= 1 << 16 else set()
    everyone |= set(facts.said) | complained
    return everyone - complained if len(everyone) > 1 else set()


def _world(facts: LogFacts) -> int:
    return facts.world or len(set(facts.said) | set(facts.troubled))


def _blame_silent(silent: set[int], symptoms: Sequence[Sighting], facts: LogFacts, *, timed_out: bool) -> Verdict:
    words: dict[int, tuple[int, str]] = {rank: facts.said[rank] for rank in sorted(silent) if rank in facts.said}
    for cause, pattern in (
        ("checkpoint_stall", _SAVING),
        ("hang_rank_late", _BUSY),
        ("filesystem_stall", _READING),
    ):
        found = {rank: said for rank, said in words.items() if pattern.search(said[1])}
        if found and timed_out:
            return _blame(cause, 0.6, found, symptoms, facts)
    deaf = {end.rank for end in facts.exits if end.pid in facts.deaf and end.rank is not None}
    people: dict[int, tuple[int, str] | None] = {rank: words.get(rank) for rank in sorted(silent & deaf or silent)}
    if timed_out and deaf & silent:
        return _blame("hang_rank_stopped", 0.7, people, symptoms, facts)  # it did not hear SIGTERM either
    if not timed_out:
        if any(end.code != 0 for end in facts.exits):
            # The launcher saw others fail first, so this one had left in good order.
            return _blame("user_uneven_inputs", 0.5, people, symptoms, facts)
        # Its connections closed and it left no word, not even a traceback: nothing but SIGKILL does that.
        return _blame("rank_killed_sigkill", 0.35, people, symptoms, facts)
    if facts.stepped:
        return _blame("hang_rank_stopped", 0.5, people, symptoms, facts)
    # It never came to its first collective: what comes before that is the first read of the data.
    return _blame("filesystem_stall", 0.3, people, symptoms, facts)


def _all_there(symptoms: Sequence[Sighting], facts: LogFacts) -> Verdict:
    """Every rank that can be heard waited."""
    places = {s.place for s in symptoms if s.place} | {place for place in facts.troubled.values() if place}
    codes = [s.code for s in symptoms if s.code]
    one_sided = len(codes) > 1 and all(_POINT_TO_POINT.search(code) for code in codes)
    if len(places) > 1 or one_sided:
        return verdict("user_deadlock", 0.5, (), _quotes(symptoms, facts))
    return verdict("network_partition", 0.5, (), _quotes(symptoms, facts))


def _blame(
    cause: str,
    confidence: float,
    who: Mapping[int, tuple[int, str] | None],
    symptoms: Sequence[Sighting],
    facts: LogFacts,
) -> Verdict:
    said = [
        Quote(facts.name, words[0], f"last words of rank {r}: {words[1].strip()[:300]}")
        for r, words in who.items()
        if words
    ]
    nothing = [Quote(facts.name, None, f"rank {rank} said nothing") for rank, words in who.items() if not words]
    culprits = tuple(Suspect(rank=rank) for rank in sorted(who))
    return verdict(cause, confidence, culprits, (*said, *nothing, *_quotes(symptoms, facts))[:_MOST_QUOTES])


def _quotes(symptoms: Sequence[Sighting], facts: LogFacts) -> tuple[Quote, ...]:
    chosen = list({s.number: s for s in symptoms}.values())[:3]
    return tuple(Quote(facts.name, s.line, s.text.strip()[:500]) for s in chosen)
