"""`resilience status`: how a run is doing, from its files; live values where it runs on this host."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from typing import Any

import attrs

from resilience_sdk.cli.common import aligned, open_run_dir, print_json, print_lines, reading_parser, resume_row
from resilience_sdk.core.resume_proof import proof_of
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.core.words import ago, duration, when
from resilience_sdk.goodput.memory import RankMemory, growing_words, memory_of
from resilience_sdk.goodput.slowness import slowness_of, standing_of
from resilience_sdk.goodput.step_time import step_time_of
from resilience_sdk.goodput.summary import AT_MOST, Summary
from resilience_sdk.incidents import IncidentStore, count_words, step_words
from resilience_sdk.incidents.record import headline, ranks_words
from resilience_sdk.incidents.stalls import EXIT
from resilience_sdk.recorder.page_layout import BEAT_KINDS
from resilience_sdk.report.outcome import supervised_end
from resilience_sdk.report.run_state import standing_now
from resilience_sdk.report.run_view import STATES, RunView, look_at, step_time_words

_MOST_RANKS = 16
_MOST_VERDICTS = 8
_MOST_SECTIONS = 8


def main(argv: Sequence[str]) -> int:
    """Print the status and return 0; raises RunDirectoryError for a directory that cannot be read."""
    parser = reading_parser("status", "Print how a run is doing: state, ranks, checkpoints, incidents.")
    options = parser.parse_args(argv)
    status = collect(open_run_dir(options.run_dir))
    if options.json:
        print_json(status)
    else:
        print_lines(render(status, time.time()))
    return 0


def collect(run_dir: RunDirectory) -> dict[str, Any]:
    """Return the status object that `--json` prints. Unreadable parts are named in `problems`, not fatal."""
    view = look_at(run_dir)
    state, holder, live, problems = view.state, view.holder, view.live, view.problems
    return {
        "run_dir": str(run_dir.path),
        "state": view.standing,
        "outcome": view.outcome,
        "in_use_by": None if holder is None else {"job": holder.job, "host": holder.host, "pid": holder.pid},
        "job": state.job,
        "attempt": state.attempt,
        "attempts": state.attempts,
        "world_size": state.world_size,
        "started_at": state.started_at,
        "last_event": state.last_event,
        "last_event_at": state.last_event_at,
        "ranks": [{**attrs.asdict(one), "progress": one.progress} for _, one in sorted(state.ranks.items())],
        "live": live,
        "checkpoint": None
        if state.checkpoint_at is None
        else {"step": state.checkpoint_step, "at": state.checkpoint_at},
        "resume": proof_of(view.events),
        "passed_over": [state.passed_over[step] for step in sorted(state.passed_over, reverse=True)],
        "stragglers": _stragglers(view),
        "stall": state.stall if view.is_running else None,
        **_steps(view.events),
        **_memory(view.events),
        "goodput": _goodput(view.account()),
        "incidents": _incidents(run_dir, view.events, problems),
        "degraded": state.degraded,
        "supervised": supervised_end(view.events),
        "journal": {"events": view.digest.count, "torn_lines": view.digest.torn_lines},
        "problems": problems,
    }


def _steps(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the steps of the newest attempt take, and why; None where too little was measured."""
    steps = step_time_of(events)
    slow = slowness_of(steps, standing_of(events))
    told = None if steps is None else {**attrs.asdict(steps), "step_s": steps.step_s, "recent_s": steps.recent_s}
    return {"step_time": told, "why_slow": None if slow is None else attrs.asdict(slow)}


def _memory(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the memory of each rank of the newest attempt in bytes, and a sentence for those that grow."""
    ranks = memory_of(events)
    return {"memory": [attrs.asdict(one) for one in ranks], "memory_grows": growing_words(ranks)}


def _goodput(account: Summary) -> dict[str, Any] | None:
    told = {"wall_s": account.wall_s, "goodput": account.goodput, "ettr": account.ettr, "at_most": account.is_bound}
    return {**told, "buckets": account.told_buckets()} if account.attempts else None


def _stragglers(view: RunView) -> list[dict[str, Any]] | None:
    """Return the verdicts that stand in the attempt that runs; None where nothing runs or is known."""
    try:
        standing = standing_now(view.run_dir, view.state, is_running=view.is_running)
    except PermissionError as error:
        view.problems.append(str(error))
        standing = None
    if standing is None or not standing.enabled:
        return None
    return [{**attrs.asdict(verdict), "text": verdict.text()} for verdict in standing.verdicts]


def _incidents(run_dir: RunDirectory, events: Sequence[dict[str, Any]], problems: list[str]) -> dict[str, Any]:
    try:
        incidents = IncidentStore(run_dir.path).all_told(events)
    except OSError as error:
        problems.append(f"cannot read {run_dir.incidents}: {error.strerror}")
        incidents = []
    last = incidents[-1] if incidents else None
    return {
        "count": len(incidents),
        "last": None
        if last is None
        else {"id": last.id, "detected_at": last.detected_at, "summary": headline(last).replace("`", "")},
    }


def render(status: dict[str, Any], now: float) -> list[str]:
    """Return the status as lines for a person; `now` is Unix time in seconds."""
    lost = status["supervised"] if status["state"] == "lost" else None
    rows = [("run directory", status["run_dir"]), ("state", lost or STATES[status["state"]])]
    if outcome := status["outcome"]:
        reason = f", {outcome['reason']}" if outcome["reason"] else ""
        code = "unknown" if outcome["exit_code"] is None else outcome["exit_code"]
        rows.append(("outcome", f"{outcome['verdict'] or 'unknown'}, exit code {code}{reason}"))
        rows += resume_row(outcome)
    if holder := status["in_use_by"]:
        rows.append(("in use by", f"job {holder['job']}, host {holder['host']}, pid {holder['pid']}"))
    if status["job"] is not None:
        size = "" if status["world_size"] is None else f", {status['world_size']} ranks"
        attempt = "" if status["attempt"] is None else f", attempt {status['attempt']}"
        rows.append(("job", f"{status['job']}{attempt}{size}, since {when(status['started_at'])}"))
    if status["last_event"]:
        rows.append(("last event", f"{status['last_event']}, {ago(status['last_event_at'], now)}"))
    rows += _ranks(status)
    if checkpoint := status["checkpoint"]:
        done = "an unknown step" if checkpoint["step"] is None else count_words(checkpoint["step"])
        rows.append(("checkpoint", f"after {done}, {ago(checkpoint['at'], now)}"))
    elif status["passed_over"]:
        rows.append(("checkpoint", "none that is good"))
    if (resume := status.get("resume")) and resume["text"]:
        rows.append(("resume", resume["text"]))
    for item in status["passed_over"]:
        rows.append(("", f"that after {count_words(item['step'])} was passed over: {item['why']}"))
    if stall := status["stall"]:
        what = "not ended" if stall.get("kind") == EXIT else "stalled"
        rows.append((what, f"{stall['text']} (told {ago(stall['at'], now)}, since {when(stall['since'])})"))
    rows += [("slow", verdict["text"]) for verdict in (status["stragglers"] or [])[:_MOST_VERDICTS]]
    rows += _step_rows(status)
    rows += [("memory", text) for text in status["memory_grows"]]
    rows += _incident_rows(status, now)
    rows += [("degraded", item["message"]) for item in status["degraded"][-3:]]
    rows += [("note", problem) for problem in status["problems"]]
    return aligned(rows)


def _ranks(status: dict[str, Any]) -> list[tuple[str, str]]:
    live = {item["rank"]: item for item in status["live"]}
    known = {item["rank"]: item for item in status["ranks"]}
    memory = {item["rank"]: RankMemory(**item).words() for item in status["memory"]}
    ranks = sorted({*live, *known})
    rows = [
        (f"rank {rank}", _rank(known.get(rank), live.get(rank), memory.get(rank, ""))) for rank in ranks[:_MOST_RANKS]
    ]
    if ranks[_MOST_RANKS:]:
        rows.append(("", f"and {ranks_words(ranks[_MOST_RANKS:])} (--json has them all)"))
    return rows


def _rank(known: dict[str, Any] | None, live: dict[str, Any] | None, memory: str) -> str:
    words: list[str] = []
    if live is not None:
        beat = live["seconds_since_beat"]
        words.append(_place(live))
        words.append(f"last beat {beat:.1f} s ago" if beat is not None else "no beat yet")
        if live["paused"]:
            words.append(f"paused ({live['paused']})")
        if not live["progress_signal"]:
            words.append("no progress signal yet: only its death, or a stop, would be noticed")
        words.append(f"pid {live['pid']}")
    elif known is not None:
        code, signal = known["exit_code"], known["signal"]
        ended = f"ended by {signal}" if signal else "exited" if code is None else f"exited with {code}"
        words.append(ended if known["state"] == "exited" else known["state"])
        words += [known["progress"]] if known["progress"] is not None else []
        words += [f"last event {known['last_event']}"] if known["last_event"] else []
    if memory:
        words.append(f"memory {memory}")
    if known is not None and known["host"]:
        words.append(f"host {known['host']}")
    return ", ".join(words)


def _place(live: dict[str, Any]) -> str:
    """Return where a rank is: its step, and the sections that are open in it."""
    step = "no step yet" if live["step"] is None else step_words(live["step"], live["step_is_global"])
    if live["done"]:
        return f"done, {step}"
    sections = live["sections"][1:] if live["sections"][:1] == ["step"] else live["sections"]
    if sections:
        return f"{step}, in {' > '.join(sections)}"
    return step if live["sections"] else f"{step}, outside any section"


def _step_rows(status: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    if steps := status["step_time"]:
        parts = [f"{part['name']} {part['share']:.0%}" for part in _parts(steps["sections"])]
        words = [f"{step_time_words(steps['step_s'])} each over {count_words(steps['steps'])} behind the first", *parts]
        if status["state"] == "running" and steps["recent_steps"]:
            words.insert(0, f"{step_time_words(steps['recent_s'])} each of the last {steps['recent_steps']}")
        if steps["work_per_s"]:
            words.append(f"{steps['work_per_s']:.4g} of work per second")
        rows.append(("steps", ", ".join(words)))
    if slow := status["why_slow"]:
        rows.append(("why slow", slow["text"]))
    if goodput := status["goodput"]:
        wall_s, known = goodput["wall_s"], [(name, part) for name, part in goodput["buckets"].items() if part]
        buckets = sorted(known, key=lambda item: -item[1])
        told = ", ".join(f"{name} {seconds / wall_s:.0%}" for name, seconds in buckets if seconds > 0.005 * wall_s)
        at_most = AT_MOST if goodput.get("at_most") else ""
        rows += [("goodput", f"{at_most}{goodput['goodput']:.0%} of {duration(wall_s)}: {told}")] if wall_s else []
    return rows


def _parts(sections: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the sections worth a word: no heartbeat, which is the whole, and nothing below one per cent."""
    return [part for part in sections if part["kind"] not in BEAT_KINDS and part["share"] >= 0.01][:_MOST_SECTIONS]


def _incident_rows(status: dict[str, Any], now: float) -> list[tuple[str, str]]:
    incidents = status["incidents"]
    if not incidents["count"]:
        return [("incidents", "none")]
    last = incidents["last"]
    newest = f"newest {last['id']}, {ago(last['detected_at'], now)}: {last['summary']}"
    return [
        ("incidents", f"{incidents['count']}; {newest}"),
        ("", f"resilience why {shlex.quote(status['run_dir'])} tells more"),
    ]
