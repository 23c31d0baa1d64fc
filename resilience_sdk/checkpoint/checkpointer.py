"""`Checkpointer`: saves the state of a run as a whole or not at all, and takes it up again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import attrs

from resilience_sdk._version import __version__
from resilience_sdk.checkpoint.commit import remove_tree
from resilience_sdk.checkpoint.manifest import FileEntry, Manifest
from resilience_sdk.checkpoint.policy import MTTF_S, SavePolicy, parse_every
from resilience_sdk.checkpoint.ranks import Ranks, describe, find_ranks, raise_together
from resilience_sdk.checkpoint.select import Skipped
from resilience_sdk.checkpoint.store import CheckpointStore
from resilience_sdk.clock import NS_PER_S, Clock, SystemClock
from resilience_sdk.console import say
from resilience_sdk.errors import CheckpointError, ConfigError
from resilience_sdk.events import Event
from resilience_sdk.journal import Journal
from resilience_sdk.run_directory import RunDirectory
from resilience_sdk.straggler import section


@attrs.frozen
class GoodCheckpoint:
    """A checkpoint that is whole: how many steps it has completed, and its directory."""

    step: int
    path: Path


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
    checkpoint stays as it was.

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
        run_dir: str | os.PathLike[str] | RunDirectory,
        every: str | int = "auto",
        keep: int = 2,
        mttf_s: float = MTTF_S,
        group_readable: bool = False,
        journal: Journal | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Prepare the run directory; no checkpoint is read or written before the first call.

        Args:
            state: What is saved, by name.
            run_dir: The run directory; checkpoints go to `checkpoints/` in it.
            every: A number of steps, a duration such as `"10min"`, or `"auto"`: as often as pays off, given
                the measured time of a save and `mttf_s`.
            keep: How many good checkpoints stay, never fewer than two.
            mttf_s: Expected time between two failures of the job in seconds.
            group_readable: Let the group read the files (nobody but the owner may ever write them).
            journal: Where saves and resumes are recorded.
            clock: For tests.

        Raises:
            ConfigError: `state` or `every` cannot be used; the message names the entry and the cure.
            RunDirectoryError: The run directory cannot be used.
        """
        # Not at the top: importing the SDK must not import torch.
        from resilience_sdk.checkpoint.state import StateMap

        if not isinstance(keep, int) or keep < 1:
            raise ConfigError(f"keep={keep!r}: expected a whole number, 1 or more (2 are always kept)")
        if not isinstance(run_dir, RunDirectory):
            run_dir = RunDirectory.create(run_dir, group_readable=group_readable)
        self.values: dict[str, Any] = {}
        self.position: DataPosition | None = None
        self.last_good: GoodCheckpoint | None = None
        self._state = StateMap(state)
        self._policy = SavePolicy(parse_every(every), mttf_s=mttf_s)
        self._store = CheckpointStore(run_dir.checkpoints, keep=keep, group_readable=group_readable)
        self._journal = journal
        self._clock = clock or SystemClock()
        self._is_started = False
        self._saved_values: str | None = None
        self._resumed_rng: Mapping[str, Any] | None = None
        self._pending: dict[str, Any] = {}

    # -- what else travels along

    def add_data(self, name: str, loader: Any) -> None:
        """Save the state of `loader` too, on every rank its own, and restore it if a resume brought one.

        One that is in `state` already is left as it is. `loader` has `state_dict` and `load_state_dict`.
        """
        from resilience_sdk.checkpoint.state import apply

        if any(item is loader for item in self._state.per_rank.values()):
            return
        self._state.per_rank[name] = loader
        if name in self._pending:
            apply(name, loader, self._pending.pop(name))

    def restore_rng(self) -> None:
        """Set the random number generators once more as the resumed checkpoint had them."""
        from resilience_sdk.checkpoint.rng import restore_rng

        if self._resumed_rng is not None:
            restore_rng(self._resumed_rng)

    # -- resume

    def resume(self) -> int:
        """Load the newest valid checkpoint into `state`; return the next step to run, 0 = fresh. Collective.

        Rank 0 decides which one, for all. Newer ones that are damaged are passed over, and it is said why.

        Raises:
            CheckpointError: The checkpoint does not fit `state`; or none may be trusted (then starting over
                would be the wrong thing to do); the message has the cure.
            ConfigError: Several ranks, but torch.distributed is not initialised.
        """
        ranks = find_ranks()
        with section("resume", kind="io"):
            # What could not be saved is found before hours of work depend on it.
            raise_together(ranks, lambda: (self._state.capture_shared(), self._state.capture_rank()))
            found = ranks.broadcast(self._select() if ranks.rank == 0 else None)
            if found["error"]:
                raise CheckpointError(found["error"])
            step = int(found["step"])
            if found["name"] is not None:
                began_s = self._now_s()
                raise_together(ranks, lambda: self._load(found, ranks))
                self.last_good = GoodCheckpoint(step, self._store.path_of(step))
                if ranks.rank == 0:
                    say(f"resumed from {self.last_good.path}: step {step} is next")
                    self._record(
                        Event.RESUME,
                        step,
                        bytes=found["bytes"],
                        seconds=self._now_s() - began_s,
                        checkpoint=found["name"],
                    )
        self._start(step)
        return step

    def _select(self) -> dict[str, Any]:
        """Return what all ranks load, on rank 0; an error that all must raise is in the answer."""
        answer: dict[str, Any] = {"error": None, "name": None, "step": 0}
        try:
            selection = self._store.find_newest()
        except OSError as error:
            reason = f"cannot read {self._store.directory}: {error.strerror}"
            return {**answer, "error": f"{reason}; so it cannot be told where to go on"}
        for skipped in selection.skipped:
            say(f"skipped checkpoint {skipped.name}: {skipped.why}")
            self._record(Event.CKPT_SKIP, skipped.step, checkpoint=skipped.name, why=skipped.why)
        manifest = selection.manifest
        if manifest is None:
            return {**answer, "error": _refusal(selection.skipped)}
        return {
            **answer,
            "name": selection.name,
            "step": manifest.step,
            "bytes": manifest.size,
            "world_size": manifest.world_size,
            "files": sorted(manifest.names()),
        }

    def _load(self, found: Mapping[str, Any], ranks: Ranks) -> None:
        from resilience_sdk.checkpoint.payload import encode_values
        from resilience_sdk.checkpoint.restore import restore

        directory = self._store.directory / found["name"]
        saved_ranks = found["world_size"]
        restored = restore(directory, found["files"], saved_ranks, ranks.rank, ranks.size, self._state)
        # The dict itself stays: the program may hold a reference to it.
        self.values.clear()
        self.values.update(restored.values)
        self._saved_values = encode_values(self.values)
        self._resumed_rng = restored.rng
        self._pending = restored.pending
        if self.position is not None and restored.position is not None:
            self.position.restore(restored.position, saved_ranks, ranks.size)

    # -- save

    def maybe_save(self, step: int) -> bool:
        """Save if it is time to after `step` completed steps; tell whether one was committed. Collective."""
        if not self._is_started:
            self._start(step)
        due = self._policy.due(step)
        if due == "ask":
            ranks = find_ranks()
            answer = ranks.broadcast(self._policy.answer(step, self._now_s()) if ranks.rank == 0 else None)
            if answer is not None:
                self._policy.next_question = answer
                return False
        return due != "no" and self.save(step)

    def save(self, step: int) -> bool:
        """Save after `step` completed steps; tell whether a whole checkpoint of it is there. Collective.

        A failure of any rank means that no rank's part is used: it is reported, and the training goes on.
        Nothing is written when the last good one is of this very step and `values` are as they were.

        Raises:
            ConfigError: `step` is no whole number, or several ranks without torch.distributed initialised.
        """
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise ConfigError(f"save(step={step!r}): expected the number of completed steps, a whole number")
        ranks = find_ranks()
        if not self._is_started:
            self._start(step)
        with section("checkpoint", kind="io"):
            return self._save(step, ranks)

    def _save(self, step: int, ranks: Ranks) -> bool:
        began_s = self._now_s()
        order = ranks.broadcast(self._open(step) if ranks.rank == 0 else None)
        if order["is_there"]:
            return True
        unfinished = None if order["name"] is None else self._store.directory / order["name"]
        try:
            part = {"error": order["error"]}
            if unfinished is not None:
                part = self._write_part(step, unfinished, ranks.rank, order["values"])
            parts = ranks.gather(part)
            outcome = self._close(step, unfinished, parts, order, began_s) if ranks.rank == 0 else None
            outcome = ranks.broadcast(outcome)
        finally:
            # After a commit the directory has another name; whatever else ends here leaves nothing behind.
            if ranks.rank == 0 and unfinished is not None:
                remove_tree(unfinished)
        self._policy.next_question = outcome["next_question"]
        if outcome["error"] is None:
            self.last_good = GoodCheckpoint(step, self._store.path_of(step))
        return outcome["error"] is None

    def _open(self, step: int) -> dict[str, Any]:
        """Begin a save on rank 0: make its directory, or find that there is nothing to do."""
        from resilience_sdk.checkpoint.payload import encode_values

        order: dict[str, Any] = {"is_there": False, "name": None, "error": None, "values": "", "token": ""}
        try:
            order["values"] = encode_values(self.values)
            if self.last_good and self.last_good.step == step and order["values"] == self._saved_values:
                return {**order, "is_there": True}
            self._record(Event.CKPT_BEGIN, step)
            order["token"] = os.urandom(4).hex()
            order["name"] = self._store.begin(step, order["token"]).name
        except (OSError, CheckpointError) as error:
            order["error"] = describe(error)
        return order

    def _write_part(self, step: int, unfinished: Path, rank: int, values: str) -> dict[str, Any]:
        """Write this rank's files; an error is part of the answer, since all ranks must learn of it."""
        from resilience_sdk.checkpoint import payload
        from resilience_sdk.checkpoint.rng import capture_rng

        mode = self._store.file_mode
        try:
            document = {"rng": capture_rng(), "position": self.position.capture() if self.position else None}
            entries = payload.write_rank(unfinished, rank, document, self._state.capture_rank(), mode=mode)
            if rank == 0:
                entries += payload.write_shared(unfinished, self._state.capture_shared(), values, mode=mode)
        except Exception as error:  # noqa: BLE001 - whatever a state_dict() raises must not end the training
            return {"error": describe(error), "step": step}
        return {"error": None, "step": step, "files": [entry.to_json() for entry in entries]}

    def _close(
        self,
        step: int,
        unfinished: Path | None,
        parts: list[dict[str, Any]],
        order: Mapping[str, Any],
        began_s: float,
    ) -> dict[str, Any]:
        """Commit on rank 0 if all parts are there, and decide when to look again."""
        error = _first_error(step, parts)
        size = 0
        if error is None and unfinished is not None:
            files = tuple(FileEntry.from_json(entry) for part in parts for entry in part["files"])
            versions = {"resilience_sdk": __version__}
            manifest = Manifest(step, len(parts), files, self._clock.wall_s(), versions)
            size = manifest.size
            try:
                self._store.commit(unfinished, manifest, order["token"])
            except OSError as failure:
                error = describe(failure)
        now_s = self._now_s()
        seconds = now_s - began_s
        name = self._store.path_of(step).name
        if error is None:
            self._saved_values = order["values"]
            self._record(Event.CKPT_COMMIT, step, bytes=size, seconds=seconds, checkpoint=name)
            self._store.retire(order["token"])
        else:
            last = f"the last good one is step {self.last_good.step}" if self.last_good else "there is none yet"
            if unfinished is not None:
                remove_tree(unfinished)  # before the others hear of it: the disk may be full
            say(f"checkpoint at step {step} failed: {error}; training goes on, {last}")
            self._record(Event.CKPT_FAIL, step, error=error, seconds=seconds)
        return {"error": error, "next_question": self._policy.saved(step, now_s, None if error else seconds)}

    # -- common

    def _start(self, step: int) -> None:
        """Begin to count time at `step`; equal on all ranks but for the guess of the size."""
        self._is_started = True
        self._policy.start(step, self._now_s(), self._state.size())

    def _now_s(self) -> float:
        return self._clock.monotonic_ns() / NS_PER_S

    def _record(self, event: Event, step: int, **fields: Any) -> None:
        if self._journal is not None:
            self._journal.emit(event, step=step, **fields)


def _first_error(step: int, parts: list[dict[str, Any]]) -> str | None:
    """Return why these parts are no checkpoint, naming the rank, or None."""
    for rank, part in enumerate(parts):
        where = f"rank {rank}: " if len(parts) > 1 else ""
        if part["error"]:
            return f"{where}{part['error']}"
        if part["step"] != step:
            return f"rank {rank} saves step {part['step']}, rank 0 step {step}: all ranks must save at one step"
    return None


def _refusal(skipped: tuple[Skipped, ...]) -> str | None:
    """Return why a start from nothing would be wrong: there is a whole checkpoint, but not to be trusted."""
    reasons = [item.why for item in skipped if item.untrusted]
    return f"the checkpoints there are refused, and nothing else can be resumed: {reasons[0]}" if reasons else None
