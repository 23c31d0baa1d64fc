"""What the run directory knows of a trainer's checkpoints: where each of them is.

A trainer saves where its arguments say. For each complete save the run directory has a checkpoint whose one file names
that place, so that launcher, reports and resume find it as they find any other.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from resilience_sdk.adapters.transformers import marks
from resilience_sdk.checkpoint.history import CheckpointId, find_quarantined
from resilience_sdk.checkpoint.manifest import InvalidCheckpointError, Manifest
from resilience_sdk.checkpoint.ranks import describe, find_ranks
from resilience_sdk.checkpoint.select import Selection, select_newest
from resilience_sdk.checkpoint.verify import verify_checkpoint
from resilience_sdk.console import say
from resilience_sdk.errors import CheckpointError
from resilience_sdk.events import Event
from resilience_sdk.journal import read_journal
from resilience_sdk.session import Session

NAME = "trainer.json"


def put(directory: Path, path: Path) -> None:
    """Write the pointer to the checkpoint at `path` into one of the run directory; raises `OSError`."""
    (directory / NAME).write_text(json.dumps({"path": str(path.absolute())}))


def checkpoint_of_run(session: Session, output_dir: str) -> str | None:
    """Return the newest complete checkpoint that this run directory knows of, for all ranks. Collective.

    What is passed over is said, also newer ones in `output_dir` whose save did not end. Raises `CheckpointError` where
    there were several, and none is left.
    """
    ranks = find_ranks()
    found: dict[str, Any] = ranks.broadcast(_choose(session, Path(output_dir)) if ranks.rank == 0 else None)
    if found["error"] is not None:
        raise CheckpointError(found["error"])
    path: str | None = found["path"]
    if path is not None and not all(ranks.gather(os.path.isdir(path))):
        raise CheckpointError(
            f"{path} is to be resumed, and not all ranks can see it: put it on storage that all share"
        )
    return path


def _choose(session: Session, output_dir: Path) -> dict[str, Any]:
    """Return `{path, error}` by what rank 0 sees, and say what is passed over."""
    place = session.run_dir.checkpoints
    paths: dict[str, Path] = {}

    def examine(name: str) -> Manifest:
        manifest = verify_checkpoint(place / name)
        paths[name] = Path(json.loads((place / name / NAME).read_bytes())["path"])
        fault = marks.examine(paths[name]).fault
        if fault is not None:
            raise InvalidCheckpointError(f"{paths[name]}: {fault}")
        return manifest

    try:
        names = [name for name in os.listdir(place) if (place / name / NAME).exists()]
        bad = find_quarantined(read_journal(session.run_dir.journal).events)
        chosen = select_newest(names, examine, lambda name, seen: bad.get(CheckpointId(name, seen.created_at)))
    except FileNotFoundError:
        names, chosen = [], Selection(None, None, ())
    except (OSError, ValueError, KeyError) as error:
        return {"path": None, "error": f"the checkpoints in {place} cannot be read: {describe(error)}"}
    for one in chosen.skipped:
        session.journal.emit(Event.CKPT_SKIP, step=one.step, checkpoint=one.name, why=one.why)
    told = "; ".join(
        [
            *_not_ended(output_dir, after=-1 if chosen.manifest is None else chosen.manifest.step),
            *(f"step {one.step}: {one.why}" for one in chosen.skipped),
        ]
    )
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


def _not_ended(output_dir: Path, *, after: int) -> list[str]:
    """Say of each newer checkpoint that a killed save has left behind."""
    with contextlib.suppress(OSError):
        newer = {step: path for step, path in marks.checkpoints_in(output_dir).items() if step > after}
        seen = {path.name: marks.examine(path) for path in newer.values()}
        return [f"{name}: {one.fault}" for name, one in seen.items() if one.fault == marks.NOT_ENDED]
    return []
