"""Saves that were cut: ranks that were ended, by whoever ended the job, before they had left by themselves. Pure.

After the agreed stop a loop of the user's own saves; nobody knows how long that takes, and the time to leave ends it.
What it was writing then is not whole, and that has to be said first.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from resilience_sdk.attribution.exceptions import is_our_frame, is_users_frame
from resilience_sdk.core.console import printable
from resilience_sdk.core.journal import Event
from resilience_sdk.hang.evidence import main_frames, parse_faulthandler
from resilience_sdk.hang.saves import is_named_save, names_checkpoint, trains, words_of, writes_a_file
from resilience_sdk.incidents.record import ranks_words
from resilience_sdk.postmortem.facts import AttemptFacts, RankExit, RankTrace, unix_s

_ENDED_BY = (-int(signal.SIGKILL), -int(signal.SIGTERM))
# Words of the innermost function of the user's: whoever calls it may do anything. To `checkpoint` may be activations.
_SAVES = frozenset({"save", "saves", "saving", "dump", "dumps", "serialize", "write", "writes", "writing"})
_DOES_MORE = frozenset({"and", "then", "or"})
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
    unheard: str | None = None
    """The signal that ended them at once, as nothing in them handles it."""
    files: tuple[str, ...] = ()
    """What was being written, as far as that is known."""

    def __str__(self) -> str:
        """Return it in words, without a full stop."""
        doing = "while saving" if self.is_save else "before leaving by itself" if len(self.ranks) == 1 else ""
        doing = doing or "before leaving by themselves"
        doing += f" {printable(os.path.basename(self.files[0]))}{self._more}" if self.files else ""
        at = f" (in {self.place})" if self.place else ""
        ended = f"{ranks_words(self.ranks)} {'was' if len(self.ranks) == 1 else 'were'} ended {doing}{at}"
        if self.unheard is not None:
            return f"{ended} by {self.unheard}, which nothing there handles"
        since = "" if self.lasted_s is None else f", {self.lasted_s:.1f} s after all ranks had stopped"
        grace = "" if self.grace_s is None or not self.is_by_us else f": the {self.grace_s:g} s to leave were over"
        return f"{ended}{since}{grace}"

    @property
    def lost(self) -> str:
        """What is lost by it."""
        what = f"{printable(self.files[0])}{self._more}" if self.files else "what was being written"
        verb = "are" if len(self.files) > 1 else "is"
        return f"{what} {verb} not whole, and what was to be kept there is lost unless it was saved before"

    @property
    def _more(self) -> str:
        return f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""

    @property
    def cure(self) -> str | None:
        """What to change; None where that is to hear the signal, which is said of every such rank."""
        if self.unheard is not None:
            return None
        if not self.is_by_us:
            return "find out who has ended it: torchrun does after 30 s, `resilience run` after preempt_time"
        need = "what the save needs" if self.lasted_s is None else f"well above {self.lasted_s:.0f} s"
        return f"raise preempt_time (--preempt-time) to {need}"


def find_cut(facts: AttemptFacts) -> CutSave | None:
    """Return which ranks of this node were ended before they had left, though they had stopped or were saving."""
    told = facts.events
    stopped = {event.get("rank"): float(event["t"]) for event in told if event["event"] == Event.STOP_AGREED.value}
    unheard, files = _unheard(told), _files(told)
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
    by = {signal.Signals(-end.exit_code).name for end in facts.exits if end.rank in cut and end.exit_code}
    saving = [found for found in cut.values() if found[2]] or list(cut.values())
    lasted = [found[0] for found in cut.values() if found[0] is not None]
    return CutSave(
        tuple(sorted(cut)),
        max(lasted, default=None),
        _grace(told),
        next((found[1] for found in saving if found[1]), None),
        any(found[2] for found in cut.values()),
        is_by_us=all(end.ended_by_us for end in facts.exits if end.rank in cut),
        unheard=" and ".join(sorted(by)) if unheard.issuperset(cut) else None,
        files=tuple(dict.fromkeys(files[rank] for rank, found in sorted(cut.items()) if found[2] and rank in files)),
    )


def _files(told: Sequence[Mapping[str, Any]]) -> Mapping[int, str]:
    """Return the file that each rank was writing when it was ended, by what its launcher has seen."""
    found: dict[int, str] = {}
    for event in told:
        writing = event.get("writing")
        if event["event"] == Event.SIGNAL_SENT.value and isinstance(writing, Mapping):
            found |= {int(rank): path for rank, path in writing.items() if rank.isdigit() and isinstance(path, str)}
    return found


def _unheard(told: Sequence[Mapping[str, Any]]) -> set[int]:
    """Return the ranks that a signal has ended at once, as nothing there handles it."""
    lists = (event.get("unheard") for event in told if event["event"] == Event.SIGNAL_SENT.value)
    return {rank for ranks in lists if isinstance(ranks, list) for rank in ranks if isinstance(rank, int)}


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
    threads = parse_faulthandler(trace.stacks) if trace is not None and trace.stacks and has_stack else ()
    main = main_frames(threads)
    found = _place_of(main)
    if found is not None and found[1]:
        return found
    # A thread of the script's that saves behind the loop; ours leaves what it has not finished aside.
    others = (one.frames for one in threads if any(map(_is_torch_save, one.frames)))
    saving = next((_place_of(frames) for frames in others if not any(map(is_our_frame, frames))), None)
    if saving is not None or found is not None:
        return saving or found or (None, False)
    section = trace.snapshot.main_lane.section if trace is not None and trace.snapshot is not None else None
    if section is None:
        return None, False
    return f"section {section}", names_checkpoint(section) or bool(words_of(section) & _SAVES)


def _place_of(frames: Sequence[str]) -> tuple[str, bool] | None:
    """Return where in the user's code a stack is, and whether that saves; None where none of that code is in it."""
    saver = next((at for at, frame in enumerate(frames) if _is_torch_save(frame)), 0)  # it may write by a user's file
    users = next((frame for frame in frames[saver:] if is_users_frame(frame)), None)
    if users is None:
        return None
    where, _, function = users.rpartition(" ")
    above = frames[: frames.index(users) + 1]
    shown = f"{os.path.basename(where)} {function}()"
    if any(map(_is_torch_save, above)):
        return f"torch.save at {shown}", True
    is_save = writes_a_file(above) or is_named_save(frames)
    words = words_of(function)
    return shown, is_save or (bool(words & _SAVES) and not words & _DOES_MORE and not trains(above))


def _is_torch_save(frame: str) -> bool:
    return _TORCH_SAVE in frame and "save" in frame.rpartition(" ")[2]


def _grace(told: Sequence[Mapping[str, Any]]) -> float | None:
    left = [event.get("time_left_s") for event in told if event["event"] == Event.PREEMPT_NOTICE.value]
    known = [float(value) for value in left if isinstance(value, (int, float)) and not isinstance(value, bool)]
    return round(min(known), 1) if known else None
