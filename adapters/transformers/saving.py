"""Checkpoints of a `Trainer`: each is there as a whole or not at all, known to the run directory, rotated, resumed.

A trainer saves where its arguments say, straight into `checkpoint-<step>`, each rank its own files, and nothing in
there tells one whose writer was killed. So a file beside them, the mark, says first "this is being written", and in the
end, after all ranks' files, what has to be there. Sizes, no checksums: the files are the trainer's own, and to read all
back would double a save.

One that is complete steps aside before its step is saved again (`checkpoint.whole_directory`), under a name that
neither a trainer nor anybody else takes for a checkpoint, and comes back where the second save fails or is killed.

For each complete save the run directory has a checkpoint whose one file names that place, so that launcher, reports and
resume find it as they find any other.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from resilience_sdk.adapters._base import checkpointer, errors_kept
from resilience_sdk.checkpoint.history import CheckpointId, Rollback, find_quarantined, find_rollbacks, skipped_steps
from resilience_sdk.checkpoint.manifest import InvalidCheckpointError, Manifest, Selection, select_newest
from resilience_sdk.checkpoint.ranks import Alone, Ranks, describe, find_ranks, group_is_ready, raise_together
from resilience_sdk.checkpoint.store import verify_checkpoint
from resilience_sdk.checkpoint.whole_directory import put_back, remove_tree, sync_directory, sync_file, sync_tree
from resilience_sdk.core import environ
from resilience_sdk.core.atomic_write import write_whole
from resilience_sdk.core.console import say
from resilience_sdk.core.journal import Event, read_journal
from resilience_sdk.core.plain_file import read_bytes
from resilience_sdk.errors import CheckpointError, Preempted, ResilienceError
from resilience_sdk.rank import Session
from resilience_sdk.straggler import section

MARK = "resilience.json"
POINTER = "trainer.json"
NOT_ENDED = "its save did not end"
NO_MARK = "nothing says that it is complete, since the SDK did not save it; to resume it all the same, name its path"
NOT_THERE = "it is not there"

_FORMAT = 1
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_ASIDE = re.compile(r"\.(checkpoint-\d+)\.before(-[0-9a-f]+)*")
_STATE = "trainer_state.json"
# What Transformers' own just-in-time checkpoint puts there for as long as it writes.
_SENTINEL = "checkpoint-is-incomplete.txt"


def step_of(path: Path) -> int | None:
    """Return the step of a checkpoint's directory by its name, None where it is something else."""
    match = _CHECKPOINT.fullmatch(path.name)
    return None if match is None else int(match[1])


def checkpoints_in(output_dir: Path) -> dict[int, Path]:
    """Return the checkpoints of a trainer, complete or not, newest first; raises `OSError`."""
    try:
        found = {step: path for path in output_dir.iterdir() if (step := step_of(path)) is not None and path.is_dir()}
    except FileNotFoundError:
        return {}
    return dict(sorted(found.items(), reverse=True))


# -- the mark


def begin(directory: Path) -> None:
    """Say that it is being written, before anything else is there. On every rank; raises `OSError`."""
    directory.mkdir(parents=True, exist_ok=True)
    _write_mark(directory, {"format": _FORMAT, "complete": False})


def seal(directory: Path, step: int, world_size: int) -> None:
    """Say what is there, now that all ranks have written. Raises `OSError`.

    All of it is brought to stable storage first: the mark must not outlive what it speaks of.
    """
    files = sync_tree(directory, mark=MARK)
    _write_mark(
        directory, {"format": _FORMAT, "complete": True, "step": step, "world_size": world_size, "files": files}
    )
    sync_directory(directory.parent)


def _write_mark(directory: Path, mark: Mapping[str, Any]) -> None:
    """Write the mark as a whole or not at all; several ranks may do so at once."""
    # Not by the number of the process: containers on several nodes give out the same ones.
    part = directory / f"{MARK}.{secrets.token_hex(8)}"
    try:
        with open(part, "x", encoding="utf-8") as file:
            json.dump(mark, file, indent=1)
        sync_file(part)
        part.replace(directory / MARK)
    finally:
        part.unlink(missing_ok=True)
    sync_directory(directory)


def find_fault(directory: Path) -> str | None:
    """Return why a checkpoint must not be resumed, in words for a person; None where it is complete. Never raises."""
    if (directory / _SENTINEL).exists():
        return NOT_ENDED
    try:
        mark = json.loads(read_bytes(directory / MARK))
    except FileNotFoundError:
        return NO_MARK if directory.is_dir() else NOT_THERE
    except (OSError, ValueError) as error:
        return f"{MARK} cannot be read: {error}"
    if not isinstance(mark, dict) or mark.get("complete") is not True or not isinstance(mark.get("files"), dict):
        return NOT_ENDED
    for name, size in mark["files"].items():
        try:
            now = (directory / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if now != size:
            return f"{name} has {now} bytes instead of {size}"
    return None


def is_complete(directory: Path) -> bool:
    """Tell whether a checkpoint may be resumed. Never raises."""
    return find_fault(directory) is None


# -- aside, while its step is saved again


def aside_of(directory: Path) -> Path:
    """Return the name of a checkpoint that has stepped aside."""
    return directory.with_name(f".{directory.name}.before")


def name_of(path: Path) -> Path:
    """Return which name a checkpoint has when it was put back."""
    match = _ASIDE.fullmatch(path.name)
    return path if match is None else path.with_name(match[1])


def set_aside(directory: Path) -> None:
    """Move a checkpoint away if it is complete, on the rank that makes the directories; raises `OSError`."""
    if is_complete(directory):
        directory.rename(aside_of(directory))


def asides_in(output_dir: Path) -> list[Path]:
    """Return the checkpoints that have stepped aside; raises `OSError`."""
    try:
        return [path for path in sorted(output_dir.iterdir()) if _ASIDE.fullmatch(path.name)]
    except FileNotFoundError:
        return []


def put_all_back(output_dir: Path) -> None:
    """Give what a failed or killed save has left aside its name again; raises `OSError`.

    Before anything is saved there, by the training that saves there. Several ranks may do so at once.
    """
    for aside in asides_in(output_dir):
        put_back(name_of(aside), aside, is_complete)


def place_of(directory: Path) -> Path:
    """Return where the complete checkpoint of this name is now: aside, where its second save did not end."""
    asides = [] if is_complete(directory) else asides_in(directory.parent)
    return next((one for one in asides if name_of(one) == directory and is_complete(one)), directory)


# -- what is resumed


def last_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """Return the newest complete checkpoint of a trainer, for `train(resume_from_checkpoint=...)`; None = no such.

    One whose save did not end, of which a file is missing or cut, or that was saved without the SDK is passed over, and
    one line says so. Collective, if the process group is there, as it is once a `Trainer` is made: then it is what
    all ranks have.

    Raises:
        CheckpointError: `output_dir` cannot be read.

    Example:
        trainer.train(resume_from_checkpoint=last_checkpoint(args.output_dir))
    """
    directory, ranks = Path(output_dir), _ranks()
    answers = ranks.gather(_examine_all(directory))
    if errors := [str(one["error"]) for one in answers if "error" in one]:
        raise CheckpointError(f"the checkpoints in {directory} cannot be read: {errors[0]}")
    faults: dict[int, str] = {}
    for step in sorted({int(step) for one in answers for step in one}, reverse=True):
        found = [one.get(str(step), "a rank does not have it") for one in answers]
        fault = next((one for one in found if one is not None), None)
        if fault is None:
            break
        faults[step] = fault
    else:
        step = None
    if faults and _is_first(ranks):
        told = "; ".join(f"checkpoint-{number}: {fault}" for number, fault in faults.items())
        taken = "no checkpoint is resumed" if step is None else f"checkpoint-{step} is resumed"
        say(f"{taken} of those in {directory}, passed over: {told}")
    return None if step is None else str(place_of(directory / f"checkpoint-{step}"))


def put_back_on_all_ranks(output_dir: str, *, is_keeper: bool) -> None:
    """Put back what a killed save of this training has left aside. Collective; what fails is passed over.

    `is_keeper`: whether this rank is the one that does so, of all or of its node, as it is for what is saved there.
    """
    if is_keeper:
        with contextlib.suppress(OSError):
            put_all_back(Path(output_dir))
    _ranks().gather(None)  # until it is done


def checked(asked: str | bool | None, output_dir: str, found: str | None) -> str | None:
    """Return what `train(resume_from_checkpoint=asked)` loads, `found` being what the run directory has. Collective.

    Raises `CheckpointError` where what is asked for is not complete.
    """
    if asked is True:
        path = last_checkpoint(output_dir)
        if path is None:
            raise CheckpointError(
                f"train(resume_from_checkpoint=True): {output_dir} has no complete checkpoint; to start from nothing "
                "where there is none, write train(resume_from_checkpoint=last_checkpoint(args.output_dir))"
            )
        return str(name_of(Path(path)))
    if not asked:
        return found
    named = Path(asked) if os.path.exists(asked) else name_of(Path(asked))
    fault = find_fault(named)
    if fault not in (None, NO_MARK, NOT_THERE):
        raise CheckpointError(
            f"train(resume_from_checkpoint={str(asked)!r}): it is not complete, {fault}; the newest complete one "
            "is last_checkpoint(args.output_dir)"
        )
    return str(named)  # one that was saved without the SDK is the user's to know


def _examine_all(directory: Path) -> dict[str, str | None]:
    try:
        paths = {*checkpoints_in(directory).values(), *map(name_of, asides_in(directory))}
        return {str(step_of(path)): find_fault(place_of(path)) for path in paths}
    except OSError as error:
        return {"error": describe(error)}


def _ranks() -> Ranks:
    return find_ranks() if group_is_ready() else Alone()


def _is_first(ranks: Ranks) -> bool:
    identity = environ.rank_identity(environ.environment())
    return ranks.rank == 0 and (identity is None or identity.rank == 0)


def checkpoint_of_run(session: Session, output_dir: str) -> tuple[str | None, frozenset[int]]:
    """Return the newest complete checkpoint that this run directory knows of, and which steps are left out then.

    Those are the steps that the run was rolled back over. What is passed over is said, also newer ones in `output_dir`
    whose save did not end. Collective; raises `CheckpointError` where there were several, and none is left.
    """
    ranks = find_ranks()
    chosen = raise_together(ranks, lambda: _choose(session, Path(output_dir)) if ranks.rank == 0 else None)
    answer: tuple[str | None, list[int]] = ranks.broadcast(chosen)
    path, bad_steps = answer
    if path is not None and not all(ranks.gather(os.path.isdir(path))):
        raise CheckpointError(
            f"{path} is to be resumed, and not all ranks can see it: put it on storage that all share"
        )
    return path, frozenset(bad_steps)


def _choose(session: Session, output_dir: Path) -> tuple[str | None, list[int]]:
    """Return the path by what rank 0 sees, and the steps that are left out; say what is passed over."""
    place = session.run_dir.checkpoints
    paths: dict[str, Path] = {}

    rollbacks: tuple[Rollback, ...] = ()

    def examine(name: str) -> Manifest:
        manifest = verify_checkpoint(place / name)
        for back in rollbacks:
            if why := back.why_bad(manifest.step, manifest.created_at):
                raise InvalidCheckpointError(why, rolled_back=True)
        paths[name] = Path(json.loads(read_bytes(place / name / POINTER))["path"])
        fault = find_fault(paths[name])
        if fault is not None:
            raise InvalidCheckpointError(f"{paths[name]}: {fault}")
        return manifest

    try:
        names = [name for name in os.listdir(place) if (place / name / POINTER).exists()]
        events = read_journal(session.run_dir.journal).events
        bad, rollbacks = find_quarantined(events), find_rollbacks(events)
        chosen = select_newest(names, examine, lambda name, seen: bad.get(CheckpointId(name, seen.created_at)))
    except FileNotFoundError:
        chosen = Selection(None, None, ())
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"the checkpoints in {place} cannot be read: {describe(error)}") from error
    for one in chosen.skipped:
        session.journal.emit(Event.CKPT_SKIP, step=one.step, checkpoint=one.name, why=one.why)
    manifest = chosen.manifest
    passed_over = _not_ended(output_dir, after=-1 if manifest is None else manifest.step)
    told = "; ".join([*passed_over, *(f"step {one.step}: {one.why}" for one in chosen.skipped)])
    if chosen.name is None or manifest is None:
        if sum(not one.rolled_back for one in chosen.skipped) > 1:
            raise CheckpointError(
                f"none of the checkpoints of {session.run_dir.path} is left ({told}): start over in another run "
                "directory, or name one: train(resume_from_checkpoint=...)"
            )
        if told:
            say(f"no checkpoint is resumed, passed over: {told}")
        return None, skipped_steps(rollbacks)
    path = str(paths[chosen.name])
    from resilience_sdk.checkpoint.capture import restore_trackers  # imports torch
    from resilience_sdk.checkpoint.payload import rank_document, read_json

    # The trainer's trackers begin behind this, on this rank alone.
    restore_trackers(read_json(place / chosen.name / rank_document(0)).get("trackers"))
    say(f"resumed from {path}: step {manifest.step} is next" + (f", passed over: {told}" if told else ""))
    facts: dict[str, Any] = {"checkpoint": chosen.name, "created_at": manifest.created_at, "bytes": manifest.size}
    session.journal.emit(Event.RESUME, step=manifest.step, **facts)
    return path, skipped_steps(rollbacks)


def _not_ended(output_dir: Path, *, after: int) -> list[str]:
    """Say of each newer checkpoint that a killed save has left behind."""
    with contextlib.suppress(OSError):
        newer = {step: path for step, path in checkpoints_in(output_dir).items() if step > after}
        return [f"{path.name}: {NOT_ENDED}" for path in newer.values() if find_fault(path) == NOT_ENDED]
    return []


# -- what is deleted


def find_deletable(
    oldest_first: Sequence[str],
    complete: Collection[str],
    best: str | None,
    limit: int,
    extra: Collection[str] = (),
) -> list[str]:
    """Return what may go, so that `limit` are left.

    Never the newest complete one nor the best. What is not complete goes before what is: it can resume nothing. So
    does what was saved for a stop alone (`extra`), where the schedule had no save.
    """
    last_good = [name for name in oldest_first if name in complete][-1:]
    kept = {*last_good, *([best] if best in oldest_first else [])}
    others = (name for name in oldest_first if name not in kept)
    doomed = sorted(others, key=lambda name: name in complete and name not in extra)
    return doomed[: max(0, len(oldest_first) - max(limit, len(kept)))]


def rotate(output_dir: Path, best: str | None, limit: int | None, extra_steps: Collection[int] = ()) -> None:
    """Delete what is over the limit, after a save is complete: until then the one before it is the last good one."""
    if limit is None or limit <= 0:
        return
    # By time, as the trainer does: what another training has left there may have higher numbers.
    paths = sorted(checkpoints_in(output_dir).values(), key=lambda path: path.stat().st_mtime_ns)
    complete = {path.name for path in paths if is_complete(path)}
    names = [path.name for path in paths]
    extra = {f"checkpoint-{step}" for step in extra_steps}
    for name in find_deletable(names, complete, None if best is None else Path(best).name, limit, extra):
        remove_tree(output_dir / name)


# -- saves


class TrainerSaves:
    """The saves of one training; of the thread that trains, on all ranks. `is_known`: to the run directory."""

    def __init__(
        self, trainer: Any, session: Session, *, is_known: bool, keep: Callable[[Path], None] | None = None
    ) -> None:
        """Save by the trainer's own method; `keep` writes what each rank adds to a checkpoint, before its mark."""
        self._trainer = trainer
        self._keep = keep
        self.extra_steps: set[int] = set()
        """After which steps a checkpoint was made for a stop alone: a training that never stopped has none there."""
        self._plain = trainer._save_checkpoint
        self._arguments: tuple[Any, ...] = ()
        self._options: dict[str, Any] = {}
        self._count = 0
        self.is_stopping = False
        """Whether the next save is that of an agreed stop."""
        self._checkpointer = checkpointer(session, self._write) if is_known else None

    @property
    def expected_save_s(self) -> float:
        """Seconds that a save takes, as the last one did; 0 before the first. Any thread."""
        return 0.0 if self._checkpointer is None else self._checkpointer.expected_save_s

    @property
    def last_step(self) -> int | None:
        """How many steps the newest complete checkpoint of this training has."""
        good = None if self._checkpointer is None else self._checkpointer.last_good
        return None if good is None else good.step

    def save(self, *args: Any, **options: Any) -> bool:
        """Let the trainer save, and mark what it wrote; tell whether all of it is there. Collective.

        A save that fails is said, and the training goes on; that of the end is tried again for a while, and what fails
        then raises `NotSavedError`. The trainer's own limit is applied after it.
        """
        self._arguments, self._options = args, options
        own = self._checkpointer
        is_saved = self._save()
        if self.is_stopping:
            self._trainer.control.should_training_stop = True
        if self._trainer.args.should_save:
            self._tidy(is_saved=is_saved)
        # At an agreed stop the job leaves to be requeued, saved or not, and has said what is lost.
        is_lost = own is not None and own is self._checkpointer and not (is_saved or self.is_stopping)
        if is_lost and self._is_end() and own is not None and own.has_waited:
            own.raise_unsaved()  # not before what is left of it was tidied away
        return is_saved

    def _is_end(self) -> bool:
        """Tell whether the training is complete: nobody can save it after this."""
        return bool(self._trainer.state.global_step >= self._trainer.state.max_steps > 0)

    def _tidy(self, *, is_saved: bool) -> None:
        directory = self._directory
        if is_saved:
            remove_tree(aside_of(directory))
            state, args = self._trainer.state, self._trainer.args
            with contextlib.suppress(OSError):
                rotate(directory.parent, state.best_model_checkpoint, args.save_total_limit, self.extra_steps)
            return
        if not is_complete(directory):
            remove_tree(directory)  # the disk may be full
        with contextlib.suppress(OSError):
            put_all_back(directory.parent)

    def _save(self) -> bool:
        if self._checkpointer is not None:
            self._count += 1
            self._checkpointer.values["saves"] = self._count  # a step may be saved twice, at the end of an epoch
            try:
                if not (self._is_end() or self.is_stopping):
                    return self._checkpointer.save(self._step)
                self._checkpointer.written_to = self._directory.parent
                end = self._checkpointer.save_patiently(self._step, is_stop=self.is_stopping)
                if end.leaves and not self.is_stopping:
                    raise Preempted
                return end.unsaved is None
            except ResilienceError as error:  # on all ranks: another process writes in the run directory
                say(f"checkpoints are saved, but the run directory does not know of them: {error}")
                self._checkpointer = None
        try:
            with section("checkpoint", kind="io"):
                self._write(None)
        except Exception as error:  # noqa: BLE001 - the same on all ranks; a save that fails ends no training
            say(f"checkpoint at step {self._step} failed: {error}; training goes on")
            return False
        return True

    def _write(self, directory: Path | None) -> None:
        """Write on all ranks, then mark it; raises on all ranks what one raises."""
        ranks = find_ranks()
        is_keeper = self._trainer.args.should_save
        # One by one: no rank writes into a directory that is moved.
        raise_together(ranks, lambda: set_aside(self._directory) if is_keeper else None)
        # Apart: the trainer's save may be collective, so one rank that failed before it would leave the others there.
        try:
            raise_together(ranks, lambda: begin(self._directory))
            raise_together(ranks, self._write_own)
            if self._keep is not None:
                raise_together(ranks, functools.partial(self._keep, self._directory))
            raise_together(ranks, lambda: self._seal(directory if ranks.rank == 0 else None, ranks.size))
        except CheckpointError:
            if is_keeper and not is_complete(self._directory):
                remove_tree(self._directory)  # on all ranks by now; a disk that is full needs the room
            raise

    def _write_own(self) -> None:
        args, state = self._trainer.args, self._trainer.state
        limit, args.save_total_limit = args.save_total_limit, None
        best = getattr(state, "best_global_step", None)
        # The trainer takes the step of the best evaluation for a checkpoint that it may load in the end.
        is_hidden = best is not None and best in self.extra_steps
        try:
            if is_hidden:
                state.best_global_step = None
            with errors_kept(self._trainer, "save_model"):
                self._plain(*self._arguments, **self._options)
        finally:
            args.save_total_limit = limit
            if is_hidden:
                state.best_global_step = best
        if is_hidden and args.should_save:
            state.save_to_json(str(self._directory / _STATE))

    def _seal(self, directory: Path | None, ranks: int) -> None:
        if self._trainer.args.should_save:
            seal(self._directory, self._step, ranks)
        if directory is not None:
            write_whole(directory / POINTER, json.dumps({"path": str(self._directory.absolute())}))

    @property
    def _step(self) -> int:
        return int(self._trainer.state.global_step)

    @property
    def _directory(self) -> Path:
        return Path(self._trainer._get_output_dir(trial=None)) / f"checkpoint-{self._step}"
