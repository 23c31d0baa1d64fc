"""The monitor's round: read the pages, learn, judge, and act on what is confirmed."""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk import console, hostinfo, job_config
from resilience_sdk.errors import EXIT_PREEMPTED
from resilience_sdk.events import Event
from resilience_sdk.hang import (
    Confirmation,
    Judgement,
    RankState,
    judge,
    standing,
)
from resilience_sdk.incidents import IncidentStore
from resilience_sdk.job_config import JobConfig
from resilience_sdk.journal import Journal
from resilience_sdk.monitor.evidence import collect_evidence
from resilience_sdk.monitor.exits import exit_code, is_clean
from resilience_sdk.monitor.foreign import DeathWatch
from resilience_sdk.monitor.learning import Learner
from resilience_sdk.monitor.nodes import Nodes
from resilience_sdk.monitor.notices import Notices, watch_cloud
from resilience_sdk.monitor.preemption import StopCoordinator
from resilience_sdk.monitor.ranks import RankTable, WatchedRank
from resilience_sdk.monitor.recovery import RecoveryWatch
from resilience_sdk.monitor.respond import HangResponse
from resilience_sdk.monitor.scene import CloseLook, states_of
from resilience_sdk.monitor.stragglers import StragglerWatch
from resilience_sdk.settings import settings_from_json

_AGREE_S = 0.02  # between the two looks that must agree on a hang
_MOVING_AGAIN_S = 0.2  # of ranks that have moved since; five times that when only another node asks
_LOOK_AGAIN_S = 5.0  # between two collections of evidence about ranks that stay where they are
_SIGNAL_EXPECTED_S = 30.0  # or the least deadline, where that is shorter


class Watcher:
    """Watches the ranks of one job on one node. Runs in the monitor's only thread."""

    def __init__(self, pages: Path, config: JobConfig, journal: Journal, in_charge: Callable[[], bool]) -> None:
        """Watch `pages`; `in_charge()` tells whether no other monitor has taken over."""
        self._pages = pages
        self._config = config
        self._settings = settings_from_json(config.settings)
        self._journal = journal
        self._in_charge = in_charge
        self._store = IncidentStore(config.run_dir)
        self.table = RankTable(pages)
        self.learner = Learner(Path(config.run_dir) / "timeouts.json", self._settings, config.script)
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
            notices.ask,
            host,
            job=config.job,
            began=began,
        )
        self._stop = StopCoordinator(pages, journal, notices, grace_s=self._settings.preempt_time, host=host)
        self._recovery = RecoveryWatch(self._store, journal, began=began)
        self.nodes = Nodes(pages, lambda: self.learner.book, host)
        self._deaths = DeathWatch(config, self._store, journal, host) if config.foreign else None
        self._response = HangResponse(
            pages,
            config,
            journal,
            in_charge,
            store=self._store,
            nodes=self.nodes,
            learner=self.learner,
            deaths=self._deaths,
        )
        self._attempt: int | None = None
        self._unseen_attempt = 0
        self._confirmation = Confirmation()
        self._look: CloseLook | None = None
        self._looked_at = float("-inf")
        self._suspected: object = None
        self._quiet_said = False

    def round(self, timeout_s: float) -> float:
        """Wait for deaths up to `timeout_s`, look once, and return how long to wait before the next look."""
        died = self.table.wait(timeout_s)
        died += self._unseen_deaths(self.table.scan())
        for why in self.table.take_refused():
            self._journal.emit(Event.DEGRADED, what="page refused", why=why)
            console.say_once("page refused", f"a rank is not watched, its page is refused: {why}")
        ranks = self._current_ranks()
        now_ns = time.monotonic_ns()
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
        wait_s = min(self._settings.monitor_interval, self._judge(ranks, now_ns))
        soon_s = self._look_for_stop(ranks)
        self._stragglers.look(completed)
        return wait_s if soon_s is None else min(wait_s, soon_s)

    def _look_for_stop(self, ranks: list[WatchedRank]) -> float | None:
        failed = any(not w.alive and not is_clean(w) and exit_code(w) != EXIT_PREEMPTED for w in ranks)
        world_size = ranks[0].snapshot.world_size if ranks else 0
        return self._stop.look(ranks, world_size, failed)

    def note_failure(self, error: Exception) -> None:
        """Journal a round that failed; the next one begins anew."""
        self._journal.emit(Event.DEGRADED, what="round", why="".join(traceback.format_exception(error)))

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
            self._attempt = self._journal.attempt = attempt
            self.learner.begin_attempt(current[0].snapshot.world_size, len(current))
            self._look = self._suspected = None
            announcement = self._announcement()
            self.nodes.begin(attempt, announcement)
            self._stop.begin(attempt, announcement)
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
        """Return what our launcher has said about the attempt; empty where nobody has."""
        with contextlib.suppress(OSError, ValueError):
            found = json.loads((self._pages / f"attempt-{self._attempt}.json").read_text())
            return found if isinstance(found, dict) else {}
        return {}

    def _is_ending(self) -> bool:
        """Tell whether the launcher has announced that it ends the ranks."""
        return (self._pages / f"ending-{self._attempt}.json").exists()

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
                    "no progress signal so far (no heartbeat, optimizer step or collective): deaths are handled, "
                    "but a hang cannot be told until there is one"
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
        book, cap = self.learner.book, self._settings.hang_cap
        states = states_of(ranks, self.nodes.name, closely=False, look=None, now_ns=now_ns)
        ending = self._is_ending()
        if not ranks or ending:
            self.nodes.tell_calmly(states, ending=ending)
            return self._settings.monitor_interval
        if self._response.follow_others(ranks, states):
            return self._settings.monitor_interval
        judgement = judge(states, book, now_ns, cap)
        if judgement.kind != "quiet":
            self._note_suspects(judgement, states)
        else:
            self._suspected = None
            if judgement.half_way and self._half_way_matters(judgement, ranks):
                self._look_closely(ranks)
            if not self.nodes.asked():
                self._response.relax()
                self.nodes.relax()
                self.nodes.tell_calmly(states, ending=False)
                return self._until(judgement.next_look_ns)
        return self._judge_suspicion(ranks, now_ns, here=judgement.kind != "quiet")

    def _judge_suspicion(self, ranks: list[WatchedRank], now_ns: int, *, here: bool) -> float:
        """Judge with all evidence, of all nodes, when something is late: `here`, or on a node that asks."""
        states, judgement = self._judge_closely(ranks, now_ns, here)
        patience_s = _MOVING_AGAIN_S * (1 if here else 5)
        if judgement.kind != "confirmed" and self._may_look_again(ranks, patience_s):
            self._look_closely(ranks)
            states, judgement = self._judge_closely(ranks, now_ns, here)
        if self._response.is_reported(judgement, states):
            return self._settings.monitor_interval
        if judgement.kind == "confirmed" and (self._look is None or not self._look.covers(ranks)):
            self._look_closely(ranks)
            states, judgement = self._judge_closely(ranks, now_ns, here)
        if judgement.kind != "confirmed":
            self._response.relax()
            self._confirmation.agrees(judgement, states)
            return self._until(judgement.next_look_ns)
        if self._response.is_reported(judgement, states):
            return self._settings.monitor_interval
        if not self._confirmation.agrees(judgement, states):
            return _AGREE_S
        if self._look is not None:
            self._response.act(judgement, ranks, states, self._look)
        return self._until(None)

    def _judge_closely(self, ranks: list[WatchedRank], now_ns: int, wants: bool) -> tuple[list[RankState], Judgement]:
        own = states_of(ranks, self.nodes.name, closely=True, look=self._look, now_ns=now_ns)
        self.nodes.tell_closely(own, self._look, time.monotonic() - self._looked_at, wants=wants)
        states = [*own, *self.nodes.states(own, now_ns)]
        return states, judge(states, self.learner.book, now_ns, self._settings.hang_cap)

    def _until(self, next_look_ns: int | None) -> float:
        wait_s = self.nodes.wait_s(self._settings.monitor_interval)
        if next_look_ns is None:
            return wait_s
        return min(wait_s, max(0.001, (next_look_ns - time.monotonic_ns()) / 1e9))

    def _half_way_matters(self, judgement: Judgement, ranks: list[WatchedRank]) -> bool:
        """Tell whether evidence should be taken early: a process group's own timeout may come before ours."""
        return bool(judgement.half_way) and self._may_look_again(ranks)

    def _may_look_again(self, ranks: list[WatchedRank], patience_s: float = _MOVING_AGAIN_S) -> bool:
        if self._look is None or not self._look.covers(ranks):
            return time.monotonic() - self._looked_at > patience_s
        return time.monotonic() - self._looked_at > _LOOK_AGAIN_S

    def _look_closely(self, ranks: list[WatchedRank]) -> None:
        """Take stacks and flight records of all living ranks; bounded by `dump_grace`."""
        earlier = self._look.cpu if self._look is not None else None
        found = collect_evidence(
            [watched.target for watched in ranks if watched.target is not None and watched.alive],
            dump_signal=self._settings.dump_signal,
            grace_s=self._settings.dump_grace,
            earlier=earlier,
            journal=self._journal,
            may_ask=self._in_charge,
        )
        for watched in ranks:
            if watched.alive:
                watched.refresh()
        self._look = CloseLook.of(ranks, found)
        self._looked_at = time.monotonic()

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
