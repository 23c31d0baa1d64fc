"""The monitor's round: read the pages, learn, judge, and act on what is confirmed."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from resilience_sdk.core import console, job_config
from resilience_sdk.core.job_config import JobConfig
from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.core.plain_file import read_text
from resilience_sdk.core.settings import Settings, settings_from_json
from resilience_sdk.errors import EXIT_PREEMPTED
from resilience_sdk.hang.detect import Confirmation, Judgement, awaited_by_collectives, expected, judge, standing
from resilience_sdk.hang.notices import look_after_s, without_progress_s
from resilience_sdk.hang.saves import stalls_in_save
from resilience_sdk.hang.timers import HangRules, RankState, watch
from resilience_sdk.incidents import IncidentStore
from resilience_sdk.monitor.activity import ActivityWatch
from resilience_sdk.monitor.evidence import CloseLook, beating_thread, collect_evidence, states_of
from resilience_sdk.monitor.hang_response import HangResponse
from resilience_sdk.monitor.learning import Learner
from resilience_sdk.monitor.memory import MemoryWatch
from resilience_sdk.monitor.nodes import Nodes
from resilience_sdk.monitor.notices import Notices, watch_cloud
from resilience_sdk.monitor.ranks import RankTable, WatchedRank, exit_code, is_clean
from resilience_sdk.monitor.save_storage import SaveStorage
from resilience_sdk.monitor.stall_teller import StallTeller
from resilience_sdk.monitor.stop import StopCoordinator
from resilience_sdk.monitor.stragglers import StepTimeWatch, StragglerWatch
from resilience_sdk.monitor.time_spent import TimeWatch
from resilience_sdk.monitor.unended import UnendedWatch
from resilience_sdk.postmortem.recovery import RecoveryWatch
from resilience_sdk.recorder import witness_ring
from resilience_sdk.recorder.page_reader import LanePasses
from resilience_sdk.system import hostinfo, procfs

if TYPE_CHECKING:
    from resilience_sdk.monitor.main import MonitorLock
    from resilience_sdk.monitor.other_launchers import DeathWatch

_USUAL_EVERY_S = 5.0
_CALM = 2  # times `monitor_interval` between two whole looks, while every rank comes on
_CALM_RING = 56  # passes of a section between two looks, of the 64 that its ring holds
_CALM_SET_S = 10.0  # deadlines that somebody set, and that are shorter, are looked at more often
_ALMOST = 0.8  # of a period: looks do not come on time to the millisecond
_AGREE_S = 0.02  # between the two looks that must agree on a hang
_MOVING_AGAIN_S = 0.2  # of ranks that have moved since; five times that when only another node asks
_LOOK_AGAIN_S = 5.0  # between two collections of evidence about ranks that stay where they are
_LOOK_AGAIN_MOST_S = 10.0  # of a stall that lasts
_LOOK_AGAIN_IDLY_S = 60.0  # of a script that may never make a step
_LOOKS_APART_S = 90.0  # looks that lie further apart are of two stalls
_LOOK_AGAIN_PART = 0.1  # of a stall that lasts, for ranks that have moved since
# Parts of `stuck_after`: 2 s, 1 s and 6 s by default.
_SAMPLE_FROM = 1 / 30
_SAMPLE_EVERY = 1 / 60
_SURVIVAL_FROM = 1 / 10
_SAMPLE_FROM_STEPS = 1.5
_SIGNAL_EXPECTED_S = 30.0  # or the least deadline, where that is shorter


class Watcher:
    """Watches the ranks of one job on one node. Runs in the monitor's only thread."""

    def __init__(self, pages: Path, config: JobConfig, journal: Journal, lock: MonitorLock) -> None:
        """Watch `pages`; `lock` tells whether no other monitor has taken over."""
        self._pages = pages
        self._config = config
        self._settings = settings_from_json(config.settings)
        self._journal = journal
        self._lock = lock
        self._store = IncidentStore(config.run_dir)
        self.table = RankTable(pages)
        self.learner = Learner(Path(config.run_dir) / "timeouts.json", self._settings, config.script, config.job)
        began = job_config.written_at(pages)
        cloud = watch_cloud(self._settings, Path(config.run_dir) / "journal")
        host = hostinfo.host_name()
        notices = Notices(Path(config.run_dir), time.time() if began is None else began, cloud)
        self._stragglers = StragglerWatch(
            pages,
            Path(config.run_dir),
            self._settings,
            journal,
            self._store,
            notices,
            host,
            job=config.job,
            began=began,
        )
        self._step_times = StepTimeWatch(journal)
        self._time = TimeWatch(journal)
        self._memory = MemoryWatch(journal)
        self._stop = StopCoordinator(pages, journal, notices, grace_s=self._settings.preempt_time, host=host)
        self._recovery = RecoveryWatch(self._store, journal, began=began)
        self._rules = HangRules(self._settings.stuck_after, self._settings.hang_cap)
        self.nodes = Nodes(pages, self.learner, self._rules, host)
        self._activity = ActivityWatch(self._rules)
        self._storage = SaveStorage()
        self._stalls = StallTeller(self._settings.stuck_after, journal, self.nodes, self._step_times)
        self._judged_at = float("-inf")
        self._journalled_look_at = float("-inf")
        self._journal_pause_s = 0.0
        self._shortest_s = _shortest_set(self._settings)
        self._shortest_seen_s = math.inf  # that a block on a page has had
        self._deaths = _death_watch(config, self._store, journal, host)
        self._response = HangResponse(
            pages,
            config,
            journal,
            lock,
            store=self._store,
            nodes=self.nodes,
            learner=self.learner,
            deaths=self._deaths,
        )
        self._unended = UnendedWatch(self._settings, journal, lock.in_charge)
        self._attempt: int | None = None
        self._pause_s = self._settings.monitor_interval
        self._whole_look_ns = 0
        self._usual = float("-inf"), 0.0
        self._said: tuple[int | None, Mapping[str, Any]] = None, {}
        self._unseen_attempt = 0
        self._confirmation = Confirmation()
        self._look: CloseLook | None = None
        self._looked_at = float("-inf")
        self._suspected: object = None
        self._quiet_said = False
        self._kept: set[Path] = set()

    def round(self, timeout_s: float) -> float:
        """Wait for deaths up to `timeout_s`, look once, and return how long to wait before the next look.

        While every rank of a node alone comes on, only every second look goes beyond the question whether to stop.
        """
        died = self.table.wait(timeout_s)
        new = self.table.scan()
        died += self._unseen_deaths(new)
        for why in self.table.take_refused():
            self._journal.emit(Event.DEGRADED, what="page refused", why=why)
            console.say_once("page refused", f"a rank is not watched, its page is refused: {why}")
        ranks = self._current_ranks()
        now_ns = time.monotonic_ns()
        if not (died or new) and now_ns < self._whole_look_ns:
            soon_s = self._look_for_stop(ranks)
            wait_s = min(self._settings.monitor_interval, (self._whole_look_ns - now_ns) / 1e9)
            return wait_s if soon_s is None else min(wait_s, soon_s)
        completed = []
        for watched in ranks:
            if watched.alive:
                watched.refresh()
            completed.append((watched, self.learner.look(watched, now_ns)))
        if self._deaths is not None:
            self._deaths.note(died)
            self._deaths.conclude([w for w in self.table.all() if w.snapshot.attempt == self._attempt])
        self.nodes.read()
        pages, elsewhere = [watched.snapshot for watched in ranks], self.nodes.pages()
        self._recovery.look(self._attempt, pages, self._expected_ranks(), elsewhere)
        self._say_if_blind(ranks)
        self._say_if_alone(ranks)
        self.learner.save_now_and_then()
        self._store.write_kept(at_once=False)
        self._pause_s = self._settings.monitor_interval * (_CALM if self._is_calm(completed) else 1)
        wait_s = self._judge(ranks, now_ns)
        self._whole_look_ns = now_ns + int(wait_s * 1e9)
        if not self._is_ending():
            self._unended.look(ranks, now_ns)
        soon_s = self._look_for_stop(ranks)
        self._step_times.look(completed, time.monotonic())
        self._time.look(completed, now_ns)
        self._memory.look(ranks, now_ns)
        self._stragglers.look(completed, time.monotonic())
        if died or new:
            self.keep_witnesses()  # last: nobody waits for it
        wait_s = min(self._settings.monitor_interval, wait_s)
        return wait_s if soon_s is None else min(wait_s, soon_s)

    def keep_witnesses(self) -> None:
        """Write the steps of ranks that have ended before their time into the run directory, each once.

        Their pages may be gone, as those of an attempt that was over before anybody looked.
        """
        known = {watched.stem: watched for watched in self.table.all()}
        for stem, pid in witness_ring.rings_in(self._pages):
            watched = known.get(stem)
            is_over = hostinfo.process_is_gone(pid, None) if watched is None else not watched.alive
            if is_over and stem not in self._kept and not (watched is not None and is_clean(watched)):
                self._kept.add(stem)
                witness_ring.keep(stem, Path(self._config.run_dir), self._config.job)

    def _is_calm(self, completed: Sequence[tuple[WatchedRank, Sequence[LanePasses]]]) -> bool:
        """Tell whether the next whole look may come later: nothing is late, nor lost from the rings of the pages."""
        fullest = max((len(new.samples_ns) for _, passes in completed for new in passes), default=0)
        room = _CALM_RING if self._pause_s > self._settings.monitor_interval else _CALM_RING / _CALM
        return (
            not self.nodes.several
            and not self._stalls.is_open
            and self._suspected is None
            and not self._time.is_late
            and min(self._shortest_s, self._shortest_seen_s) > _CALM_SET_S
            and fullest <= room
        )

    def _look_for_stop(self, ranks: list[WatchedRank]) -> float | None:
        failed = any(not w.alive and not is_clean(w) and exit_code(w) != EXIT_PREEMPTED for w in ranks)
        world_size = ranks[0].snapshot.world_size if ranks else 0
        return self._stop.look(ranks, world_size, failed)

    def note_failure(self, error: Exception) -> None:
        """Journal a round that failed; the next one begins anew."""
        self._journal.emit(Event.DEGRADED, what="round", why="".join(traceback.format_exception(error)))

    def note_loss(self, why: str) -> None:
        """Journal what became of the page directory."""
        self._journal.emit(Event.DEGRADED, what="pages", why=why)

    def ended_well(self) -> bool:
        """Tell whether the ranks of the newest attempt have all finished their program."""
        return all(is_clean(watched) for watched in self._current_ranks())

    def is_over(self) -> bool:
        """Tell whether nobody is left to watch."""
        return not any(watched.alive for watched in self.table.all())

    def conclude(self) -> None:
        """Keep what was learned and say how it ended, when all ranks are gone; there may be another attempt."""
        self.learner.save()
        if self._deaths is not None:
            self._deaths.conclude(self._current_ranks(), everything=True)

    # -- ranks and attempts

    def _current_ranks(self) -> list[WatchedRank]:
        ranks = self.table.all()
        if not ranks:
            return []
        attempt = self._newest_attempt(ranks)
        present = [watched for watched in ranks if watched.snapshot.attempt == attempt]
        last = {w.rank: w for w in sorted(present, key=lambda w: (w.alive, w.snapshot.created_ns))}
        # The dead count as long as nobody has taken their place.
        current = [watched for watched in present if watched.alive or last[watched.rank] is watched]
        if attempt != self._attempt:
            self._stalls.end("ended")
            self._attempt = self._journal.attempt = attempt
            console.bind(attempt=attempt)
            self.learner.begin_attempt(current[0].snapshot.world_size, len(current))
            self._look = self._suspected = None
            self._stalls.begin()
            announcement = self._announcement()
            self.nodes.begin(attempt, announcement)
            self._stop.begin(attempt, announcement)
            self._step_times.begin()
            self._time.begin()
            self._memory.begin()
            self._stragglers.begin(attempt, announcement)
            self._response.begin(attempt)
            self._quiet_said = False
        return current

    def _newest_attempt(self, ranks: list[WatchedRank]) -> int:
        """Return the newest attempt that has living ranks: pages of the dead prove nothing, unless they are new."""
        living = [watched.snapshot.attempt for watched in ranks if watched.alive]
        if not living and self._attempt is not None:
            return max(self._attempt, self._unseen_attempt)
        return max(living or [watched.snapshot.attempt for watched in ranks])

    def _unseen_deaths(self, new: list[WatchedRank]) -> list[WatchedRank]:
        """Return the ranks that a foreign launcher has restarted and that came and went between two looks."""
        if self._deaths is None or self._attempt is None:
            return []  # our launcher tells them itself; and what lies there at the beginning may be another job's
        dead = [watched for watched in new if not watched.alive]
        self._unseen_attempt = max([self._unseen_attempt, *(watched.snapshot.attempt for watched in dead)])
        return dead

    def _expected_ranks(self) -> list[int] | None:
        """Return the ranks of this attempt on this node, where our launcher announced them."""
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return [int(rank) for rank in self._announcement()["ranks"]]
        return None

    def _announcement(self) -> Mapping[str, Any]:
        """Return what our launcher has said about the attempt, which it says once; empty where nobody has."""
        if self._config.foreign:
            return {}
        if not self._said[1] or self._said[0] != self._attempt:
            self._said = self._attempt, {}
            with contextlib.suppress(OSError, ValueError):
                found = json.loads(read_text(self._pages / f"attempt-{self._attempt}.json"))
                self._said = self._attempt, found if isinstance(found, dict) else {}
        return self._said[1]

    def _is_ending(self) -> bool:
        """Tell whether the launcher has announced that it ends the ranks."""
        return os.path.exists(f"{self._pages}/ending-{self._attempt}.json")

    def _say_if_blind(self, ranks: list[WatchedRank]) -> None:
        """Say once per attempt that there is no progress signal, so that no hang can be told."""
        now_ns = time.monotonic_ns()
        expected_s = min(_SIGNAL_EXPECTED_S, self._settings.timeout_floor)
        blind = [
            watched.rank
            for watched in ranks
            if watched.alive
            and not watched.snapshot.declared
            and not watched.snapshot.beats
            and not watched.snapshot.done
            and now_ns - watched.snapshot.created_ns > expected_s * 1e9
        ]
        if blind and not self._quiet_said:
            self._quiet_said = True
            self._journal.emit(Event.DEGRADED, what="no progress signal", ranks=blind)
            if 0 in blind:
                console.say(
                    "no progress signal so far (no heartbeat, optimizer step or collective): deaths and stops are "
                    "told, another hang only where other ranks wait"
                )

    def _say_if_alone(self, ranks: list[WatchedRank]) -> None:
        """Say once that ranks elsewhere are not seen: under a foreign launcher nobody relays between nodes."""
        old_ns = time.monotonic_ns() - int(_SIGNAL_EXPECTED_S * 1e9)
        first = next((w.snapshot for w in ranks if w.rank == 0 and w.snapshot.created_ns < old_ns), None)
        unseen = first.world_size - len(ranks) if first is not None and self._config.foreign else 0
        if unseen > 0 and console.say_once(
            "alone",
            f"{unseen} of {len(ranks) + unseen} ranks are not on this node: hangs across nodes are told late under "
            f"this launcher; `resilience run` relays between nodes",
        ):
            self._journal.emit(Event.DEGRADED, what="relay", why="not under our launcher", unseen=unseen)

    # -- judging

    def _judge(self, ranks: list[WatchedRank], now_ns: int) -> float:
        """Judge the attempt, act on a confirmed hang, and return the seconds until the next look."""
        states = states_of(ranks, self.nodes.name, closely=False, look=None, now_ns=now_ns)
        ending = self._is_ending()
        if not ranks or ending:
            self._stalls.end("ended")
            self.nodes.tell_calmly(states, ending=ending)
            return self._settings.monitor_interval
        if self._response.follow_others(ranks, states):
            self._stalls.end("verdict")
            return self._settings.monitor_interval
        usual_s = self._usual_step_s()
        set_s = self._shortest_set_s(ranks)
        sample_s = self._sample(ranks, now_ns, usual_s, set_s)
        judgement = judge(states, self.learner.book, now_ns, self._rules)
        look_s = look_after_s(self._settings.stuck_after, usual_s, set_s)
        is_calm = judgement.kind == "quiet" and not self._stalls.is_open and not self.nodes.asked()
        for_s = without_progress_s(states, now_ns, look_s if is_calm else 0.0)
        if self._stalls.is_open and self._stalls.went_on(states, for_s):
            self._stalls.end("went on")
        stalled = for_s >= look_s
        late = {suspect.rank for suspect in judgement.suspects}
        self.learner.note_late(ranks, {s.rank: watch(s, self.learner.book, now_ns) for s in states if s.rank in late})
        if judgement.kind != "quiet":
            self._note_suspects(judgement, states)
        else:
            self._suspected = None
            if judgement.half_way and self._half_way_matters(judgement, ranks):
                self._look_closely(ranks)
            if not stalled and not self.nodes.asked():
                self._response.relax()
                self.nodes.relax()
                self.nodes.tell_calmly(states, ending=False)
                return min(self._until(judgement.next_look_ns), sample_s)
            if stalled and time.monotonic() - self._judged_at < _ALMOST * self._period_s():
                return min(self._until(judgement.next_look_ns), sample_s)
        self._judged_at = time.monotonic()
        here = judgement.kind != "quiet" or stalled
        return min(self._judge_suspicion(ranks, now_ns, for_s, usual_s, here=here), sample_s)

    def _usual_step_s(self) -> float:
        """Return the usual length of a step in seconds, as of a moment ago: it is found by sorting thousands."""
        now = time.monotonic()
        if now - self._usual[0] > _USUAL_EVERY_S:
            self._usual = now, self.learner.book.usual_step_s()
        return self._usual[1]

    def _shortest_set_s(self, ranks: list[WatchedRank]) -> float:
        """Return the shortest deadline that somebody set, of all that may expire now."""
        open_s = min((s.timeout_s for w in ranks for s in w.snapshot.main_lane.stack if s.timeout_s), default=math.inf)
        self._shortest_seen_s = min(self._shortest_seen_s, open_s)
        return min(open_s, self._shortest_s)

    def _sample(self, ranks: list[WatchedRank], now_ns: int, usual_s: float, set_s: float) -> float:
        """Look from outside at who has not moved for a while; return the seconds until somebody is to be looked at."""
        start_s = max(_SAMPLE_FROM * self._settings.stuck_after, _SAMPLE_FROM_STEPS * usual_s)
        next_s = self._activity.update(
            ranks, now_ns, start_s=min(start_s, set_s / 4), period_s=min(self._period_s(), set_s / 8)
        )
        for place, still_s in self._activity.take_survived():
            if still_s >= _SURVIVAL_FROM * self._settings.stuck_after:
                self.learner.places.survive(place, still_s)
        return self._pause_s if next_s is None else max(0.01, next_s)

    def _period_s(self) -> float:
        return min(1.0, _SAMPLE_EVERY * self._settings.stuck_after)

    def _judge_suspicion(
        self, ranks: list[WatchedRank], now_ns: int, for_s: float, usual_s: float, *, here: bool
    ) -> float:
        """Judge with all evidence, of all nodes, when something is late: `here`, or on a node that asks."""
        if self._is_suspended(ranks):
            return self._settings.monitor_interval
        states, judgement = self._judge_closely(ranks, now_ns, here)
        patience_s = max(_MOVING_AGAIN_S * (1 if here else 5), min(_LOOK_AGAIN_S, _LOOK_AGAIN_PART * for_s))
        if judgement.kind != "confirmed" and self._may_look_again(ranks, patience_s, for_s, bool(judgement.waited_for)):
            self._look_closely(ranks)
            states, judgement = self._judge_closely(ranks, now_ns, here)
        if self._response.is_reported(judgement, states):
            return self._settings.monitor_interval
        if judgement.kind == "confirmed" and not self._look_suffices(ranks):
            self._look_closely(ranks)
            states, judgement = self._judge_closely(ranks, now_ns, here)
        self._stalls.note_stop(judgement, states, for_s)
        storage = self._try_storage(judgement, states, ranks)
        if judgement.kind != "confirmed":
            if self._look is not None:
                self._stalls.tell(judgement, states, self._look, for_s, usual_s, storage, ranks)
            self._response.relax()
            self._confirmation.agrees(judgement, states)
            return self._until(judgement.next_look_ns)
        if self._response.is_reported(judgement, states):
            return self._settings.monitor_interval
        self._activity.sample_now(ranks)
        states, judgement = self._judge_closely(ranks, time.monotonic_ns(), here)
        if not self._confirmation.agrees(judgement, states):
            return _AGREE_S
        if self._look is not None and self._response.act(judgement, ranks, states, self._look, storage):
            self._stalls.end("verdict")
        return self._until(None)

    def _judge_closely(
        self, ranks: list[WatchedRank], now_ns: int, wants: bool
    ) -> tuple[Sequence[RankState], Judgement]:
        own = states_of(ranks, self.nodes.name, closely=True, look=self._look, now_ns=now_ns)
        own = self._with_activity(own, ranks)
        self.nodes.tell_closely(own, self._look, time.monotonic() - self._looked_at, wants=wants)
        states = expected([*own, *self.nodes.states(own, now_ns)])
        return states, judge(states, self.learner.book, now_ns, self._rules, stalled=True)

    def _with_activity(self, own: Sequence[RankState], ranks: Sequence[WatchedRank]) -> list[RankState]:
        """Return the states with what each rank does and what is remembered of its place."""
        named = awaited_by_collectives([state for state in own if state.running])
        by_rank = {watched.rank: watched for watched in ranks if watched.alive}
        found = []
        for state in own:
            watched = by_rank.get(state.rank)
            if watched is None:
                found.append(state)
                continue
            stands = any(position.blocked for position in (state.collectives or {}).values())
            place = self._activity.place_of(watched)
            tracker = self._activity.tracker(watched)
            found.append(
                attrs.evolve(
                    state,
                    activity=self._activity.activity(
                        watched, in_collective=state.in_collective or stands, is_named=state.rank in named
                    ),
                    place=place,
                    survived_s=max(
                        self.learner.places.survived_s(place), tracker.survived_s if tracker is not None else 0.0
                    ),
                    endings=self.learner.places.endings(place),
                )
            )
        return found

    def _try_storage(
        self, judgement: Judgement, states: Sequence[RankState], ranks: Sequence[WatchedRank]
    ) -> Mapping[int, str]:
        """Return, by rank of this node that stands in a save, into what it saves, and whether that place answers."""
        frames = self._look.frames if self._look is not None else {}
        saves = {s.rank for s in states if s.rank in judgement.waited_for and stalls_in_save(s, frames.get(s.rank, ()))}
        found = {}
        for watched in ranks:
            if watched.alive and watched.rank in saves:
                tracker = self._activity.tracker(watched)
                threads = (beating_thread(watched), *(tracker.workers if tracker is not None else ()))
                self._storage.ask(watched.rank, watched.snapshot.pid, threads)
                if (words := self._storage.words(watched.rank)) is not None:
                    found[watched.rank] = words
        if not saves:
            self._storage.forget()
        return found

    def _is_suspended(self, ranks: Sequence[WatchedRank]) -> bool:
        """Tell whether somebody has suspended the whole job with Ctrl-Z: its launcher, or a rank that has none."""
        pid = self._config.launcher_pid or self._config.parent_pid
        if pid:
            return hostinfo.process_state(pid) in ("T", "t")
        return any(procfs.is_suspended(watched.snapshot.pid) for watched in ranks if watched.alive)

    def _until(self, next_look_ns: int | None) -> float:
        wait_s = self.nodes.wait_s(self._pause_s)
        if next_look_ns is None:
            return wait_s
        return min(wait_s, max(0.001, (next_look_ns - time.monotonic_ns()) / 1e9))

    def _half_way_matters(self, judgement: Judgement, ranks: list[WatchedRank]) -> bool:
        """Tell whether evidence should be taken early: a process group's own timeout may come before ours."""
        return bool(judgement.half_way) and self._may_look_again(ranks)

    def _may_look_again(
        self,
        ranks: list[WatchedRank],
        patience_s: float = _MOVING_AGAIN_S,
        for_s: float = 0.0,
        is_awaited: bool = True,
    ) -> bool:
        if self._look is None or not self._look.covers(ranks):
            return time.monotonic() - self._looked_at > patience_s
        most_s = _LOOK_AGAIN_MOST_S if is_awaited else _LOOK_AGAIN_IDLY_S
        again_s = min(most_s, max(_LOOK_AGAIN_S, for_s / 12))
        if is_awaited:
            again_s = min(again_s, self._settings.stuck_after / 6)
        return time.monotonic() - self._looked_at > again_s

    def _look_closely(self, ranks: list[WatchedRank]) -> None:
        """Take stacks and flight records of all living ranks; bounded by `dump_grace`."""
        earlier = self._look.cpu if self._look is not None else None
        found = collect_evidence(
            [watched.target for watched in ranks if watched.target is not None and watched.alive],
            dump_signal=self._settings.dump_signal,
            grace_s=self._settings.dump_grace,
            earlier=earlier,
            journal=self._journal if self._may_journal_look() else None,
            may_ask=self._lock.in_charge,
            moving=[watched.rank for watched in ranks if not self._activity.is_still(watched)],
        )
        for watched in ranks:
            if watched.alive:
                watched.refresh()
        self._look = CloseLook.of(ranks, found)
        self._activity.note_stacks(ranks, self._look)
        self._looked_at = time.monotonic()

    def _look_suffices(self, ranks: list[WatchedRank]) -> bool:
        """Tell whether the last look still holds; a rank that worked then and stands still now owes its stack."""
        look = self._look
        return (
            look is not None
            and look.covers(ranks)
            and not any(watched.rank in look.spared and self._activity.is_still(watched) for watched in ranks)
        )

    def _may_journal_look(self) -> bool:
        """Tell whether to journal this look: with doubling pauses, as a stall may last for hours."""
        now = time.monotonic()
        if now - self._looked_at > _LOOKS_APART_S:
            self._journal_pause_s = 0.0
        if now < self._journalled_look_at + self._journal_pause_s:
            return False
        self._journalled_look_at = now
        self._journal_pause_s = min(3600.0, max(_LOOK_AGAIN_S, 2 * self._journal_pause_s))
        return True

    def _note_suspects(self, judgement: Judgement, states: list[RankState]) -> None:
        late = [suspect.rank for suspect in judgement.suspects]
        suspected = tuple((s.rank, s.name) for s in judgement.suspects), standing(judgement, states, late)
        if suspected != self._suspected:
            self._suspected = suspected
            self._journal.emit(
                Event.SUSPECT,
                suspects=[attrs.asdict(suspect) for suspect in judgement.suspects],
                detail=judgement.detail,
            )


def _death_watch(config: JobConfig, store: IncidentStore, journal: Journal, host: str) -> DeathWatch | None:
    """Return what explains deaths where no launcher of ours does; elsewhere its code is not even loaded."""
    if not config.foreign:
        return None
    from resilience_sdk.monitor.other_launchers import DeathWatch

    return DeathWatch(config, store, journal, host)


def _shortest_set(settings: Settings) -> float:
    """Return the shortest deadline that somebody set; infinite where nobody did."""
    own = (settings.initial_heartbeat_timeout, settings.heartbeat_timeout, settings.out_of_section_timeout)
    return min((s for s in (*own, *settings.section_timeouts.values()) if s is not None), default=math.inf)
