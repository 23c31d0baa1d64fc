"""The ledger of a run: a pure function of the journal's events says what each second of its wall time went into.

Fed with the events of all nodes it is that of the run, with those of one node it is that of the node. Seconds are those
of the nodes' monotonic clocks; between two boots, and between hosts, there are only their wall clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import attrs

from resilience_sdk.core.journal import Event
from resilience_sdk.goodput.attempt_account import AttemptAccount
from resilience_sdk.goodput.buckets import Bucket, total
from resilience_sdk.goodput.step_time import is_stop
from resilience_sdk.incidents import InjectedFaults
from resilience_sdk.incidents.stalls import EXIT

_NANO = 1e9
_MOST_NS = 1 << 63
_MOST_S = 1e15
_NO_ACTION = "none"
_FINISHED = "finished"
_FAULTS = ("crash", "hang")
_WENT_ON = "went on"
_OF_TRAINING = (Bucket.PRODUCTIVE, Bucket.HANG, Bucket.LAUNCHER)


@attrs.define
class Timeline:
    """Tells Unix times as a wall clock would that nobody sets: the first one of each boot counts, and time from there.

    Between two boots there is only the wall clock.
    """

    _began: dict[str, float] = attrs.field(factory=dict)
    """Of each boot, at which Unix time its monotonic clock was 0."""

    def at(self, wall_s: float, mono_ns: object, boot_id: object) -> float:
        """Return when something was."""
        wall_s = _clean(wall_s)
        if not isinstance(mono_ns, int) or abs(mono_ns) >= _MOST_NS or not isinstance(boot_id, str) or not boot_id:
            return wall_s
        mono_s = mono_ns / _NANO
        return _clean(self._began.setdefault(boot_id, wall_s - mono_s) + mono_s)


class RunPhase(str, Enum):
    """What a run is doing. Values are labels of a metric."""

    STARTING = "starting"  # until its ranks step for the first time
    TRAINING = "training"
    RECOVERING = "recovering"  # from the end of an attempt, or a fault, until all ranks step again
    WAITING = "waiting"  # between two jobs: preempted and requeued, or given up until somebody starts it again


@attrs.frozen
class Stretch:
    """A time that the run spent in one bucket. Of training it is `productive`, but for a hang whose time is known."""

    bucket: Bucket
    began_at: float
    ended_at: float
    account: int | None
    """The place of its attempt among `Ledger.accounts`; None while no job ran."""

    @property
    def seconds(self) -> float:
        """How long it lasted."""
        return self.ended_at - self.began_at


@attrs.frozen
class Standstill:
    """A time in which a rank was stopped or stuck, that went on by itself. Times are Unix seconds."""

    began_at: float
    ended_at: float
    account: int
    """The place of its attempt among `Ledger.accounts`."""
    rank: int
    """The first of the ranks that stood."""
    more: int
    """How many other ranks stood."""
    node: str | None
    step: int | None
    step_is_global: bool
    section: str | None
    activity: str
    """stopped or stuck."""

    @property
    def seconds(self) -> float:
        """How long it lasted."""
        return self.ended_at - self.began_at


_MOST_STANDSTILLS = 500  # of them the longest are kept
_MOST_STRETCHES = 2000
_KEPT_STRETCHES = 1000  # once there are too many


def shortened(stretches: Sequence[Stretch], most: int) -> list[Stretch]:
    """Return so many stretches of the same time at most: the shortest have become a part of those before them."""
    too_many = len(stretches) - most
    if too_many <= 0:
        return list(stretches)
    limit_s = sorted(one.seconds for one in stretches)[too_many]
    kept = [stretches[0]]
    for one in stretches[1:]:
        before = kept[-1]
        if too_many > 0 and min(one.seconds, before.seconds) <= limit_s:
            too_many -= 1
            longer = before if before.seconds >= one.seconds else one
            kept[-1] = attrs.evolve(longer, began_at=before.began_at, ended_at=one.ended_at)
        else:
            kept.append(one)
    return kept


@attrs.frozen
class Reading:
    """The ledger at one moment; seconds."""

    buckets: Mapping[Bucket, float]
    """Of the whole chain of jobs; they add up to `wall_s`."""
    wall_s: float
    phases: Mapping[RunPhase, float]
    lost_s: float
    """Of the training: what was hung, or had to be done again."""
    attempts: tuple[tuple[AttemptAccount, Mapping[Bucket, float], float], ...]
    """Each with its seconds, which add up to the time from its begin to its end, and its end."""
    stretches: tuple[Stretch, ...] = ()
    """The run's time in its order, without a hole while it lasts; of thousands the shortest are parts of others."""


@attrs.define
class Ledger:
    """The account of one run. Not thread-safe."""

    accounts: list[AttemptAccount] = attrs.field(factory=list)
    failures: set[str] = attrs.field(factory=set)
    """Ids of the incidents that were faults: crashes and hangs."""
    injected: set[str] = attrs.field(factory=set)
    """Those of them that an injected fault led to: they took time as any, and say nothing of how often one comes."""
    recoveries_s: list[float] = attrs.field(factory=list)
    """Of the faults that were recovered from: seconds from the fault to all ranks stepping again."""
    standstills: list[Standstill] = attrs.field(factory=list)
    """What stood still and went on by itself; of hundreds the longest, in the order of time."""
    steps_are_global: bool = False
    _strikes: InjectedFaults = attrs.field(factory=InjectedFaults)
    _phase: RunPhase | None = None  # None before the run, and once it has finished
    _bucket: Bucket = Bucket.STARTUP
    _phases: dict[RunPhase, float] = attrs.field(factory=lambda: dict.fromkeys(RunPhase, 0.0))
    _idle_s: float = 0.0
    _opened_at: float = 0.0
    _closed_s: float = 0.0  # wall time of what has finished
    _since: float = 0.0
    _last: float = 0.0
    _has_trained: bool = False
    _has_launcher: bool = False
    _job: str | None = None
    _launched_on: dict[str, str] = attrs.field(factory=dict)  # host to boot id
    _joined: tuple[float, float] | None = None  # last sign of life before, and time, of a launcher that came later
    _announced: set[tuple[int, int]] = attrs.field(factory=set)  # attempt and node
    _awaited: set[int] = attrs.field(factory=set)  # ranks that have not beaten in this attempt
    _stepped_at: float = 0.0  # when the last of its ranks had completed its first step
    _ended_well: int = 0  # launchers whose ranks have all finished
    _good_step: int | None = None  # up to where there is something to go on from
    _alive: set[int] = attrs.field(factory=set)  # under a foreign launcher
    _has_finished: bool = False
    _is_leaving: bool = False
    _stands_since: float | None = None
    _stalled: Sequence[Mapping[str, Any]] = ()  # the ranks that stand, as the notice has them
    _timeline: Timeline = attrs.field(factory=Timeline)
    _newest_at: float = 0.0
    _stretches: list[Stretch] = attrs.field(factory=list)

    def apply(self, event: Mapping[str, Any]) -> None:
        """Take one event; what cannot be understood is left out."""
        wall_s = float(event["t"])
        self._newest_at = max(self._newest_at, _clean(wall_s))
        if event.get("event") == Event.REPORT.value:
            return  # the page is written when the job is over: nothing ran, and nobody waited
        if self._strikes.led_to(event) and isinstance(name := event.get("id"), str):
            self.injected.add(name)
        at = max(self._since, self.when(wall_s, event.get("mono_ns"), event.get("boot_id")))
        if event.get("step_is_global") is True and self.accounts and event.get("job") == self._job:
            self.steps_are_global = True
            self.accounts[-1].reach(_whole(event.get("step")))
        if (rule := _RULES.get(str(event.get("event")))) is not None:
            rule(self, event, at)
        self._last = max(self._last, at)

    @property
    def newest_at(self) -> float:
        """Unix time of the newest event, as it was written down."""
        return self._newest_at

    @property
    def last_at(self) -> float:
        """Moment of the newest event, as `when` tells it."""
        return self._last

    def when(self, wall_s: float, mono_ns: object, boot_id: object) -> float:
        """Return a moment of a node as `read` wants it, from the clocks there."""
        return self._timeline.at(wall_s, mono_ns, boot_id)

    def read(self, now: float | None = None, *, standing_s: float = 0.0) -> Reading:
        """Return the account at `now`, as `when` told it; None, or what is older: at the last event.

        `standing_s`: for how long no step has been completed by then, which counts where the run trains.
        """
        until = max(self._since, self._last, float("-inf") if now is None else now)
        passed = 0.0 if self._phase is None else until - self._since
        phases, idle_s = dict(self._phases), self._idle_s
        going_on: dict[Bucket, float] = {}
        trains = self._phase is not None and self._bucket is Bucket.PRODUCTIVE
        # What the monitors have told of tells by itself how long it stood.
        untold_s = until - max(self._since, self.accounts[-1].told_until) if trains else 0.0
        stood_s = min(standing_s, max(0.0, untold_s)) if trains else 0.0
        if self._phase is not None:
            phases[self._phase] += passed
            if self._bucket is Bucket.IDLE:
                idle_s += passed
            else:
                going_on = {self._bucket: passed - stood_s, Bucket.STANDING: stood_s}
        lost_s, attempts = 0.0, []
        for account in self.accounts:
            goes_on = bool(going_on) and account is self.accounts[-1]
            seconds = total([account.seconds, going_on if goes_on else {}])
            training = account.training(
                seconds.pop(Bucket.PRODUCTIVE),
                (self._since, until - stood_s) if goes_on and trains else None,
                self._good_step_of(account),
            )
            lost_s += training[Bucket.HANG] + training[Bucket.REPLAYED]
            attempts.append((account, total([seconds, training]), until if goes_on else account.ended_at))
        buckets = total([*(seconds for _, seconds, _ in attempts), {Bucket.IDLE: idle_s}])
        wall_s = self._closed_s + (0.0 if self._phase is None else until - self._opened_at)
        stretches = list(self._stretches)
        if passed > stood_s:
            stretches.append(Stretch(self._bucket, self._since, until - stood_s, self._account()))
        if stood_s > 0:
            stretches.append(Stretch(Bucket.STANDING, until - stood_s, until, self._account()))
        return Reading(buckets, wall_s, phases, lost_s, tuple(attempts), tuple(stretches))

    @property
    def fails_unseen(self) -> bool:
        """Whether the newest job has failed if it runs no more: it has told no end, and was not asked to leave."""
        is_well = self._phase in (RunPhase.STARTING, RunPhase.TRAINING)  # else a fault has been told
        return self._has_launcher and is_well and not self._is_leaving

    @property
    def goes_on(self) -> bool:
        """Whether a job has begun that has not told its end."""
        return self._runs

    def lost_steps_of(self, account: AttemptAccount) -> int:
        """Return how many of its steps are lost: done again, or behind what there is to go on from."""
        return account.lost_after(self._good_step_of(account))

    def _good_step_of(self, account: AttemptAccount) -> int | None:
        """Return up to where there is something to go on from, of an attempt that has failed; None where one goes on,
        and where nobody has told of a checkpoint.
        """
        is_over = self._phase in (RunPhase.WAITING, RunPhase.RECOVERING) and not (
            self._phase is RunPhase.RECOVERING and self._bucket is Bucket.HANG
        )
        if not self.steps_are_global or not is_over:
            return None
        for one in reversed(self.accounts):
            if one is account:
                return self._good_step
            if one.first_step is not None:
                break
        return None

    @property
    def knows_steps(self) -> bool:
        """Whether ranks tell where their steps begin; else what lies between two of them may count as productive."""
        return all(account.is_bracketed for account in self.accounts)

    @property
    def knows_replayed(self) -> bool:
        """Whether `replayed` is known: a fault lost steps that only those who count over attempts find again."""
        return self.steps_are_global or not self.failures

    # -- the moment at which one thing ends and another begins

    def _enter(self, phase: RunPhase | None, bucket: Bucket, at: float) -> float:
        """Go over to another bucket; return the seconds that the one before has lasted."""
        spent = 0.0
        if self._phase is not None:
            spent = at - self._since
            self._phases[self._phase] += spent
            if self._bucket is Bucket.IDLE:
                self._idle_s += spent
            else:
                self.accounts[-1].seconds[self._bucket] += spent
                self.accounts[-1].ended_at = at
                if self._bucket is Bucket.PRODUCTIVE:
                    self.accounts[-1].note_trained(self._since, at)
            if spent > 0:
                self._stretches.append(Stretch(self._bucket, self._since, at, self._account()))
            if len(self._stretches) > _MOST_STRETCHES:
                self._stretches = shortened(self._stretches, _KEPT_STRETCHES)
        if self._phase is None and phase is not None:
            self._opened_at = at
        if self._phase is not None and phase is None:
            self._closed_s += at - self._opened_at
        self._phase, self._bucket, self._since = phase, bucket, at
        self._stands_since = None
        return spent

    def _account(self) -> int | None:
        """Return the place of the account that pays for what happens now."""
        return None if self._bucket is Bucket.IDLE else len(self.accounts) - 1

    def _idle_between(self, began_at: float, ended_at: float) -> float:
        """Return how long no job ran between two moments."""
        idle = (one for one in self._stretches if one.bucket is Bucket.IDLE)
        return sum(max(0.0, min(one.ended_at, ended_at) - max(one.began_at, began_at)) for one in idle)

    def _was(self, bucket: Bucket, seconds: float) -> None:
        """Note that the last part of the newest stretch was something else."""
        if seconds <= 0 or not self._stretches:
            return
        last = self._stretches.pop()
        began_at = max(last.began_at, last.ended_at - seconds)
        if began_at > last.began_at:
            self._stretches.append(attrs.evolve(last, ended_at=began_at))
        self._stretches.append(attrs.evolve(last, bucket=bucket, began_at=began_at))

    @property
    def _nodes(self) -> int:
        """How many launchers have announced the attempt that runs."""
        newest = self.accounts[-1].attempt if self.accounts else 0
        return sum(attempt == newest for attempt, _ in self._announced)

    @property
    def _runs(self) -> bool:
        return self._phase not in (None, RunPhase.WAITING)

    def _end_job(self, at: float | None = None, *, is_fault: bool = False) -> None:
        """Another job begins: one that did not tell its end was over with its last sign of life, and failed."""
        if self._runs:
            if is_fault and self.fails_unseen:
                self.failures.add(f"end of job {self._job} in attempt {len(self.accounts)}")
            self._enter(RunPhase.WAITING, Bucket.IDLE, max(self._since, self._last if at is None else at))

    def _begin_job(self, job: str, at: float) -> None:
        self._job, self._joined = job, None
        self._announced.clear()
        phase = RunPhase.RECOVERING if self._has_trained else RunPhase.STARTING
        self._enter(phase, Bucket.STARTUP, at)
        self.accounts.append(AttemptAccount(job, 0, at, at))

    def _begin_attempt(self, event: Mapping[str, Any], at: float) -> float:
        """Begin an attempt; return how long what led to it has lasted."""
        job, attempt = str(event.get("job")), _whole(event.get("attempt"))
        if not self._runs or job != self._job:
            self._end_job()
            self._begin_job(job, at)
        is_first = not self.accounts[-1].is_known
        phase = RunPhase.RECOVERING if self._has_trained else RunPhase.STARTING
        spent = self._enter(phase, Bucket.STARTUP if is_first else Bucket.RESTART, at)
        if is_first:
            self.accounts[-1].attempt = attempt
        else:
            self.accounts.append(AttemptAccount(job, attempt, at, at))
        self.accounts[-1].is_known = True
        self._has_finished = self._is_leaving = False
        self._stepped_at, self._ended_well = 0.0, 0
        self._alive.clear()
        return spent

    # -- rules

    def _on_run_start(self, event: Mapping[str, Any], at: float) -> None:
        self._has_launcher = True
        job, host, boot = (str(event.get(key)) for key in ("job", "host", "boot_id"))
        unheld = event.get("unheld_s")
        # Of a job that did not tell its end, the lease was renewed after its last event.
        alive_at = self._last if unheld is None else max(self._last, at - _seconds_of(unheld))
        may_join = host not in self._launched_on or (not self._announced and self._launched_on[host] == boot)
        if self._runs and job == self._job and self._launched_on and may_join:
            # Another node of this job; or the same job elsewhere, after an end that nobody told: its attempts tell.
            self._launched_on[host] = boot
            self._joined = self._joined or (alive_at, at)
            return
        self._end_job(alive_at, is_fault=True)
        self._launched_on = {host: boot}
        self._begin_job(job, at)

    def _on_attempt_start(self, event: Mapping[str, Any], at: float) -> None:
        self._has_launcher = True
        attempt, node = _whole(event.get("attempt")), _whole(event.get("node"))
        ranks = event.get("ranks")
        told = {rank for rank in ranks if isinstance(rank, int)} if isinstance(ranks, list) else set()
        known = {number for number, _ in self._announced}
        if self._runs and attempt in known and (attempt, node) not in self._announced:
            self._announced.add((attempt, node))  # another node of it
            self._awaited |= told
            self._joined = None
            return
        if (attempt, node) in self._announced and self._joined is not None:
            ended_at, began_at = self._joined
            self._end_job(ended_at, is_fault=True)
            self._begin_job(str(event.get("job")), max(self._since, began_at))
        payer, bucket = (self.accounts[-1] if self.accounts else None), self._bucket
        spent_s = self._begin_attempt(event, at)
        if payer is not None and bucket in (Bucket.STARTUP, Bucket.RESTART):
            waited_s = min(_seconds_of(event.get("rendezvous_s")), spent_s)
            payer.seconds[bucket] -= waited_s
            payer.seconds[Bucket.RENDEZVOUS] += waited_s
            self._was(Bucket.RENDEZVOUS, waited_s)
        self._announced.add((attempt, node))
        self._awaited = told

    def _on_rank_start(self, event: Mapping[str, Any], at: float) -> None:
        """Under a foreign launcher the ranks tell that an attempt began."""
        if self._has_launcher:
            return
        job, attempt = str(event.get("job")), _whole(event.get("attempt"))
        newest = self.accounts[-1] if self.accounts else None
        if not self._runs or newest is None or (job, attempt) != (newest.job, newest.attempt):
            self._begin_attempt(event, at)
            self._awaited = set()
        rank = _whole(event.get("rank"))
        self._awaited.add(rank)
        self._alive.add(rank)

    def _on_first_beat(self, event: Mapping[str, Any], at: float) -> None:
        self._awaited.discard(_whole(event.get("rank")))
        # Whoever tells of it has seen it a moment later.
        self._stepped_at = max(self._stepped_at, at - _seconds_of(event.get("ago_s")))
        if not self._awaited and self._bucket in (Bucket.STARTUP, Bucket.RESTART) and self._runs:
            self._has_trained = True
            self._enter(RunPhase.TRAINING, Bucket.PRODUCTIVE, max(self._since, self._stepped_at))

    def _on_resume(self, event: Mapping[str, Any], _: float) -> None:
        if self.accounts:
            self._go_back_to(_whole(event.get("step")))

    def _go_back_to(self, step: int) -> None:
        """Training goes on from so many completed steps: what attempts before had done beyond is lost."""
        self.steps_are_global = True
        self.accounts[-1].first_step = self._good_step = step
        for account in self.accounts[:-1]:
            account.rewind(step)

    def _on_suspect(self, event: Mapping[str, Any], at: float) -> None:
        suspects = event.get("suspects")
        stood_s = [
            _seconds_of(suspect.get("elapsed_s"))
            for suspect in (suspects if isinstance(suspects, list) else ())
            if isinstance(suspect, Mapping)
        ]
        self._stands_since = at - max(stood_s, default=0.0)

    def _on_stall(self, event: Mapping[str, Any], at: float) -> None:
        if event.get("kind") == EXIT:
            return
        self._stands_since = at - _seconds_of(event.get("for_s"))
        ranks = event.get("ranks")
        self._stalled = [one for one in ranks if isinstance(one, Mapping)] if isinstance(ranks, list) else []

    def _on_stall_end(self, event: Mapping[str, Any], at: float) -> None:
        """Count what went on by itself: a process that was stopped, or a rank that was stuck, but in no long wait.

        One that loads or saves for long stands still as well, and has a bucket of its own.
        """
        since, self._stands_since = self._stands_since, None
        if event.get("why") != _WENT_ON or since is None or self._phase is not RunPhase.TRAINING or self._is_leaving:
            return
        stood = [one for one in self._stalled if is_stop(str(one.get("activity")), str(one.get("section")))]
        if not stood:
            return
        # It is the time of the run, however many ranks stood.
        stood_s = max(0.0, at - max(since, self._since))
        self.accounts[-1].hung_s += stood_s
        self._enter(self._phase, self._bucket, at)
        self._was(Bucket.HANG, stood_s)
        first = stood[0]
        self.standstills.append(
            Standstill(
                began_at=at - stood_s,
                ended_at=at,
                account=len(self.accounts) - 1,
                rank=_whole(first.get("rank")),
                more=len(stood) - 1,
                node=node if isinstance(node := first.get("node"), str) and node else None,
                step=_whole(first.get("step")) if isinstance(first.get("step"), int) else None,
                step_is_global=first.get("step_is_global") is True,
                section=section if isinstance(section := first.get("section"), str) and section else None,
                activity=str(first.get("activity")),
            )
        )
        if len(self.standstills) > _MOST_STANDSTILLS:
            self.standstills.remove(min(self.standstills, key=lambda one: one.seconds))

    def _on_incident(self, event: Mapping[str, Any], at: float) -> None:
        kind = event.get("kind")
        if kind not in _FAULTS:
            return
        ends = event.get("action") != _NO_ACTION
        if ends and isinstance(name := event.get("id"), str):
            self.failures.add(name)
        if self._phase is not RunPhase.TRAINING or self._is_leaving:
            return
        if kind == "hang":
            stood_s = 0.0 if self._stands_since is None else at - max(self._stands_since, self._since)
            self._enter(RunPhase.RECOVERING if ends else RunPhase.TRAINING, Bucket.HANG, at)
            self.accounts[-1].hung_s += max(0.0, stood_s)
            self._was(Bucket.HANG, stood_s)
        elif ends:
            self._enter(RunPhase.RECOVERING, Bucket.RESTART, at)

    def _on_rank_exit(self, event: Mapping[str, Any], at: float) -> None:
        self._alive.discard(_whole(event.get("rank")))
        if self.accounts and (event.get("job"), event.get("attempt")) == (self._job, self.accounts[-1].attempt):
            self.accounts[-1].note_completed(event.get("completed"))
        if not self._has_launcher and self._has_finished and not self._alive:
            self._enter(None, Bucket.IDLE, at)
        elif event.get("exit_code") != 0 and self._bucket in _OF_TRAINING and self._runs:
            self._enter(RunPhase.RECOVERING, Bucket.RESTART, at)

    def _on_stop_agreed(self, _: Mapping[str, Any], at: float) -> None:
        if self._phase is RunPhase.TRAINING and not self._is_leaving:
            self._is_leaving = True
            self._enter(RunPhase.TRAINING, Bucket.PREEMPTED, at)

    def _on_attempt_end(self, event: Mapping[str, Any], at: float) -> None:
        codes = event.get("exit_codes")
        ended_well = isinstance(codes, Mapping) and bool(codes) and not any(codes.values())
        if ended_well and event.get("ended_by") == "ranks":
            # Nothing is started again: what follows is the end, or a fault on another node.
            self._ended_well += 1
            if self._runs and self._bucket is Bucket.PRODUCTIVE and self._ended_well >= self._nodes:
                self._enter(self._phase, Bucket.LAUNCHER, at)
            return
        if self._runs:
            self._enter(RunPhase.RECOVERING, Bucket.PREEMPTED if self._is_leaving else Bucket.RESTART, at)

    def _on_decision(self, event: Mapping[str, Any], at: float) -> None:
        if event.get("exit_code") is None or event.get("others_go_on") is True or self._phase is None:
            return
        is_over = event.get("verdict") == _FINISHED
        if is_over or self._runs:
            self._enter(None if is_over else RunPhase.WAITING, Bucket.IDLE, at)

    def _on_finished(self, event: Mapping[str, Any], at: float) -> None:
        if event.get("rank") is None and self._phase is not None:
            self._enter(None, Bucket.IDLE, at)
        self._has_finished = True  # of a rank: one fit is, and another one may follow

    def _on_commit(self, event: Mapping[str, Any], _: float) -> None:
        if not self.accounts:
            return
        if not self._is_leaving:  # else it is a part of leaving
            self.accounts[-1].stall_s += _seconds_of(event.get("stall_s"))
        if isinstance(event.get("step"), int):
            self.accounts[-1].reach(_whole(event.get("step")))
            self._good_step = _whole(event.get("step"))

    def _on_framework_checkpoint(self, event: Mapping[str, Any], _: float) -> None:
        if isinstance(event.get("step"), int):
            self._good_step = _whole(event.get("step"))

    def _on_step_time(self, event: Mapping[str, Any], _: float) -> None:
        """Take what a node's ranks have waited for in an attempt so far."""
        if (account := self._account_of(event)) is not None:
            account.note_step_time(event)

    def _on_time_spent(self, event: Mapping[str, Any], at: float) -> None:
        """Take what the time of a node's ranks was spent on in an attempt so far."""
        if (account := self._account_of(event)) is not None:
            self.steps_are_global |= isinstance(event.get("step"), int)
            account.note_spent(event, at)

    def _account_of(self, event: Mapping[str, Any]) -> AttemptAccount | None:
        key = str(event.get("job")), _whole(event.get("attempt"))
        return next((one for one in reversed(self.accounts) if (one.job, one.attempt) == key), None)

    def _on_recovered(self, event: Mapping[str, Any], at: float) -> None:
        is_known = isinstance(name := event.get("id"), str) and name in self.failures
        if is_known and isinstance(event.get("recovery_s"), (int, float)):
            took_s = _seconds_of(event.get("recovery_s"))
            self.recoveries_s.append(max(0.0, took_s - self._idle_between(at - took_s, at)))
        if self._bucket is Bucket.HANG and self._runs:
            self._enter(RunPhase.TRAINING, Bucket.PRODUCTIVE, at)  # by itself: no attempt has ended
        lost_steps, resumed_at = event.get("lost_steps"), event.get("resumed_at")
        if isinstance(lost_steps, int) and isinstance(resumed_at, int) and self.accounts[:-1]:
            failed = next((one for one in reversed(self.accounts[:-1]) if one.seconds[Bucket.PRODUCTIVE] > 0), None)
            if failed is not None:
                failed.reach(_whole(resumed_at) + _whole(lost_steps))
            self._go_back_to(_whole(resumed_at))


_RULES: Mapping[str, Callable[[Ledger, Mapping[str, Any], float], None]] = {
    Event.RUN_START.value: Ledger._on_run_start,
    Event.ATTEMPT_START.value: Ledger._on_attempt_start,
    Event.RANK_START.value: Ledger._on_rank_start,
    Event.FIRST_BEAT.value: Ledger._on_first_beat,
    Event.RESUME.value: Ledger._on_resume,
    Event.SUSPECT.value: Ledger._on_suspect,
    Event.STALL.value: Ledger._on_stall,
    Event.STALL_END.value: Ledger._on_stall_end,
    Event.INCIDENT.value: Ledger._on_incident,
    Event.RANK_EXIT.value: Ledger._on_rank_exit,
    Event.STOP_AGREED.value: Ledger._on_stop_agreed,
    Event.ATTEMPT_END.value: Ledger._on_attempt_end,
    Event.DECISION.value: Ledger._on_decision,
    Event.FINISHED.value: Ledger._on_finished,
    Event.CKPT_COMMIT.value: Ledger._on_commit,
    Event.FRAMEWORK_CKPT.value: Ledger._on_framework_checkpoint,
    Event.STEP_TIME.value: Ledger._on_step_time,
    Event.TIME_SPENT.value: Ledger._on_time_spent,
    Event.RECOVERED.value: Ledger._on_recovered,
}


def _clean(seconds: float) -> float:
    return min(max(seconds, 0.0), _MOST_S)


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63 else 0


def _seconds_of(value: object) -> float:
    """Return a duration that a journal tells; 0.0 where it is none."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value < _MOST_S else 0.0  # type: ignore[arg-type, operator]
