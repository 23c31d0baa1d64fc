"""The state of a run: a pure function of the journal's events, and what its ranks on this host publish right now.

Fields may be missing, of another version or of the wrong type; what cannot be understood is None.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs

from resilience_sdk.core import environ
from resilience_sdk.core.journal import Event
from resilience_sdk.core.lease import LeaseHolder
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.goodput.ledger import Ledger
from resilience_sdk.goodput.summary import Summary, summarize
from resilience_sdk.incidents import count_words, step_words
from resilience_sdk.incidents.stalls import EXIT
from resilience_sdk.straggler.published import StandingVerdicts, read_standing
from resilience_sdk.system.hostinfo import boot_id, process_is_gone, process_state

if TYPE_CHECKING:
    from resilience_sdk.recorder.page_reader import RankSnapshot

_BEGINNINGS = frozenset({Event.RUN_START.value, Event.ATTEMPT_START.value, Event.RANK_START.value})
_OF_CHECKPOINTS = frozenset(
    {Event.CKPT_COMMIT.value, Event.RESUME.value, Event.CKPT_SKIP.value, Event.CKPT_QUARANTINE.value}
)
_MOST_DEGRADED = 20
_LEAST_STANDING_S, _USUAL_STEPS = 2.0, 2.0  # without a step, before it is said that the run stands
_NO_SIGNAL = "no progress signal"  # what the monitor says is degraded until the ranks that it names have beaten


@attrs.define
class RankHistory:
    """A rank of the newest attempt, as its events tell."""

    rank: int
    host: str | None = None
    state: str = "started"  # started, stepping, exited
    exit_code: int | None = None
    signal: str | None = None  # the name of the signal that ended it, instead of an exit code
    step: int | None = None  # the newest step that an event of it carried
    step_is_global: bool | None = None  # False: it counts the heartbeats of the attempt, from 0
    last_event: str | None = None
    last_event_at: float | None = None
    completed: int | None = None  # steps of the attempt, as its exit tells

    @property
    def reached(self) -> int | None:
        """How far it has come: of one that has ended and counts its heartbeats, how many steps; else its step."""
        is_count = self.state == "exited" and self.completed and self.step_is_global is False
        return self.completed if is_count else self.step

    @property
    def progress(self) -> str | None:
        """The same in words. Steps count from 0, so the last of 1500 is step 1499: a number alone tells too little."""
        if self.reached is None:
            return None
        if self.state != "exited":
            return step_words(self.reached, self.step_is_global)
        if self.completed and self.step_is_global is False:
            return f"{count_words(self.reached)} of this attempt"
        return f"last {step_words(self.reached, self.step_is_global)}"


@attrs.define
class RunState:
    """The newest job of a run directory."""

    job: str | None = None
    attempt: int | None = None
    attempts: int = 0
    world_size: int | None = None
    started_at: float | None = None
    attempt_at: float | None = None
    """When the newest attempt was first told of."""
    last_event: str | None = None
    last_event_at: float | None = None
    attempt_ended: bool = False
    ranks: dict[int, RankHistory] = attrs.field(factory=dict)
    checkpoint_step: int | None = None
    checkpoint_at: float | None = None
    passed_over: dict[int, dict[str, Any]] = attrs.field(factory=dict)
    """By step: the checkpoints newer than that one which the last resume did not take, and why."""
    degraded: list[dict[str, Any]] = attrs.field(factory=list)
    blind: set[int] = attrs.field(factory=set)
    """The ranks of which the newest entry of `degraded` about progress still holds: it goes with the last of them."""
    stall: dict[str, Any] | None = None
    """The notice that stands: since when nothing has progressed (Unix seconds), and what was told when."""
    launched_on: set[str] = attrs.field(factory=set)  # hosts whose launcher has announced this job


def state_of(events: Iterable[Mapping[str, Any]], before: RunState | None = None) -> RunState:
    """Return the state after `events`, which are in the order of their times.

    A new job (a requeue, a resume) starts a new count of attempts and ranks; its checkpoints go on. `before` is the
    state that earlier events have led to, which is used up.
    """
    state = RunState() if before is None else before
    for event in events:
        if event["event"] == Event.REPORT.value:
            continue  # the page is written when the job is over, or by whoever looks
        if _is_new_job(state, event):
            state = RunState(
                checkpoint_step=state.checkpoint_step,
                checkpoint_at=state.checkpoint_at,
                passed_over=state.passed_over,
            )
        _apply(state, event, str(event["event"]))
    return state


def _is_new_job(state: RunState, event: Mapping[str, Any]) -> bool:
    """Tell whether `event` begins another job than that of `state`.

    A requeued job has the key of the one before it; it shows when a launcher announces the job again on the
    same host, or counts its attempts from the beginning.
    """
    name = event["event"]
    if name not in _BEGINNINGS:
        return False
    if _text(event.get("job")) != state.job:
        return state.last_event is not None
    if name == Event.RUN_START.value:
        return state.attempt_ended or _text(event.get("host")) in state.launched_on
    attempt = _integer(event.get("attempt"))
    starts_over = attempt is not None and state.attempt is not None and attempt < state.attempt
    return name == Event.ATTEMPT_START.value and starts_over


def _apply(state: RunState, event: Mapping[str, Any], name: str) -> None:
    at = float(event["t"])
    state.job = state.job or _text(event.get("job"))
    state.started_at = at if state.started_at is None else state.started_at
    state.last_event, state.last_event_at = name, at
    attempt = _integer(event.get("attempt"))
    is_newer = attempt is not None and (state.attempt is None or attempt > state.attempt)
    if is_newer and name != Event.RUN_START.value:
        state.attempt, state.attempt_ended, state.ranks, state.stall = attempt, False, {}, None
        state.attempts += 1
        state.attempt_at = at
        _forget_blind(state, set(state.blind))
    if (size := _integer(event.get("world_size"))) is not None:
        state.world_size = size
    rank = _rank_of(event)
    if name == Event.RUN_START.value:
        state.launched_on |= {host} if (host := _text(event.get("host"))) else set()
    elif name == Event.ATTEMPT_END.value and attempt == state.attempt:
        state.attempt_ended, state.stall = True, None
    elif name == Event.STALL.value and attempt == state.attempt:
        since = event.get("since")
        known_since = float(since) if isinstance(since, (int, float)) else at
        state.stall = {"since": known_since, "at": at, "text": _text(event.get("text")) or "no details"}
        if event.get("kind") == EXIT:  # nothing that makes progress stands still
            state.stall["kind"] = EXIT
    elif name == Event.STALL_END.value and attempt == state.attempt:
        state.stall = None
    elif name in _OF_CHECKPOINTS:
        _apply_to_checkpoints(state, event, name, at)
    elif name == Event.DEGRADED.value:
        words = [text for key in ("what", "why", "message") if (text := _text(event.get(key)))]
        found = {"at": at, "rank": rank, "message": ": ".join(words) or "no details"}
        state.degraded = [*state.degraded, found][-_MOST_DEGRADED:]
        if event.get("what") == _NO_SIGNAL and attempt == state.attempt:
            ranks = event.get("ranks")
            state.blind |= {one for one in ranks if isinstance(one, int)} if isinstance(ranks, list) else set()
    elif name == Event.FIRST_BEAT.value and attempt == state.attempt and rank is not None:
        _forget_blind(state, {rank})
    if rank is not None and rank >= 0 and attempt == state.attempt:
        _apply_to_rank(state.ranks.setdefault(rank, RankHistory(rank)), event, name, at)


def _forget_blind(state: RunState, ranks: set[int]) -> None:
    """Note that these ranks give signs of progress, or are gone: once all that were told of do, it is told no more."""
    if state.blind and not state.blind - ranks:
        state.degraded = [item for item in state.degraded if item["message"] != _NO_SIGNAL]
    state.blind -= ranks


def _apply_to_checkpoints(state: RunState, event: Mapping[str, Any], name: str, at: float) -> None:
    """Keep the newest checkpoint that is good, as far as the journal knows: files are not examined here.

    A resume tells first what it passes over, from the newest down, and then what it takes. If it takes none, none is
    good.
    """
    step = _integer(event.get("step"))
    why_bad = _text(event.get("why_bad"))  # of one that is whole, and no good
    if why_bad is not None and step is not None and state.checkpoint_step is not None:
        # A training that is spoiled goes on to save: the newest of its checkpoints stands for all of them.
        others = {n: item for n, item in state.passed_over.items() if item["why"] != why_bad}
        state.passed_over = {**others, step: {"step": step, "at": at, "why": why_bad}}
    elif name == Event.CKPT_COMMIT.value or name == Event.RESUME.value:
        created_at = event.get("created_at")  # of one that was resumed
        state.checkpoint_step = step
        state.checkpoint_at = float(created_at) if isinstance(created_at, (int, float)) else at
        state.passed_over = {n: item for n, item in state.passed_over.items() if step is not None and n > step}
    elif step is not None and "checkpoint" in event:  # else a save that was left out
        if state.checkpoint_step is not None and state.checkpoint_step <= step:
            state.checkpoint_step = state.checkpoint_at = None
        why = _text(event.get("why")) or "no reason given"
        state.passed_over[step] = {"step": step, "at": at, "why": why}


def _rank_of(event: Mapping[str, Any]) -> int | None:
    """Return the rank that an event is about: its writer, or the one that a launcher or monitor names."""
    return _integer(event.get("rank"))


def _apply_to_rank(rank: RankHistory, event: Mapping[str, Any], name: str, at: float) -> None:
    rank.host = rank.host or _text(event.get("host"))
    if name == Event.RANK_START.value:
        rank.host = _text(event.get("host")) or rank.host
        rank.state, rank.exit_code, rank.signal = "started", None, None
    elif name == Event.FIRST_BEAT.value:
        rank.state = "stepping"
    elif name == Event.RANK_EXIT.value:
        rank.state = "exited"
        rank.exit_code, rank.signal = _integer(event.get("exit_code")), _text(event.get("signal"))
        rank.completed = _integer(event.get("completed"))
    step = _integer(event.get("step"))
    if step is not None:
        is_global = event.get("step_is_global")
        rank.step, rank.step_is_global = step, is_global if isinstance(is_global, bool) else None
    rank.last_event, rank.last_event_at = name, at


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def live_ranks(run_dir: RunDirectory, env: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Return one object per rank that writes into `run_dir` and lives on this host; empty when there is none.

    Never raises and never makes anything: a job elsewhere, of another user or version is simply not seen.
    """
    wanted = os.path.realpath(run_dir.path)
    return live_ranks_of([wanted], env).get(wanted, [])


def live_ranks_of(run_dirs: Collection[str], env: Mapping[str, str] | None = None) -> dict[str, list[dict[str, Any]]]:
    """Return the same of many run directories, by their real paths, in one look; none for one without a live rank."""
    if not hasattr(os, "getuid"):
        return {}
    from resilience_sdk.recorder.page_directory import page_directories

    found: dict[str, dict[int, dict[str, Any]]] = {}
    for pages in page_directories(environ.environment() if env is None else env):
        if (run_dir := _run_dir_of(pages)) not in run_dirs or run_dir is None:
            continue
        for rank in _ranks_in(pages):
            known = found.setdefault(run_dir, {})
            if rank["attempt"] >= known.get(rank["rank"], rank)["attempt"]:
                known[rank["rank"]] = rank
    return {run_dir: [ranks[rank] for rank in sorted(ranks)] for run_dir, ranks in found.items()}


def _run_dir_of(pages: Path) -> str | None:
    from resilience_sdk.core import job_config

    config = job_config.read(pages)
    return os.path.realpath(config.run_dir) if config is not None and isinstance(config.run_dir, str) else None


def _ranks_in(pages: Path) -> list[dict[str, Any]]:
    from resilience_sdk.recorder.page_reader import PageReader

    ranks: list[dict[str, Any]] = []
    for path in sorted(pages.glob("*.page")):
        # A page may vanish, be cut or be of another version at any moment.
        with contextlib.suppress(OSError, ValueError):
            reader = PageReader(path)
            try:
                snapshot = reader.snapshot()
            finally:
                reader.close()
            if snapshot is not None and not process_is_gone(snapshot.pid, snapshot.start_ticks):
                ranks.append(_describe(snapshot))
    return ranks


def _describe(snapshot: RankSnapshot) -> dict[str, Any]:
    beat = snapshot.main_lane.last_ns if snapshot.beats else 0
    return {
        "rank": snapshot.rank,
        "attempt": snapshot.attempt,
        "pid": snapshot.pid,
        "process_state": process_state(snapshot.pid),
        "step": snapshot.step,
        "step_is_global": snapshot.step_is_global,
        "seconds_since_beat": None if not beat else round(max(0, time.monotonic_ns() - beat) / 1e9, 3),
        "seconds_since_step": round(snapshot.without_step_s(time.monotonic_ns()), 3),
        "mean_step_s": round(snapshot.mean_step_s, 6),
        "sections": [section.name for section in snapshot.main_lane.stack],
        "paused": snapshot.paused,
        "done": snapshot.done,
        "progress_signal": snapshot.declared or snapshot.beat_source != "none",
    }


def without_step_s(
    ages_s: Iterable[float], usual_s: float, stall: Mapping[str, Any] | None, *, is_paused: bool
) -> float:
    """Return for how long no step has been completed in a run that goes on; 0 within its usual steps.

    That is the age of the rank that came on last: while steps are completed, nobody stands for the run.

    Args:
        ages_s: Since each rank that is to complete steps has come on last, of those that are seen.
        usual_s: What a step usually takes.
        stall: The notice that stands (`RunState.stall`): it alone tells where no rank is seen.
        is_paused: Whether a rank has paused its deadlines, and so says that no step is due.
    """
    if is_paused:
        return 0.0
    seen = list(ages_s)
    if not seen:
        stands = stall is not None and stall.get("kind") != EXIT
        return max(0.0, time.time() - stall["since"]) if stands and stall is not None else 0.0
    for_s = min(seen)
    return for_s if for_s > max(_LEAST_STANDING_S, _USUAL_STEPS * usual_s) else 0.0


def live_without_step_s(live: Iterable[Mapping[str, Any]], state: RunState) -> float:
    """Return the same of a run whose ranks `live_ranks` has found."""
    stepping = [rank for rank in live if not rank["done"]]
    return without_step_s(
        [rank["seconds_since_step"] for rank in stepping],
        max((rank["mean_step_s"] for rank in stepping), default=0.0),
        state.stall,
        is_paused=any(rank["paused"] for rank in stepping),
    )


class ReadAt(NamedTuple):
    """When something was read, by both clocks of this machine."""

    unix_s: float
    monotonic_ns: int

    @classmethod
    def now(cls) -> ReadAt:
        """Return this moment."""
        return cls(time.time(), time.monotonic_ns())


def own_outcome(state: RunState, outcome: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the outcome, unless it is that of a job before the newest one."""
    ended_at = outcome["ended_at"] if outcome else None
    is_older = ended_at is not None and state.started_at is not None and ended_at < state.started_at
    return None if is_older else outcome


def is_held(holder: LeaseHolder | None, state: RunState, outcome: Mapping[str, Any] | None) -> bool:
    """Tell whether a job goes on in a run directory: somebody holds it who has not told how the job ended.

    A launcher that has done so is about to leave: its report is written meanwhile.
    """
    if holder is None or (told := own_outcome(state, outcome)) is None:
        return holder is not None
    ended_at = told["ended_at"]
    return told["job"] != holder.job or ended_at is None or ended_at < (holder.started_at or 0.0)


def state_name(run_dir: RunDirectory, state: RunState, outcome: Mapping[str, Any] | None, *, is_running: bool) -> str:
    """Return running, finished, ended, lost (nothing tells that it runs or how it ended) or empty."""
    if is_running:
        return "running"
    if run_dir.is_finished():
        return "finished"
    if own_outcome(state, outcome):
        return "ended"
    return "lost" if state.last_event else "empty"


def standing_now(run_dir: RunDirectory, state: RunState, *, is_running: bool) -> StandingVerdicts | None:
    """Return what is published of the attempt that runs; None where nothing runs, or nothing of it is known.

    Raises PermissionError where the file is somebody else's.
    """
    standing = read_standing(run_dir.path) if is_running else None
    if standing is None or standing.attempt != state.attempt or standing.job != state.job:
        return None
    return standing


def goodput_of(
    events: Iterable[Mapping[str, Any]],
    *,
    is_running: bool = False,
    renewed_after_s: float | None = None,
    standing_s: float = 0.0,
    now: ReadAt | None = None,
) -> Summary:
    """Return the account of a journal; see `goodput_now`."""
    ledger = Ledger()
    for event in events:
        ledger.apply(event)
    return goodput_now(ledger, is_running=is_running, renewed_after_s=renewed_after_s, standing_s=standing_s, now=now)


def goodput_now(
    ledger: Ledger,
    *,
    is_running: bool,
    renewed_after_s: float | None,
    standing_s: float = 0.0,
    now: ReadAt | None = None,
) -> Summary:
    """Return the account of a ledger up to the last sign of its job, which stands for `standing_s` where it runs.

    `now` is when its journal was read, where that took long: what came since then nobody has seen.
    """
    until = last_sign(ledger, is_running=is_running, renewed_after_s=renewed_after_s, now=now)
    return summarize(ledger, until, standing_s=standing_s if is_running else 0.0, is_gone=not is_running)


def last_sign(ledger: Ledger, *, is_running: bool, renewed_after_s: float | None, now: ReadAt | None = None) -> float:
    """Return up to when a ledger is to be read: now while a job runs, else the last sign of it.

    That is its last event, or what a lease that nobody gave up was renewed after it (`renewed_after_s`). A job that has
    told its end holds its lease while its launcher writes the report, which is no time of the run.
    """
    if is_running:
        return ledger.when(*(now or ReadAt.now()), boot_id())
    return ledger.last_at + (renewed_after_s or 0.0 if ledger.goes_on else 0.0)
