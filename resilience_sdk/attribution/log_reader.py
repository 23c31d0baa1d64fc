"""From the lines that `log_scan` picks to what they say: exceptions, signs, exit codes, last words. No I/O."""

from __future__ import annotations

import re
from collections import deque

import attrs

from resilience_sdk.attribution.exit_reports import ExitReports
from resilience_sdk.attribution.exits import classify_exit
from resilience_sdk.attribution.fingerprint import is_users_frame
from resilience_sdk.attribution.log_lines import LogLine, parse_line
from resilience_sdk.attribution.log_words import says_done, says_finished, says_handled, tells_of_a_step, world_size
from resilience_sdk.attribution.rules import match_exception
from resilience_sdk.attribution.sightings import LogFacts, Sighting, Sightings
from resilience_sdk.attribution.signatures import read_line, without_advice
from resilience_sdk.attribution.tracebacks import Raised, Tracebacks, parse_exception_line

_TEARDOWN = re.compile(
    r"Sending process \d+ closing signal|Killing subprocess|via (?:Signals\.)?SIGTERM|closing signal"
)
_QUIET_LEVELS = ("DEBUG", "INFO")
# What a quiet line may still say: a program that obeys a signal or sees a NaN is not in error.
_ALSO_QUIETLY = frozenset({"preemption_sigterm", "nan_loss", "nan_grad_anomaly", "slurm_time_limit", "user_interrupt"})
_ASKED_TO_LEAVE = "preemption_sigterm"
_AFTER_EVENT = 200
_AFTER_FAILURE = 60
_NEW_EPISODE = 2000
_SOON = 20
_MOST_RANKS = 100_000
_MOST_CHAINS = 4096
_USERS_OWN = 0.8  # an exception that was raised below a frame of the user's program


class LogReader:
    """Reads one log. Give it to `log_scan.scan`, then ask for `facts()`.

    `rank`: who wrote the log, where one rank alone did; lines that name another are that one's.
    """

    def __init__(self, name: str, rank: int | None = None) -> None:
        self._name = name
        self._rank = rank
        self._tracebacks = Tracebacks()
        self._sightings = Sightings()
        self._reports = ExitReports()
        self._chains: dict[int | None, list[Sighting]] = {}
        self._troubled: dict[int, str | None] = {}
        self._said: dict[int, tuple[int, str]] = {}
        self._done: dict[int, tuple[int, str]] = {}
        self._world: int | None = None
        self._progress = 0
        self._stepped = False
        self._previous: LogLine | None = None
        self._announced: dict[int, LogLine] = {}  # first line of a traceback -> the line before it
        self._finished: tuple[int, str] | None = None
        self._last_event = -_NEW_EPISODE
        self._wants_before = False
        self._cut_short = False
        self._torn_down = False  # the launcher has sent SIGTERM itself: who tells of one now tells of that
        self._fragments: deque[tuple[int, str]] = deque(maxlen=10)
        self._last: tuple[int, str] | None = None

    def head(self, number: int, raw: bytes) -> None:
        """Learn from the first lines how many ranks there are."""
        if self._world is None:
            self._world = world_size(raw[:2000].decode("utf-8", "replace"))

    def wants_before(self) -> bool:
        """Tell once, at the first event of an episode, that the lines before it matter."""
        wants, self._wants_before = self._wants_before, False
        return wants

    def before(self, lines: list[tuple[int, bytes]]) -> None:
        """Note the last words of every rank before things went wrong."""
        self._said.clear()
        self._done.clear()
        for number, raw in lines:
            line = self._parse(number, raw)
            self._note_words(line)
            if line.text.lstrip().startswith('File "'):
                self._fragments.append((number, line.text.strip()))

    def feed(self, number: int, raw: bytes, *, trouble: bool) -> int:
        """Read one line; return how many more are wanted after it, -1 when it meant nothing."""
        line = self._parse(number, raw)
        if self._tracebacks.take(line, self._progress, may_begin=trouble):
            self._take_finished()
            self._event(number)
            if "Traceback" in line.text and self._previous is not None and len(self._announced) < _MOST_CHAINS:
                self._announced[number] = self._previous
            self._previous = None
            return _AFTER_EVENT if "Traceback" in line.text else 1
        self._take_finished()
        self._note_handling(line)
        if tells_of_a_step(line.text):
            self._progress += 1
            self._stepped = True
        self._note_words(line)
        wanted = self._read_plain(line) if trouble or self._reports.in_summary(number) else 0
        if line.text:
            self._previous = line
        if self._tracebacks.is_open(number):
            return max(wanted, 1)
        return wanted

    def tail(self, lines: list[tuple[int, bytes]]) -> None:
        """Read how the log ends."""
        for number, raw in lines:
            line = self._parse(number, raw)
            if line.text.strip():
                self._last = (number, line.text)
            if says_finished(line.text) and line.level not in ("ERROR", "FATAL"):
                self._finished = (number, line.text)

    def facts(self) -> LogFacts:
        """Return all that was read; call it once, after the scan."""
        for cut in self._tracebacks.close():
            self._trouble(cut.rank, _place(cut))
            self._cut_short = True
        self._take_finished()
        for rank in list(self._chains):
            self._end_chain(rank)
        return LogFacts(
            name=self._name,
            sightings=tuple(self._sightings),
            exits=tuple(self._reports.exits),
            troubled=self._troubled,
            said=self._said,
            done=self._done,
            deaf=frozenset(self._reports.deaf),
            world=self._world,
            finished=self._finished,
            failed=self._reports.failed,
            progress=self._progress,
            stepped=self._stepped,
            cut_short=self._cut_short,
            last=self._last,
            fragments=tuple(self._fragments),
        )

    def _parse(self, number: int, raw: bytes) -> LogLine:
        line = parse_line(number, raw)
        return attrs.evolve(line, rank=self._rank) if line.rank is None and self._rank is not None else line

    def _note_words(self, line: LogLine) -> None:
        if line.rank is None or not line.text.strip():
            return
        if len(self._said) < _MOST_RANKS:
            self._said[line.rank] = (line.number, line.text)
        if tells_of_a_step(line.text):
            self._stepped = True
        if says_done(line.text):
            self._done[line.rank] = (line.number, line.text)

    def _read_plain(self, line: LogLine) -> int:
        text = line.text
        if _TEARDOWN.search(text):
            self._torn_down |= "closing signal" in text
            return 0
        if self._reports.read(line):
            return _AFTER_FAILURE
        if (raised := parse_exception_line(text)) is not None and not line.prefixed:
            self._event(line.number)
            self._add_exception(
                Raised(line.number, line.rank, *raised, (), (), False, line.time_s, self._progress, line.number)
            )
            return _AFTER_EVENT
        what = text.partition("what():")[2].strip()
        if what:
            return self._read_terminate(line, what)
        reading = read_line(text)
        if reading is None:
            return _AFTER_FAILURE if self._reports.in_summary(line.number) else -1
        if self._torn_down and reading.cause == _ASKED_TO_LEAVE and reading.role == "fault":
            return 0
        quiet = line.level in _QUIET_LEVELS or "NCCL INFO" in text
        if quiet and reading.role != "proof" and reading.cause not in _ALSO_QUIETLY:
            return -1
        role = reading.role
        if line.level == "WARNING" and not _is_told_quietly(reading.cause):
            # A warning is given by who goes on.
            role = {"fault": "hint", "hint": "handled" if says_handled(text) else "hint"}.get(role, role)
        return self._see(line, reading.cause, role, reading.confidence, reading.rank, reading.node)

    def _read_terminate(self, line: LogLine, what: str) -> int:
        """Read what a C++ exception said that nobody caught."""
        rule = match_exception({"type": "c10::Error", "message": what})
        if rule is not None and rule.cause != "unknown":
            return self._see(line, rule.cause, "symptom" if rule.symptom else "fault", rule.confidence)
        reading = read_line(what)
        if reading is not None:
            role = "fault" if reading.role == "hint" else reading.role
            return self._see(line, reading.cause, role, reading.confidence)
        return self._see(line, "rank_abort", "fault", 0.6)

    def _see(
        self,
        line: LogLine,
        cause: str,
        role: str,
        confidence: float,
        rank: int | None = None,
        node: str | None = None,
    ) -> int:
        whose = line.rank if rank is None else rank
        if role == "symptom":
            self._trouble(line.rank, None)
        self._event(line.number)
        new = self._sightings.add(
            Sighting(
                number=line.number,
                text=line.text,
                cause=cause,
                role=role,
                confidence=confidence,
                rank=whose,
                node=node or line.node,
                time_s=line.time_s,
                progress=self._progress,
            )
        )
        return _AFTER_EVENT if new else 5

    def _event(self, number: int) -> None:
        if number - self._last_event >= _NEW_EPISODE:
            self._wants_before = True
        self._last_event = number

    def _trouble(self, rank: int | None, place: str | None) -> None:
        if rank is not None and len(self._troubled) < _MOST_RANKS:
            self._troubled[rank] = place or self._troubled.get(rank)

    def _take_finished(self) -> None:
        if self._tracebacks.finished:
            for raised in self._tracebacks.finished:
                self._add_exception(raised)
            self._tracebacks.finished.clear()

    def _add_exception(self, raised: Raised) -> None:
        sighting = self._classify(raised)
        if self._torn_down and sighting.cause == _ASKED_TO_LEAVE:
            return
        if not raised.chained:
            self._end_chain(raised.rank)
        if sighting.role == "symptom" or sighting.cause == "user_code_error":
            self._trouble(raised.rank, sighting.place)
        else:
            self._trouble(raised.rank, None)
        if len(self._chains) >= _MOST_CHAINS:
            for rank in list(self._chains):
                self._end_chain(rank)
        chain = self._chains.setdefault(raised.rank, [])
        if len(chain) < 20:
            chain.append(sighting)

    def _classify(self, raised: Raised) -> Sighting:
        before = self._announced.pop(raised.number, None)
        found = classify_exit(None, raised.record())
        if found.cause == "user_code_error":
            reading = read_line(raised.message.partition("\n")[0])
            if reading is not None and (reading.role != "hint" or not raised.frames):
                return self._sighting(raised, reading.cause, reading.role, reading.confidence)
        role = "symptom" if found.symptom else "fault"
        confidence = found.confidence
        if found.cause == "user_code_error" and _place(raised) is not None:
            confidence = _USERS_OWN
        announced = before is not None and before.prefixed and raised.number - before.number <= 2
        if before is not None and announced and role == "fault" and says_handled(without_advice(before.text)):
            role = "handled"
        return self._sighting(raised, found.cause, role, confidence)

    def _sighting(self, raised: Raised, cause: str, role: str, confidence: float) -> Sighting:
        first_line = raised.message.partition("\n")[0]
        return Sighting(
            number=raised.number,
            quoted=raised.last,
            text=f"{raised.type}: {first_line}" if first_line else raised.type,
            cause=cause,
            role=role,
            confidence=confidence,
            kind="exception",
            rank=raised.rank,
            time_s=raised.time_s,
            progress=raised.mark,
            place=_place(raised),
            code=_code(raised),
            frames=raised.frames[:5],
        )

    def _end_chain(self, rank: int | None) -> None:
        """Of exceptions that led to one another, keep the one that says most; among equals the first."""
        chain = self._chains.pop(rank, None)
        if not chain:
            return
        telling = [sighting for sighting in chain if sighting.cause != "user_code_error"] or chain[-1:]
        best = max(telling, key=lambda sighting: (sighting.role == "fault", sighting.confidence, -sighting.number))
        self._sightings.add(best)

    def _note_handling(self, line: LogLine) -> None:
        """A rank that goes on to say that it retries has handled what it raised."""
        chain = self._chains.get(line.rank)
        if not chain or line.number - chain[-1].line > _SOON:
            return
        if line.prefixed and line.level not in ("ERROR", "FATAL") and says_handled(without_advice(line.text)):
            self._chains[line.rank] = [attrs.evolve(sighting, role="handled") for sighting in chain]
            self._end_chain(line.rank)


def _is_told_quietly(cause: str) -> bool:
    """Tell whether a warning is how such a thing is told: signals that are obeyed, numbers that are seen."""
    return cause in _ALSO_QUIETLY or cause in (
        "straggler_persistent",
        "network_ib_unreachable",
        "network_node_unreachable",
    )


def _place(raised: Raised) -> str | None:
    return next(filter(is_users_frame, raised.frames), None)


def _code(raised: Raised) -> str | None:
    for frame, source in zip(raised.frames, raised.sources, strict=True):
        if is_users_frame(frame):
            return source or None
    return None
