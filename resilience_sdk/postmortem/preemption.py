"""The explanation of a stop: who asked, whether all ranks stopped at one step, and who hindered that. Pure.

Read by whoever writes the incident of a job that left: our launcher, or the monitor under another one. The journal of
the attempt tells what was said at the time, the pages how often each rank of this node has called `check()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import attrs

from resilience_sdk.attribution.exits import describe_exit
from resilience_sdk.attribution.taxonomy import lookup
from resilience_sdk.core.journal import Event
from resilience_sdk.incidents import CURE, STALL, Culprit, Evidence, Incident, compact_ranks, count_words
from resilience_sdk.incidents.record import injected_faults
from resilience_sdk.postmortem.cut_saves import CutSave
from resilience_sdk.preemption.reasons import PLANNED_EXIT, Askers, Hindrance, who_asked, whole
from resilience_sdk.recorder.page_reader import RankSnapshot

_TOLD, _UNTOLD = 0.9, 0.5  # confidence in the cause: somebody asked, or only the exit code 75 says so
_MOST_EXITS = 16
_MOST_GROUPS = 4
_NEVER = "no rank has called preemption.check()"
_NOTHING_SAVED = "the SDK saved nothing, what the script saved itself is kept"
_ADD_CHECK = "call preemption.check() once per step on every rank, or train by run.steps(), which saves and stops"


@attrs.frozen
class Hindered:
    """Ranks without which no stop could be agreed, and why. `culprits` may be empty: nobody knows which."""

    told: str
    cure: str
    culprits: tuple[Culprit, ...] = ()

    def __str__(self) -> str:
        """Return who it was and what, in words."""
        return f"{who(self.culprits)} {self.told}{where(self.culprits)}" if self.culprits else self.told


class Phase(Enum):
    """How far the ranks of this node had come in an attempt."""

    START_UP = "start-up"
    """None had completed a step, nor asked whether to stop."""
    TRAINING = "training"
    OVER = "over"
    """All had made their steps, and some had ended."""


@attrs.frozen
class Account:
    """The story of one attempt that was asked to leave."""

    askers: Askers
    is_agreed: bool
    """All ranks stopped at one check."""
    stopped_after: int | None
    """How many steps were complete at the stop, where that is known and counts over attempts."""
    reached: int | None
    """How many steps all ranks of this node had completed in the end, where steps count over attempts."""
    saved: int | None
    """After how many steps the newest checkpoint of the SDK was saved."""
    saved_here: bool
    """It was completed in this attempt."""
    skipped: str | None
    """Why the last save was not made."""
    hindered: tuple[Hindered, ...]
    saved_by: tuple[str, int] | None = None
    """Who has a checkpoint of its own beside those of the SDK, and after how many steps that was saved."""
    stood: str | None = None
    """What stood still when it was asked, as the begin of a sentence; the incident of that says the rest."""
    injected: tuple[Evidence, ...] = ()
    """The SIGTERM may be of the SDK's own injection."""
    phase: Phase = Phase.TRAINING
    """Where the ranks were when they left."""
    is_declared: bool = False
    """The script uses the SDK, so that its steps would have been seen."""
    shows_steps: bool = False
    """The same, or it has an optimizer."""
    cut: CutSave | None = None
    """Ranks that were ended before they had left by themselves."""

    @property
    def is_settled(self) -> bool:
        """Tell whether all ranks stopped as they were asked, and what they had done was saved."""
        return self.is_agreed and self.saved_here

    @property
    def lost_steps(self) -> int | None:
        """Return how many steps have to be done again; None where that is not known."""
        if self.phase is Phase.START_UP and not self.is_agreed:
            return 0 if self.is_in_start_up else None
        done = self.stopped_after if self.is_agreed else self.reached
        # Without a checkpoint of ours the script may have saved by itself.
        saved = self.saved if self.saved is not None or self.saved_by is None else self.saved_by[1]
        return None if done is None or saved is None else max(0, done - saved)

    @property
    def advice(self) -> str | None:
        """Return what to change, so that the next stop works; None where this one did."""
        cures = [one.cure for one in self._shown]
        if self.cut is not None and self.cut.cure is not None:
            cures.insert(0, self.cut.cure)
        elif self.cut is not None and not cures:
            cures.append(_ADD_CHECK)
        return "; ".join(dict.fromkeys(cures)) or None

    @property
    def is_in_start_up(self) -> bool:
        """Whether the ranks are known to have made no step yet: they use the SDK, and have shown none."""
        return self.phase is Phase.START_UP and self.is_declared

    @property
    def _is_planned(self) -> bool:
        """Whether nobody has asked: the training left by its own options."""
        return self.askers.cause == PLANNED_EXIT

    @property
    def _shown(self) -> tuple[Hindered, ...]:
        """Who was late is told of an agreed stop only where there was no time left for a save."""
        if self.stood is not None:  # ranks that wait for one that stands still cannot call it: no advice cures that
            return ()
        if self._is_planned:
            return ()
        return () if self.is_agreed and self.skipped is None else self.hindered

    def reason(self) -> str:
        """Return it in one sentence without a full stop, for the screen and the outcome."""
        told = "" if self.stood is None else f"{self.stood}; then "
        if self.cut is not None:
            told = f"{self.cut}; {self.cut.lost}; {told}"
        if self._is_planned:
            return f"{told}the job left by {self.askers.asked[0]}; {self._told_lost()}"
        told += "the job was asked to leave" + (f" by {self.askers.asked[0]}" if self.askers.asked else "")
        told += f" (and before that, in vain, by {self.askers.in_vain[-1]})" if self.askers.in_vain else ""
        if self.is_agreed:
            at = "" if self.stopped_after is None else f" after {count_words(self.stopped_after)}"
            told += f"; all ranks stopped{at}, {self._told_lost()}"
        elif self.phase is Phase.START_UP and not self._shown and self.stood is None:
            when = "before its first step" if self.shows_steps else "before a step of it was seen"
            told += f", {when}; {self._told_lost()}"
        elif self.phase is Phase.OVER and not self._shown and self.stood is None:
            done = "" if self.reached is None else f" ({count_words(self.reached)})"
            told += f", when its loop had ended{done}; {self._told_lost()}"
        elif self._shown or self.stood is not None:
            told += f"; no stop was agreed; {self._told_lost()}"
        # Parts of their own: a page that has said one of them leaves it out.
        return "; ".join([told, *map(str, self._shown), *([f"to do: {self.advice}"] if self.advice else [])])

    def _told_lost(self) -> str:
        if self.phase is Phase.START_UP and not self.is_agreed:
            if self.is_in_start_up:
                return "nothing is lost"
            if self.saved is not None:
                return f"the newest checkpoint is after {count_words(self.saved)}"
        if self.saved is None and self.saved_by is None and self.cut is not None:
            return "the SDK saved nothing, what the script saved before itself is kept"
        if self.saved is None and self.saved_by is not None:
            by, step = self.saved_by
            return f"{by}'s own newest checkpoint is after {count_words(step)}"
        if self.saved is None:
            return _NOTHING_SAVED  # how many steps there were, is said beside it
        return lost_words(self.stopped_after if self.is_agreed else self.reached, self.saved)

    def incident(self, attempt: int, now: float, exit_codes: Mapping[int, int | None]) -> Incident:
        """Return the incident of the stop, which is not written yet. `now` is Unix time in seconds."""
        entry = lookup(self.askers.cause)
        ends = [f"rank {rank} {describe_exit(code)}" for rank, code in sorted(exit_codes.items())]
        told_ends = ", ".join(ends[:_MOST_EXITS]) + (", ..." if len(ends) > _MOST_EXITS else "")
        return Incident(
            kind="preemption",
            attempt=attempt,
            detected_at=now,
            culprits=tuple({c.rank: c for one in self._shown for c in one.culprits}.values()),
            category=entry.category,
            cause=entry.cause,
            action=entry.action if self.stood is None else "restart",
            confidence=_TOLD if self.askers.asked else _UNTOLD,
            lost_steps=self.lost_steps,
            evidence=(
                *([] if self.cut is None else [Evidence("save", f"{self.cut}; {self.cut.lost}")]),
                *([] if self.stood is None else [Evidence(STALL, self.stood)]),
                Evidence("notice", "; ".join(self.askers.asked) or "by whom is not known"),
                *(Evidence("notice", f"before that, in vain: {one}") for one in self.askers.in_vain),
                *(Evidence("hindrance", str(one)) for one in self._shown),
                Evidence("checkpoint", self._told_checkpoint()),
                Evidence("exit", told_ends or "no exit code is known"),
                *self.injected,
                *([Evidence(CURE, self.advice)] if self.advice else []),
            ),
        )

    def _told_checkpoint(self) -> str:
        if self.saved is None:
            told = _NOTHING_SAVED if self.cut is None else "the SDK saved nothing"
            if self.saved_by is not None:
                told = f"the SDK saved no checkpoint, {self.saved_by[0]} its own after {count_words(self.saved_by[1])}"
        else:
            told = f"{'saved' if self.saved_here else 'the newest was saved'} after {count_words(self.saved)}"
        if self.is_agreed and self.stopped_after is not None:
            told += f"; all ranks stopped after {count_words(self.stopped_after)}"
        elif not self.is_agreed and self.reached is not None:
            told += f"; {count_words(self.reached)} done"
        told += "" if self.lost_steps is None else f", {count_words(self.lost_steps)} lost"
        return told + (f"; {self.skipped}" if self.skipped else "")


def lost_words(done: int | None, saved: int | None) -> str:
    """Say how many steps have to be done again, of those that were `done`; `saved` is the newest checkpoint's."""
    if saved is None:
        return _NOTHING_SAVED if done is None else f"{count_words(done)} done, {_NOTHING_SAVED}"
    if done is None:
        kept = f"the newest checkpoint is after {count_words(saved)}"
        return f"{kept}; what came after it is lost (give heartbeat() or check() the step to have it counted)"
    return f"{count_words(max(0, done - saved))} lost"


def completed_steps(pages: Iterable[RankSnapshot]) -> int | None:
    """Return how many steps every one of these ranks has completed; None where steps do not count over attempts.

    A step that a rank is still in, or that an exception has ended, is none.
    """
    done = [page.completed_steps for page in pages]
    return min((steps for steps in done if steps is not None), default=None)


def account(
    told: Sequence[Mapping[str, Any]],
    pages: Mapping[int, RankSnapshot],
    *,
    node: str,
    saved: int | None,
    saved_here: bool,
    died: Mapping[int, str],
    cut: CutSave | None = None,
) -> Account:
    """Return the story of an attempt.

    `told` are its events, by time; `pages` the last readings of this node's ranks. `saved` is the newest checkpoint,
    `saved_here` whether this attempt made it. `died`: which ranks of this node ended of their own, and how, in words.
    `cut`: which were ended before they had left.
    """
    stops = [event for event in told if event["event"] == Event.STOP_AGREED.value]
    reached = completed_steps(pages.values())
    hindered = [
        Hindered(how, f"find out why rank {rank} ended", (_culprit(rank, pages, node),)) for rank, how in died.items()
    ]
    phase = phase_of(pages.values())
    if phase is not Phase.START_UP:
        hindered += _silent(pages, node)
    hindered += _hindered(told, {culprit.rank for one in hindered for culprit in one.culprits})
    return Account(
        askers=who_asked(told),
        is_agreed=bool(stops),
        stopped_after=_stopped_after(told, stops, saved, reached) if stops else None,
        reached=reached,
        saved=saved,
        saved_here=saved_here,
        skipped=next((_skip(event) for event in told if _is_last_save(event)), None),
        hindered=tuple(hindered),
        saved_by=next((found for event in reversed(told) if (found := _saved_by(event)) is not None), None),
        injected=tuple(injected_faults(told)),
        phase=phase,
        is_declared=any(page.declared for page in pages.values()),
        shows_steps=any(page.declared or page.trains for page in pages.values()),
        cut=cut,
    )


def phase_of(pages: Iterable[RankSnapshot]) -> Phase:
    """Return how far the ranks had come, by their last pages."""
    pages = list(pages)
    if pages and not any(page.beats or page.checks for page in pages):
        return Phase.START_UP
    has_ended = any(page.exit_state == "clean" for page in pages)
    if pages and (all(page.done for page in pages) or (has_ended and len({made_words(page) for page in pages}) == 1)):
        return Phase.OVER
    return Phase.TRAINING


def made_words(page: RankSnapshot) -> tuple[int, int]:
    """Return what a rank has made, to be compared: how often it has asked whether to stop, and its completed steps."""
    return page.checks, page.beats


def _saved_by(event: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return whose own checkpoint an event tells of, and after how many steps it was saved."""
    step = whole(event.get("step"))
    return (str(event.get("by")), step) if event["event"] == Event.FRAMEWORK_CKPT.value and step is not None else None


def _stopped_after(
    told: Sequence[Mapping[str, Any]], stops: Sequence[Mapping[str, Any]], saved: int | None, reached: int | None
) -> int | None:
    """Return how many steps were complete at the agreed stop.

    What was saved there tells it best: a loop of the user's own may give `check()` no step, or that of its index.
    """
    for at, event in enumerate(told):
        is_newest = saved is not None and event.get("step") == saved
        if event["event"] == Event.CKPT_BEGIN.value and is_newest and _had_stopped(told[:at], event.get("rank")):
            return saved
    return max((step for stop in stops if (step := whole(stop.get("step"))) is not None), default=reached)


def _had_stopped(told: Iterable[Mapping[str, Any]], rank: object) -> bool:
    """Tell whether a rank had come to the agreed stop: events of one rank have the times of one clock."""
    return any(event["event"] == Event.STOP_AGREED.value and event.get("rank") == rank for event in told)


def who(culprits: Iterable[Culprit]) -> str:
    """Return ranks with their nodes: `rank 3 on n0, ranks 8-11 on n1`."""
    return _grouped(culprits, lambda culprit: f" on {culprit.node}" if culprit.node else "")


def where(culprits: Sequence[Culprit]) -> str:
    """Return what they were in, where that is known: ` (in section eval at step 12)`, with ranks where it differs."""
    places = {_place(culprit) for culprit in culprits}
    told = places.pop().strip() if len(places) == 1 else _grouped(culprits, _place)
    return f" ({told})" if told else ""


def _place(culprit: Culprit) -> str:
    section = f" in section {culprit.section}" if culprit.section else ""
    return section + (f" at {culprit.told_step}" if culprit.told_step else "")


def _grouped(culprits: Iterable[Culprit], by: Callable[[Culprit], str]) -> str:
    groups: dict[str, list[int]] = {}
    for culprit in culprits:
        groups.setdefault(by(culprit), []).append(culprit.rank)
    told = [f"rank{'s' * (len(ranks) > 1)} {compact_ranks(ranks)}{group}" for group, ranks in groups.items()]
    return ", ".join(told[:_MOST_GROUPS]) + (", ..." if len(told) > _MOST_GROUPS else "")


def _silent(pages: Mapping[int, RankSnapshot], node: str) -> Iterator[Hindered]:
    """Yield the ranks of this node that have never called `check()`."""
    silent = [rank for rank, page in sorted(pages.items()) if not page.checks]
    if silent and len(silent) == len(pages):
        yield Hindered(_NEVER, _ADD_CHECK)
    elif silent:
        yield hindered_by(Hindrance.NO_CHECK, tuple(_culprit(rank, pages, node) for rank in silent))


def _hindered(told: Iterable[Mapping[str, Any]], known: set[int]) -> Iterator[Hindered]:
    """Yield whom the events of this attempt name, but those that are `known`, and nobody twice."""
    seen: set[object] = set()
    for event in told:
        kind = next((one for one in Hindrance if one.value == event.get("hindrance")), None)
        if event["event"] != Event.DEGRADED.value or kind is None:
            continue
        named = Incident.from_json({"culprits": event.get("culprits")}).culprits
        culprits = tuple(culprit for culprit in named if culprit.rank not in known)
        identity = kind, tuple(culprit.rank for culprit in culprits)
        if (named and not culprits) or identity in seen:
            continue
        seen.add(identity)
        yield hindered_by(kind, culprits)


def hindered_by(kind: Hindrance, culprits: tuple[Culprit, ...]) -> Hindered:
    """Return the words for it."""
    ranks = f"rank{'s' if len(culprits) > 1 else ''} {compact_ranks(c.rank for c in culprits)}" if culprits else "it"
    return Hindered(kind.told if culprits else f"a rank {kind.told}", kind.cure.format(ranks=ranks), culprits)


def _culprit(rank: int, pages: Mapping[int, RankSnapshot], node: str) -> Culprit:
    page = pages.get(rank)
    return Culprit(rank, node) if page is None else culprit_of(page, node)


def culprit_of(page: RankSnapshot, node: str | None) -> Culprit:
    """Return a rank and where its page says that it is."""
    return Culprit(page.rank, node, page.step, page.main_lane.section, step_is_global=page.step_is_global)


def _is_last_save(event: Mapping[str, Any]) -> bool:
    return event["event"] == Event.CKPT_SKIP.value and "expected_s" in event


def _skip(event: Mapping[str, Any]) -> str:
    takes, left = (_seconds(event.get(name)) for name in ("expected_s", "time_left_s"))
    return f"the last save was skipped: it takes about {takes}, {left} were left"


def _seconds(value: object) -> str:
    return f"{float(value if isinstance(value, (int, float)) else 0.0):.1f} s"
