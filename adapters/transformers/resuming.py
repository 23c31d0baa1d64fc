"""Which checkpoint a `Trainer` resumes: only ever a complete one, and the same on all ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from resilience_sdk import environ
from resilience_sdk.adapters.transformers import marks
from resilience_sdk.adapters.transformers.saving import POINTER
from resilience_sdk.checkpoint.history import CheckpointId, find_quarantined
from resilience_sdk.checkpoint.manifest import InvalidCheckpointError, Manifest
from resilience_sdk.checkpoint.ranks import Alone, Ranks, describe, find_ranks, group_is_ready
from resilience_sdk.checkpoint.select import select_newest
from resilience_sdk.checkpoint.verify import verify_checkpoint
from resilience_sdk.console import say
from resilience_sdk.errors import CheckpointError
from resilience_sdk.events import Event
from resilience_sdk.journal import read_journal
from resilience_sdk.session import Session


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
    return None if step is None else str(directory / f"checkpoint-{step}")


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
        return path
    if not asked:
        return found
    seen = marks.examine(Path(asked))
    if seen.fault is not None and seen.is_marked:
        raise CheckpointError(
            f"train(resume_from_checkpoint={str(asked)!r}): it is not complete, {seen.fault}; the newest complete one "
            "is last_checkpoint(args.output_dir)"
        )
    return str(asked)  # one that was saved without the SDK is the user's to know


def checkpoint_of_run(session: Session) -> str | None:
    """Return the newest complete checkpoint that this run directory knows of, for all ranks. Collective.

    Raises `CheckpointError` where there were several, and none is left.
    """
    ranks = find_ranks()
    found: dict[str, Any] = ranks.broadcast(_choose(session) if ranks.rank == 0 else None)
    if found["error"] is not None:
        raise CheckpointError(found["error"])
    path: str | None = found["path"]
    if path is not None and not all(ranks.gather(os.path.isdir(path))):
        raise CheckpointError(
            f"{path} is to be resumed, and not all ranks can see it: put it on storage that all share"
        )
    return path


def _choose(session: Session) -> dict[str, Any]:
    """Return `{path, error}` by what rank 0 sees, and say what is passed over."""
    place = session.run_dir.checkpoints
    paths: dict[str, Path] = {}

    def examine(name: str) -> Manifest:
        manifest = verify_checkpoint(place / name)
        paths[name] = Path(json.loads((place / name / POINTER).read_bytes())["path"])
        fault = marks.examine(paths[name]).fault
        if fault is not None:
            raise InvalidCheckpointError(f"{paths[name]}: {fault}")
        return manifest

    try:
        names = [name for name in os.listdir(place) if (place / name / POINTER).exists()]
        bad = find_quarantined(read_journal(session.run_dir.journal).events)
        chosen = select_newest(names, examine, lambda name, seen: bad.get(CheckpointId(name, seen.created_at)))
    except FileNotFoundError:
        return {"path": None, "error": None}
    except (OSError, ValueError, KeyError) as error:
        return {"path": None, "error": f"the checkpoints in {place} cannot be read: {describe(error)}"}
    for one in chosen.skipped:
        session.journal.emit(Event.CKPT_SKIP, step=one.step, checkpoint=one.name, why=one.why)
    told = "; ".join(f"step {one.step}: {one.why}" for one in chosen.skipped)
    if chosen.name is None or chosen.manifest is None:
        if len(chosen.skipped) > 1:
            cure = "start over in another run directory, or name one: train(resume_from_checkpoint=...)"
            return {
                "path": None,
                "error": f"none of the checkpoints of {session.run_dir.path} is left ({told}): {cure}",
            }
        if told:
            say(f"no checkpoint is resumed, passed over: {told}")
        return {"path": None, "error": None}
    path = str(paths[chosen.name])
    say(f"resumed from {path}: step {chosen.manifest.step} is next" + (f", passed over: {told}" if told else ""))
    facts: dict[str, Any] = {
        "checkpoint": chosen.name,
        "created_at": chosen.manifest.created_at,
        "bytes": chosen.manifest.size,
    }
    session.journal.emit(Event.RESUME, step=chosen.manifest.step, **facts)
    return {"path": path, "error": None}


def _examine_all(directory: Path) -> dict[str, str | None]:
    try:
        return {str(step): marks.examine(path).fault for step, path in marks.checkpoints_in(directory).items()}
    except OSError as error:
        return {"error": describe(error)}


def _ranks() -> Ranks:
    return find_ranks() if group_is_ready() else Alone()


def _is_first(ranks: Ranks) -> bool:
    identity = environ.rank_identity(environ.environment())
    return ranks.rank == 0 and (identity is None or identity.rank == 0)
