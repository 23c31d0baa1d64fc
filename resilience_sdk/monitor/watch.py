"""The monitor's round: read the pages, learn, judge, and act on what is confirmed."""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk import console, hostinfo
from resilience_sdk.events import Event
from resilience_sdk.hang import (
    Confirmation,
    CulpritFinding,
    Judgement,
    RankState,
    find_culprits,
    judge,
    standing,
)
from resilience_sdk.incidents import Incident, IncidentStore
from resilience_sdk.job_config import JobConfig
from resilience_sdk.journal import Journal
from resilience_sdk.monitor.escalate import end_ranks
from resilience_sdk.monitor.evidence import collect_evidence
from resilience_sdk.monitor.foreign import DeathWatch
from resilience_sdk.monitor.hang_report import hang_incident, hang_lines, headline
from resilience_sdk.monitor.learning import Learner
from resilience_sdk.monitor.merge import succession
from resilience_sdk.monitor.nodes import Nodes
from resilience_sdk.monitor.raised import blame_exceptions
from resilience_sdk.monitor.ranks import RankTable, WatchedRank, remove_files
from resilience_sdk.monitor.recovery import RecoveryWatch
from resilience_sdk.monitor.scene import CloseLook, states_of
from resilience_sdk.monitor.summary import Verdict
from resilience_sdk.rank_page import snapshot_to_json
from resilience_sdk.settings import settings_from_json

_AGREE_S = 0.02  # between the two looks that must agree on a hang
_MOVING_AGAIN_S = 0.2  # of ranks that have moved since; five times that when only another node asks
_TURN_S = 1.0  # how long the node whose turn it is to report a hang may take before the next one does
_LOOK_AGAIN_S = 5.0  # between two collections of evidence about ranks that stay where they are
_TERM_GRACE_S = 1.0  # a hung rank that handles SIGTERM gets this long; its peers only wait for it
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
        self._recovery = RecoveryWatch(self._store, journal)
        host = hostinfo.host_name()
        self.nodes = Nodes(pages, lambda: self.learner.book, host)
        self._deaths = DeathWatch(config, self._store, journal, host) if config.foreign else None
        self._attempt: int | None = None
        self._confirmation = Confirmation()
        self._confirmed_at: float | None = None
        self._followed: Verdict | None = None
        self._look: CloseLook | None = None
        self._looked_at = float("-inf")
        self._suspected: object = None
        self._reported: object = None
        self._quiet_said = False

    def round(self, timeout_s: float) -> float:
        """Wait for deaths up to `timeout_s`, look once, and return how long to wait before the next look."""
        died = self.table.wait(timeout_s)
        self.table.scan()
        for why in self.table.take_refused():
            self._journal.emit(Event.DEGRADED, what="page refused", why=why)
        ranks = self._current_ranks()
        now_ns = time.monotonic_ns()
        for watched in ranks:
            if watched.alive:
                watched.refresh()
            self.learner.look(watched, now_ns)
        if self._deaths is not None:
            self._deaths.note(died)
            self._deaths.conclude([w for w in self.table.all() if w.snapshot.attempt == self._attempt])
        self.nodes.read()
        pages, elsewhere = [watched.snapshot for watched in ranks], self.nodes.pages()
        self._recovery.look(self._attempt, pages, self._expected_ranks(), elsewhere)
        self._say_if_blind(ranks)
        self._say_if_alone(ranks)
        self.learner.save_now_and_then()
        return min(self._settings.monitor_interval, self._judge(ranks, now_ns))

    def note_failure(self, error: Exception) -> None:
        """Journal a round that failed; the next one begins anew."""
        self._journal.emit(Event.DEGRADED, what="round", why="".join(traceback.format_exception(error)))

    def is_over(self) -> bool:
        """Tell whether nobody is left to watch."""
        return not any(watched.alive for watched in self.table.all())

    def finish(self) -> None:
        """Keep what was learned and clean up, when all ranks are gone."""
        self.learner.save()
        if self._deaths is not None:
            self._deaths.conclude(self.table.all(), everything=True)
            for watched in self.table.all():
                remove_files(watched.stem)

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
            self._look = self._suspected = self._reported = self._confirmed_at = self._followed = None
            self.nodes.begin(attempt, self._announcement())
            self._quiet_said = False
        return current

    def _newest_attempt(self, ranks: list[WatchedRank]) -> int:
        """Return the newest attempt that has living ranks: pages of the dead prove nothing."""
        living = [watched.snapshot.attempt for watched in ranks if watched.alive]
        if not living and self._attempt is not None:
            return self._attempt
        return max(living or [watched.snapshot.attempt for watched in ranks])

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
        if self._follow_others(ranks, states):
            return self._settings.monitor_interval
        judgement = judge(states, book, now_ns, cap)
        if judgement.kind != "quiet":
            self._note_suspects(judgement, states)
        else:
            self._suspected = None
            if judgement.half_way and self._half_way_matters(judgement, ranks):
                self._look_closely(ranks)
            if not self.nodes.asked():
                self._confirmed_at = None
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
        if self._is_reported(judgement, states):
            return self._settings.monitor_interval
        if judgement.kind == "confirmed" and (self._look is None or not self._look.covers(ranks)):
            self._look_closely(ranks)
            states, judgement = self._judge_closely(ranks, now_ns, here)
        if judgement.kind != "confirmed":
            self._confirmed_at = None
            self._confirmation.agrees(judgement, states)
            return self._until(judgement.next_look_ns)
        if self._is_reported(judgement, states):
            return self._settings.monitor_interval
        if not self._confirmation.agrees(judgement, states):
            return _AGREE_S
        self._act(judgement, ranks, states)
        return self._until(None)

    def _judge_closely(
        self, ranks: list[WatchedRank], now_ns: int, wants: bool
    ) -> tuple[list[RankState], Judgement]:
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

    def _is_reported(self, judgement: Judgement, states: list[RankState]) -> bool:
        """Tell whether this is the hang that was reported already: a hang that lasts is one incident."""
        if judgement.kind != "confirmed" or self._reported is None:
            return False
        return standing(judgement, states, judgement.waited_for) == self._reported

    # -- acting

    def _act(self, judgement: Judgement, ranks: list[WatchedRank], states: list[RankState]) -> None:
        if not self._in_charge():
            return
        look = self._look
        assert look is not None
        frames, flight = self.nodes.evidence(states, look)
        finding = find_culprits(states, frames, flight, on_cuda=_on_cuda())
        finding = blame_exceptions(finding, ranks)
        if self._followed is not None and set(self._followed.culprits) == set(finding.culprits):
            self._reported = standing(judgement, states, judgement.waited_for)
            return
        if not self._is_our_turn(finding, ranks):
            return
        self._journal.emit(
            Event.CONFIRMED,
            waited_for=list(judgement.waited_for),
            culprits=list(finding.culprits),
            detail=judgement.detail,
        )
        self._reported = standing(judgement, states, judgement.waited_for)
        incident = self._write_incident(judgement, finding, states, frames)
        if not finding.conclusive or _is_unnamed(judgement, states):
            for name in {suspect.name for suspect in judgement.suspects}:
                self.learner.book.double(name)
        self.learner.save()
        for line in hang_lines(incident, self._config.on_hang, self._config.run_dir):
            console.say(line)
        verdict = Verdict(incident.id, finding.culprits, incident.cause, headline(incident))
        if self._config.on_hang != "report":
            self._write_verdict(verdict)
        self.nodes.announce(verdict, _own(states), look)
        if self._config.on_hang != "report":
            self._end(verdict, ranks)

    def _is_our_turn(self, finding: CulpritFinding, ranks: list[WatchedRank]) -> bool:
        """Tell whether this node reports the hang: at once if it is the culprit's, else when that is silent.

        Before that the other nodes are given a moment to answer: alone, no node can tell culprits from victims.
        """
        if self._confirmed_at is None:
            self._confirmed_at = time.monotonic()
        if not self.nodes.all_heard() and time.monotonic() - self._confirmed_at < _TURN_S:
            return False
        order = succession(finding.culprits, self.nodes.ranks_of([watched.rank for watched in ranks]))
        return time.monotonic() - self._confirmed_at >= order.index(self.nodes.me) * _TURN_S

    def _follow_others(self, ranks: list[WatchedRank], states: list[RankState]) -> bool:
        """Act on a hang that another node has reported: end our ranks too, so that all start again."""
        told = self.nodes.verdict()
        if told is None or told[1] == self._followed or not self._in_charge():
            return False
        name, verdict = told
        self._followed = verdict
        self._journal.emit(Event.CONFIRMED, culprits=list(verdict.culprits), by=name, incident=verdict.incident)
        if self._config.on_hang == "report":
            self.nodes.pass_on(verdict, states)
            return False
        self._write_verdict(verdict)
        self.nodes.pass_on(verdict, states)
        console.say(f"HANG, told by {name}: {verdict.headline}")
        self._end(verdict, ranks)
        return True

    def _write_incident(
        self,
        judgement: Judgement,
        finding: CulpritFinding,
        states: list[RankState],
        frames: Mapping[int, Sequence[str]],
    ) -> Incident:
        look = self._look
        assert look is not None
        now_ns = time.monotonic_ns()
        incident = hang_incident(
            judgement,
            finding,
            states,
            frames,
            (*look.facts, *self.nodes.facts(now_ns)),
            attempt=self._attempt,
            on_hang=self._config.on_hang,
            now_ns=now_ns,
            now=time.time(),
        )
        pages = {state.rank: snapshot_to_json(state.snapshot) for state in states if state.snapshot is not None}
        stacks = {rank: "\n".join(("innermost first:", *lines, "")) for rank, lines in frames.items()}
        try:
            incident = self._store.create("hang", incident, {**stacks, **look.texts}, pages)
        except OSError as error:
            console.say_once("incident", f"cannot write the incident into {self._store.path}: {error}")
        self._journal.emit(
            Event.INCIDENT, id=incident.id, kind="hang", culprits=list(finding.culprits), cause=finding.cause
        )
        return incident

    def _end(self, verdict: Verdict, ranks: list[WatchedRank]) -> None:
        """End the stuck ranks; our launcher, or a foreign one by its own policy, does the rest."""
        living = [watched.target for watched in ranks if watched.alive and watched.target is not None]
        guilty = [target for target in living if target.rank in verdict.culprits]
        escalation = end_ranks(
            guilty or living,
            term_grace_s=min(_TERM_GRACE_S, self._settings.term_grace),
            reason=f"hang, incident {verdict.incident}",
            journal=self._journal,
            in_charge=self._in_charge,
        )
        if escalation.survivors:
            console.say(f"cannot end {escalation.survivors}: they survive SIGKILL, which means the kernel holds them")
        if self._deaths is not None:
            self._deaths.explained(self._attempt)

    def _write_verdict(self, verdict: Verdict) -> None:
        facts = {
            "attempt": self._attempt,
            "kind": "hang",
            "incident": verdict.incident,
            "at_ns": time.monotonic_ns(),
        }
        temporary = self._pages / f".verdict.{os.getpid()}"
        try:
            temporary.write_text(json.dumps(facts))
            temporary.replace(self._pages / f"verdict-{self._attempt}.json")
        except OSError as error:
            console.say_once("verdict", f"cannot tell the launcher about the hang: {error}")


def _own(states: Sequence[RankState]) -> list[RankState]:
    """Return the states of this node's ranks: only those of others carry a clock of their own."""
    return [state for state in states if state.now_ns is None]


def _is_unnamed(judgement: Judgement, states: list[RankState]) -> bool:
    """Tell whether all that expired is time that nobody named.

    Rank 0 may export in it while the others wait, in every attempt anew: it must get through some time.
    """
    late = {suspect.rank for suspect in judgement.suspects}
    return all(not state.stack or state.stack[-1].kind == "pulse" for state in states if state.rank in late)


def _on_cuda() -> bool:
    """Tell whether this node has NVIDIA devices, where Python runs ahead of what the device does."""
    return os.path.exists("/proc/driver/nvidia/version")
