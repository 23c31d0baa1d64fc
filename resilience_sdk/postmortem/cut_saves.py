"""Saves that were cut: ranks that were ended, by whoever ended the job, before they had left by themselves. Pure.

After the agreed stop a loop of the user's own saves; nobody knows how long that takes, and the time to leave ends it.
What it was writing then is not whole, and that has to be said first.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from resilience_sdk.attribution.exceptions import is_users_frame
from resilience_sdk.core.journal import Event
from resilience_sdk.hang.evidence import main_frames, parse_faulthandler
from resilience_sdk.incidents.record import ranks_words
from resilience_sdk.postmortem.facts import AttemptFacts, RankExit, RankTrace, unix_s

_ENDED_BY = (-int(signal.SIGKILL), -int(signal.SIGTERM))
_SAVES = re.compile(r"save|dump|serializ|write", re.IGNORECASE)  # of functions: to `checkpoint` may be activations
_SAVING_SECTION = re.compile(r"checkpoint|" + _SAVES.pattern, re.IGNORECASE)
_TORCH_SAVE = "/torch/serialization.py"
_LAST_S = 5.0  # a stack that is no older than this shows where a process was when it ended


@attrs.frozen
class CutSave:
    """What ranks were at when their time to leave was over."""

    ranks: tuple[int, ...]
    lasted_s: float | None
    """From the agreed stop to the end; None where no stop was agreed."""
    grace_s: float | None
    """How long they had from the notice on; None where nobody has said."""
    place: str | None
    """Where in their code they were, as far as that is known."""
    is_save: bool
    """The place is one that saves."""
    is_by_us: bool = True
    """Our launcher ended them, when the time of `preempt_time` was over."""

    def __str__(self) -> str:
        """Return it in words, without a full stop."""
        doing = "while saving" if self.is_save else "before leaving by itself" if len(self.ranks) == 1 else ""
        doing = doing or "before leaving by themselves"
        at = f" (in {self.place})" if self.place else ""
        ended = f"{ranks_words(self.ranks)} {'was' if len(self.ranks) == 1 else 'were'} ended {doing}{at}"
        since = "" if self.lasted_s is None else f", {self.lasted_s:.1f} s after all ranks had stopped"
        grace = "" if self.grace_s is None or not self.is_by_us else f": the {self.grace_s:g} s to leave were over"
        return f"{ended}{since}{grace}"

    @property
    def lost(self) -> str:
        """What is lost by it."""
        return "what was being written is not whole, and what it was to keep is lost unless it was saved before"

    @property
    def cure(self) -> str:
        """What to change."""
        if not self.is_by_us:
            return "find out who has ended it: torchrun does after 30 s, `resilience run` after preempt_time"
        need = "what the save needs" if self.lasted_s is None else f"well above {self.lasted_s:.0f} s"
        return f"raise preempt_time (--preempt-time) to {need}"


def find_cut(facts: AttemptFacts) -> CutSave | None:
    """Return which ranks of this node were ended before they had left, though they had stopped or were saving."""
    told = facts.events
    stopped = {event.get("rank"): float(event["t"]) for event in told if event["event"] == Event.STOP_AGREED.value}
    asked_s = max((float(event["t"]) for event in told if event["event"] == Event.PREEMPT_NOTICE.value), default=None)
    cut: dict[int, tuple[float | None, str | None, bool]] = {}
    for end in facts.exits:
        trace = facts.traces.get(end.rank)
        if end.exit_code not in _ENDED_BY or end.rank in facts.asked or _had_left(trace):
            continue
        since = stopped.get(end.rank)
        place, is_save = _place(trace, _shows_end(trace, end, asked_s if since is None else since))
        if end.rank in stopped or is_save:
            cut[end.rank] = (None if since is None else max(0.0, unix_s(end.at_ns) - since), place, is_save)
    if not cut:
        return None
    saving = [found for found in cut.values() if found[2]] or list(cut.values())
    lasted = [found[0] for found in cut.values() if found[0] is not None]
    return CutSave(
        tuple(sorted(cut)),
        max(lasted, default=None),
        _grace(told),
        next((found[1] for found in saving if found[1]), None),
        any(found[2] for found in cut.values()),
        is_by_us=all(end.ended_by_us for end in facts.exits if end.rank in cut),
    )


def _had_left(trace: RankTrace | None) -> bool:
    page = None if trace is None else trace.snapshot
    return page is not None and page.exit_state != "running"


def _shows_end(trace: RankTrace | None, end: RankExit, asked_s: float | None) -> bool:
    """Tell whether the last stack of a rank is of its end, and not of a stall before it was asked to leave."""
    if trace is None or trace.stacks_ns is None:
        return True
    written_s = unix_s(trace.stacks_ns)
    return written_s > unix_s(end.at_ns) - _LAST_S or (asked_s is not None and written_s >= asked_s)


def _place(trace: RankTrace | None, has_stack: bool) -> tuple[str | None, bool]:
    """Return where a rank was, and whether that saves: by its last stack, else by the section that its page shows."""
    frames: Sequence[str] = ()
    if trace is not None and trace.stacks and has_stack:
        frames = main_frames(parse_faulthandler(trace.stacks))
    users = next((frame for frame in frames if is_users_frame(frame)), None)
    if users is not None:
        where, _, function = users.rpartition(" ")
        above = frames[: frames.index(users) + 1]
        shown = f"{os.path.basename(where)} {function}()"
        if any(_TORCH_SAVE in frame and "save" in frame.rpartition(" ")[2] for frame in above):
            return f"torch.save at {shown}", True
        return shown, any(_SAVES.search(frame.rpartition(" ")[2]) for frame in frames)
    section = trace.snapshot.main_lane.section if trace is not None and trace.snapshot is not None else None
    return (None, False) if section is None else (f"section {section}", bool(_SAVING_SECTION.search(section)))


def _grace(told: Sequence[Mapping[str, Any]]) -> float | None:
    left = [event.get("time_left_s") for event in told if event["event"] == Event.PREEMPT_NOTICE.value]
    known = [float(value) for value in left if isinstance(value, (int, float)) and not isinstance(value, bool)]
    return round(min(known), 1) if known else None
