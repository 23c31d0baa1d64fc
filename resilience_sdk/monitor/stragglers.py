"""The monitor's part in finding slow ranks and slow steps: the durations of this node, and those of all nodes.

Each node writes a file, `straggler.json`. Our launcher carries it into the store, and one node's launcher, that of the
lowest number which is there, brings those of all nodes into `stragglers.json`. Its monitor judges.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.cluster.membership import DURATIONS, NodePlace, PeerFile
from resilience_sdk.core import console
from resilience_sdk.core.atomic_write import Version, version_of, write_whole
from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.core.settings import Settings
from resilience_sdk.goodput.step_time import NodeProgress, RankSteps, node_facts
from resilience_sdk.incidents import IncidentStore
from resilience_sdk.monitor.machine_load import LoadReader, LoadWatch
from resilience_sdk.monitor.notices import LeaveRequest, Notices
from resilience_sdk.monitor.ranks import WatchedRank
from resilience_sdk.monitor.straggler_response import StragglerResponse
from resilience_sdk.postmortem.recovery import first_step
from resilience_sdk.recorder.page_layout import WORK
from resilience_sdk.recorder.page_reader import LanePasses
from resilience_sdk.straggler import kernels
from resilience_sdk.straggler.detector import Aggregate
from resilience_sdk.straggler.kernels import KernelWindow
from resilience_sdk.straggler.published import ControlFile
from resilience_sdk.straggler.window_messages import Collector, NodePieces, Piece, chosen, decode, pace_s
from resilience_sdk.straggler.workload import read_role, role_file

_TOLD = 16  # kernels of a rank, those with the largest part of the time
_TIMES = 2  # that a window is told: one message may be overwritten before it is read


class KernelNews:
    """What is new on this node. The monitor's only thread."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._newest: dict[Path, tuple[Version, KernelWindow]] = {}
        self._told: Counter[Path] = Counter()

    def of(self, ranks: Iterable[tuple[int, Path]]) -> dict[int, KernelWindow]:
        """Return rank -> its newest window, where that has not been told often enough; `ranks` with their stems."""
        found = {}
        for rank, stem in ranks:
            path = stem.with_name(stem.name + kernels.SUFFIX)
            now, known = version_of(path), self._newest.get(stem)
            if now is not None and (known is None or known[0] != now) and (window := kernels.read(path)) is not None:
                known = self._newest[stem] = now, attrs.evolve(window, kernels=window.kernels[:_TOLD])
                self._told[stem] = 0
            if known is not None and self._told[stem] < _TIMES:
                self._told[stem] += 1
                found[rank] = known[1]
        return found


OWN, PEERS = DURATIONS.own, DURATIONS.peers
_PIECES_KEPT = 64
READ_AT_ONCE = 128  # messages: reading those of 2,048 nodes takes a second


class StragglerNodes:
    """What is told to and heard from the other nodes. The monitor's only thread."""

    def __init__(self, pages: Path, attempt: int, announcement: Mapping[str, Any], host: str) -> None:
        """Use the files in `pages`; `announcement` is our launcher's and says which of how many nodes this is."""
        self._pages = pages
        self.attempt = attempt
        place = NodePlace.of(announcement, host)
        self.me, self.count, self.name = place.me, place.count, place.name
        self._peers = PeerFile(pages / PEERS)
        self._pieces: deque[Piece] = deque(maxlen=_PIECES_KEPT)
        self._turn = time.monotonic_ns()  # not that of a monitor before
        self._told_at = float("-inf")
        self._turns: dict[int, int] = {}
        self._texts: set[str] = set()
        self._unread: dict[str, None] = {}
        self.gathers = self.me == 0
        """Whether this node judges for all. Two may believe that of themselves for a while, which is harmless."""

    def message(
        self, pieces: Iterable[Piece], roles: Mapping[int, str], kernels: Mapping[int, KernelWindow]
    ) -> NodePieces:
        """Return what there is to be told of this node."""
        self._turn += 1
        return NodePieces(self.attempt, self.me, self.name, self._turn, tuple(pieces), roles, kernels)

    def is_due(self, pieces: list[Piece], now_s: float) -> bool:
        """Keep what is new, and tell whether it is time to tell; `now_s` is a steady clock."""
        self._pieces.extend(pieces)
        if not self._pieces or now_s - self._told_at < pace_s(self.count):
            return False
        self._told_at = now_s
        return True

    def tell(self, roles: Mapping[int, str], kernels: Mapping[int, KernelWindow]) -> None:
        """Tell the newest windows of this node."""
        told = self.message(chosen(self._pieces, self.count), roles, kernels)
        self._pieces.clear()
        self._pieces.extend(told.pieces)
        try:
            write_whole(self._pages / OWN, told.to_text())
        except OSError as error:
            console.say_once("straggler", f"the other nodes are not told how fast this one is: {error}")

    def read(self) -> list[NodePieces]:
        """Return what has come from other nodes, some of it where it is much. Costs one stat while nothing has."""
        if self.count == 1:
            return []
        heard = self._peers.news(self.attempt)
        if heard is not None:
            self.gathers = self.me == 0 or heard.gathers
            texts = set(heard.texts)
            unread = {text: None for text in self._unread if text in texts}
            self._unread = unread | dict.fromkeys(text for text in heard.texts if text not in self._texts)
            self._texts = texts
        now = list(islice(self._unread, READ_AT_ONCE))
        for text in now:
            del self._unread[text]
        told = (decode(text) for text in now)
        news = [n for n in told if n is not None and n.attempt == self.attempt and self._turns.get(n.node) != n.turn]
        self._turns.update((node.node, node.turn) for node in news)
        return [node for node in news if node.node != self.me]


_CONTROL_S = 1.0
_STEPLESS_S = 600.0  # sections pass all the time: a way back to the last step, or steps of which nobody tells


class StragglerWatch:
    """Collects, judges and reports. The monitor's only thread; adds nothing to that of the training."""

    def __init__(
        self,
        pages: Path,
        run_dir: Path,
        settings: Settings,
        journal: Journal,
        store: IncidentStore,
        notices: Notices,
        host: str,
        *,
        job: str,
        began: float | None,
    ) -> None:
        """Read and write in `pages` and `run_dir`; `notices` has all ranks stop at one step.

        `job` is its key; `began`: Unix seconds since when it runs; incidents before that are of another one.
        """
        self._pages = pages
        self._settings = settings
        self._host = host
        self._control = ControlFile(run_dir, settings)
        self._response = StragglerResponse(run_dir, journal, store, job=job, began=began or 0.0)
        self._notices = notices
        self._load = LoadReader()
        self._looked_at = float("-inf")
        self._nodes = StragglerNodes(pages, 0, {}, host)
        self._start()

    def begin(self, attempt: int, announcement: Mapping[str, Any]) -> None:
        """Begin an attempt; `announcement` is our launcher's, empty where nobody has made one."""
        self._nodes = StragglerNodes(self._pages, attempt, announcement, self._host)
        self._start()
        if self._nodes.gathers:
            self._response.withdraw()

    def _start(self) -> None:
        self._collector = Collector(self._nodes.count)
        self._aggregate: Aggregate | None = None
        self._reported_at: float | None = None
        self._roles: dict[Path, tuple[Version | None, str]] = {}
        self._kernels = KernelNews()
        self._has_failed = False

    def look(self, completed: Sequence[tuple[WatchedRank, Sequence[LanePasses]]], now: float) -> None:
        """Take what each rank of this node has completed since the last look, and judge what can be judged.

        `now` is that of `time.monotonic`, in seconds.

        Never raises: a mistake here must not cost the job its watch over hangs. It is said, and the attempt goes on
        without.
        """
        if self._has_failed:
            return
        try:
            self._look(completed, now)
        except Exception as error:  # noqa: BLE001 - see above
            self._has_failed = True
            self._response.note_failure(error)

    def _look(self, completed: Sequence[tuple[WatchedRank, Sequence[LanePasses]]], now: float) -> None:
        if self._reported_at is None:
            self._reported_at = now
        if now - self._looked_at >= _CONTROL_S:
            self._looked_at = now
            self._look_at_control(now)
        living = [watched for watched, _ in completed if watched.alive]
        if not self._control.now.straggler_detection or not living:
            return
        self._collector.present({watched.rank: watched.stem for watched in living})
        for watched, passes in completed:
            self._say_if_stepless(watched, passes, now)
            for new in sorted(passes, key=lambda new: new.kind != WORK):  # it belongs to passes of the same look
                self._collector.add(
                    watched.rank,
                    new.name,
                    new.kind,
                    new.lane,
                    new.start,
                    new.samples_ns,
                    is_joint=new.is_joint,
                    before=new.before,
                )
        pieces = self._collector.take(_first_step(living), now)
        told = self._nodes.read()
        if self._nodes.gathers:
            if pieces:
                told.append(self._nodes.message(pieces, self._roles_of(living), {}))
            self._judge(told, living, now)
        elif self._nodes.is_due(pieces, now):
            self._nodes.tell(self._roles_of(living), self._kernels_of(living))

    def _say_if_stepless(self, watched: WatchedRank, passes: Sequence[LanePasses], now: float) -> None:
        """Say that a rank whose optimizers step where torch does not tell of it is not compared."""
        age_s = now - watched.snapshot.created_ns / 1e9
        if age_s > _STEPLESS_S and any(new.before is None for new in passes):
            self._response.note_stepless(watched.rank, age_s)

    def _judge(self, told: Sequence[NodePieces], living: Sequence[WatchedRank], now: float) -> None:
        control = self._control.now
        self._load.pids = {watched.snapshot.pid for watched in living}
        aggregate = self._aggregate
        if aggregate is None:
            if not told:
                return
            aggregate = self._aggregate = Aggregate(self._nodes.count)
            self._response.begin(self._nodes.attempt, LoadWatch(self._load, now, alone=self._nodes.count == 1))
            self._notices.ask(None)
        for node in told:
            aggregate.add(node)
        changes, verdicts = aggregate.judge(), aggregate.verdicts
        if changes or verdicts:
            self._ask(self._response.tell(changes, verdicts, now, stop=control.stop_if_detected))
        if now - (self._reported_at or now) >= control.report_interval:
            self._reported_at = now
            aggregate.add(self._nodes.message((), {}, self._kernels_of(living)))
            report = aggregate.report(control.relative_threshold, control.individual_threshold)
            if report is not None:
                self._response.report(report, control.scores_to_print)
                below = {"relative": control.stop_below_relative, "individual": control.stop_below_individual}
                self._ask(self._response.stop_below(report, **below))

    def _ask(self, request: LeaveRequest | None) -> None:
        if request is not None:
            self._notices.ask(request)

    def _look_at_control(self, now: float) -> None:
        was_on = self._control.now.straggler_detection
        said = self._control.look()
        if said is None:
            return
        control = self._control.now
        if self._nodes.gathers:
            console.say(said)
            self._response.note_control(said, control)
        if was_on and not control.straggler_detection:
            if self._aggregate is not None:
                self._response.tell(self._aggregate.end(), (), now, stop=False)
            if self._nodes.gathers:
                self._response.switched_off()
            self._start()

    def _kernels_of(self, living: Sequence[WatchedRank]) -> dict[int, KernelWindow]:
        return self._kernels.of((watched.rank, watched.stem) for watched in living)

    def _roles_of(self, living: Sequence[WatchedRank]) -> dict[int, str]:
        for watched in living:
            said = version_of(role_file(watched.stem))
            known = self._roles.get(watched.stem)
            if known is None or known[0] != said:
                self._roles[watched.stem] = said, read_role(watched.stem) or self._settings.straggler_role or ""
        return {watched.rank: self._roles[watched.stem][1] for watched in living}


def _first_step(living: Sequence[WatchedRank]) -> int:
    page = living[0].snapshot
    return first_step(page) if page.step_is_global else 0


_FIRST_AFTER_S = 10.0
_GROWS = 1.5
"""Each pause between two events beside the one before: a short run tells soon, a long one seldom."""
_MOST_S = 300.0
_POINTS = 60
"""A point of the curve of progress comes after this part of the attempt's age: a short run has some, a long one
hundreds."""


def progress_pause_s(age_s: float) -> float:
    """Return how long after one `progress` event the next one comes, in an attempt of this age."""
    return min(_MOST_S, max(1.0, age_s / _POINTS))


class StepTimeWatch:
    """Adds up, and tells: the sums of the attempt so far, and what was done since it was told last.

    The monitor's only thread.
    """

    def __init__(self, journal: Journal) -> None:
        """Begin with nothing."""
        self._journal = journal
        self._has_failed = False
        self.begin()

    def begin(self) -> None:
        """Begin an attempt."""
        self._ranks: dict[Path, tuple[int, RankSteps]] = {}
        self._due_at: float | None = None
        self._pause_s = _FIRST_AFTER_S
        self._told_steps = 0
        self._progress = NodeProgress()
        self._step: int | None = None
        self._step_is_global: bool | None = None
        self._began_at = self._progress_at = 0.0

    def note_stop(self, for_s: float) -> None:
        """Note that the run stands still for so many seconds by now: that is no time of a step."""
        for _, steps in self._ranks.values():
            steps.note_stop(for_s)

    def look(self, completed: Sequence[tuple[WatchedRank, Sequence[LanePasses]]], now: float) -> None:
        """Take what each rank has completed since the last look; `now` is a steady clock's, in seconds.

        Never raises, as `StragglerWatch.look`.
        """
        if self._has_failed:
            return
        try:
            self._look(completed, now)
        except Exception as error:  # noqa: BLE001 - see above
            self._has_failed = True
            self._journal.emit(Event.DEGRADED, what="step time", why=repr(error))
            console.say_once("step time", f"what steps take is not told any more: {error!r}")

    def _look(self, completed: Sequence[tuple[WatchedRank, Sequence[LanePasses]]], now: float) -> None:
        for watched, passes in completed:
            if watched.stem not in self._ranks:
                self._ranks[watched.stem] = watched.rank, RankSteps()
            page = watched.snapshot
            self._ranks[watched.stem][1].take(passes, page.beats, page.main_lane.beat_ns, page.first_beat_ns)
        told = [watched.snapshot for watched, _ in completed if watched.snapshot.step is not None]
        if told:
            newest = max(told, key=lambda page: page.step or 0)
            self._step, self._step_is_global = newest.step, newest.step_is_global
        if self._due_at is None:
            self._due_at = now + self._pause_s
            self._began_at, self._progress_at = now, now + progress_pause_s(0.0)
        # The pages of those that have ended may be gone before anybody has looked again.
        is_over = not any(watched.alive for watched, _ in completed)
        if is_over or now >= self._due_at:
            self._pause_s = min(_MOST_S, self._pause_s * _GROWS)
            self._due_at = now + self._pause_s
            self._tell()
        if is_over or now >= self._progress_at:
            self._progress_at = now + progress_pause_s(now - self._began_at)
            self._tell_progress()

    def _tell_progress(self) -> None:
        facts = self._progress.take(dict(self._ranks.values()))
        if facts is not None:
            self._journal.emit(Event.PROGRESS, step=self._step, step_is_global=self._step_is_global, **facts)

    def _tell(self) -> None:
        facts = node_facts(dict(self._ranks.values()))
        if facts is not None and facts["steps"] > self._told_steps:
            self._told_steps = facts["steps"]
            self._journal.emit(Event.STEP_TIME, **facts)
