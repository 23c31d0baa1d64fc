"""Which checkpoint a `Trainer` resumes: only ever a complete one, and the same on all ranks."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from resilience_sdk import environ
from resilience_sdk.adapters.transformers import again, marks
from resilience_sdk.checkpoint.ranks import Alone, Ranks, describe, find_ranks, group_is_ready
from resilience_sdk.console import say
from resilience_sdk.errors import CheckpointError


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
    return None if step is None else str(again.place_of(directory / f"checkpoint-{step}"))


def put_back(output_dir: str, *, is_keeper: bool) -> None:
    """Put back what a killed save of this training has left aside. Collective; what fails is passed over.

    `is_keeper`: whether this rank is the one that does so, of all or of its node, as it is for what is saved there.
    """
    if is_keeper:
        with contextlib.suppress(OSError):
            again.put_back(Path(output_dir))
    _ranks().gather(None)  # it is done


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
        return str(again.name_of(Path(path)))
    if not asked:
        return found
    named = Path(asked) if os.path.exists(asked) else again.name_of(Path(asked))
    seen = marks.examine(named)
    if seen.fault is not None and seen.is_marked:
        raise CheckpointError(
            f"train(resume_from_checkpoint={str(asked)!r}): it is not complete, {seen.fault}; the newest complete one "
            "is last_checkpoint(args.output_dir)"
        )
    return str(named)  # one that was saved without the SDK is the user's to know


def _examine_all(directory: Path) -> dict[str, str | None]:
    try:
        paths = {*marks.checkpoints_in(directory).values(), *again.names_in(directory)}
        return {str(marks.step_of(path)): marks.examine(again.place_of(path)).fault for path in paths}
    except OSError as error:
        return {"error": describe(error)}


def _ranks() -> Ranks:
    return find_ranks() if group_is_ready() else Alone()


def _is_first(ranks: Ranks) -> bool:
    identity = environ.rank_identity(environ.environment())
    return ranks.rank == 0 and (identity is None or identity.rank == 0)
