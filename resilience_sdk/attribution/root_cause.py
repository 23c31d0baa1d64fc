"""Which of the things seen in a log was the first fault. Pure.

1. What the kernel, the driver or the scheduler says counts always; what a program says counts unless the
   program went on (many lines of progress follow, or the run finished).
2. What another cause in the same log explains is dropped (`explains` in `causes/*.toml`): a killed process
   where the kernel tells of the memory killer, a CUDA error where the driver lost the GPU.
3. Of the rest the first to be said is the cause; an exit code is said late, so it counts where nothing else
   speaks for that rank. What is merely mentioned counts where nothing stronger does.
4. Symptoms alone (a closed connection, a watchdog) name nobody by themselves: `waiting` looks for who is silent.
"""

from __future__ import annotations

from collections.abc import Sequence

from resilience_sdk.attribution.exits import classify_exit, describe_exit
from resilience_sdk.attribution.sightings import Exit, LogFacts, Sighting
from resilience_sdk.attribution.taxonomy import lookup
from resilience_sdk.attribution.verdict import Quote, Suspect, Verdict, verdict
from resilience_sdk.attribution.waiting import judge_symptoms

_SURVIVED_BY = 3
_SURE = 0.5
_MOST_QUOTES = 6
_MOST_QUOTED = 500
_HINT = 0.9
_TEARDOWN_CODES = (-15, 143)
_WATCHDOGS = frozenset({"nccl_watchdog_timeout", "nccl_remote_error"})
_MARKS_A_RUN = frozenset({"nan_loss", "nan_grad_anomaly"})  # also where the run went on or finished


def find_root(facts: LogFacts) -> Verdict:
    """Return the verdict on one log."""
    sightings = [*facts.sightings, *_exit_sightings(facts)]
    lasting = [s for s in sightings if not _survived(s, facts) and not _gave_up(s, sightings)]
    symptoms = [s for s in lasting if s.role == "symptom"]
    for roles in (("proof", "fault"), ("hint",), ("handled",)):
        candidates = _unexplained([s for s in lasting if s.role in roles], lasting)
        if candidates and (roles != ("handled",) or symptoms or facts.failed is not None):
            return _name(_first(candidates), sightings, facts)
    return judge_symptoms(symptoms, facts) if symptoms else _nothing(facts)


def _gave_up(sighting: Sighting, sightings: Sequence[Sighting]) -> bool:
    """Tell whether a process aborted because its watchdog had given up on the others: that is how NCCL ends it."""
    return (
        sighting.cause == "rank_abort"
        and sighting.kind == "line"
        and any(s.cause in _WATCHDOGS and s.number <= sighting.number for s in sightings)
    )


def _survived(sighting: Sighting, facts: LogFacts) -> bool:
    """Tell whether the program went on after it."""
    if sighting.role == "proof" and sighting.cause not in _MARKS_A_RUN:
        return False
    if sighting.cause in _MARKS_A_RUN:
        return False
    if facts.failed is not None and facts.failed[0] > sighting.number:
        others = [s for s in facts.sightings if s.number > sighting.number and s.progress > sighting.progress]
        return facts.progress - sighting.progress >= _SURVIVED_BY and bool(others)
    if facts.finished is not None and facts.finished[0] > sighting.number and not facts.cut_short:
        return sighting.role != "symptom" or not _others_failed(sighting, facts)
    return facts.progress - sighting.progress >= _SURVIVED_BY


def _others_failed(symptom: Sighting, facts: LogFacts) -> bool:
    """A rank that finishes while others lose their connection does not speak for them."""
    return bool(facts.done) and symptom.rank is not None and symptom.rank not in facts.done


def _unexplained(candidates: Sequence[Sighting], all_of_them: Sequence[Sighting]) -> list[Sighting]:
    strong = {s.cause for s in all_of_them if s.role in ("proof", "fault")}
    strong |= {s.cause for s in candidates}
    explained = {name for cause in strong for name in lookup(cause).explains}
    # Causes that explain each other: what remains of a circle is all of it.
    return [s for s in candidates if s.cause not in explained] or list(candidates)


def _first(candidates: Sequence[Sighting]) -> Sighting:
    """The first to be said; what is a mere guess gives way to what is sure."""
    sure = [s for s in candidates if s.confidence >= _SURE and s.kind != "exit"]
    sure = sure or [s for s in candidates if s.confidence >= _SURE] or list(candidates)
    first = min(sure, key=lambda s: s.number)
    if first.time_s is not None:
        earlier = [s for s in sure if s.time_s is not None and s.time_s < first.time_s and s.rank != first.rank]
        if earlier:
            return min(earlier, key=lambda s: (s.time_s or 0.0, s.number))
    return first


def _name(root: Sighting, sightings: Sequence[Sighting], facts: LogFacts) -> Verdict:
    same = [s for s in sightings if s.cause == root.cause and s.role != "symptom"]
    alike = [s for s in same if s.kind == root.kind and s.text == root.text] or [root]
    confirming = [s for s in same if s is not root and (s.kind, s.text) != (root.kind, root.text)]
    consequences = [s for s in sightings if s.cause in lookup(root.cause).explains]
    who = _whom(alike) or _whom(confirming) or _whom(consequences)
    symptoms = [s for s in sightings if s.role == "symptom" and s.number > root.number]
    quoted = [root, *confirming[:2], *consequences[:1], *symptoms[:1]]
    confidence = root.confidence * (_HINT if root.role == "hint" else 1.0)
    if any(s.kind != root.kind or s.role == "proof" for s in confirming):
        confidence = min(0.97, confidence + 0.05)
    return verdict(root.cause, confidence, who, tuple(quote(facts, s.line, s.text) for s in quoted))


def _whom(sightings: Sequence[Sighting]) -> tuple[Suspect, ...]:
    """Return everyone whom these sightings name, each once."""
    return tuple(dict.fromkeys(_suspect(s) for s in sightings if s.rank is not None or s.node is not None))


def _suspect(sighting: Sighting) -> Suspect:
    return Suspect(rank=sighting.rank, node=sighting.node, stack=sighting.frames)


def _exit_sightings(facts: LogFacts) -> list[Sighting]:
    """Exit codes as statements: a signal that nothing else explains, said when the launcher said it."""
    named = {end.pid for end in facts.exits if end.rank is not None}
    codes = [
        end
        for end in facts.exits
        if end.code != 0 and end.pid not in facts.deaf and (end.rank is not None or end.pid not in named)
    ]
    ours = [end for end in codes if end.code not in _TEARDOWN_CODES] or codes
    found = [_exit_sighting(end, facts) for end in ours]
    return [sighting for sighting in found if sighting is not None]


def _exit_sighting(end: Exit, facts: LogFacts) -> Sighting | None:
    judged = classify_exit(end.code)
    if judged.cause in ("unknown", "no_fault"):
        return None
    # An abort is how a process ends that met something else; a bare code is a convention.
    is_signal = (end.code < 0 or end.code > 128) and end.code not in _TEARDOWN_CODES
    role = "fault" if is_signal and judged.cause != "rank_abort" else "hint"
    if judged.cause == "rank_abort" and (end.rank in facts.troubled or (end.rank is None and facts.troubled)):
        return None
    text = f"{end.text.strip()} ({describe_exit(end.code)})"
    return Sighting(
        end.number, text, judged.cause, role, judged.confidence, "exit", end.rank, end.node, progress=facts.progress
    )


def _nothing(facts: LogFacts) -> Verdict:
    if facts.failed is not None and not (facts.finished and facts.finished[0] > facts.failed[0]):
        return verdict("unknown", 0.2, (), (quote(facts, *facts.failed),))
    if facts.finished is not None:
        return verdict("no_fault", 0.85, (), (quote(facts, *facts.finished),))
    if facts.last is None:
        return verdict("unknown", 0.1, (), (Quote(facts.name, None, "the log is empty"),))
    if facts.cut_short:
        return verdict("unknown", 0.2, (), (quote(facts, *facts.last),))
    return verdict("no_fault", 0.5, (), (quote(facts, *facts.last),))


def quote(facts: LogFacts, number: int, text: str) -> Quote:
    """Return a line of the log as evidence, cut to what a person reads."""
    return Quote(facts.name, number, text.strip()[:_MOST_QUOTED])
