"""The reader of a log: from the lines that `log_scan` picks to exceptions, signs, exit codes and last words. No I/O."""

from __future__ import annotations

import re
import signal
from collections import deque

import attrs

from resilience_sdk.attribution.exceptions import is_users_frame, match_exception
from resilience_sdk.attribution.exits import classify_exit
from resilience_sdk.attribution.log_facts import Exit, LogFacts, Sighting, Sightings, Took
from resilience_sdk.attribution.log_lines import LogLine, parse_line
from resilience_sdk.attribution.log_signs import read_line, without_advice
from resilience_sdk.attribution.tracebacks import Raised, StackDumps, Tracebacks, parse_exception_line

_WORLD = re.compile(
    r"(?i)\b(?:world[_ ]?size|nranks|num_processes|WORLD_SIZE)\b['\"]?\s*[=: ]\s*(\d{1,6})\b"
    r"|Starting with (\d{1,6}) processes|MEMBER: \d+/(\d{1,6})"
)
_PROGRESS = re.compile(
    r"(?i)\b(?:step|iter|iteration|epoch|batch)\b['\"]?\s*[=:#\[(]?\s*\d+|\d+(?:\.\d+)?\s?(?:it/s|s/it)\b"
)
_SCHEDULER = re.compile(r"\bsrun|slurm|job step|\bSTEP \d+\.")  # a step of theirs is no step of ours
_DONE = re.compile(
    r"(?i)\b(?:training|run|job|fit|epoch|loop|rank \d+|worker|all epochs|optimi[sz]ation)\b.{0,40}"
    r"\b(?:finished|complete[d]?|done|ended|successful\w*|exhausted)\b"
    r"|\b(?:finished|completed|done|ending|leaving)\b.{0,20}\b(?:training|run|epochs?|loop|all steps)\b"
    r"|`?Trainer\.fit`? stopped|reached max_(?:steps|epochs)|training_success|exited? with (?:code )?0\b"
    r"|out of (?:data|batches)|no more (?:data|batches)|end of (?:data|dataset|loader)"
    r"|(?:loader|iterator|dataset|inputs?|data|batches) (?:is |are )?(?:exhausted|finished|ended)"
)
# The words of a whole run, not of an epoch or of one rank.
_FINISHED = re.compile(
    r"(?i)\b(?:training|fine-?tuning|optimi[sz]ation)\b.{0,30}\b(?:finished|completed?|done|ended|successful\w*)\b"
    r"|\b(?:finished|completed|done|end of)\b.{0,12}\b(?:training|all (?:steps|epochs))\b|`?Trainer\.fit`? stopped"
    r"|\b(?:job|run|experiment)\b.{0,30}\b(?:finished|completed)\b|\btrain_runtime\b|reached max_(?:steps|epochs)"
)
_TOOK = re.compile(
    r"(?i)\b(?:took|in|after|for|duration|spent|time)\b\W{0,3}(?:\w+\W{1,3}){0,2}?"
    r"(?P<number>\d{1,9}(?:\.\d{1,9})?) ?(?P<unit>ms|milliseconds?|s|secs?|seconds?|m|mins?|minutes?|h|hrs?|hours?)\b"
)
# Who waited for the others was not late, and how long a whole run has taken says nothing.
_NO_WORK = re.compile(
    r"(?i)\bwait|barrier|all_?reduce|all_?gather|collective|time[d ]?-?out|retry|every|max(?:imum)?\b|limit|eta\b|"
    r"remaining|left\b|\b(?:total|elapsed|train\w*|run|running|runtime|uptime|since|epochs?|so far|overall)\b"
)
_UNITS = {"ms": 0.001, "mi": 60.0, "m": 60.0, "s": 1.0, "se": 1.0, "h": 3600.0, "hr": 3600.0, "ho": 3600.0}
_HANDLED = re.compile(
    r"(?i)\b(?:retry(?:ing)?|retried|will (?:try|retry)|try(?:ing)? again|attempt \d+|skip(?:ping|ped)?|"
    r"ignor(?:ing|ed)|continu(?:e|ing)|fall(?:ing)? back|fallback|recover(?:ed|ing)|handled|caught|using defaults?|"
    r"from scratch|"
    r"succeeded after)\b"
)


def world_size(text: str) -> int | None:
    """Return how many ranks the job has, where the line tells."""
    match = _WORLD.search(text)
    return int(next(group for group in match.groups() if group)) if match else None


def tells_of_a_step(text: str) -> bool:
    """Tell whether the line is one of the training loop's progress."""
    return _PROGRESS.search(text) is not None and _SCHEDULER.search(text) is None


def says_done(text: str) -> bool:
    """Tell whether a rank says that it has come to an end of something: a run, an epoch, its data."""
    return _DONE.search(text) is not None


def says_finished(text: str) -> bool:
    """Tell whether the run as a whole is said to have finished."""
    return _FINISHED.search(text) is not None


def says_handled(text: str) -> bool:
    """Tell whether the program says that it goes on: it tries again, skips, falls back."""
    return _HANDLED.search(text) is not None


def took_seconds(text: str) -> float | None:
    """Return how long something of its own took whoever writes the line, None where it does not tell."""
    match = _TOOK.search(text)
    if match is None or _NO_WORK.search(text) is not None or tells_of_a_step(text):
        return None
    unit = match["unit"].lower()
    return float(match["number"]) * (0.001 if unit.startswith("milli") else _UNITS[unit[:2]])


_LAUNCHER_EXIT = re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: \d+ \(pid: (?P<pid>\d+)\)")
_BLOCK_RANK = re.compile(r"^\s*rank\s*: (?P<rank>\d+) \(local_rank: \d+\)")
_BLOCK_CODE = re.compile(r"^\s*exitcode\s*: (?P<code>-?\d+) \(pid: (?P<pid>\d+)\)")
_DEAF = re.compile(r"Unable to shutdown process (?P<pid>\d+) via")
_SRUN_EXIT = re.compile(r"srun: error: (?P<node>[\w.-]+): tasks? (?P<rank>\d+)\S*: Exited with exit code (?P<code>\d+)")
# A script of the user's that runs a program of the user's: it tells no more than how that ended.
_RUNS_A_PROGRAM = re.compile(
    r"^Command .{0,4000}?\b(?:torchrun|torch\.distributed|accelerate|deepspeed|python[\d.]*|srun|"
    r"mpirun|mpiexec|horovodrun|(?:ba|z)?sh|docker|podman|apptainer|singularity)\b",
    re.DOTALL,
)
_CHILD_CODE = re.compile(
    r"(?:returned non-zero exit status |exits with return code = |terminated with exit code )(?P<code>-?\d+)"
)
_CHILD_SIGNAL = re.compile(r"died with <Signals\.(?P<name>SIG\w+): |terminated with signal (?P<name2>SIG\w+)")
_FAILED = re.compile(
    r"failed \(exitcode|ChildFailedError|Root Cause \(first observed|srun: error: .*(?:Exited|exit code)|"
    r"Job step aborted|\bFAILED$|non-zero exit|exit(?:ed)? (?:with )?(?:code|status) [1-9]|Command exited|"
    r"mpirun (?:noticed|has exited)|Primary job +terminated|exits with return code = -?[1-9]"
)
_SUMMARY_LINES = 60
_MOST_EXITS = 1000


class ExitReports:
    """Reads the lines of one log, in their order.

    `failed`: the newest line that says that the job as a whole failed. `deaf`: processes that had to be killed
    because they did not react when they were asked to leave.
    """

    def __init__(self) -> None:
        self.exits: list[Exit] = []
        self.deaf: set[int] = set()
        self.failed: tuple[int, str] | None = None
        self._rank: int | None = None

    def in_summary(self, number: int) -> bool:
        """Tell whether the launcher's summary may go on at a line: it has no words of trouble of its own."""
        return self.failed is not None and number - self.failed[0] <= _SUMMARY_LINES

    def read(self, line: LogLine) -> bool:
        """Read a line; tell whether it is one that says nothing else."""
        text = line.text
        if _FAILED.search(text):
            self.failed = (line.number, text)
        if "rank" not in text and "exit" not in text and "shutdown" not in text:
            return False
        if (match := _DEAF.search(text)) is not None:
            self.deaf.add(int(match["pid"]))
        elif (match := _LAUNCHER_EXIT.search(text)) is not None:
            self._add(Exit(line.number, int(match["code"]), text=text, pid=int(match["pid"])))
        elif "return code =" in text and (code := _child_code(text)) is not None:
            self._add(Exit(line.number, code, text=text))
        elif (match := _BLOCK_RANK.search(text)) is not None:
            self._rank = int(match["rank"])
        elif (match := _BLOCK_CODE.search(text)) is not None:
            self._add(Exit(line.number, int(match["code"]), self._rank, text=text, pid=int(match["pid"])))
        else:
            if (match := _SRUN_EXIT.search(text)) is not None:
                self._add(Exit(line.number, int(match["code"]), int(match["rank"]), match["node"], text))
            return False
        return True

    def read_wrapper(self, number: int, rank: int | None, kind: str, message: str) -> bool:
        """Read an exception; tell whether it only says how the program ended that the raising one had started."""
        is_command = kind.endswith("CalledProcessError") and _RUNS_A_PROGRAM.search(message) is not None
        if not is_command and not kind.endswith("ProcessExitedException"):
            return False
        text = f"{kind}: {message}"
        self.failed = (number, text)
        code = _child_code(message)
        if code is not None:
            self._add(Exit(number, code, rank, text=text))
        return True

    def _add(self, end: Exit) -> None:
        if len(self.exits) < _MOST_EXITS:
            self.exits.append(end)


def _child_code(text: str) -> int | None:
    """Return the exit code that a parent tells of its child, negative for a signal."""
    if (match := _CHILD_SIGNAL.search(text)) is not None:
        number = getattr(signal, match["name"] or match["name2"], None)
        return None if number is None else -int(number)
    match = _CHILD_CODE.search(text)
    return int(match["code"]) if match is not None else None


_TEARDOWN = re.compile(
    r"Sending process \d+ closing signal|Killing subprocess|via (?:Signals\.)?SIGTERM|closing signal"
)
_QUIET_LEVELS = ("DEBUG", "INFO")
_GOES_ON = (*_QUIET_LEVELS, "WARNING")  # who says something at such a level has not failed
# What a quiet line may still say: a program that obeys a signal or sees a NaN is not in error.
_ALSO_QUIETLY = frozenset({"preemption_sigterm", "nan_loss", "nan_grad_anomaly", "slurm_time_limit", "user_interrupt"})
_ASKED_TO_LEAVE = "preemption_sigterm"
_AFTER_EVENT = 200
_AFTER_FAILURE = 60
_AFTER_DUMP = 100
_NEW_EPISODE = 2000
_SOON = 20
_MOST_RANKS = 100_000
_MOST_CHAINS = 4096
# Names of what programs call when they have failed already.
_CLEANS_UP = re.compile(
    r"(?i)(?:\b|_)(?:report|notify|alert|clean_?up|tear_?down|shut_?down|finali[sz]e|finish|destroy_process_group|"
    r"on_exception|on_error|handle_(?:error|exception)|post_mortem|webhook|__exit__|wandb|mlflow)(?:\b|_)"
)
_USERS_OWN = 0.8  # an exception that was raised below a frame of the user's program


class LogReader:
    """Reads one log. Give it to `log_scan.scan`, then ask for `facts()`.

    `rank`: who wrote the log, where one rank alone did; lines that name another are that one's.
    """

    def __init__(self, name: str, rank: int | None = None) -> None:
        self._name = name
        self._rank = rank
        self._tracebacks = Tracebacks()
        self._dumps = StackDumps()
        self._sightings = Sightings()
        self._reports = ExitReports()
        self._chains: dict[int | None, list[Sighting]] = {}
        self._troubled: dict[int, str | None] = {}
        self._said: dict[int, tuple[int, str]] = {}
        self._done: dict[int, tuple[int, str]] = {}
        self._took: dict[int, Took] = {}
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
        self._ends_well = False

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
        if self._dumps.take(line, self._progress):
            self._event(number)
            return _AFTER_DUMP
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
                # A training that stops behind a step may have been killed there.
                self._ends_well = says_done(line.text) or (line.level in _GOES_ON and not self._trained(line))
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
        self._dumps.close()
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
            ends_well=self._ends_well,
            fragments=tuple(self._fragments),
            stacks=tuple(self._dumps.stacks),
            took=self._took,
        )

    def _trained(self, last: LogLine) -> bool:
        return self._stepped or tells_of_a_step(last.text)

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
        seconds = took_seconds(line.text)
        if seconds is not None and (line.rank not in self._took or self._took[line.rank].seconds < seconds):
            self._took[line.rank] = Took(seconds, line.number, line.text)

    def _read_plain(self, line: LogLine) -> int:
        text = line.text
        if _TEARDOWN.search(text):
            self._torn_down |= "closing signal" in text
            return 0
        if self._reports.read(line):
            return _AFTER_FAILURE
        raised = None if line.prefixed else parse_exception_line(text)
        if raised is not None and raised[0] == "Error" and read_line(text) is not None:
            raised = None  # `Error: ...` is how commands begin their complaints
        if raised is not None:
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
        hearsay = reading.hearsay and not line.of_kernel
        return self._see(line, reading.cause, role, reading.confidence, reading.rank, reading.node, hearsay=hearsay)

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
        *,
        hearsay: bool = False,
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
                hearsay=hearsay,
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
        last = raised.number if raised.last is None else raised.last
        if self._reports.read_wrapper(last, raised.rank, raised.type, raised.message):
            return
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
                own = not raised.frames or is_users_frame(raised.frames[0])
                found_it = self._sighting(raised, reading.cause, reading.role, reading.confidence)
                return attrs.evolve(found_it, hearsay=reading.hearsay and own)
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
            aftermath=_is_aftermath(raised),
        )

    def _end_chain(self, rank: int | None) -> None:
        """Of exceptions that led to one another, keep the one that says most; among equals the first."""
        chain = self._chains.pop(rank, None)
        if not chain:
            return
        chain = _without_aftermath(chain)
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


def _without_aftermath(chain: list[Sighting]) -> list[Sighting]:
    """Leave out of a chain what failed only because, or while, a failure was being told or cleaned up."""
    if len(chain) > 1 and chain[-1].aftermath:
        own = [sighting for sighting in chain[:-1] if sighting.place is not None and not sighting.aftermath]
        return own or chain
    first_fault = next((n for n, sighting in enumerate(chain) if sighting.role == "fault"), len(chain))
    return [sighting for n, sighting in enumerate(chain) if n <= first_fault or sighting.role != "symptom"]


def _is_aftermath(raised: Raised) -> bool:
    """Tell whether an exception was raised below code of the user's that reports or cleans up."""
    frames = zip(raised.frames, raised.sources, strict=True)
    return any(_CLEANS_UP.search(f"{frame} {source}") for frame, source in frames if is_users_frame(frame))


def _place(raised: Raised) -> str | None:
    return next(filter(is_users_frame, raised.frames), None)


def _code(raised: Raised) -> str | None:
    for frame, source in zip(raised.frames, raised.sources, strict=True):
        if is_users_frame(frame):
            return source or None
    return None
