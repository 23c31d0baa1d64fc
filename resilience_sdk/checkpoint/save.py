"""Saves, one after the other: state is staged, written by every rank and committed by rank 0.

In the thread that trains, or in one beside it, without a collective: each rank's thread leaves a small file beside what
it has written, and rank 0's waits for all of them before it commits. Collectives would have to keep their order with
those of the training, and would hang with a dead rank.
"""

from __future__ import annotations

import atexit
import functools
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

import resilience_sdk
from resilience_sdk.checkpoint.background import (
    PATIENCE_S,
    Background,
    await_close,
    await_parts,
    leave_part,
    own_process,
)
from resilience_sdk.checkpoint.commit import discard
from resilience_sdk.checkpoint.failure import Unsaved, number_of, number_of_parts
from resilience_sdk.checkpoint.last_save import End, left_out_words, lost_words, resume_words, spare_descriptors
from resilience_sdk.checkpoint.manifest import SHARDED, step_name
from resilience_sdk.checkpoint.policy import SavePolicy
from resilience_sdk.checkpoint.ranks import BackgroundGroup, Ranks, describe
from resilience_sdk.checkpoint.store import CheckpointStore
from resilience_sdk.core.clock import NS_PER_S, Clock
from resilience_sdk.core.console import say, say_once
from resilience_sdk.core.journal import Event
from resilience_sdk.errors import CheckpointError
from resilience_sdk.torch_saves import ignore, listen, place_of

if TYPE_CHECKING:
    from resilience_sdk.checkpoint.capture import RankPart
    from resilience_sdk.checkpoint.memory_staging import Stager
    from resilience_sdk.checkpoint.state import StateMap


# How long an end of the process waits for what is being written: within the grace of schedulers and launchers.
EXIT_PATIENCE_S = 30.0
# How far the end of a save may lag behind on one rank: a name in a directory that is cached.
_LAG_S = 5.0


@attrs.frozen
class GoodCheckpoint:
    """A checkpoint that is whole: how many steps it has completed, and its directory."""

    step: int
    path: Path


class Saver:
    """Saves `state` and `values` into `store`; of the thread that trains, on every rank.

    `capture_position` returns the data position as a JSON value, or None. `emit(event, step, **fields)` journals.
    `stager`: takes what `writer` writes, for a save in the background.
    """

    def __init__(
        self,
        state: StateMap,
        values: dict[str, Any],
        store: CheckpointStore,
        policy: SavePolicy,
        capture_position: Callable[[], Any],
        emit: Callable[..., None],
        clock: Clock,
        writer: Callable[[Path], object] | None = None,
        stager: Stager | None = None,
    ) -> None:

        from resilience_sdk.checkpoint.capture import Staging

        self._state = state
        self._values = values
        self._store = store
        self._policy = policy
        self._capture_position = capture_position
        self._record = emit
        self._clock = clock
        self._writer = writer
        self._stager = stager
        self._staging = Staging()
        self._last_good: GoodCheckpoint | None = None
        self._unsaved: Unsaved | None = None
        self._failed_here = self._script_saved = False
        self._is_first, self._pid = True, os.getpid()
        self._saved_values: str | None = None
        self._is_short = False  # saves are left out for want of time, which has been said
        self._background: Background | None = None
        self.is_checked: Callable[[], bool] = lambda: True
        """Whether digests go into the manifest, for the resume to be compared with."""
        self.has_open_window: Callable[[], bool] = lambda: False
        """Whether gradients were added up that are not saved."""
        self.other_optimizers: Sequence[str] = ()
        """The classes of optimizers that train what is saved and are not saved."""
        self.also: Callable[[], Mapping[str, Any]] | None = None
        """Objects that `writer` saves by itself, which have digests, too."""
        self._overtaken: Background | None = None
        """One whose end this rank has not heard of yet, though a save that came after it is over."""
        self._group = BackgroundGroup(PATIENCE_S)  # of the threads that write what is sharded

    @property
    def last_good(self) -> GoodCheckpoint | None:
        """The newest checkpoint that is known to be whole."""
        self.settle(0.0)
        return self._last_good

    @property
    def unsaved(self) -> Unsaved | None:
        """What the newest save came to, where it was not made; None where it was. On all ranks."""
        self.settle(0.0)
        return self._unsaved

    @property
    def failed_here(self) -> bool:
        """Whether it was this rank that could not write its part of the newest save."""
        return self._failed_here

    @property
    def is_busy(self) -> bool:
        """Whether a save is being written in the background. Any thread."""
        behind = self._background
        return behind is not None and behind.pid == os.getpid() and not behind.wait(0.0)

    def adopt(self, step: int, values: str) -> None:
        """Take note of the checkpoint that was resumed, and of its values as JSON text."""
        self._last_good = GoodCheckpoint(step, self._store.path_of(step))
        self._saved_values = values

    def save(
        self,
        step: int,
        ranks: Ranks,
        *,
        in_background: bool,
        left_s: float | None = None,
        anew: bool = False,
        last: bool = False,
    ) -> bool:
        """Save; tell whether a whole checkpoint of `step` is there, or has been begun in the background. Collective.

        `left_s` (rank 0's): seconds until the job is ended. One that leaves no time for another is left out then.
        `anew`: also where the last good one is of this step and of these values. `last`: no training goes on behind it;
        the caller says what it came to.
        """

        from resilience_sdk.checkpoint.capture import first_error, with_own, write_part

        began_s = self._now_s()
        self._failed_here, self._script_saved, self._is_first = False, False, ranks.rank == 0
        self._pid = os.getpid()
        _await_at_exit(self)
        spare_descriptors.keep()
        order = ranks.broadcast(self._open(step, in_background, left_s, anew) if ranks.rank == 0 else None)
        if order["last_good"] is not None:
            self._last_good = GoodCheckpoint(order["last_good"], self._store.path_of(order["last_good"]))
        self._policy.next_question = order["next_question"]
        if order["is_there"] or order["is_left_out"]:
            self._overtaken = self._background if order["is_there"] else None
            self._note(None if order["is_there"] else Unsaved(step, str(order["error"]), is_left_out=True))
            return bool(order["is_there"])
        unfinished = None if order["name"] is None else self._store.directory / order["name"]
        handed_over = False
        try:
            part, ready = self._take_part(step, ranks, unfinished, order, in_background)
            own_digests = ready.pop("digests")
            taken = ranks.gather({**ready, "digested": bool(own_digests)})
            error = first_error(taken, step)
            if error is None and part is not None and taken[0]["digested"]:
                # Not gathered: of a thousand buffers on thousands of ranks that would be too much for each of them.
                part = with_own(self._state, part, own_digests, ranks.broadcast(own_digests))
            if error is None and part is not None and part.spread and in_background:
                error = self._meet_beside(ranks)
            if error is None and part is not None and unfinished is not None and in_background:
                processes = [one["process"] for one in taken]
                handed_over = self._write_behind(step, ranks, unfinished, part, order, began_s, processes)
                return handed_over
            parts = [{"error": error, "number": number_of_parts(taken)}]
            if error is None and part is not None and unfinished is not None:
                own = write_part(part, unfinished, ranks, mode=self._store.file_mode)
                self._failed_here = own["error"] is not None
                parts = ranks.gather(own)
            outcome = self._close(step, unfinished, parts, order, began_s, last=last) if ranks.rank == 0 else None
            outcome = ranks.broadcast(outcome)
        finally:
            # After a commit the directory has another name; whatever else ends here leaves nothing behind.
            if ranks.rank == 0 and unfinished is not None and not handed_over:
                discard(unfinished)
        return self._conclude(step, order, outcome, ranks.rank)

    def _open(self, step: int, in_background: bool, left_s: float | None, anew: bool) -> dict[str, Any]:
        """Begin a save on rank 0: make its directory, or find that there is nothing to do."""
        from resilience_sdk.checkpoint.payload import encode_values

        order: dict[str, Any] = {"is_there": False, "is_left_out": False, "name": None, "error": None}
        order.update(number=None, values="", token="", last_good=None, next_question=step + 1)
        # It is due all the same: not to be asked for after each step until it can be made.
        left_out = {"is_left_out": True, "next_question": self._policy.postpone(step)}
        is_settled = self.settle(0.0 if in_background else None)
        if self._last_good is not None:
            order["last_good"] = self._last_good.step
        if not is_settled:
            say_once("busy", f"the save before step {step} is still being written: steps between are not saved")
            return {**order, **left_out, "error": "the save before it was still being written"}
        if left_s is not None and left_s < 2 * self._policy.expected_save_s:
            if not self._is_short:
                say(f"no save at step {step}: {left_s:.1f} s are left, which are kept for the last one")
                self._record(Event.CKPT_SKIP, step, why="no time before the last save", time_left_s=left_s)
            self._is_short = True
            return {**order, **left_out, "error": f"{left_s:.1f} s were left"}
        self._is_short = False
        try:
            order["values"] = encode_values(self._values)
            if order["last_good"] == step and order["values"] == self._saved_values and not anew:
                return {**order, "is_there": True}
            self._record(Event.CKPT_BEGIN, step)
            order["token"] = os.urandom(4).hex()
            order["name"] = self._store.begin(step, order["token"]).name
        except (OSError, CheckpointError) as error:
            order["error"], order["number"] = describe(error), number_of(error)
        return order

    def _take_part(
        self, step: int, ranks: Ranks, unfinished: Path | None, order: Mapping[str, Any], in_background: bool
    ) -> tuple[RankPart | None, dict[str, Any]]:
        """Take this rank's part of the state; an error is part of the answer, since all ranks must learn of it."""

        from resilience_sdk.checkpoint import by_rank
        from resilience_sdk.checkpoint.capture import capture_part, copy_part, with_digests, with_values

        ready: dict[str, Any] = {"error": order["error"] if ranks.rank == 0 else None, "step": step}
        ready["number"] = order.get("number")
        ready["process"] = own_process() if in_background else None
        ready["digests"] = {}
        part = None
        try:
            # The thread of a failed save may still write from the copies that are about to be overwritten.
            if self._background is not None and not self._background.wait_written(_LAG_S):
                raise CheckpointError(f"the save of step {self._background.step} is still being written")
            if unfinished is not None:
                if self._writer is not None and not unfinished.is_dir():
                    # A framework would make it here, on this node alone, and nobody would miss what is in it.
                    raise CheckpointError(f"{unfinished} is not there: put the run directory on storage that all share")
                position = self._capture_position()
                values, is_checked = order["values"], self.is_checked()
                part = capture_part(self._state, position, ranks.rank, values, self._writer, is_checked=is_checked)
                if self.has_open_window():
                    part = attrs.evolve(part, document={**part.document, "open_window": True})
                if self.other_optimizers:
                    part = attrs.evolve(part, document={**part.document, "other_optimizers": [*self.other_optimizers]})
                if ranks.size > 1:
                    part = with_values(part, self._values)
                    ready["digests"] = by_rank.digests(self._state)
                if is_checked and self.also is not None:
                    part = with_digests(part, self.also)
                part = copy_part(part, self._staging) if in_background else part
                if part.spread and ranks.rank == 0:
                    (unfinished / SHARDED).mkdir(mode=self._store.directory_mode)
        except Exception as error:  # noqa: BLE001 - whatever a state_dict() raises must not end the training
            ready["error"], ready["number"] = describe(error), number_of(error)
        return part, ready

    def _meet_beside(self, ranks: Ranks) -> str | None:
        """Make the group for the threads, if there is none; return why that failed, on any rank. Collective."""
        try:
            self._group.make(ranks)
        except CheckpointError as error:
            return describe(error)
        return None

    def _write_behind(
        self,
        step: int,
        ranks: Ranks,
        unfinished: Path,
        part: RankPart,
        order: Mapping[str, Any],
        began_s: float,
        processes: Sequence[Any],
    ) -> bool:
        """Let a thread write and commit what was copied, and go on; tell whether it has begun."""

        from resilience_sdk.checkpoint import sharded
        from resilience_sdk.checkpoint.capture import write_part

        spread = sharded.Writing(unfinished, part.spread, self._group.group) if part.spread else None
        if part.writer is not None:
            part = attrs.evolve(part, writer=self._stage(part.writer, unfinished))
        stall_s = self._now_s() - began_s

        def work(written: Callable[[], None]) -> dict[str, Any]:

            own = write_part(part, unfinished, ranks, mode=self._store.file_mode, spread=spread)
            if ranks.rank != 0:
                leave_part(unfinished, ranks.rank, own)
                written()
                return await_close(unfinished, self._store.path_of(step), processes=processes)
            # Not `written()` here: at the end of the process rank 0 stays until the commit.
            parts = await_parts(unfinished, own, ranks.size, processes=processes)
            return {**self._close(step, unfinished, parts, order, began_s, stall_s), "order": order}

        self._policy.saved(step, self._now_s(), None)
        try:
            self._background = Background(step, work)
        except RuntimeError as error:
            failed: dict[str, Any] = {"error": describe(error), "number": None}
            self._note(Unsaved(step, failed["error"]))
            if ranks.rank == 0:
                self._close(step, unfinished, [failed], order, began_s, stall_s)
            else:
                leave_part(unfinished, ranks.rank, failed, patience_s=0.0)
            return False
        return True

    def _stage(self, writer: Callable[[Path], object], unfinished: Path) -> Callable[[Path], object]:
        """Let a framework take its state, on all ranks at once; return what writes it, or raises what taking raised."""
        try:
            if self._stager is None:
                written = writer(unfinished)
                return lambda _directory: written
            finish = self._stager(unfinished)
        except BaseException as error:
            # As in `write_part`: the others learn of it by this rank's part.
            if not isinstance(error, Exception) and type(error).__name__ != "CheckpointException":
                raise
            return functools.partial(_fail, error)
        return lambda _directory: finish()

    def settle(self, timeout_s: float | None) -> bool:
        """Take note of the end of a save in the background, if there is one; tell whether none is left."""
        behind = self._background
        if behind is None or behind.pid != os.getpid():
            return True
        if not behind.wait(timeout_s) or behind.outcome is None:
            return False
        self._background = None
        outcome = behind.outcome
        # A rank other than 0 may hear of this one only after a newer one, which alone counts then, as on rank 0.
        if behind is self._overtaken:
            self._overtaken = None
            return True
        is_newer = self._last_good is None or behind.step >= self._last_good.step
        if outcome["error"] is not None:
            self._note(Unsaved(behind.step, outcome["error"], outcome.get("number")))
        elif is_newer:
            self._last_good = GoodCheckpoint(behind.step, self._store.path_of(behind.step))
            if self._unsaved is not None and self._unsaved.step <= behind.step:
                self._note(None)
        if "order" in outcome and outcome["error"] is None:
            self._saved_values = outcome["order"]["values"]
            self._policy.measured(outcome["stall_s"], outcome["seconds"])
        return True

    def _close(
        self,
        step: int,
        unfinished: Path | None,
        parts: list[dict[str, Any]],
        order: Mapping[str, Any],
        began_s: float,
        stall_s: float | None = None,
        *,
        last: bool = False,
    ) -> dict[str, Any]:
        """Commit on rank 0 if all parts are there, and journal it. In whichever thread has written."""

        from resilience_sdk.checkpoint.capture import first_error, seal

        error, number = first_error(parts), number_of_parts(parts)
        size, why_bad = 0, None
        if error is None and unfinished is not None:
            try:
                manifest = seal(self._store, parts, unfinished, step, order["token"], self._clock.wall_s())
                size, why_bad = manifest.size, manifest.why_bad
            except OSError as failure:
                error, number = describe(failure), number_of(failure)
                self._failed_here = True
        seconds = self._now_s() - began_s
        stall_s = seconds if stall_s is None else stall_s
        name = self._store.path_of(step).name
        if error is None:
            facts = {} if why_bad is None else {"why_bad": why_bad}
            self._record(
                Event.CKPT_COMMIT, step, bytes=size, seconds=seconds, stall_s=stall_s, checkpoint=name, **facts
            )
            if why_bad is not None:
                say_once(
                    "nan in a checkpoint",
                    f"checkpoint {name} is bad: {why_bad}; a resume takes the newest one without, which stays; "
                    "numerics.check(loss=..., grad_norm=...) finds the step at which it began",
                )
            self._store.retire(order["token"])
        else:
            good = order["last_good"]
            kept = f"the last good one is step {good}" if good is not None else "there is none yet"
            if good is not None and not (self._store.directory / step_name(good)).is_dir():
                kept = f"the last one, of step {good}, is gone"
            if unfinished is not None:
                discard(unfinished)  # before the others hear of it: the disk may be full
            if not last:
                say(f"checkpoint at step {step} failed: {error}; training goes on, {kept}")
            self._record(Event.CKPT_FAIL, step, error=error, seconds=seconds)
        return {"error": error, "number": number, "seconds": seconds, "stall_s": stall_s}

    def _conclude(self, step: int, order: Mapping[str, Any], outcome: Mapping[str, Any], rank: int) -> bool:
        """Take note of a save that is over, on every rank."""
        self._overtaken = self._background
        is_good = outcome["error"] is None
        if is_good:
            self._last_good = GoodCheckpoint(step, self._store.path_of(step))
        self._note(None if is_good else Unsaved(step, outcome["error"], outcome["number"]))
        if rank == 0:
            self._saved_values = order["values"] if is_good else self._saved_values
            self._policy.saved(step, self._now_s(), outcome["seconds"] if is_good else None)
        return is_good

    def _note(self, unsaved: Unsaved | None) -> None:
        """Take note of what the newest save came to, and hear from then on whether the script saves by itself."""
        if (unsaved is None) != (self._unsaved is None):
            (ignore if unsaved is None else listen)(self._note_torch_save)
        self._unsaved = unsaved

    def forget_at_exit(self) -> None:
        """Let the end of the process pass over what was not saved: somebody has said it."""
        _savers.discard(self)

    def at_exit(self) -> None:
        """Say at the clean end of a process what its newest save was to be, where nothing was saved since."""
        unsaved = self.unsaved
        if unsaved is None or self._pid != os.getpid() or self._script_saved:
            return
        spare_descriptors.give_back()
        good = None if self._last_good is None else self._last_good.step
        if unsaved.is_left_out:  # nothing failed, and whoever saves now and then may not need this one
            if self._is_first:
                say(left_out_words(unsaved, good))
            return
        own = resilience_sdk._own_checkpoints()
        lost, place = lost_words(unsaved, good, End(unsaved)), self._store.directory
        if own is not None and own.end_unsaved(lost, unsaved.cure(place), at_exit=True) and self._is_first:
            say(f"{lost}; {resume_words(good, place)}")

    def _note_torch_save(self, target: Any) -> None:
        """Note that the script has saved by itself after a save of ours that failed."""
        place = place_of(target)
        if place is not None and not place.startswith(f"{self._store.directory}{os.sep}"):
            self._script_saved = True

    def wait_written(self, timeout_s: float) -> None:
        """Wait until nothing of this rank is left to write; on rank 0 until all is committed."""
        behind = self._background
        if behind is not None and behind.pid == os.getpid():
            behind.wait_written(timeout_s)

    def _now_s(self) -> float:
        return self._clock.monotonic_ns() / NS_PER_S


def _fail(error: BaseException, _directory: Path) -> None:
    raise error


_savers: weakref.WeakSet[Saver] = weakref.WeakSet()


def _await_at_exit(saver: Saver) -> None:
    global _is_registered
    if not _is_registered:
        _is_registered = True
        atexit.register(end_process)
    _savers.add(saver)


_is_registered = False


def end_process() -> None:
    """Let what is being written be committed before the process ends and takes its threads with it."""
    deadline = time.monotonic() + EXIT_PATIENCE_S
    for saver in list(_savers):
        saver.wait_written(max(0.0, deadline - time.monotonic()))
    for saver in list(_savers):
        saver.at_exit()
