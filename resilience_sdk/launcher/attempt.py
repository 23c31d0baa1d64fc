"""One attempt on this node, from the start of its ranks until the last of them is gone, and its files.

They lie in the job's page directory, which is made again whoever removes it. It is private to this user; still, what
ranks wrote there is distrusted: a file that does not parse counts as missing. Nothing here raises for a file that is
gone or a disk that is full.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from resilience_sdk.attribution.exceptions import is_peer_symptom
from resilience_sdk.core import nvrx_words
from resilience_sdk.core.atomic_write import write_whole
from resilience_sdk.core.console import say, say_once
from resilience_sdk.core.job_config import FILE, JobConfig
from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.core.json_records import from_text
from resilience_sdk.core.plain_file import open_to_read
from resilience_sdk.core.redaction import redact_text
from resilience_sdk.core.settings import Settings
from resilience_sdk.core.settings.parse import signal_name, signal_number
from resilience_sdk.errors import EXIT_PREEMPTED
from resilience_sdk.incidents.record import ranks_words
from resilience_sdk.launcher.asking import LastLook, LateSaves, SecondSignal, ends_by, look_at
from resilience_sdk.launcher.ranks import RankProcesses, number_for
from resilience_sdk.launcher.signals import SignalInbox
from resilience_sdk.monitor.pending_exceptions import read_thread_exception
from resilience_sdk.postmortem.facts import (
    ENDING_SUFFIX,
    LEAVE_SIGNALS,
    EndedBy,
    EndingRequest,
    RankExit,
    RankTrace,
    asked_to_leave,
    written_ns,
)
from resilience_sdk.preemption.context import time_to_leave
from resilience_sdk.preemption.reasons import Asker
from resilience_sdk.rank.exceptions import frames_in, user_frame
from resilience_sdk.recorder import witness_ring
from resilience_sdk.recorder.page_directory import make_again, make_private, page_stem, parse_stem
from resilience_sdk.recorder.page_reader import PageReader, RankSnapshot
from resilience_sdk.system.hostinfo import process_start_ticks

if TYPE_CHECKING:
    from resilience_sdk.cluster.bus import NodeRelay
    from resilience_sdk.launcher.agent import Agent
    from resilience_sdk.launcher.sidecars import Housekeeping


JOINS = "another node wants to join: starting the ranks again with it"
_TICK_S = 1.0  # housekeeping only: a death or a signal ends the wait at once
_HURRIED_S = 3.0  # for ranks of an attempt that has failed, once the launcher itself is asked to leave
_SETTLE_S = 0.5  # how long a rank that only lost its peers may be followed by the one that was lost


@attrs.frozen
class AttemptEnding:
    """How an attempt ended. `ending_ns`: monotonic, when the launcher began to end ranks, if it did."""

    by: EndedBy
    ending_ns: int | None = None
    first_ns: int | None = None  # monotonic, when the first rank failed
    asked: tuple[int, ...] = ()  # ranks that died of a signal of somebody who asked them to leave
    terminal_closed: bool = False  # that is what asked the launcher to leave


class Attempt:
    """Watches the ranks of one attempt and ends them. Main thread only."""

    def __init__(
        self,
        number: int,
        ranks: RankProcesses,
        *,
        settings: Settings,
        inbox: SignalInbox,
        files: AttemptFiles,
        journal: Journal,
        housekeeping: Housekeeping,
        agent: Agent,
        relay: NodeRelay,
    ) -> None:
        """Watch `ranks`. `housekeeping` is tended about once a second, the `agent` asked whether nodes want to join.

        The other nodes hear through the `relay` that a rank has failed of its own, as soon as that is seen.
        """
        self.number = number
        self.ranks = ranks
        self._settings = settings
        self._inbox = inbox
        self._files = files
        self._journal = journal
        self._housekeeping = housekeeping
        self._agent = agent
        self._relay = relay
        self._leave_signals = LEAVE_SIGNALS | {signal_number(name) for name in settings.preempt_signals}
        self._hurried_at: float | None = None
        self._reported = 0
        self._late: set[int] = set()  # ranks that have finished, did not end, and were ended
        self._ending_ns: int | None = None
        self._saves = LateSaves(lambda rank: self._look_at({rank: self.ranks.pids[rank]}), settings.exit_timeout or 0.0)
        self._seen: dict[int, tuple[str, int]] = {}  # stacks of ranks a moment before they were ended, and when

    def run(self) -> AttemptEnding:
        """Watch until all ranks of this node are gone, and return how it came to that."""
        try:
            return self._watch()
        finally:
            self._note_exits()

    def traces(self) -> dict[int, RankTrace]:
        """Return what the ranks have left so far."""
        traces = self._files.traces(self.number, self.ranks.pids)
        for rank, (stacks, at_ns) in self._seen.items():
            traces[rank] = attrs.evolve(traces[rank], stacks=stacks, stacks_ns=at_ns)
        return traces

    def _watch(self) -> AttemptEnding:
        left_at: float | None = None
        while True:
            self.ranks.wait(_TICK_S)
            self._inbox.drain()
            self._note_exits()
            if self._inbox.request is not None:
                return self._leave(self._inbox.request)
            failed = [end for end in self.ranks.exits if end.exit_code not in (0, EXIT_PREEMPTED)]
            if failed:
                return self._fail(failed)
            if not self.ranks.running:
                return AttemptEnding(EndedBy.RANKS, self._ending_ns)
            if any(end.exit_code == EXIT_PREEMPTED for end in self.ranks.exits):
                # The others leave too, each after its own last save; one that never does is ended.
                left_at = left_at or time.monotonic()
                if time.monotonic() - left_at > self._settings.preempt_time:
                    self._look_at_the_end()
                    return self._end("others left", EndedBy.RANKS)
            if self._agent.elastic and self._agent.nodes_waiting() > 0:
                say(JOINS)
                return self._end("membership", EndedBy.MEMBERSHIP)
            if self._settings.exit_timeout is not None:
                self._end_finished(self._settings.exit_timeout)
            self._housekeeping.tend()

    def _end_finished(self, limit_s: float) -> None:
        """End processes of ranks that are finished and do not end, once every rank of this node is proven to be."""
        pages = {rank: self._files.page(self.number, rank, pid) for rank, pid in self.ranks.pids.items()}
        well = {end.rank for end in self.ranks.exits if end.exit_code == 0}
        if not all(page is not None and page.done for rank, page in pages.items() if rank not in well):
            return
        now_ns = time.monotonic_ns()
        for rank in self.ranks.running:
            page = pages[rank]
            since_ns = unended_since(page) if page is not None else None
            late_s = (now_ns - since_ns) / 1e9 - limit_s if since_ns is not None else -1.0
            if late_s < 0 or (rank not in self._late and self._saves.is_saving(rank, late_s)):
                continue
            if rank not in self._late:
                self._late.add(rank)
                say(
                    f"rank {rank} has finished, and its process has not ended in {limit_s + late_s:.0f} s "
                    "(exit_timeout): it is ended, and counts as finished"
                )
                self._journal.emit(Event.SIGNAL_SENT, signal="SIGKILL", ranks=[rank], why="exit_timeout")
            # A handler of SIGTERM would take that for a request to save and leave: there is nothing to save any more.
            self.ranks.finish(rank)

    def _fail(self, failed: list[RankExit]) -> AttemptEnding:
        """End the attempt after a rank failed, be it of its own or ended by the monitor for a hang."""
        first_ns = failed[0].at_ns
        if all(end.server_lost for end in failed):
            self._relay.note_fault()
            return attrs.evolve(self._end("the fork server is gone", EndedBy.SERVER), first_ns=first_ns)
        if self._files.hang_verdict(self.number) is not None:
            return attrs.evolve(self._end("hang", EndedBy.HANG), first_ns=first_ns)
        self._settle()
        traces = self.traces()
        if asked := asked_to_leave(self.ranks.exits, traces, self._leave_signals):
            return attrs.evolve(self._follow(asked), first_ns=first_ns)
        if not self._only_symptoms(traces):
            self._relay.note_fault()
        ending = self._end("rank failed", EndedBy.RANKS)
        # The monitor may have spoken in the moment between.
        if self._files.hang_verdict(self.number) is not None:
            ending = attrs.evolve(ending, by=EndedBy.HANG)
        return attrs.evolve(ending, first_ns=first_ns)

    def _follow(self, asked: Sequence[RankExit]) -> AttemptEnding:
        """Let the other ranks leave, too, after some that had no handler died of a signal that asked them to.

        No stop can be agreed without those, so this is a teardown for who would stop; handlers of the script's own
        have the time of a request.
        """
        names = {end.rank: signal_name(-(end.exit_code or 0)) for end in asked}
        for rank, name in names.items():
            self._journal.emit(Event.PREEMPT_NOTICE, source=name, kind=Asker.SIGNAL.value, rank=rank)
        told = f"{ranks_words(names)} died of {' and '.join(sorted(set(names.values())))}, which nobody here has sent"
        grace = time_to_leave(self._settings.preempt_time)
        rest = list(self.ranks.running)
        say(f"{told}: the job is asked to leave" + (f", the other ranks within {grace:g} s" if rest else ""))
        self._begin_ending("a rank was asked to leave")
        if rest:
            self._say_closing(rest, "SIGTERM")
            seen = self._look_before(signal.SIGTERM)
            self._journal.emit(Event.SIGNAL_SENT, signal="SIGTERM", ranks=rest, why="leave", **seen)
        before = self._inbox.interrupts
        self.ranks.end(grace, hurry=lambda: self._inbox.interrupts > before, at_the_end=self._look_at_the_end)
        by = EndedBy.INTERRUPT if self._inbox.interrupted else EndedBy.PREEMPTION
        return AttemptEnding(by, self._ending_ns, asked=tuple(names))

    def _settle(self) -> None:
        """While all who failed only lost their peers, give the lost one a moment to die by itself."""
        deadline = time.monotonic() + _SETTLE_S
        while self.ranks.running and time.monotonic() < deadline and self._only_symptoms(self.traces()):
            self.ranks.wait(min(0.05, deadline - time.monotonic()))
            self._inbox.drain()
            self._note_exits()

    def _only_symptoms(self, traces: Mapping[int, RankTrace]) -> bool:
        for trace in traces.values():  # an exception is written before its process has ended
            if trace.exception is not None and not is_peer_symptom(trace.exception):
                return False
        for end in self.ranks.exits:
            told = traces[end.rank].exception is not None
            if end.exit_code not in (0, EXIT_PREEMPTED, -signal.SIGABRT) and not told:
                return False
        return True

    def _leave(self, request: int) -> AttemptEnding:
        """Forward a request to leave once, wait for the ranks as long as it allows, and end them."""
        self._begin_ending("interrupt" if self._inbox.interrupted else "preemption")
        before, name = self._inbox.interrupts, signal_name(request)
        if self._inbox.interrupted:
            say(f"{name}: asking the ranks to stop (Ctrl-C again ends them now)")
            forward: int = signal.SIGINT if request == signal.SIGINT else signal.SIGTERM
            grace = self._settings.term_grace
        else:
            grace = time_to_leave(self._settings.preempt_time)
            say(f"{name}: asking the ranks to save and leave within {grace:g} s")
            self._journal.emit(Event.PREEMPT_NOTICE, source=name, time_left_s=grace)
            forward = request
        running = list(self.ranks.running)
        if self._is_for_nvrx(running):
            say(nvrx_words.death(name))
        self._say_closing(running, signal_name(forward))
        seen = self._look_before(forward)
        self._journal.emit(Event.SIGNAL_SENT, signal=signal_name(forward), ranks=running, why="leave", **seen)
        second = SecondSignal(self.ranks, lambda rank, pid: self._files.page(self.number, rank, pid), forward)
        second.note = lambda deaf: self._journal.emit(
            Event.SIGNAL_SENT, signal="SIGTERM", ranks=list(deaf), why=f"{name} is not heard there"
        )
        self.ranks.end(
            grace,
            first=forward,
            hurry=lambda: self._inbox.interrupts > before,
            meanwhile=lambda: self._hear_more(second),
            at_the_end=self._look_at_the_end,
        )
        if not self._inbox.interrupted:
            return AttemptEnding(EndedBy.PREEMPTION, self._ending_ns)
        return AttemptEnding(EndedBy.INTERRUPT, self._ending_ns, terminal_closed=name == "SIGHUP")

    def _hear_more(self, second: SecondSignal) -> None:
        """Pass SIGTERM on where it follows a signal for which a rank may have a use of its own, and go on training."""
        self._inbox.drain()  # else no wait lasts any more
        second.look()
        if second.first in (signal.SIGTERM, signal.SIGINT) or signal.SIGTERM not in self._inbox.arrived[1:]:
            return
        first, second.first = signal_name(second.first), signal.SIGTERM
        running = list(self.ranks.running)
        say(f"SIGTERM after {first}: " + ("passing it on to the ranks that still run" if running else "no rank runs"))
        if running:
            seen = self._look_before(signal.SIGTERM)
            self._journal.emit(Event.SIGNAL_SENT, signal="SIGTERM", ranks=running, why=f"it followed {first}", **seen)
            self.ranks.signal(signal.SIGTERM)

    def _end(self, reason: str, by: EndedBy) -> AttemptEnding:
        """End the ranks that still run, on the launcher's own behalf."""
        self._begin_ending(reason)
        if self.ranks.running:
            running = list(self.ranks.running)
            self._say_closing(running, "SIGTERM")
            self._journal.emit(Event.SIGNAL_SENT, signal="SIGTERM", ranks=running, why=reason)
            self.ranks.end(self._settings.term_grace, hurry=self._is_hurried)
        else:
            self.ranks.kill()
        return AttemptEnding(by, self._ending_ns)

    def _is_for_nvrx(self, ranks: Sequence[int]) -> bool:
        """Tell whether the program of these ranks is written for NVRx, whose lines are then printed beside ours."""
        pages = (self._files.page(self.number, rank, self.ranks.pids[rank]) for rank in ranks)
        return any(page is not None and page.nvrx_words for page in pages)

    def _say_closing(self, ranks: Sequence[int], name: str) -> None:
        if self._is_for_nvrx(ranks):
            for rank in ranks:
                say(nvrx_words.closing(self.ranks.pids[rank], name))

    def _look_before(self, number: int) -> dict[str, Any]:
        """Look at the ranks that this signal ends at once: a save may be cut by that. Returns fields of an event."""
        pids = {rank: self.ranks.pids[rank] for rank in self.ranks.running}
        seen = self._look_at({rank: pid for rank, pid in pids.items() if ends_by(pid, number_for(pid, number))})
        return {"unheard": list(seen.ranks), "writing": seen.writing_as_json()} if seen.ranks else {}

    def _look_at_the_end(self) -> None:
        """Look at the ranks that still run, before they are ended: a save may be cut by that."""
        seen = self._look_at({rank: self.ranks.pids[rank] for rank in self.ranks.running})
        self._note_exits()
        self._journal.emit(
            Event.SIGNAL_SENT,
            signal="SIGKILL",
            ranks=list(seen.ranks),
            why="the time to leave is over",
            writing=seen.writing_as_json(),
        )

    def _look_at(self, pids: Mapping[int, int]) -> LastLook:
        seen = look_at(
            pids,
            stem=lambda rank, pid: self._files.stem(self.number, rank, pid),
            dump_signal=self._settings.dump_signal,
        )
        self._seen.update({rank: (text, seen.at_ns) for rank, text in seen.stacks.items()})
        return seen

    def _is_hurried(self) -> bool:
        """Tell whether ranks that are ended anyway are to be gone now: somebody waits for the launcher."""
        self._inbox.drain()
        if self._inbox.request is not None and self._hurried_at is None:
            self._hurried_at = time.monotonic()
            say(f"{self._inbox.name}: the ranks that are left of this attempt have {_HURRIED_S:g} s to end")
        late = self._hurried_at is not None and time.monotonic() - self._hurried_at > _HURRIED_S
        return late or self._inbox.interrupts > 0

    def _begin_ending(self, reason: str) -> None:
        self._files.write_ending(self.number, reason)
        self._ending_ns = time.monotonic_ns()

    def _note_exits(self) -> None:
        for end in self.ranks.exits[self._reported :]:
            self._journal.emit(
                Event.RANK_EXIT,
                rank=end.rank,
                local_rank=end.local_rank,
                pid=end.pid,
                order=end.order,
                **end.to_event(),
                ended_by_launcher=end.ended_by_us,
                **self._files.last_step(self.number, end.rank, end.pid, is_finished=end.exit_code == 0),
            )
        self._reported = len(self.ranks.exits)


_MOST_BYTES = 1 << 20


class AttemptFiles:
    """Writes and reads one page directory. Without one (no place for it) everything is a no-op."""

    def __init__(self, directory: Path | None, config: JobConfig | None = None) -> None:
        """Use the job's page directory, or none; with `config` it is made again where somebody removes it."""
        self.directory = directory
        self._config = config
        self._written: dict[str, str] = {}
        self._lock = threading.RLock()

    def keep(self) -> bool:
        """Make again what was removed of the directory and the launcher's files in it; tell whether this did it.

        Any thread. Raises OSError where the directory cannot be made.
        """
        if self.directory is None or self._config is None:
            return False
        with self._lock:
            if not self._written or all(os.path.exists(self.directory / name) for name in (*self._written, FILE)):
                return False
            make_private(self.directory)
            for name, text in self._written.items():
                if not (self.directory / name).exists():
                    write_whole(self.directory / name, text)
            return make_again(self.directory, self._config)  # last: then a monitor may come

    def write_launcher(self, **facts: Any) -> None:
        """Say that this launcher is in charge."""
        pid = os.getpid()
        self._write("launcher.json", {"pid": pid, "start_ticks": process_start_ticks(pid), **facts})

    def write_attempt(self, attempt: int, ranks: Sequence[int], world_size: int, **node: Any) -> None:
        """Announce an attempt and its ranks on this node, before they start; `node`: number, name and count."""
        facts = {"attempt": attempt, "started_ns": time.monotonic_ns(), "ranks": list(ranks)}
        self._write(f"attempt-{attempt}.json", {**facts, "world_size": world_size, **node})

    def write_ending(self, attempt: int, reason: str) -> None:
        """Say, before any signal is sent, that the launcher ends what dies from now on; the first wins."""
        if self.directory is not None and not (self.directory / f"ending-{attempt}.json").exists():
            facts = {"attempt": attempt, "reason": reason, "at_ns": time.monotonic_ns()}
            self._write(f"ending-{attempt}.json", facts)

    def write_over(self) -> None:
        """Say that no attempt will follow: the monitor may go."""
        self._write("over.json", {"at_ns": time.monotonic_ns()})

    def write_settings(self, settings: Mapping[str, Any]) -> Path | None:
        """Write the effective settings for the ranks and return the file."""
        return self._write("settings.json", settings)

    def hang_verdict(self, attempt: int) -> Mapping[str, Any] | None:
        """Return the monitor's verdict that the deaths of this attempt are the end of a hang."""
        if self.directory is None:
            return None
        verdict = _read_json(self.directory / f"verdict-{attempt}.json")
        return verdict if verdict is not None and verdict.get("kind") == "hang" else None

    def last_step(self, attempt: int, rank: int, pid: int, *, is_finished: bool) -> dict[str, Any]:
        """Return the step that this rank process was in, or its last, and how many it completed.

        Nothing when its page does not say.
        """
        if self.directory is None:
            return {}
        snapshot = _snapshot(self.directory / (page_stem(attempt, rank, pid) + ".page"))
        if snapshot is None or snapshot.step is None:
            return {}
        step = snapshot.last_step if is_finished else snapshot.step
        return {"step": step, "step_is_global": snapshot.step_is_global, "completed": snapshot.completed_beats}

    def stem(self, attempt: int, rank: int, pid: int) -> Path | None:
        """Return how the files of a rank process are called, without suffix; None where there are none."""
        return None if self.directory is None else self.directory / page_stem(attempt, rank, pid)

    def page(self, attempt: int, rank: int, pid: int) -> RankSnapshot | None:
        """Return the page of a rank process as it is now, None where there is none."""
        return None if self.directory is None else _snapshot(self.directory / (page_stem(attempt, rank, pid) + ".page"))

    def script_exit_code(self, attempt: int, rank: int, pid: int) -> int | None:
        """Return what the script of a rank process has left with, by the rank's own word; None where it had not."""
        if self.directory is None:
            return None
        snapshot = _snapshot(self.directory / (page_stem(attempt, rank, pid) + ".page"))
        return None if snapshot is None else snapshot.script_exit_code

    def traces(self, attempt: int, pids: Mapping[int, int]) -> dict[int, RankTrace]:
        """Return what each of these rank processes left, by rank."""
        traces = {}
        for rank, pid in pids.items():
            stem = None if self.directory is None else self.directory / page_stem(attempt, rank, pid)
            if stem is None:
                traces[rank] = RankTrace(rank, pid, None, None, None, None)
                continue
            error_file = stem.with_name(stem.name + ".error.json")
            exception = _read_json(error_file)
            traces[rank] = RankTrace(
                rank,
                pid,
                _snapshot(stem.with_name(stem.name + ".page")),
                exception,
                written_ns(error_file) if exception is not None else None,
                _text(stem.with_name(stem.name + ".stack")),
                read_thread_exception(stem),
                from_text(EndingRequest, _text(stem.with_name(stem.name + ENDING_SUFFIX)) or ""),
                written_ns(stem.with_name(stem.name + ".stack")),
            )
        return traces

    def remove_attempt(self, attempt: int) -> None:
        """Remove the page files of an ended attempt; their content has been taken.

        Its witnesses stay until the next one has ended, whose ranks compare their steps with them.
        """
        with self._lock:
            for name in (f"attempt-{attempt}.json", f"ending-{attempt}.json"):
                self._written.pop(name, None)
        for path, found in self._rank_files():
            if found[0] < attempt or (found[0] == attempt and path.suffix != witness_ring.SUFFIX):
                _unlink(path)

    def remove_all(self) -> None:
        """Remove the directory at the end of the job."""
        if self.directory is None:
            return
        with contextlib.suppress(OSError):
            for path in self.directory.iterdir():
                _unlink(path)
            self.directory.rmdir()

    def _rank_files(self) -> Iterator[tuple[Path, tuple[int, int, int]]]:
        if self.directory is None:
            return
        with contextlib.suppress(OSError):
            for path in list(self.directory.iterdir()):
                found = parse_stem(path.name.partition(".")[0])
                if found is not None:
                    yield path, found

    def _write(self, name: str, facts: Mapping[str, Any]) -> Path | None:
        if self.directory is None:
            return None
        path, text = self.directory / name, json.dumps(facts)
        try:
            with self._lock:
                if self._config is not None and not self.directory.is_dir():
                    make_private(self.directory)
                write_whole(path, text)
                self._written[name] = text
        except OSError as error:
            say_once(f"write:{name}", f"cannot write {path} ({error.strerror}); the ranks run unwatched")
            return None
        return path


def unended_since(page: RankSnapshot) -> int | None:
    """Return since when (monotonic nanoseconds) the process of a rank that is done should have ended.

    None where it need not: it has done more than leave since its training, or its script left with an error.
    """
    if page.exit_state == "error" or page.script_exit_code not in (None, 0):
        return None
    return page.over_ns if page.exit_state == "clean" or page.is_over else page.destroying_ns


def exception_from_torch(path: str | os.PathLike[str]) -> Mapping[str, Any] | None:
    """Return an exception record made from the error file of torch's `@record`, or None.

    What is left when the SDK is disabled in the ranks. Torch writes secrets as they were said; the record has none.
    """
    data = _read_json(Path(path)) if path else None
    message = data.get("message") if data else None
    if not isinstance(message, Mapping):
        return None
    text = redact_text(str(message.get("message", "")))
    extra = message.get("extraInfo")
    callstack = redact_text(str(extra.get("py_callstack", ""))) if isinstance(extra, Mapping) else ""
    kind, colon, rest = text.partition(": ")
    known = colon and kind.replace(".", "").isidentifier()
    return {
        "type": kind if known else "Exception",
        "message": rest if known else text,
        "frames": [f"{file}:{line} {name}" for file, line, name in frames_in(callstack)],
        "user_frame": user_frame(frames_in(callstack)),
        "step": None,
        "traceback": callstack or None,
    }


def _snapshot(path: Path) -> RankSnapshot | None:
    try:
        reader = PageReader(path)
    except OSError:
        return None
    try:
        return reader.snapshot()
    except Exception as error:  # noqa: BLE001 - what a rank wrote must not end its launcher
        say_once("page", f"a rank page cannot be decoded ({type(error).__name__}: {error})")
        return None
    finally:
        reader.close()


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        with open_to_read(path) as file:
            data = json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _text(path: Path) -> str | None:
    try:
        with open_to_read(path) as file:
            return file.read(_MOST_BYTES).decode(errors="replace") or None
    except OSError:
        return None


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
