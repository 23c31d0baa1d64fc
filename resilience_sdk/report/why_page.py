"""The page of `resilience why`: each incident told once, for somebody whose job has just failed. Pure.

A training step is often 30 frames of libraries below the loop. Innermost first, as stacks are kept, the line that the
reader can change would come last, or be cut.

Of an incident: a headline, one paragraph, the stack, what to change. Then, once, how the job ended, what to do now and
the command for it. What is left out here stands in the rows of the evidence.

A report repeats itself by its nature: the exception is in the title and in the evidence, a stall in the hang, in the
preemption that ended it and in the reason of the job's end, and a restarted program fails the same way again. So all
sentences of a page go through one `_Told`, which lets nothing pass that was said before.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from resilience_sdk.attribution.exceptions import is_our_frame, is_users_frame
from resilience_sdk.attribution.taxonomy import UNKNOWN, lookup, meaning
from resilience_sdk.core.console import printable
from resilience_sdk.core.words import one_line, when
from resilience_sdk.incidents import STALL, Culprit, Evidence, Incident, count_words
from resilience_sdk.incidents.record import compact_ranks, headline, in_short, next_words, went_on_words
from resilience_sdk.incidents.stalls import ENDING
from resilience_sdk.postmortem.exit_codes import JobVerdict
from resilience_sdk.postmortem.outcome import hint_of

_PACKAGE = "resilience_sdk"
_MOST = 8
_OUTERMOST = 2  # of a deep program: where it began; the rest of the lines is where it was
_MOST_OF_LIBRARIES = 3
_INSTALLED = re.compile(r"^.*/(?:(?:site|dist)-packages|lib/python3(?:\.\d+)?)/")


def users_first(stack: Sequence[str]) -> list[str]:
    """Return lines for a stack (`file:line function`, innermost first).

    The program's own frames, innermost first, then where in a library the innermost of them was. A stack of libraries
    alone is shown by its innermost frames.
    """
    users = [frame for frame in stack if is_users_frame(frame)]
    if not users:
        shown = [_short(frame) for frame in stack[:_MOST_OF_LIBRARIES]]
        rest = len(stack) - len(shown)
        return shown + ([f"and {_more(rest)} of libraries"] if rest else [])
    lines = _middle_left_out(users)
    libraries = len(stack) - len(users)
    if libraries and stack[0] != users[0]:
        more = f" (and {_more(libraries - 1)} of libraries)" if libraries > 1 else ""
        lines.append(f"in {_short(stack[0])}{more}")
    return lines


def _middle_left_out(frames: Sequence[str]) -> list[str]:
    if len(frames) <= _MOST:
        return list(frames)
    inner, outer = frames[: _MOST - _OUTERMOST], frames[-_OUTERMOST:]
    return [*inner, f"... {_more(len(frames) - _MOST)}", *outer]


def _more(frames: int) -> str:
    return f"{frames} more frame{'' if frames == 1 else 's'}"


def _short(frame: str) -> str:
    """Return a frame of a library, or of this package, without where that is installed."""
    if is_our_frame(frame):
        return f"{_PACKAGE}/{frame.rpartition(f'/{_PACKAGE}/')[2]}"
    return _INSTALLED.sub("", frame)


_MOST_STACKS = 4
_MOST_EVIDENCE = 4
_GUESS_BELOW = 0.5
_SUBJECT = re.compile(r"^(ranks? [\d, -]+|its?) ")  # "it is stopped" says what "rank 1 is stopped" said
_ASKED = "the job was asked to leave"  # as the headline of a preemption and the reason of an end begin
_WAS_ENDED = "then it was ended"  # as the evidence of a hang begins that somebody ended from outside
_FINAL = ("stop", "none")
# How each rank was found, in the kernel's words and with the deadlines in numbers: for who doubts the verdict.
_DETAILS = frozenset(("proc", "kernel", "rule", "deadline", "cpu", "stack", "flight", "order", "exit"))
_OF_A_STOP = frozenset(("notice", "hindrance"))
_EXCEPTION = "exception"
_LOGS = ("log of rank", "the launcher's standard error")
_WHAT = re.compile(r"^what\(\):\s*")  # as C++ begins the words of an exception that nobody has caught
_VICTIMS = {
    "crash": ("went down with it", "went down with them"),
    "hang": ("waited for it", "waited for them"),
    "slow": ("waits for it", "wait for them"),
}


@attrs.frozen
class JobEnding:
    """What became of the newest job of a run directory, as far as it has told."""

    running: bool = False
    verdict: str | None = None
    exit_code: int | None = None
    reason: str | None = None
    resume: str | None = None
    checkpoint: int | None = None
    ended_at: float | None = None
    advice: str | None = None

    @classmethod
    def of(cls, outcome: Mapping[str, Any] | None, *, running: bool) -> JobEnding:
        """Return the ending by an object of `outcome --json`; one from before the job that runs says nothing of it."""
        if running or outcome is None:
            return cls(running=running)
        return cls(**{field.name: outcome[field.name] for field in attrs.fields(cls) if field.name != "running"})


class _Told:
    """Which sentences and incidents a page has so far."""

    def __init__(self, notices: Sequence[str] = ()) -> None:
        """Begin a page on which a preemption tells these `notices`, so that the hang which it ended need not."""
        self.notices = notices
        self.by_title: dict[str, tuple[str, list[str]]] = {}
        """Headline -> id and stack of the incident that was told under it."""
        self._before = ""

    @property
    def names(self) -> list[str]:
        """The ids of the incidents that are told."""
        return [name for name, _ in self.by_title.values()]

    def has(self, words: str) -> bool:
        """Tell whether these words are said."""
        return words in self._before

    def new(self, *sentences: str) -> list[str]:
        """Return those that are neither said, nor part of what is said; they are said from now on."""
        fresh = []
        for sentence in sentences:
            if (words := _plain(sentence)) and words not in self._before:
                self._before += f" {words} |"
                fresh.append(sentence)
        return fresh


def page(
    incidents: Sequence[Incident],
    ending: JobEnding,
    *,
    signs: Mapping[str | None, Sequence[str]] | None = None,
    newest: str | None = None,
    width: int | None = None,
) -> list[str]:
    """Return the lines of a page about these incidents, oldest first, and how the job ended.

    Args:
        incidents: What is to be told.
        ending: What became of the job.
        signs: Lines on the nodes' health around an incident, by its id.
        newest: The id of the newest incident there is; how the job ended is told below that one alone.
        width: Of the terminal, to which paragraphs are wrapped; None: one line each, for whatever reads it.
    """
    told = _Told([one_line(e.text) for one in incidents for e in one.evidence if e.source == "notice"])
    lines: list[str] = []
    newest = incidents[-1].id if incidents and newest is None else newest
    for incident in incidents:
        is_newest = incident.id == newest
        lines += _incident(incident, told, ending if is_newest else None, width)
        if found := list((signs or {}).get(incident.id, ())):
            lines += [*found, ""]
    if not incidents or incidents[-1].id == newest:
        lines += _ended(ending, incidents[-1] if incidents else None, told, width)
    while lines and not lines[-1]:
        lines.pop()
    return lines


@attrs.frozen
class IncidentWords:
    """What the page says of one incident that stands by itself."""

    headline: str
    paragraph: str
    what_to_change: str


def words_of(incident: Incident, ending: JobEnding | None) -> IncidentWords:
    """Return the parts of the page about one incident; `ending` as `recovery_words` takes it."""
    told = _Told([one_line(e.text) for e in incident.evidence if e.source == "notice"])
    title = _title(incident, told)
    told.new(title)
    told.by_title[title] = (one_line(incident.id or "?"), [])
    return IncidentWords(
        headline=title,
        paragraph=" ".join(_told_of(incident, told, _moment(incident, ending))),
        what_to_change=" ".join(told.new(*_sentences(incident.advice))),
    )


def recovery_words(incident: Incident, ending: JobEnding | None) -> str:
    """Return whether the run went on after an incident; nothing where that is not known or speaks for itself.

    `ending`: what became of the job, for its newest incident; None for others.
    """
    if went_on := went_on_words(incident):
        return f"it {went_on}"
    if incident.kind == "numerics" and incident.action == "none":
        return "the training went on"
    steps = f", {count_words(incident.lost_steps)} to be repeated" if incident.lost_steps else ""
    if incident.recovered_at is not None:
        took = "" if incident.recovery_s is None else f" {incident.recovery_s:.1f} s later"
        return f"it was over{took}" if incident.kind == "slow" else f"the run went on{took}{steps}"
    if ending is None or incident.action in _FINAL or incident.kind in ("slow", "preemption"):
        return steps[2:]
    if ending.running:
        return f"the run has not gone on yet{steps}"
    if ending.verdict == JobVerdict.FINISHED.value:
        return "the job finished all the same"
    if ending.verdict is not None:
        return f"the job ended before it recovered{steps}"
    return f"no job runs here now, and none told that it went on{steps}"


def _incident(incident: Incident, told: _Told, ending: JobEnding | None, width: int | None) -> list[str]:
    name, title, stacks = one_line(incident.id or "?"), _title(incident, told), _stacks(incident)
    known = told.by_title.setdefault(title, (name, stacks))
    again = known[0] != name
    told.new(title)
    moment = _moment(incident, ending)
    if again:  # a restart that fails in the same way has another time, and nothing else that is new
        lines = _wrapped(f"{name}  The same as {known[0]}, {moment}.", width, "")
    else:
        sentences = " ".join(_told_of(incident, told, moment))
        lines = [*_wrapped(f"{name}  {title}", width, ""), *_wrapped(sentences, width)]
    if stacks and (not again or stacks != known[1]):
        lines += ["", *stacks]
    if cure := told.new(*_sentences(incident.advice)):
        lines += ["", *_wrapped(" ".join(cure), width, "  to do: ")]
    return [*lines, ""]


def _told_of(incident: Incident, told: _Told, moment: str) -> list[str]:
    """Return the sentences below the headline."""
    return [*told.new(*_paragraph(incident, told)), _sentence(f"seen {moment}")]


def _ended(ending: JobEnding, last: Incident | None, told: _Told, width: int | None) -> list[str]:
    """Return how the job ended, what to do and the command for it."""
    lines: list[str] = []
    if ending.verdict is not None:
        lines += _wrapped(_end_words(ending, _reason(ending.reason or "", told)), width, "")
        hint = ending.advice or hint_of(ending.verdict)
        if ending.resume:
            # To be copied: never cut or wrapped.
            again = "To run it again:" if ending.checkpoint is None else "To resume:"
            lines += [f"What to do: {hint}:" if hint else again, f"  {printable(ending.resume)}"]
        elif hint:
            lines.append(f"What to do: {hint}.")
    elif last is not None and last.recovered_at is None and last.action != "none":
        lines += _wrapped(f"What to do: {next_words(last.action)}", width, "")
    return lines


def _end_words(ending: JobEnding, reason: str) -> str:
    at = "" if ending.ended_at is None else f" at {when(ending.ended_at)}"
    finished = ending.verdict == JobVerdict.FINISHED.value
    code = "" if finished or ending.exit_code is None else f" with exit code {ending.exit_code}"
    return f"The job {'finished' if finished else 'ended'}{at}{code}{f': {reason}' if reason else ''}."


def ending_words(ending: JobEnding, *beside: str) -> tuple[str, str | None, str | None]:
    """Return how a job ended, what to do, and the command for it; without what the sentences `beside` them tell."""
    told = _Told()
    told.new(*beside)
    reason = _reason(ending.reason or "", told)
    hint = ending.advice or hint_of(ending.verdict or "")
    return _end_words(ending, reason), _sentence(hint) if hint else None, ending.resume


def _reason(reason: str, told: _Told) -> str:
    """Return what a reason says that the page has not said: not the incidents that led to the end, nor who asked."""
    parts = [part.removeprefix("then ").removeprefix("to do: ") for part in one_line(reason).split("; ")]
    asked = [part for part in parts if _ASKED in part and (told.has(_ASKED) or told.has(_WAS_ENDED))]
    fresh = [part for part in parts if part not in asked and not any(name in part for name in told.names)]
    return "; ".join(told.new(*fresh))


def _title(incident: Incident, told: _Told) -> str:
    """Return the headline; without an exception too long for it, and without a stall that has its own incident."""
    leave_out = set()
    if any(in_short(e.text) != e.text.strip() for e in incident.evidence if e.source == _EXCEPTION):
        leave_out.add(_EXCEPTION)
    if _told_stall(incident, told) is not None:
        leave_out.add(STALL)
    kept = tuple(e for e in incident.evidence if e.source not in leave_out)
    return _with_line(one_line(headline(attrs.evolve(incident, evidence=kept))).replace("`", ""), incident)


def _with_line(title: str, incident: Incident) -> str:
    """Return a headline with the culprit's line of the user's, where its stack has one."""
    stack = incident.culprits[0].stack if incident.culprits and incident.kind != "preemption" else ()
    frame = next(filter(is_users_frame, stack), "")
    line = one_line(frame.split(" ")[0].rpartition("/")[2])
    return title if not line or line in title else f"{title.rstrip('.')}, at {line}."


def _told_stall(incident: Incident, told: _Told) -> str | None:
    """Return the id of the hang on this page that stood when this incident came."""
    stalls = [e.text for e in incident.evidence if e.source == STALL]
    return next((name for name in told.names if any(name in text for text in stalls)), None)


def _paragraph(incident: Incident, told: _Told) -> list[str]:
    raised = [e for e in incident.evidence if e.source == _EXCEPTION]
    stood = _told_stall(incident, told)
    findings = [_sentence(_without_place(one_line(e.text), incident)) for e in _findings(incident, stood, told.notices)]
    sentences = [f"{one_line(e.text).rstrip('.')}." for e in raised]
    if stood:
        sentences.append(f"That was while {stood} lasted.")
    if incident.cause in (UNKNOWN, None):
        sentences += [] if raised else ["Nothing that was seen tells why."]
    elif not _says_itself(incident, findings):
        sentences.append(_sentence(meaning(incident.cause)))
    sentences += findings
    if incident.confidence is not None and incident.confidence < _GUESS_BELOW:
        sentences.append(f"That is a guess (confidence {incident.confidence:.2f}).")
    victims = _ranks(incident.victims).lower()
    if incident.victims and incident.culprits and not _speak_of(victims, findings):
        one, several = _VICTIMS.get(incident.kind or "", ("suffered from it", "suffered from it"))
        sentences.append(f"{_capital(victims)} {one if len(incident.culprits) == 1 else several}.")
    return sentences


def _says_itself(incident: Incident, findings: Sequence[str]) -> bool:
    """Tell whether what was seen says as much as the meaning of the cause, and more.

    So it is of a hang, of a slow rank, of a stop that somebody asked for, and of a bug of the program.
    """
    cause = incident.cause or UNKNOWN
    if lookup(cause).cause != cause:  # of another version: its meaning is not known here
        return True
    raised = any(e.source == _EXCEPTION for e in incident.evidence)
    by_findings = bool(findings) and incident.kind in (incident.category, "preemption")
    return by_findings or (raised and incident.category == "user")


def _speak_of(victims: str, findings: Iterable[str]) -> bool:
    named = re.compile(rf"{re.escape(victims)}\b", re.IGNORECASE)  # rank 1 is not rank 12
    return any(named.search(text) or "the others wait" in text for text in findings)


def _findings(incident: Incident, stood: str | None, notices: Sequence[str]) -> list[Evidence]:
    """Return the evidence that the verdict stands on: the first, which decided, and what is no detail of a rank."""
    left_out = _DETAILS | {_EXCEPTION} | ({STALL} if stood else set())
    # Of a stop, its notices and hindrances are the headline.
    left_out |= _OF_A_STOP if incident.kind == "preemption" else set()
    rest = [e for e in incident.observed if e.source not in left_out]
    rest = [e for e in rest if e.source != ENDING or not any(notice in one_line(e.text) for notice in notices)]
    first = incident.observed[:1]
    if first and first[0] not in rest and first[0].source not in (_EXCEPTION, STALL, *_OF_A_STOP):
        # Who died first says something only of a death of which neither words nor a signal are told.
        told = any(e.source == _EXCEPTION for e in incident.evidence) or _tells_signal(incident)
        rest = rest if told and first[0].source in ("order", "exit") else [first[0], *rest]
    return _first_of_logs(rest, incident)[:_MOST_EVIDENCE]


def _first_of_logs(evidence: Sequence[Evidence], incident: Incident) -> list[Evidence]:
    """Return the evidence with one quotation of what programs printed: the first, which decided.

    And none where an exception says it. What a library prints is long, and its peers print what follows from it.
    """
    quoted = [one for one in evidence if one.source.startswith(_LOGS)]
    raised = any(one.source == _EXCEPTION for one in incident.evidence)
    kept = [] if raised else quoted[:1]
    return [_as_words(one) if one in kept else one for one in evidence if one not in quoted or one in kept]


def _as_words(quoted: Evidence) -> Evidence:
    return Evidence(quoted.source, f'printed was "{_WHAT.sub("", quoted.text.strip())}"')


def _tells_signal(incident: Incident) -> bool:
    """Tell whether the meaning of the cause names the signal that a rank died of."""
    signals = re.findall(r"\bSIG[A-Z]+\b", " ".join(e.text for e in incident.evidence if e.source == "exit"))
    return bool(signals) and all(name in meaning(incident.cause or UNKNOWN) for name in signals)


def _without_place(text: str, incident: Incident) -> str:
    """Return what was seen of the culprits without where they were: that is in the headline and in the stack."""
    for culprit in incident.culprits:
        name = f"rank {culprit.rank}"
        at = f" at {culprit.told_step}" if culprit.told_step else ""
        inside = f" in section {one_line(culprit.section)}" if culprit.section else " outside any section"
        frame = f", at {one_line(culprit.stack[0])}" if culprit.stack else ""
        node = f" ({one_line(culprit.node)})" if culprit.node else ""
        told = one_line(culprit.node or "")
        for place in (f"{node}{at}{inside}{frame}", f"{node}{at}{inside}", node, f" (node {told})", f" on {told}"):
            if place:
                text = text.replace(f"{name}{place}", name)
        for frame in culprit.stack:
            text = text.replace(f" at {one_line(frame)}", "")
    return text.removeprefix(f"rank {incident.culprits[0].rank}: ") if len(incident.culprits) == 1 else text


def _stacks(incident: Incident) -> list[str]:
    """Return where the culprits were; ranks that were at the same place share it."""
    groups: dict[tuple[str, ...], list[Culprit]] = {}
    for culprit in incident.culprits:
        if culprit.stack:
            groups.setdefault(tuple(map(one_line, users_first(culprit.stack))), []).append(culprit)
    lines: list[str] = []
    for frames, culprits in list(groups.items())[:_MOST_STACKS]:
        lines.append(f"  {_ranks(c.rank for c in culprits).lower()}{_place(culprits, incident.culprits[0])}")
        lines += [f"    {frame}" for frame in frames]
    if rest := [c.rank for group in list(groups.values())[_MOST_STACKS:] for c in group]:
        lines.append(f"  {_ranks(rest).lower()} elsewhere: --verbose")
    return lines


def _place(culprits: Sequence[Culprit], titled: Culprit) -> str:
    """Return where ranks were that are not where the headline says: it tells of the first one alone."""
    first = culprits[0]
    if (first.node, first.step, first.section) == (titled.node, titled.step, titled.section):
        return ""
    place = [f"on {one_line(first.node)}"] if first.node else []
    place += [f"at {first.told_step}"] if first.told_step else []
    place += [f"in section {one_line(first.section)}"] if first.section else []
    return " " + " ".join(place) if place else ""


def _moment(incident: Incident, ending: JobEnding | None) -> str:
    """Return when it was seen, and what came of it."""
    attempt = "" if incident.attempt is None else f"in attempt {incident.attempt} "
    at = when(incident.detected_at)
    seen = attempt + (at if at.startswith("at ") else f"at {at}")
    recovery = recovery_words(incident, ending)
    return f"{seen}; {recovery}" if recovery else seen


def _ranks(ranks: Iterable[int]) -> str:
    told = compact_ranks(ranks)
    return f"Rank{'s' if '-' in told or ',' in told else ''} {told}"


def _sentences(text: str | None) -> list[str]:
    """Return pieces of advice, which are joined by semicolons, as sentences of their own."""
    return [_sentence(one_line(part)) for part in (text or "").split("; ") if part.strip()]


def _sentence(text: str) -> str:
    text = text.strip().rstrip(".")
    return f"{_capital(text)}." if text else ""


def _capital(text: str) -> str:
    """Return a sentence with its first letter in upper case; names of files and functions stay as they are."""
    return text[:1].upper() + text[1:] if re.match(r"[^\W\d_]+(?![\w./:])", text) else text


def _plain(text: str) -> str:
    """Return the words of a sentence, by which it is recognised."""
    return _SUBJECT.sub("", " ".join(text.replace("`", "").casefold().split())).rstrip(".")


def _wrapped(text: str, width: int | None, lead: str = "  ") -> list[str]:
    if width is None:
        return [lead + text]
    rest = " " * (len(lead) - len(lead.lstrip())) or "  "
    return textwrap.wrap(
        *(text, max(40, width)),
        initial_indent=lead,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def render(
    incident: Incident, directory: str, signs: Sequence[str] = (), *, ending: JobEnding | None = None
) -> list[str]:
    """Return one incident as lines for a terminal; everything that a job wrote is flattened to one line.

    `signs` are lines of what was wrong with the nodes' health around it; `ending` is what became of the job.
    """
    lines = [f"{one_line(incident.id or '?')}  {_one_line_headline(incident)}"]
    latency = incident.detection_latency_s
    after = "" if latency is None else f", {latency:.1f} s after it happened"
    attempt = "" if incident.attempt is None else f", attempt {incident.attempt}"
    lines.append(f"  detected    {when(incident.detected_at)}{after}{attempt}")
    for culprit in incident.culprits:
        lines += _culprit(culprit)
    if incident.victims:
        several = "s" if len(set(incident.victims)) > 1 else ""
        lines.append(f"  victims     rank{several} {compact_ranks(incident.victims)}")
    confidence = "" if incident.confidence is None else f", confidence {incident.confidence:.2f}"
    cause = f"{one_line(incident.cause or 'unknown')} ({one_line(incident.category or 'unknown')})"
    lines.append(f"  cause       {cause}{confidence}")
    lines += [f"  evidence    {one_line(e.source)}: {one_line(e.text)}" for e in incident.observed]
    lines += signs
    lines.append(f"  action      {one_line(incident.action or 'unknown')}")
    lines += [f"  to do       {one_line(incident.advice)}"] if incident.advice else []
    if recovery := recovery_words(incident, ending):
        lines.append(f"  recovered   {recovery}")
    lines.append(f"  more in     {one_line(directory)}/{one_line(incident.id or '?')}/report.md")
    return lines


def _one_line_headline(incident: Incident) -> str:
    return _with_line(one_line(headline(incident)).replace("`", ""), incident)


def _culprit(culprit: Culprit) -> list[str]:
    place = [f"rank {culprit.rank}"]
    place += [f"node {one_line(culprit.node)}"] if culprit.node else []
    place += [culprit.told_step] if culprit.told_step else []
    place += [f"section {one_line(culprit.section)}"] if culprit.section else []
    lines = [f"  culprit     {', '.join(place)}"]
    return lines + [f"                at {one_line(frame)}" for frame in culprit.stack]
