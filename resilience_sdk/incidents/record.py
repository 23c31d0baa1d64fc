"""The record of an incident: its fields, their JSON, and `report.md`, the page that a person reads. Pure.

Steps count from 0, so the last of 49 steps is step 48. "After step 49" would leave open which of the two is meant.

Reading is forgiving, because a report may come from another version, a full disk or an editor: unknown keys
are ignored, and a value of the wrong shape counts as missing. Only `store` does I/O.

On the page everything that a job wrote (messages, stacks, names) stands in indented code blocks or code spans, where
Markdown and HTML mean nothing, with control characters replaced: it can neither steer a terminal nor
leave its block.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.core.console import printable
from resilience_sdk.core.journal import Event
from resilience_sdk.core.json_records import from_values, to_values


def step_words(step: int, is_global: bool | None) -> str:
    """Return a step as a person is to read it: one that begins anew with each attempt is no place in the training."""
    return f"step {step} of this attempt" if is_global is False else f"step {step}"


def count_words(steps: int) -> str:
    """Return an amount of steps: `1 step`, `49 steps`."""
    return f"{steps} step{'' if steps == 1 else 's'}"


KINDS = ("crash", "hang", "slow", "preemption", "numerics")
_ENDS_NO_RANK = re.compile(r"(?:RESILIENCE_FAULT=| as )(?:slow|monitor-kill)\b")
_SURVIVED = re.compile(
    r"(?:RESILIENCE_FAULT=| as )(?:slow|pause|nan|disk-full|monitor-kill)\b"
)  # by the rank that it strikes
_MOST_SUMMARY = 300
_MOST_SIGNATURE = 160
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
_FOLDERS = re.compile(r"(?:/[\w.+@-]+)+/(?=[\w.+@-])")
CURE = "cure"
"""The source of evidence that tells what to change."""
FAULT = "fault"
"""The source of evidence that tells of an injected fault."""
STALL = "stall"
"""The source of evidence that tells what stood still when a job was ended from outside."""
ACTIONS = ("restart", "exclude_node", "wait", "rollback", "requeue", "stop", "none")


_PACKAGE = Path(__file__).resolve().parent.parent
_STARTERS = (
    f"{_PACKAGE / 'begin.py'}:",
    f"{_PACKAGE / 'launcher'}{os.sep}",
    f"{_PACKAGE / 'auto.py'}:",
    f"{_PACKAGE / '__main__.py'}:",
    "<frozen runpy>:",
    f"{Path(os.__file__).with_name('runpy.py')}:",
)


@attrs.frozen
class Evidence:
    """One observation: where it comes from (`exit`, `proc`, `stack`, `flight`, ...) and what it says."""

    source: str
    text: str


def without_own_frames(frames: Iterable[str]) -> tuple[str, ...]:
    """Return a stack (`file:line function`, innermost first) without what started the script, at its outer end.

    Frames of ours further in stay: there the script called us. A stack of nothing else is left as it is.
    """
    kept = list(frames)
    while kept and kept[-1].startswith(_STARTERS):
        kept.pop()
    if len(kept) > 1 and kept[-1].startswith("<string>:") and kept[-2].startswith(_STARTERS[:4]):
        return without_own_frames(kept[:-1])  # the one line that a new interpreter is started with
    return tuple(kept or frames)


@attrs.frozen
class Culprit:
    """A rank that the evidence names, and where it was. `stack`: `file:line function`, innermost first."""

    rank: int
    node: str | None = None
    step: int | None = None
    section: str | None = None
    stack: tuple[str, ...] = attrs.field(default=(), converter=without_own_frames)
    step_is_global: bool | None = None
    """Whether `step` counts over attempts; if False, it counts the heartbeats of this attempt, from 0."""

    @property
    def told_step(self) -> str:
        """The step in words, nothing where it is not known."""
        return "" if self.step is None else step_words(self.step, self.step_is_global)


@attrs.frozen(kw_only=True)
class Incident:
    """One fault of one attempt. Times are Unix seconds, durations seconds; None means not known.

    `id` is given by `IncidentStore.create`. `culprits` may be empty: "cannot tell" is an answer.
    `lost_steps` stays None unless steps are global.
    """

    id: str | None = None
    kind: str | None = None
    attempt: int | None = None
    detected_at: float | None = None
    detection_latency_s: float | None = None
    culprits: tuple[Culprit, ...] = ()
    victims: tuple[int, ...] = ()
    category: str | None = "unknown"
    cause: str | None = "unknown"
    action: str | None = "restart"
    confidence: float | None = None
    evidence: tuple[Evidence, ...] = ()
    recovered_at: float | None = None
    recovery_s: float | None = None
    lost_steps: int | None = None

    @property
    def observed(self) -> tuple[Evidence, ...]:
        """What was seen: the evidence without the advice."""
        return tuple(one for one in self.evidence if one.source != CURE)

    @property
    def injected(self) -> bool:
        """Whether a fault that somebody injected led to it: that says nothing of machines, and is no failure."""
        ends_no_rank = _ENDS_NO_RANK if self.kind in ("crash", "numerics") else None
        told = [one.text for one in self.evidence if one.source == FAULT]
        return any(ends_no_rank is None or not ends_no_rank.search(text) for text in told)

    @property
    def advice(self) -> str | None:
        """What to change in this very job, beside what `action` says of all such incidents."""
        return "; ".join(one.text for one in self.evidence if one.source == CURE) or None

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values: every stable key, null for what is missing or not finite."""
        data = to_values(self)
        for name in ("detected_at", "detection_latency_s", "confidence", "recovered_at", "recovery_s"):
            data[name] = number_of(data[name])
        return data

    @classmethod
    def from_json(cls, data: object) -> Incident:
        """Build a record from whatever was read; what is missing or misshapen becomes None or empty."""
        values = data if isinstance(data, dict) else {}
        told = values.get("evidence")
        evidence = [_with_source(item) for item in told] if isinstance(told, list) else []
        incident = from_values(cls, {**values, "evidence": evidence}, lenient=True)
        confidence = incident.confidence
        return attrs.evolve(incident, confidence=None if confidence is None else min(1.0, max(0.0, confidence)))


def _with_source(item: object) -> object:
    if isinstance(item, dict) and not isinstance(item.get("source"), str):
        return {**item, "source": "unknown"}
    return item


def event_fields(incident: Incident) -> dict[str, Any]:
    """Return what the journal's `incident` event says of it; what is decided from the journal needs all of these."""
    return {
        "id": incident.id,
        "kind": incident.kind,
        "culprits": [culprit.rank for culprit in incident.culprits],
        "cause": incident.cause,
        "category": incident.category,
        "action": incident.action,
        "nodes": sorted({culprit.node for culprit in incident.culprits if culprit.node}),
        "confidence": number_of(incident.confidence),
        "injected": incident.injected,
        "signature": signature(incident),
        "summary": headline(incident).replace("`", "")[:_MOST_SUMMARY],
    }


def from_event(event: Mapping[str, Any]) -> Incident | None:
    """Return what the journal tells of an incident, for where its directory is gone; None for one without an id."""
    if not isinstance(name := event.get("id"), str):
        return None
    ranks, nodes = (told if isinstance(told := event.get(key), list) else [] for key in ("culprits", "nodes"))
    node = nodes[0] if len(nodes) == 1 and isinstance(nodes[0], str) else None
    told = {key: event.get(key) for key in ("id", "kind", "attempt", "category", "cause", "action", "confidence")}
    gone = f"the directory incidents/{name} is not there, the journal alone tells: {event.get('summary') or 'no more'}"
    culprits = [{"rank": rank, "node": node} for rank in ranks if isinstance(rank, int)]
    evidence = [{"source": "journal", "text": gone}]
    return Incident.from_json({**told, "detected_at": event.get("t"), "culprits": culprits, "evidence": evidence})


def signature(incident: Incident) -> str:
    """Return what is the same whenever the same thing goes wrong again: the cause, and what an exception said.

    Of that without what differs from run to run: numbers, addresses and folders.
    """
    cause = incident.cause or "unknown"
    raised = next((in_short(one.text) for one in incident.evidence if one.source == "exception"), "")
    told = _NUMBERS.sub("N", _FOLDERS.sub("", raised))[:_MOST_SIGNATURE]
    return f"{cause}: {told}" if told else cause


def text_of(value: object) -> str | None:
    """Return a text as it is, None for anything else."""
    return value if isinstance(value, str) else None


def whole_of(value: object) -> int | None:
    """Return a whole number as it is, None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def number_of(value: object) -> float | None:
    """Return a finite number, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits is JSON too
        return None
    return number if math.isfinite(number) else None


_MOST_FRAMES = 12
_MOST_CULPRITS = 8
_MOST_CHARACTERS = 2000
_MOST_IN_SHORT = 160
_HAPPENED = {
    "crash": "died",
    "hang": "made no progress",
    "slow": "was slow",
    "numerics": "computed bad numbers",
}
_NEXT = {
    "restart": "The launcher starts the next attempt; under a foreign launcher, start the same job again.",
    "exclude_node": "Run again without the node named above, and have it checked.",
    "wait": "Free or repair what is named above (space, storage, an external service), then run again.",
    "rollback": "Run again from an older good state; the newest one is not to be trusted.",
    "requeue": "Submit the same command again with the same run directory: it resumes.",
    "stop": "Repair the program or its configuration first: the same command would fail in the same way.",
    "none": "Nothing.",
}


def render_markdown(incident: Incident, *, meaning: str | None = None) -> str:
    """Return the page. `meaning` is the sentence of the taxonomy for the cause, where the caller has it."""
    lines = [f"# Incident {_plain(incident.id or '(no id)')}", "", headline(incident), ""]
    lines += _facts(incident, meaning)
    lines += ["## Where", "", *_where(incident)]
    lines += ["## Why", "", *_why(incident.observed)]
    lines += ["## What was lost", "", *_lost(incident), ""]
    lines += ["## What to do next", "", *_next(incident)]
    return "\n".join(lines) + "\n"


def headline(incident: Incident) -> str:
    """Return one line for consoles and lists: who, what, where, why."""
    if incident.kind == "preemption":
        return _stop_headline(incident)
    happened = _HAPPENED.get(incident.kind or "", "failed")
    cause = f"{_plain(incident.cause or 'unknown')} ({_plain(incident.category or 'unknown')})"
    if not incident.culprits:
        return f"The job {happened}: {cause}; no rank can be named."
    ranks = compact_ranks(c.rank for c in incident.culprits)
    who = f"Rank {ranks}" if len(incident.culprits) == 1 else f"Ranks {ranks}"
    first = incident.culprits[0]
    place = f" in section {_code(first.section)}" if first.section else ""
    step = f" at {first.told_step}" if first.told_step else ""
    node = f" on {_code(first.node)}" if first.node else ""
    return f"{who}{node} {happened}{place}{step}{_raised(incident)}: {cause}."


def one_line(incident: Incident) -> str:
    """Return the headline as part of a sentence: without Markdown and full stop, with how a rank ended by itself."""
    told = headline(incident).replace("`", "").rstrip(".")
    ends = [e.text for e in incident.evidence if e.source == "exit"]
    text = told[:1].lower() + told[1:]
    if incident.kind != "crash" or not ends or _raised(incident):
        return text
    subject = "it " if ends[0].startswith(("exited ", "died ")) else ""  # the others have one, or no verb
    return f"{text}; {subject}{in_short(ends[0])}"


def in_short(message: str) -> str:
    """Return what an exception said for a line among others: its first line, with the next one where it leads to that.

    Cut behind a word, at about 160 characters.
    """
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    told = " ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1])
    if len(told) <= _MOST_IN_SHORT:
        return told
    cut = told[:_MOST_IN_SHORT]
    at_word = cut.rfind(" ", _MOST_IN_SHORT // 2)
    return f"{cut[:at_word] if at_word > 0 else cut} ..."


def _raised(incident: Incident) -> str:
    if incident.kind != "crash":
        return ""
    told = next((in_short(e.text) for e in incident.evidence if e.source == "exception"), "")
    return f" with {_code(told)}" if told else ""


def _stop_headline(incident: Incident) -> str:
    """Say who asked, and who hindered the stop: `culprits` are no ranks that did what `kind` says."""
    asked, hindered = (
        "; ".join(_plain(e.text) for e in incident.evidence if e.source == source) for source in ("notice", "hindrance")
    )
    cause = f"{_plain(incident.cause or 'unknown')} ({_plain(incident.category or 'unknown')})"
    stood = "; ".join(_plain(e.text) for e in incident.evidence if e.source == STALL)
    told = f"The job was asked to leave, {cause}: {asked or 'by whom is not known'}."
    if stood:
        told = f"The job stood still when it was asked to leave: {stood}. {told}"
    return f"{told} It could not stop as it should: {hindered}." if hindered else told


def went_on_words(incident: Incident) -> str | None:
    """Return that a hang ended by itself, and after how long without progress; None where it did not."""
    if incident.kind != "hang" or incident.action != "none" or incident.recovered_at is None:
        return None
    if incident.recovery_s is None:
        return "went on by itself"
    return f"went on by itself after {(incident.detection_latency_s or 0.0) + incident.recovery_s:.0f} s"


def next_words(action: str | None) -> str:
    """Return what follows from an action, for the person who is to take it."""
    return _NEXT.get(action or "", "The action is not known to this version.")


def injected_faults(events: Iterable[Mapping[str, Any]], *, of_others: bool = False) -> Iterator[Evidence]:
    """Yield what a rank has journalled of a fault that was injected: no verdict looks at it, its reader should know.

    `of_others`: where another rank is named, only what the rank does not outlive. Who follows it may be named first.
    """
    for event in events:
        if event.get("event") == Event.FAULT_INJECTED.value and not (
            of_others and _SURVIVED.search(str(event.get("by")))
        ):
            at = "" if event.get("step") is None else f" at step {event['step']}"
            yield Evidence(FAULT, f"injected by {event.get('by')}, which struck rank {event.get('rank')}{at}")


class InjectedFaults:
    """Tells which incidents injected faults led to, by the events of a run in the order of time."""

    def __init__(self) -> None:
        """Nothing has struck yet."""
        self._struck: set[tuple[str, str]] = set()

    def led_to(self, event: Mapping[str, Any]) -> bool:
        """Take the next event, of whatever kind; tell whether it is an incident that an injected fault led to.

        Incidents of before this was told count where a fault has struck in their attempt.
        """
        attempt = str(event.get("job")), str(event.get("attempt"))
        if event.get("event") == Event.RUN_START.value:
            self._struck.clear()  # a requeued job has the same key and counts its attempts from 0 again
        elif event.get("event") == Event.FAULT_INJECTED.value:
            self._struck.add(attempt)
        if event.get("event") != Event.INCIDENT.value:
            return False
        told = event.get("injected")
        return told if isinstance(told, bool) else attempt in self._struck


def compact_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as a person writes them: `0-6, 8`."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def ranks_words(ranks: Iterable[int]) -> str:
    """Return ranks with their noun: `rank 1`, `ranks 0-6, 8`."""
    shown = compact_ranks(ranks)
    return f"{'rank' if shown.isdecimal() else 'ranks'} {shown}"


def _facts(incident: Incident, meaning: str | None) -> list[str]:
    unnamed = "" if incident.kind == "preemption" else "cannot tell"
    rows = [
        ("kind", _plain(incident.kind or "unknown")),
        ("detected", _when(incident.detected_at) + _after(incident.detection_latency_s)),
        ("attempt", _or_unknown(incident.attempt)),
        ("cause", f"{_plain(incident.category or 'unknown')} / {_plain(incident.cause or 'unknown')}"),
        ("meaning", _plain(meaning) if meaning else ""),
        ("confidence", "not stated" if incident.confidence is None else f"{incident.confidence:.2f}"),
        ("culprits", compact_ranks(c.rank for c in incident.culprits) or unnamed),
        ("victims", _victims(incident.victims)),
        ("action", _plain(incident.action or "unknown")),
    ]
    return ["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows if text), ""]


def _where(incident: Incident) -> list[str]:
    if not incident.culprits and incident.kind == "preemption":
        return ["It concerns all ranks.", ""]
    if not incident.culprits:
        return ["No rank can be named. The stacks of all ranks that answered are in `stacks/`.", ""]
    lines: list[str] = []
    for culprit in incident.culprits[:_MOST_CULPRITS]:
        lines += _report_culprit(culprit)
    if len(incident.culprits) > _MOST_CULPRITS:
        rest = ranks_words(c.rank for c in incident.culprits[_MOST_CULPRITS:])
        lines += [f"Also named: {rest} (see report.json).", ""]
    return lines


def _report_culprit(culprit: Culprit) -> list[str]:
    known = [f"rank {culprit.rank}"]
    known += [f"node {_code(culprit.node)}"] if culprit.node else []
    known += [culprit.told_step] if culprit.told_step else []
    known += [f"section {_code(culprit.section)}"] if culprit.section else ["outside any section"]
    head = ", ".join(known) + ", innermost frame first:"
    if not culprit.stack:
        return [", ".join(known) + "; no stack.", ""]
    lines = [head, "", *_block(culprit.stack[:_MOST_FRAMES])]
    if len(culprit.stack) > _MOST_FRAMES:
        rest = len(culprit.stack) - _MOST_FRAMES
        lines += [f"and {rest} more in `stacks/rank-{culprit.rank}.txt`.", ""]
    return lines


def _why(evidence: Sequence[Evidence]) -> list[str]:
    if not evidence:
        return ["No evidence was recorded.", ""]
    width = max(len(_one_line(e.source)) for e in evidence)
    return _block(f"{_one_line(e.source):<{width}}  {_one_line(e.text)}" for e in evidence)


def _lost(incident: Incident) -> list[str]:
    if incident.kind == "slow":
        over = f"It was over at {_when(incident.recovered_at)}. "
        return [(over if incident.recovered_at is not None else "") + "No step is repeated; the job was slower."]
    if went_on := went_on_words(incident):
        return [f"It {went_on}. No step is repeated."]
    steps = "Steps to be repeated: " + ("not known." if incident.lost_steps is None else f"{incident.lost_steps}.")
    if incident.recovered_at is not None:
        took = "" if incident.recovery_s is None else f", {incident.recovery_s:.1f} s after the detection"
        return [f"The run went on at {_when(incident.recovered_at)}{took}. {steps}"]
    if incident.action in ("stop", "none"):
        return [f"The run did not go on by itself. {steps}"]
    return [f"The run has not gone on yet. {steps}"]


def _next(incident: Incident) -> list[str]:
    lines = [f"{_plain(incident.advice)}.", ""] if incident.advice else []
    if lines and incident.action == "none":
        return lines
    return [*lines, next_words(incident.action)]


def _victims(victims: Sequence[int]) -> str:
    if not victims:
        return "none"
    count = len(set(victims))
    return f"{compact_ranks(victims)} ({count} rank{'s' if count > 1 else ''})"


def _when(unix_s: float | None) -> str:
    if unix_s is None:
        return "at an unknown time"
    try:
        moment = datetime.fromtimestamp(unix_s, tz=timezone.utc)
    except (OverflowError, ValueError, OSError):
        return "at an unknown time"
    return moment.strftime("%Y-%m-%d %H:%M:%S UTC")


def _after(latency_s: float | None) -> str:
    return "" if latency_s is None else f", {latency_s:.1f} s after it happened"


def _or_unknown(value: int | None) -> str:
    return "unknown" if value is None else str(value)


def _block(lines: Iterable[str]) -> list[str]:
    """Return an indented code block: four spaces before every line, so that no text can end it early."""
    return [*("    " + _one_line(line) for line in lines), ""]


def _one_line(text: str) -> str:
    flat = " ".join(printable(text).split("\n")).replace("\t", " ")
    return flat if len(flat) <= _MOST_CHARACTERS else flat[:_MOST_CHARACTERS] + " ... (cut)"


def _code(text: str) -> str:
    """Return a code span; a backtick inside becomes an apostrophe, so the span cannot be left."""
    return "`" + _one_line(text).replace("`", "'").replace("|", "/") + "`"


def _plain(text: str) -> str:
    """Return text for the running page: words of ours pass, anything else becomes a code span."""
    ours = all(c.isalnum() or c in "_ -:,.;()/'" for c in text) and text.isascii()
    return text if ours else _code(text)
