"""The reading of a run directory: everything that a report shows of it, at one moment, whatever its state.

Each part is read by itself. One that fails is named among the problems and is empty on the page: a report is wanted
most when something is broken.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs

from resilience_sdk._version import __version__
from resilience_sdk.core.console import printable
from resilience_sdk.core.journal import Event
from resilience_sdk.core.resume_proof import proof_of
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.core.words import duration, one_line, when
from resilience_sdk.goodput.buckets import Bucket
from resilience_sdk.goodput.memory import RankMemory, growing_words, memory_of
from resilience_sdk.goodput.slowness import ON_HOST, WhySlow, slowness_of, standing_of
from resilience_sdk.goodput.step_time import StepTime, step_time_of
from resilience_sdk.goodput.summary import Summary
from resilience_sdk.incidents import Incident, IncidentStore, count_words, step_words
from resilience_sdk.incidents.stalls import EXIT
from resilience_sdk.postmortem.exit_codes import JobVerdict
from resilience_sdk.recorder.page_layout import BEAT_KINDS
from resilience_sdk.report import timeline
from resilience_sdk.report.cards import checkpoint_cards, finding_cards, incident_cards, text
from resilience_sdk.report.facts import (
    Headline,
    IncidentFacts,
    RankFacts,
    RunFacts,
    ScoreFacts,
    Segment,
    StandstillFacts,
    StragglerFacts,
)
from resilience_sdk.report.heat import heat_map
from resilience_sdk.report.outcome import supervised_end
from resilience_sdk.report.run_state import RankHistory, live_without_step_s
from resilience_sdk.report.run_view import STATES, RunView, look_at, step_time_words, untold_stall, untold_words
from resilience_sdk.report.series import gaps_of, loss_curves, step_time_curves
from resilience_sdk.report.standstills import newest_sentence
from resilience_sdk.report.why_page import ending_words
from resilience_sdk.straggler.published import read_report
from resilience_sdk.straggler.reports import Report

_MOST_RANKS = 64
_MOST_VERDICTS = 100
_MOST_SCORES = 40
_MOST_WORST = 5
_MOST_SHARES = 16
_MIN_REST = 0.005
_MOST_PROBLEMS = 50
_T = TypeVar("_T")


@attrs.define
class _Parts:
    """The parts of a report, read one after the other, and what went wrong with them."""

    problems: list[str] = attrs.field(factory=list)

    def part(self, name: str, read: Callable[[], _T], otherwise: _T) -> _T:
        """Return what `read` returns; `otherwise`, and a problem that names the part, where it fails."""
        try:
            return read()
        except OSError as error:
            is_ours = error.errno is None  # it says in a sentence what is wrong with whose file
            told = str(error) if is_ours else f"{name}: cannot read {error.filename or 'it'}: {error.strerror}"
            self.problems.append(told)
        except Exception as error:  # noqa: BLE001 - a report is wanted most when something is broken
            self.problems.append(f"{name}: left out, it could not be understood ({type(error).__name__}: {error})")
        return otherwise


def read_run(run_dir: RunDirectory, *, now: float | None = None) -> RunFacts:
    """Return the facts of a run directory in any state: empty, torn, of another version, or in use.

    Never raises for what the directory holds: what cannot be read is named in `problems`. `now` is Unix time.
    """
    at = time.time() if now is None else now
    parts = _Parts()
    view = look_at(run_dir)
    events, digest, state = view.events, view.digest, view.state
    account: Summary | None = parts.part("goodput", view.account, None)
    incidents: list[Incident] = parts.part("incidents", lambda: IncidentStore(run_dir.path).all_told(view.events), [])
    unread = [one.id for one in incidents if any(e.text.startswith("report.json cannot") for e in one.evidence)]
    parts.problems += [f"the report of incident {name} cannot be read" for name in unread]
    cards: tuple[IncidentFacts, ...] = parts.part("incidents", lambda: incident_cards(view, incidents), ())
    standstills: tuple[StandstillFacts, ...] = parts.part("standstills", lambda: timeline.standstill_cards(account), ())
    beginnings = [] if account is None else timeline.beginnings_of(account)
    segments: tuple[Segment, ...] = parts.part("time", lambda: timeline.segments_of(account) if account else (), ())
    hangs = [(one.began_at, one.ended_at) for one in segments if set(one.parts) == {Bucket.HANG.value}]
    timeline.note_bad_numbers(digest.losses, events)
    steps: StepTime | None = parts.part("steps", lambda: step_time_of(events), None)
    slow: WhySlow | None = parts.part("steps", lambda: slowness_of(steps, standing_of(events)), None)
    untold: Incident | None = None
    if view.ending.verdict is None:
        untold = parts.part("stalls", lambda: untold_stall(view, incidents), None)
    none: tuple[tuple[Any, ...], int] = ((), 0)
    attempts, hidden_attempts = parts.part(
        "attempts", lambda: none if account is None else timeline.attempts_of(account, segments, cards), none
    )
    checkpoints, hidden_checkpoints = parts.part("checkpoints", lambda: checkpoint_cards(events), none)
    heat = parts.part("heat map", lambda: heat_map(digest.progress), None)
    worst = [] if heat is None else [rank for rank, *_ in heat.worst]
    nobody: tuple[RankMemory, ...] = ()
    memory = parts.part("memory", lambda: memory_of(view.events), nobody)
    ranks, hidden_ranks = parts.part("ranks", lambda: _ranks(view, worst, memory), none)
    if digest.misshapen:
        parts.problems.append(f"{digest.misshapen} events of the journal could not be understood")
    headline = Headline(view.standing, STATES[view.standing])
    headline = parts.part("headline", lambda: headline_of(view, cards, account, steps, slow, untold), headline)
    return RunFacts(
        run_dir=printable(str(run_dir.path)),
        name=printable(run_dir.path.name),
        at=at,
        version=__version__,
        headline=headline,
        job=None if state.job is None else one_line(state.job),
        job_number=attempts[-1].job_number if attempts else 1,
        job_started_at=state.started_at,
        script=parts.part("script", lambda: _script(events), None),
        world_size=state.world_size,
        nodes=parts.part("nodes", lambda: _nodes(view), None),
        started_at=float(events[0]["t"]) if events else None,
        ended_at=at if view.is_running else state.last_event_at,
        goodput=_figures(account),
        segments=segments,
        attempts=attempts,
        hidden_attempts=hidden_attempts,
        pins=parts.part("pins", lambda: timeline.pins_of(cards, events, standstills), ()),
        step_time=parts.part("step times", lambda: step_time_curves(digest.progress, beginnings, hangs), ()),
        loss=parts.part("losses", lambda: loss_curves(digest.losses, digest.logged, gaps_of(beginnings, hangs)), ()),
        shares=() if steps is None else _shares(steps),
        why_slow=None if slow is None else text(slow.text),
        throughput=None if steps is None or not steps.work_per_s else f"{steps.work_per_s:.4g} of work per second",
        heat=heat,
        stragglers=parts.part("stragglers", lambda: _stragglers(view), None),
        checkpoints=checkpoints,
        hidden_checkpoints=hidden_checkpoints,
        resume=parts.part("resume", lambda: proof_of(events), None),
        findings=parts.part("findings", lambda: finding_cards(events), ()),
        incidents=cards,
        hidden_incidents=len(incidents) - len(cards),
        standstills=standstills,
        stood=parts.part("standstills", lambda: newest_sentence(account) if account is not None else None, None),
        ranks=ranks,
        hidden_ranks=hidden_ranks,
        memory_grows=tuple(growing_words(memory)),
        events=parts.part("events", lambda: timeline.events_of(events), ()),
        problems=tuple(text(problem) for problem in [*view.problems, *parts.problems][:_MOST_PROBLEMS]),
    )


def _figures(account: Summary | None) -> dict[str, Any]:
    """Return the account as `goodput --json` has it, without its attempts; nothing where nothing has run."""
    if account is None or not account.attempts:
        return {}
    told = account.to_json()
    del told["attempts"]
    return told


def _shares(steps: StepTime) -> tuple[tuple[str, str, float, float, float], ...]:
    told = [one for one in steps.sections if one.kind not in BEAT_KINDS]
    shares = [(one_line(one.name), one.kind, one.share, one.least, one.most) for one in told][:_MOST_SHARES]
    # Sections within one another and those of the device make it more than all: then nothing is left over.
    rest = 1.0 - sum(one.share for one in told if one.kind in ON_HOST)
    return (*shares, *([("in no section", "", rest, rest, rest)] if told and rest >= _MIN_REST else []))


def _script(events: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the script of the newest job, as its ranks or its launcher's command name it."""
    for event in reversed(events):
        if event["event"] == Event.RANK_START.value and isinstance(name := event.get("script"), str):
            return one_line(name)
        if event["event"] == Event.RUN_START.value and isinstance(words := event.get("argv"), list):
            return next((one_line(Path(word).name) for word in map(str, words) if word.endswith(".py")), None)
    return None


def _nodes(view: RunView) -> int | None:
    for event in reversed(view.events):
        if event["event"] == Event.ATTEMPT_START.value and type(count := event.get("nodes")) is int and count > 0:
            return count
    hosts = {rank.host for rank in view.state.ranks.values() if rank.host}
    return len(hosts) or None


def headline_of(
    view: RunView,
    incidents: Sequence[IncidentFacts],
    account: Summary | None,
    steps: StepTime | None,
    slow: WhySlow | None,
    untold: Incident | None,
) -> Headline:
    """Return the first thing that is read of a run: what happened, why, what to do now."""
    standing, ending = view.standing, view.ending
    last = incidents[-1] if incidents else None
    last_words = None if last is None else last.headline
    more = (_command("why", view.run_dir),) if incidents else ()
    if standing == "running":
        what, why = _running_words(view, account, steps)
        why = why or (text(slow.text) if slow is not None else None)
        if last is not None and last.recovered_at is None and last.action != "none":
            return Headline(standing, what, why or last_words, last.what_to_change, more)
        return Headline(standing, what, why, None, more)
    if ending.verdict is not None:
        beside = () if last is None else (last.headline, last.what_to_change or "")
        what, hint, resume = ending_words(ending, *beside)
        if standing == "finished" or ending.verdict == JobVerdict.FINISHED.value:
            why = None if last is None else f"{_incidents_words(incidents)} on the way, the last one: {last_words}"
            return Headline(standing, text(what), why, None, more)
        change = None if last is None else last.what_to_change
        said = " ".join(filter(None, (change, hint))) or None
        return Headline(standing, text(what), last_words, said, (printable(resume), *more) if resume else more)
    if standing == "lost":
        ended = supervised_end(view.events)
        told = untold_words(untold) if untold is not None else last_words
        why = told or f"The last thing it told of was at {when(view.state.last_event_at)}."
        step = view.state.checkpoint_step
        saved = "the SDK knows of no checkpoint" if step is None else f"it resumes after {count_words(step)}"
        commands = more or (_command("status", view.run_dir),)
        what = _sentence(STATES["lost"]) if ended is None else _sentence(ended)
        return Headline(standing, what, why, f"Start the same command again: {saved}.", commands)
    return Headline(standing, _sentence(STATES[standing]))


def _command(name: str, run_dir: RunDirectory) -> str:
    """Return a command about the directory, for a shell: its name may hold anything."""
    return printable(shlex.join(["resilience", name, str(run_dir.path)]))


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{text(words[1:]).rstrip('.')}."


def _incidents_words(incidents: Sequence[IncidentFacts]) -> str:
    return "1 incident" if len(incidents) == 1 else f"{len(incidents)} incidents"


def _running_words(view: RunView, account: Summary | None, steps: StepTime | None) -> tuple[str, str | None]:
    """Return how far a run is, and that nothing progresses where a notice stands."""
    told = [rank["step"] for rank in view.live if isinstance(rank["step"], int)]
    told += [rank.step for rank in view.state.ranks.values() if rank.step is not None and not told]
    is_global = any(rank["step_is_global"] for rank in view.live)
    words = ["The job runs"]
    words += [f"at {step_words(max(told), is_global or None)}"] if told else []
    if account is not None and account.goodput is not None:
        words.append(f"{account.at_most}{account.goodput:.0%} of {duration(account.wall_s)} was productive")
    if account is not None and (stood_s := live_without_step_s(view.live, view.state)) > 0:
        words.append(f"standing for {duration(stood_s)}")
    elif steps is not None:
        words.append(f"a step takes {step_time_words(steps.recent_s)}")
    stall = view.state.stall
    if stall is None:
        return ", ".join(words) + ".", None
    # A notice has seconds that count from when it was told.
    notice = f"{text(stall['text'])} (told {when(stall['at'])})"
    if stall.get("kind") == EXIT:
        return f"A process should have ended at {when(stall['since'])}.", notice
    return f"Nothing has progressed since {when(stall['since'])}.", notice


def _stragglers(view: RunView) -> StragglerFacts | None:
    """Return the scores of the newest report, and the verdicts that the journal tells of."""
    verdicts: list[tuple[float, str, str]] = []
    reported_at = None
    for event in view.events:
        if event["event"] != Event.STRAGGLER.value:
            continue
        what, said = event.get("what"), event.get("text")
        if what == "report":
            reported_at = float(event["t"])
        elif isinstance(what, str) and isinstance(said, str) and what != "settings":
            verdicts.append((float(event["t"]), one_line(what), one_line(said)))
    report = read_report(Path(view.run_dir.path))
    if report is None and not verdicts:
        return None
    shown = tuple(verdicts[-_MOST_VERDICTS:])
    hidden = len(verdicts) - len(shown)
    if report is None:
        return StragglerFacts(None, 0, None, (), shown, hidden)
    scores = tuple(_scores(report))[:_MOST_SCORES]
    return StragglerFacts(reported_at, report.ranks, report.relative_threshold, scores, shown, hidden)


def _scores(report: Report) -> Iterable[ScoreFacts]:
    for rule, section, scores in report.tables():
        what, _, kind = rule.partition("_")
        ordered = sorted((score, rank) for rank, score in scores.items())
        if not ordered:
            continue
        yield ScoreFacts(
            name=f"{kind} {one_line(section) if section else _TITLES.get(what, what)}",
            least=ordered[0][0],
            median=ordered[len(ordered) // 2][0],
            most=ordered[-1][0],
            worst=tuple(
                (rank, one_line(node) if (node := report.nodes.get(rank)) else None, score)
                for score, rank in ordered[:_MOST_WORST]
            ),
        )


_TITLES = {"gpu": "GPU", "overall": "overall"}


def _ranks(view: RunView, slowest: Sequence[int], memory: Iterable[RankMemory]) -> tuple[tuple[RankFacts, ...], int]:
    """Return the ranks of the newest attempt: all of a small run; of a large one who ended badly, then the slowest."""
    live = {item["rank"]: item for item in view.live}
    known = view.state.ranks
    ranks = sorted({*live, *known})
    shown = ranks
    if len(ranks) > _MOST_RANKS:
        bad = [r for r in ranks if r in known and known[r].state == "exited" and known[r].exit_code != 0]
        order = dict.fromkeys([*bad[: _MOST_RANKS // 2], *(r for r in slowest if r in known), *ranks])
        shown = sorted(list(order)[:_MOST_RANKS])
    amounts = {one.rank: one.words() for one in memory}
    told = (attrs.evolve(_rank(rank, known.get(rank), live.get(rank)), memory=amounts.get(rank, "")) for rank in shown)
    return tuple(told), len(ranks) - len(shown)


def _rank(rank: int, known: RankHistory | None, live: Mapping[str, Any] | None) -> RankFacts:
    node = one_line(known.host) if known is not None and known.host else None
    if live is not None:
        state = "done" if live["done"] else f"paused ({live['paused']})" if live["paused"] else "running"
        step = None if live["step"] is None else step_words(live["step"], live["step_is_global"])
        sections = tuple(one_line(name) for name in live["sections"])
        return RankFacts(rank, node, state, step, live["seconds_since_beat"], sections)
    if known is None:
        return RankFacts(rank, node, "unknown", None, None, ())
    state = known.state
    if state == "exited":
        state = f"ended by {known.signal}" if known.signal else f"exited with {known.exit_code}"
        state = "exited" if known.exit_code is None and not known.signal else state
    return RankFacts(rank, node, one_line(state), known.progress, None, ())
