"""`Checkpointer`: saves the state of a run as a whole or not at all, and takes it up again."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import resilience_sdk
from resilience_sdk.checkpoint.failure import Unsaved
from resilience_sdk.checkpoint.history import (
    PRIOR_MTTF_S,
    CheckpointRecord,
    JournalPlace,
    mean_time_to_failure_s,
    newest_save_s,
)
from resilience_sdk.checkpoint.last_save import (
    End,
    NoTerms,
    facts_of,
    lost_words,
    resume_words,
    save_patiently,
    spare_descriptors,
)
from resilience_sdk.checkpoint.loaders import TravellingLoaders
from resilience_sdk.checkpoint.newest import choose, look
from resilience_sdk.checkpoint.other_optimizers import OtherOptimizers
from resilience_sdk.checkpoint.policy import SavePolicy, parse_every
from resilience_sdk.checkpoint.proof import ResumeProof
from resilience_sdk.checkpoint.ranks import Ranks, agreement, find_ranks, raise_together
from resilience_sdk.checkpoint.save import GoodCheckpoint, Saver
from resilience_sdk.checkpoint.store import CheckpointStore, WriterHold, hold_checkpoints
from resilience_sdk.checkpoint.window import AccumulationWindow, note_open_window
from resilience_sdk.core import resume_limits
from resilience_sdk.core.clock import NS_PER_S, Clock, SystemClock
from resilience_sdk.core.console import say, say_once
from resilience_sdk.core.environ import environment, is_disabled, rank_identity
from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.errors import (
    CheckpointError,
    ConfigError,
    DirectoryInUseError,
    NotSavedError,
    Preempted,
    RunDirectoryError,
)
from resilience_sdk.recorder import lookup
from resilience_sdk.straggler import section

if TYPE_CHECKING:
    from resilience_sdk.checkpoint.capture import CheckpointReading
    from resilience_sdk.checkpoint.memory_staging import Stager
    from resilience_sdk.checkpoint.state import StateMap


def directory_of_job() -> Path | None:
    """Return the run directory of the job that this process is in; None where there is none, and the SDK is off.

    Raises `RunDirectoryError` where none is named.
    """
    own = resilience_sdk._own_checkpoints()
    path: Path | None = None if own is None else own.directory_of_job()
    if path is None and not is_disabled(environment()):
        raise RunDirectoryError(
            "Checkpointer(run_dir=...) is missing, and this job has named no run directory: give one to resume from "
            "later, such as run_dir='runs/a', or set RESILIENCE_RUN_DIR"
        )
    return path


def _is_checked() -> bool:
    """Tell whether saves take digests, and resumes compare with them: the setting `resume_check`."""
    own = resilience_sdk._own_checkpoints()
    return own is not None and own.checks_resumes()


def open_directory(path: str | os.PathLike[str], *, read_only: bool, group_readable: bool) -> RunDirectory:
    """Return the run directory at `path`, made if it is to be written; raises `RunDirectoryError`."""
    return RunDirectory.open(path) if read_only else RunDirectory.create(path, group_readable=group_readable)


def become_writer(run_dir: RunDirectory, record: CheckpointRecord) -> WriterHold | None:
    """Return the hold on `run_dir`, on rank 0; raises `DirectoryInUseError` where another process or job has it.

    None where nothing is held: the SDK is switched off, or the disk refuses, which is said. A training that could save
    nothing yet must be able to start.
    """
    own = resilience_sdk._own_checkpoints()
    claim = None if own is None else own.claim(run_dir)
    if claim is None:
        return None
    try:
        return hold_checkpoints(run_dir, claim)
    except DirectoryInUseError:
        raise
    except RunDirectoryError as error:
        why = f"nothing keeps another process from writing checkpoints there: {error}"
        if say_once(f"writer:{run_dir.path}", why):
            record.degraded("writer", why)
        return None


def start_recording(run_dir: RunDirectory) -> None:
    """Let the job begin to record there, on each rank, unless it has begun elsewhere or the recording is off."""
    own = resilience_sdk._own_checkpoints()
    if own is not None and lookup.starter() is resilience_sdk._start_recording:
        own.start_in(run_dir)


def nowhere(_: RunDirectory) -> JournalPlace | None:
    """Return where a reader journals: nowhere, it is no part of the job."""
    return None


class SaveFollower(Protocol):
    """Whoever wants to know of the saves of this process."""

    def saved(self) -> None:
        """Hear that a save was made, or begun; on each rank."""
        ...


_followers: weakref.WeakSet[SaveFollower] = weakref.WeakSet()


def follow_saves(follower: SaveFollower) -> None:
    """Let somebody hear of each save from now on, for as long as it is there."""
    _followers.add(follower)


_states: weakref.WeakSet[StateMap] = weakref.WeakSet()


def saved_objects() -> list[Any]:
    """Return what the checkpointers of this process save for all ranks, for whoever looks for a scheduler."""
    return [item for state in _states for item in state.shared.values()]


class DataPosition(Protocol):
    """Whoever counts batches: its JSON value is saved by every rank for itself."""

    def capture(self) -> Mapping[str, Any]:
        """Return the position as a JSON value."""
        ...

    def restore(self, saved: Mapping[str, Any], saved_ranks: int, ranks: int) -> None:
        """Take a position that was saved in a job of `saved_ranks`, in one of `ranks`."""
        ...


class Checkpointer:
    """Saves and resumes a training state in a run directory.

    `state` maps names to what is saved: modules, optimizers, schedulers, anything with `state_dict` and
    `load_state_dict`, tensors, data loaders. Random number generators and `values` (plain values of the
    caller, JSON) travel along. In a distributed job `resume`, `save` and `maybe_save` are collective: all
    ranks call them at the same step. Not thread-safe; use it from the thread that trains.

    A save that fails (disk full, permission, I/O error) is reported and survived, and the last good
    checkpoint stays as it was. That of the end is another matter: `save(step, last=True)`.

    One process writes the checkpoints of a run directory, rank 0 of one job: from the first `resume`, `save` or
    `maybe_save` on another one is refused there. All checkpointers of that process share the directory.

    Example:
        checkpointer = Checkpointer({"model": model, "optimizer": optimizer}, run_dir="runs/a", every="10min")
        for step in range(checkpointer.resume(), 1000):
            train_step()
            checkpointer.maybe_save(step + 1)
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        *,
        run_dir: str | os.PathLike[str] | RunDirectory | None = None,
        every: str | int = "auto",
        keep: int = 2,
        in_background: bool = False,
        mttf_s: float | None = None,
        read_only: bool = False,
        group_readable: bool = False,
        journal: Journal | None = None,
        clock: Clock | None = None,
        writer: Callable[[Path], object] | None = None,
        stager: Stager | None = None,
    ) -> None:
        """Prepare the run directory; no checkpoint is read or written before the first call.

        Args:
            state: What is saved, by name.
            run_dir: The run directory; checkpoints go to `checkpoints/` in it. None = that of the job: of `start_run`,
                of `resilience run`, of `RESILIENCE_RUN_DIR`, or of the Slurm job; without one, where the SDK is
                switched off, nothing is saved or resumed. One that is named here is the job's
                if that has named no other, and uses nothing of the SDK before the first `resume`, `save` or
                `maybe_save`.
            every: A number of steps, a duration such as `"10min"`, or `"auto"`: as often as pays off, given
                the measured time of a save (of the stall, in the background) and `mttf_s`.
            keep: How many good checkpoints stay, never fewer than two.
            in_background: Let `maybe_save` copy the state and write it in a thread while the training goes on. It
                takes as much memory of the host as the state has, for good.
            mttf_s: Expected time between two failures of the job in seconds; None = by the failures that the
                journal of the run directory has seen, beginning with 3 hours.
            read_only: Only `resume`, beside whoever writes there: for an evaluation of a run that trains.
            group_readable: Let the group read the files (nobody but the owner may ever write them).
            journal: Where saves and resumes are recorded; None = in the journal of this rank, in `run_dir`.
            clock: For tests.
            writer: For a framework that saves by itself: `writer(directory)` writes more files there, on all ranks at
                once, in the thread that trains. Plain names, and these in directories, become a part of the checkpoint;
                the framework reads them from `last_good.path`. It ends on all ranks, also where one of them fails. It
                may return a frozenset of names: files of this rank alone, which it reads back; rank 0 reads all others.
            stager: For the same in the background: takes the state as `writer` does, and returns what writes it, which
                a thread calls. Without it `writer` writes while the training waits, and all else is left to a thread.

        Raises:
            ConfigError: `state` or `every` cannot be used; the message names the entry and the cure.
            RunDirectoryError: The run directory cannot be used, or none is named.
        """
        # Not at the top: importing the SDK must not import torch.

        from resilience_sdk.checkpoint.state import StateMap

        if not isinstance(keep, int) or keep < 1:
            raise ConfigError(f"keep={keep!r}: expected a whole number, 1 or more (2 are always kept)")
        if run_dir is None:
            run_dir = directory_of_job()
        self._is_off = run_dir is None
        if run_dir is None:
            say_once(
                "nothing saved", "Checkpointer: NOTHING IS SAVED or resumed: the SDK is off, and no directory named"
            )
            run_dir, read_only = RunDirectory(Path(os.devnull)), True  # of which nothing is read
        if not isinstance(run_dir, RunDirectory):
            run_dir = open_directory(run_dir, read_only=read_only, group_readable=group_readable)
        self.values: dict[str, Any] = {}
        self.position: DataPosition | None = None
        self.skipped_steps: frozenset[int] = frozenset()
        """Known after `resume`: the steps whose batches are left out, since `numerics.check` rolled back over them."""
        self.time_left: Callable[[], float | None] | None = None
        """Seconds until the job is ended, None = not known. `maybe_save` then leaves time for a last `save`."""
        self.written_to: Path | None = None
        """Where a `writer` writes by itself, if that is elsewhere: what a last save waits for."""
        self._state = StateMap(state)
        self._state.beside.values = self.values
        _states.add(self._state)
        self._mttf_s = mttf_s
        self._policy = SavePolicy(parse_every(every), mttf_s=PRIOR_MTTF_S if mttf_s is None else mttf_s)
        self._store = CheckpointStore(
            run_dir.checkpoints, keep=keep, group_readable=group_readable, read_only=read_only
        )
        self._record = CheckpointRecord(run_dir, journal, nowhere if read_only else None)
        self._clock = clock or SystemClock()
        self._in_background = in_background
        self._saver = Saver(
            self._state,
            self.values,
            self._store,
            self._policy,
            self._capture_position,
            self._record.emit,
            self._clock,
            writer,
            stager,
        )
        self._saver.is_checked = _is_checked
        self._saver.has_open_window = self._has_open_window
        self._window: AccumulationWindow | None = None
        self._others: OtherOptimizers | None = None
        self._found: dict[str, Any] | None = None
        self._end: End | None = None
        self._is_first = True
        self._run_dir = run_dir
        self._has_journal = journal is not None
        self._is_read_only = read_only
        self._is_joined = read_only
        self._is_started = False
        self._resumed_rng: Mapping[str, Any] | None = None
        self._resumed_held: Mapping[str, Any] = {}
        self._loaders = TravellingLoaders(self._state, self._set_rng, lambda: self.position is not None)
        self._is_framework = writer is not None
        self._takes_offered = writer is None and not read_only
        self._reading: CheckpointReading | None = None
        self._proof = ResumeProof(self._record.emit, lambda: not read_only and _is_checked())

    @property
    def last_good(self) -> GoodCheckpoint | None:
        """The newest checkpoint that is whole: the one resumed, or committed since."""
        return self._saver.last_good

    @property
    def expected_save_s(self) -> float:
        """Seconds that `save` takes, with what is still being written; 0 before the first one of all. Rank 0's.

        As measured, before the first one since the start as the journal tells of the one before. Any thread.
        """
        saves = 2 if self._saver.is_busy else 1
        return saves * self._policy.expected_save_s

    def _capture_position(self) -> Any:
        return None if self.position is None else self.position.capture()

    # -- what else travels along

    def add_data(self, name: str, loader: Any) -> None:
        """Save the state of `loader` too, on every rank its own, and restore it if a resume brought one.

        One that is in `state` already is left as it is. `loader` has `state_dict` and `load_state_dict`.
        """
        self._loaders.add(name, loader)

    def note_walked(self, loader: Any) -> None:
        """Say what a resume will not repeat where the batches of `loader` alone are counted (see `position`)."""
        self._loaders.note_walked(loader)

    def restore_rng(self) -> None:
        """Set the random number generators once more as the resumed checkpoint had them.

        For loaders with a state this is done just before their first batch, so that nothing is to be called.
        """
        self._loaders.generators.leave()
        self._set_rng()

    def _set_rng(self) -> None:
        from resilience_sdk.checkpoint.state import restore_rng

        if self._resumed_rng is None:
            return
        restore_rng(self._resumed_rng)
        self._state.held.restore(self._resumed_held)
        self._proof.generators(self._resumed_rng)

    # -- resume

    def resume(self) -> int:
        """Load the newest valid checkpoint into `state`; return the next step to run, 0 = fresh. Collective.

        Rank 0 decides which one, for all. Newer ones that are damaged are passed over, and it is said why.

        Raises:
            CheckpointError: The checkpoint does not fit `state`; or none may be trusted (then starting over
                would be the wrong thing to do); the message has the cure. On ranks other than 0 also where
                the directory is in use.
            ConfigError: Several ranks, but torch.distributed is not initialised.
            DirectoryInUseError: Another process writes there, or another job uses the directory.
        """
        if self._is_off:
            return 0
        ranks = find_ranks()
        self._join(ranks)
        # A reader is no part of a job, so it starts no recording.
        with nullcontext() if self._is_read_only else section("resume", kind="io"):
            self._saver.settle(None)  # a run that goes back may still be writing
            self._watch()
            # What could not be saved is found before hours of work depend on it.
            raise_together(ranks, self._state.check)
            found = ranks.broadcast(self._choose() if ranks.rank == 0 else None)
            if found["error"]:
                raise CheckpointError(found["error"])
            step = int(found["step"])
            self.skipped_steps = frozenset(found["skip"])
            if found["name"] is not None:
                began_s = self._now_s()
                self._load(found, ranks)
                if not self._is_read_only:
                    resume_limits.resumed()
                if ranks.rank == 0:
                    say(f"resumed from {self._store.path_of(step)}: step {step} is next")
                    facts = {"checkpoint": found["name"], "created_at": found["created_at"], "bytes": found["bytes"]}
                    self._record.emit(Event.RESUME, step, seconds=self._now_s() - began_s, **facts)
                reading, self._reading = self._reading, None
                if reading is not None:
                    self._proof.restored(found, ranks, lambda: reading.digests(self._capture_position(), self.values))
        self._start(step)
        return step

    def begins_at(self, step: int) -> None:
        """Count from `step` completed steps, where nothing is resumed; else the first `maybe_save` begins. Collective.

        For a training whose first `maybe_save` may come late: what was due until then would not be saved. Raises as
        `save`.
        """
        if not self._is_off:
            self._begin(step)

    def find(self) -> GoodCheckpoint | None:
        """Return the checkpoint that `resume` would load, as this rank finds it by itself; None = fresh. Any rank.

        For a framework that must be told of it before the process group is there. Not collective: every rank reads
        every byte, and rank 0 alone (by the launcher's variables) says and journals what it passes over.

        Raises:
            CheckpointError: As `resume`.
        """
        if self._is_off:
            return None
        identity = rank_identity(environment())
        is_first = identity is None or identity.rank == 0
        found = self._choose() if is_first else look(self._store, self._record.events())
        if found["error"]:
            raise CheckpointError(found["error"])
        self._found = found if is_first else None
        return None if found["name"] is None else GoodCheckpoint(found["step"], self._store.path_of(found["step"]))

    def _choose(self) -> dict[str, Any]:
        found, self._found = self._found, None
        if found is not None:
            return found  # every byte was read a moment ago
        events = self._record.events()
        self._policy.assumed_save_s = newest_save_s(events)
        if self._mttf_s is None:
            self._policy.mttf_s = mean_time_to_failure_s(events)
        return choose(self._store, events, self._record.emit)

    def _load(self, found: Mapping[str, Any], ranks: Ranks) -> None:
        from resilience_sdk.checkpoint.capture import CheckpointReading
        from resilience_sdk.checkpoint.payload import encode_values

        reading = CheckpointReading(self._store.directory / found["name"], found["files"], self._state, ranks)

        def load() -> None:
            restored = reading.restore(found["world_size"])
            # The dict itself stays: the program may hold a reference to it.
            self.values.clear()
            self.values.update(restored.values)
            self._resumed_rng, self._resumed_held = restored.rng, restored.held
            # A framework may make its objects later, and calls `restore_rng` when they are there.
            self._state.held.restore(restored.held, says=not self._is_framework)
            self._state.beside.resume(restored.beside)
            self._loaders.resumed(restored)
            if self.position is not None and restored.position is not None:
                self.position.restore(restored.position, found["world_size"], ranks.size)

        # Apart, since reading what is spread is collective: one rank that failed before would leave the rest there.
        raise_together(ranks, reading.prepare)
        raise_together(ranks, load)
        self._reading = reading
        self._saver.adopt(int(found["step"]), encode_values(self.values))

    def also_compare(self, objects: Callable[[], Mapping[str, Any]]) -> None:
        """Have what a `writer` saves by itself compared at a resume, too: `objects()` returns it by name.

        Modules, optimizers, and what has a `state_dict` that is no collective. `compare` does it, once the framework
        has restored them.
        """
        self._saver.also = objects

    def also_held(self, objects: Callable[[], Mapping[str, Any]]) -> None:
        """Save and restore the generators that these objects hold, too, on each rank: `objects()` returns them by name.

        Those of `state` are looked through anyway.
        """
        self._state.held.also(objects)

    def also_beside(self, objects: Callable[[], Mapping[str, Any]]) -> None:
        """Say what a resume loses of what these modules hold beside their states: `objects()` returns them by name.

        Those of `state` and of `also_held` are looked at anyway.
        """
        self._state.beside.also(objects)

    def compare(self) -> None:
        """Compare what the framework has restored with the digests of the save, if one was resumed. Collective."""
        if self._saver.also is not None:
            self._proof.framework(self._saver.also)

    # -- save

    def maybe_save(self, step: int) -> bool:
        """Save if it is time to after `step` completed steps; tell whether one was committed (or begun). Collective.

        Raises as `save`.
        """
        if not self._is_started or self._is_read_only:  # in every step: a call that can be spared is
            if self._is_off:
                return False
            self._begin(step)
        if self._others is not None:
            self._others.step = step
        if self._state.beside.is_unsure:
            self._state.beside.look()
        due = self._policy.due(step)
        if self._window is not None:
            self._window.at_boundary(step, is_new=True)
            if self._window.is_held:
                due = "save"
        if due == "ask":
            ranks = find_ranks()
            with agreement():
                answer = ranks.broadcast(self._answer(step) if ranks.rank == 0 else None)
            if answer is not None:
                self._policy.next_question = answer
                return False
        if due == "no" or self.holds(step):
            return False
        left_s = None if self.time_left is None else self.time_left()
        if self._has_open_window():  # there was no time to wait
            note_open_window()
        return self._checked_save(step, in_background=self._in_background, left_s=left_s)

    def holds(self, step: int) -> bool:
        """Tell whether a save after `step` steps is to wait for the next optimizer step of a loop. Collective.

        That is so where the loop adds up gradients over several of its steps, which are not saved; and no longer than
        a stop leaves time for it. `maybe_save` sees to it by itself.
        """
        if self._window is None:
            return False
        self._window.at_boundary(step)
        left_s = None if self.time_left is None else self.time_left()
        ranks = find_ranks()
        with agreement():
            return self._window.waits(ranks, left_s, self.expected_save_s)

    def _has_open_window(self) -> bool:
        return self._window is not None and self._window.is_open()

    def next_due(self) -> int:
        """Return after how many completed steps `maybe_save` has something to do again, behind a call of it."""
        return self._policy.next_due()

    def _answer(self, step: int) -> int | None:
        """Return None for "save now", else the step at which to ask again; on rank 0."""
        answer = self._policy.answer(step, self._now_s())
        return self._policy.postpone(step) if answer is None and not self._saver.settle(0.0) else answer

    def save(self, step: int, *, anew: bool = False, last: bool = False) -> bool:
        """Save after `step` completed steps; tell whether a whole checkpoint of it is there. Collective.

        One that is written in the background is awaited first, and this one is not written in the background. A
        failure of any rank means that no rank's part is used: it is reported, and the training goes on. Nothing
        is written when the last good one is of this very step and `values` are as they were, unless `anew`: something
        else has changed since, and this one takes its place.

        `last`: the training is over, so nobody could save it later. Where the disk is full, say, all ranks wait and try
        again, for at most the setting `wait_limit` and never longer than a stop leaves time; then, and at once where
        waiting cures nothing, the failure is raised, so that the job does not count as finished.

        Raises:
            NotSavedError: With `last`: it could not be saved; the message says what is lost and where to go on.
            Preempted: With `last`: all ranks were asked to leave while they waited.
            ConfigError: `step` is no whole number, the checkpointer is read-only, or several ranks without
                torch.distributed initialised.
            DirectoryInUseError: At the first use only: another process writes there, or another job uses it.
        """
        if self._is_off:
            return False
        if not last:
            self._note_window(step)
            return self._checked_save(step, in_background=False, anew=anew)
        end = self.save_patiently(step, anew=anew)
        if end.leaves:
            raise Preempted
        self.raise_unsaved()
        return True

    def save_patiently(self, step: int, *, anew: bool = False, is_stop: bool = False) -> End:
        """Save the last state, and wait where that may cure what hinders it; return how it ended. Collective.

        As `save(last=True)`, but for who says later that it was not saved: see `raise_unsaved`. `is_stop`: the ranks
        have agreed to stop.
        """

        if self._is_off:
            return End(None)

        def save() -> Unsaved | None:
            self._checked_save(step, in_background=False, anew=anew, last=True)
            return self._saver.unsaved

        def report(unsaved: Unsaved, saved: bool, waited_s: float) -> None:
            self._record.emit(Event.HEALTH, step, **facts_of(unsaved, self._place, saved, waited_s))

        if is_stop:
            self._note_window(step)
        ranks = find_ranks()
        self._end = save_patiently(
            save,
            lambda: self._saver.failed_here,
            self._place,
            ranks,
            resilience_sdk._own_checkpoints() or NoTerms(),
            expected_s=self.expected_save_s,
            is_stop=is_stop,
            report=report,
        )
        if self._end.unsaved is not None and (is_stop or self._end.leaves):
            self._saver.forget_at_exit()
            if ranks.rank == 0:
                say(self._unsaved_words(self._end))
        return self._end

    @property
    def unsaved(self) -> Unsaved | None:
        """What the newest save was to be, where it was not made; None where it was. The same on all ranks."""
        return self._saver.unsaved

    @property
    def _place(self) -> Path:
        return self._store.directory if self.written_to is None else self.written_to

    @property
    def has_waited(self) -> bool:
        """Whether all that could be done for what is `unsaved` was done: waiting for longer is not allowed."""
        return self._end is not None and self._end.unsaved is not None and self._end.unsaved == self.unsaved

    def raise_unsaved(self) -> None:
        """Raise `NotSavedError` where the newest save was not made, and let the launcher know. On all ranks alike."""
        unsaved = self._saver.unsaved
        if unsaved is None:
            return
        end = End(unsaved) if self._end is None or self._end.unsaved != unsaved else self._end
        self._saver.forget_at_exit()
        spare_descriptors.give_back()
        own = resilience_sdk._own_checkpoints()
        if own is not None:
            own.end_unsaved(lost_words(unsaved, self._good_step(), end), unsaved.cure(self._place))
        words = self._unsaved_words(end)
        if self._is_first:
            say(words)
        raise NotSavedError(words)

    def _unsaved_words(self, end: End) -> str:
        assert end.unsaved is not None
        good = self._good_step()
        return f"{lost_words(end.unsaved, good, end)}; {resume_words(good, self._store.directory)}"

    def _good_step(self) -> int | None:
        good = self._saver.last_good
        return None if good is None else good.step

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until what is written in the background is committed or has failed; tell whether that is so.

        Not collective, and it never raises: for the end of a process, with the time that is left, in seconds.
        """
        return self._saver.settle(timeout_s)

    def _checked_save(
        self, step: int, *, in_background: bool, left_s: float | None = None, anew: bool = False, last: bool = False
    ) -> bool:
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise ConfigError(f"save(step={step!r}): expected the number of completed steps, a whole number")
        self._begin(step)
        ranks = find_ranks()
        self._is_first = ranks.rank == 0
        with section("checkpoint", kind="io"):
            is_saved = self._saver.save(step, ranks, in_background=in_background, left_s=left_s, anew=anew, last=last)
        for follower in list(_followers) if is_saved else ():
            follower.saved()
        return is_saved

    # -- common

    def _join(self, ranks: Ranks) -> None:
        """Have the directory for this job, once. Collective; raises on all ranks where another process has it."""
        if self._is_joined:
            return

        def take() -> None:
            if ranks.rank == 0:
                self._store.hold = become_writer(self._run_dir, self._record)

        raise_together(ranks, take)
        # Not before: who is refused leaves no trace in the job that has it. Who gives a journal has a session.
        if not self._has_journal:
            start_recording(self._run_dir)
        self._is_joined = True

    def _begin(self, step: int) -> None:
        """Before a save: join, and count from `step` where nothing was resumed. Collective the first time."""
        if self._is_read_only:
            raise ConfigError("this Checkpointer is read_only=True: it resumes and saves nothing")
        if not self._is_joined:
            self._join(find_ranks())
        if not self._is_started:
            self._start(step)

    def _note_window(self, step: int) -> None:
        if self._window is not None:
            self._window.at_boundary(step)
        if self._has_open_window():
            note_open_window()

    def _watch(self) -> None:
        if not self._is_read_only:
            self._loaders.watch()
        if self._takes_offered:
            self._takes_offered = False
            self._loaders.take_offered()
        if self._window is None and not self._is_read_only:
            self._window = AccumulationWindow.of(self._state.shared)
        if self._others is None and not self._is_read_only:
            state, saver = self._state, self._saver
            self._others = OtherOptimizers(
                lambda: [*state.shared.values(), *({} if saver.also is None else saver.also()).values()]
            )
            if self._window is not None:
                self._others.stepped = self._window.step_of
            self._saver.other_optimizers = self._others.names

    def _start(self, step: int) -> None:
        """Begin to count time at `step`; equal on all ranks but for the guess of the size."""
        self._is_started = True
        self._watch()
        if not self._is_read_only:
            self._state.beside.begin()
        self._policy.start(step, self._now_s(), self._state.size())

    def _now_s(self) -> float:
        return self._clock.monotonic_ns() / NS_PER_S
