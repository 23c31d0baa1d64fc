"""The root cause: which of the things seen in a log was the first fault, and who made the others wait. Pure.

A rank that waits in a collective says so when it gives up. The one that it waited for says nothing, so the
silent rank is the suspect and its last words are the evidence. Where every rank complains, they were all there:
at one place of the program the network did not carry it, at different places the program's order is wrong.

1. What the kernel, the driver or the scheduler says counts always; what a program says counts unless the
   program went on (many lines of progress follow, or the run finished).
2. What another cause in the same log explains is dropped (`explains` in `causes/*.toml`): a killed process
   where the kernel tells of the memory killer, a CUDA error where the driver lost the GPU.
3. Of the rest the first to be said is the cause; an exit code is said late, so it counts where nothing else
   speaks for that rank. What is merely mentioned counts where nothing stronger does.
4. Symptoms alone (a closed connection, a watchdog) name nobody by themselves: `waiting` looks for who is silent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from resilience_sdk.attribution.exits import classify_exit, describe_exit
from resilience_sdk.attribution.log_facts import Exit, LogFacts, Quote, Sighting, Suspect, Verdict, verdict
from resilience_sdk.attribution.taxonomy import lookup
from resilience_sdk.attribution.tracebacks import COLLECTIVE, LOADER, READING, SAVING, STANDING, WORKING, Stack
from resilience_sdk.core.redaction import redact_text

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
_LIMIT = re.compile(r"Timeout\(ms\)=(?P<ms>\d+)|Timed out waiting (?P<ms2>\d+) ?ms")
_ASKED_TO_LEAVE = (-15, 143)
_MOST_QUOTES = 5
# The cause by what a thread does that is in no collective, the surest sign first.
_STANDS_FOR = {
    SAVING: "checkpoint_stall",
    READING: "filesystem_stall",
    LOADER: "dataloader_timeout",
    STANDING: "hang_rank_stuck",
    WORKING: "hang_rank_late",
}


def judge_stacks(stacks: Sequence[Stack], symptoms: Sequence[Sighting], facts: LogFacts) -> Verdict | None:
    """Return the verdict on a log that says where processes stood; None where that tells of no fault.

    Whoever is in no collective is the one that the others wait for. Where all are in one, they were all there.
    """
    elsewhere = [stack for stack in stacks if stack.doing != COLLECTIVE]
    waiting = [stack for stack in stacks if stack.doing == COLLECTIVE]
    for doing, cause in _STANDS_FOR.items():
        found = [stack for stack in elsewhere if stack.doing == doing]
        # Who works holds somebody up only where somebody waits.
        if found and (waiting or symptoms or doing != WORKING):
            return _blame_stacks(cause, 0.7, found, waiting, symptoms, facts)
    places = {(stack.collective, stack.place) for stack in waiting}
    if not waiting:
        return None
    if len(places) > 1:
        return _blame_stacks("user_deadlock", 0.5, [], waiting, symptoms, facts)
    everybody = facts.world is not None and len({stack.number for stack in waiting}) >= facts.world
    cause = "network_partition" if everybody else "nccl_watchdog_timeout"
    return _blame_stacks(cause, 0.4, [], waiting, symptoms, facts)


def _blame_stacks(
    cause: str,
    confidence: float,
    found: Sequence[Stack],
    waiting: Sequence[Stack],
    symptoms: Sequence[Sighting],
    facts: LogFacts,
) -> Verdict:
    who = tuple(dict.fromkeys(Suspect(rank=s.rank, stack=s.frames[:_MOST_QUOTES]) for s in found if s.rank is not None))
    quoted = [Quote(facts.name, s.number, f"{s.text.strip()} {s.frames[0]}") for s in (*found, *waiting)]
    return verdict(cause, confidence, who, (*quoted[: _MOST_QUOTES - 1], *_quotes(symptoms, facts))[:_MOST_QUOTES])


def _late(symptoms: Sequence[Sighting], facts: LogFacts) -> dict[int, tuple[int, str]]:
    """Return the ranks that took longer over work of their own than the others were willing to wait for them."""
    limits = [float(match["ms"] or match["ms2"]) / 1000 for s in symptoms for match in _LIMIT.finditer(s.text)]
    late = {r: (t.number, t.text) for r, t in facts.took.items() if limits and t.seconds >= min(limits)}
    everybody = max(_world(facts), len(facts.took))
    return late if len(late) < everybody else {}


def judge_symptoms(symptoms: Sequence[Sighting], facts: LogFacts) -> Verdict:
    """Return the verdict on a log in which every rank only misses another one. `symptoms` is not empty."""
    late = _late(symptoms, facts)
    if late:
        return _blame("hang_rank_late", 0.7, late, symptoms, facts)
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
    obeyed = {end.rank for end in facts.exits if end.code in _ASKED_TO_LEAVE and end.rank in silent}
    if obeyed:
        # A stopped process would not have heard it: this one was alive, and elsewhere.
        alive = {rank: words.get(rank) for rank in sorted(silent & obeyed)}
        return _blame("hang_rank_late", 0.5, alive, symptoms, facts)
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
    heard = {s.rank for s in symptoms if s.rank is not None} | {rank for rank, place in facts.troubled.items() if place}
    if len(heard) < (facts.world or 2):
        # A time-out of one of several says that its peer did not come, and nothing about what lies between them.
        return verdict("hang_rank_late", 0.4, (), _quotes(symptoms, facts))
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


_SURVIVED_BY = 3
_SURE = 0.5
_MOST_CAUSE_QUOTES = 6
_MOST_QUOTED = 500
_HINT = 0.9
_HEARSAY = 0.5
_TEARDOWN_CODES = (-15, 143)
_ENDS_WHAT_STANDS = frozenset({
    "rank_abort", "user_interrupt", "slurm_cancelled", "preemption_sigterm", "rank_killed_sigkill", "hang_rank_stopped",
})  # fmt: skip
_TEARDOWNS = frozenset({"rank_abort", "rank_segfault"})
_GAVE_UP = re.compile(r"what\(\):|NCCL|ncclError|DistBackendError")
_WATCHDOGS = frozenset({"nccl_watchdog_timeout", "nccl_remote_error"})
_MARKS_A_RUN = frozenset({"nan_loss", "nan_grad_anomaly"})  # also where the run went on or finished


def find_root(facts: LogFacts) -> Verdict:
    """Return the verdict on one log."""
    sightings = [*facts.sightings, *_exit_sightings(facts)]
    lasting = [s for s in _without_teardowns(sightings) if not _survived(s, facts)]
    symptoms = [s for s in lasting if s.role == "symptom"]
    stacks = [stack for stack in facts.stacks if not _went_on(stack.number, stack.progress, facts)]
    if stacks and all(_ended_it(s) for s in lasting if s.role in ("proof", "fault", "hint")):
        stood = judge_stacks(stacks, symptoms, facts)
        if stood is not None:
            return stood
    for roles in (("proof", "fault"), ("hint",), ("handled",)):
        candidates = _unexplained([s for s in lasting if s.role in roles], lasting)
        if candidates and (roles != ("handled",) or symptoms or facts.failed is not None):
            return _name(_first(candidates), sightings, facts)
    return judge_symptoms(symptoms, facts) if symptoms else _nothing(facts)


def _without_teardowns(sightings: Sequence[Sighting]) -> list[Sighting]:
    """Leave out processes that died by SIGABRT or SIGSEGV after NCCL or C++ had given up in them."""
    gave_up: dict[tuple[int | None, bool], int] = {}  # rank, whether it only lost a peer -> first line
    for s in sightings:
        if s.cause in _WATCHDOGS or _GAVE_UP.search(s.text) is not None:
            key = (s.rank, s.cause == "nccl_remote_error")
            gave_up[key] = min(s.number, gave_up.get(key, s.number))
    return [s for s in sightings if not _is_teardown(s, gave_up)]


def _is_teardown(death: Sighting, gave_up: Mapping[tuple[int | None, bool], int]) -> bool:
    if death.cause not in _TEARDOWNS or death.role == "proof" or "what():" in death.text:
        return False
    for (rank, lost_a_peer), number in gave_up.items():
        claimed = rank is not None and death.rank is not None
        # Whose death it is cannot always be told. Who only lost a peer may speak of this very death; a time-out
        # came before it, and at an address of nil nothing dies but a teardown.
        fits = rank == death.rank if claimed else not lost_a_peer or "(nil)" in death.text
        if fits and number < death.number:
            return True
    return False


def _ended_it(sighting: Sighting) -> bool:
    """Tell whether it may be no more than how a job that stood still was ended."""
    return sighting.kind == "exit" or sighting.cause in _ENDS_WHAT_STANDS


def _went_on(number: int, progress: int, facts: LogFacts) -> bool:
    finished = facts.finished is not None and facts.finished[0] > number and not facts.cut_short
    return finished or facts.progress - progress >= _SURVIVED_BY


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
    evidence = tuple(quote(facts, s.line, s.text) for s in quoted)
    if lookup(root.cause).action == "exclude_node" and all(s.hearsay for s in same):
        # What a program says in its own words costs nobody a node.
        return verdict(root.cause, min(confidence, _HEARSAY), who, evidence, action="restart")
    return verdict(root.cause, confidence, who, evidence)


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
    if not facts.ends_well:
        # Nothing was understood, which is no proof of a good end: a failed run told as fine is the worst answer.
        return verdict("unknown", 0.2, (), (quote(facts, *facts.last),))
    return verdict("no_fault", 0.5, (), (quote(facts, *facts.last),))


def quote(facts: LogFacts, number: int, text: str) -> Quote:
    """Return a line of the log as evidence, without secrets, cut to what a person reads."""
    return Quote(facts.name, number, redact_text(text.strip())[:_MOST_QUOTED])
