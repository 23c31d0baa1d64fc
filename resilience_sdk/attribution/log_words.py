"""What a program says of its own progress: a step, an end, a retry; and how many ranks there are. Pure."""

from __future__ import annotations

import re

_WORLD = re.compile(
    r"(?i)\b(?:world[_ ]?size|nranks|num_processes|WORLD_SIZE)\b['\"]?\s*[=: ]\s*(\d{1,6})\b"
    r"|Starting with (\d{1,6}) processes|MEMBER: \d+/(\d{1,6})"
)
_PROGRESS = re.compile(
    r"(?i)\b(?:step|iter|iteration|epoch|batch)\b['\"]?\s*[=:#\[(]?\s*\d+|\d+(?:\.\d+)?\s?(?:it/s|s/it)\b"
)
_SCHEDULER = re.compile(r"\bsrun|slurm|job step|\bSTEP \d+\.")  # a step of theirs is no step of ours
_DONE = re.compile(
    r"(?i)\b(?:training|run|job|fit|epoch|loop|rank \d+|worker|all epochs|optimi[sz]ation)\b.{0,40}"
    r"\b(?:finished|complete[d]?|done|ended|successful\w*|exhausted)\b"
    r"|\b(?:finished|completed|done|ending|leaving)\b.{0,20}\b(?:training|run|epochs?|loop|all steps)\b"
    r"|`?Trainer\.fit`? stopped|reached max_(?:steps|epochs)|training_success|exited? with (?:code )?0\b"
    r"|out of (?:data|batches)|no more (?:data|batches)|end of (?:data|dataset|loader)"
    r"|(?:loader|iterator|dataset|inputs?|data|batches) (?:is |are )?(?:exhausted|finished|ended)"
)
# The words of a whole run, not of an epoch or of one rank.
_FINISHED = re.compile(
    r"(?i)\b(?:training|fine-?tuning|optimi[sz]ation)\b.{0,30}\b(?:finished|completed?|done|ended|successful\w*)\b"
    r"|\b(?:finished|completed|done|end of)\b.{0,12}\b(?:training|all (?:steps|epochs))\b|`?Trainer\.fit`? stopped"
    r"|\b(?:job|run|experiment)\b.{0,30}\b(?:finished|completed)\b|\btrain_runtime\b|reached max_(?:steps|epochs)"
)
_HANDLED = re.compile(
    r"(?i)\b(?:retry(?:ing)?|retried|will (?:try|retry)|try(?:ing)? again|attempt \d+|skip(?:ping|ped)?|"
    r"ignor(?:ing|ed)|continu(?:e|ing)|fall(?:ing)? back|fallback|recover(?:ed|ing)|handled|caught|using defaults?|"
    r"from scratch|"
    r"succeeded after)\b"
)


def world_size(text: str) -> int | None:
    """Return how many ranks the job has, where the line tells."""
    match = _WORLD.search(text)
    return int(next(group for group in match.groups() if group)) if match else None


def tells_of_a_step(text: str) -> bool:
    """Tell whether the line is one of the training loop's progress."""
    return _PROGRESS.search(text) is not None and _SCHEDULER.search(text) is None


def says_done(text: str) -> bool:
    """Tell whether a rank says that it has come to an end of something: a run, an epoch, its data."""
    return _DONE.search(text) is not None


def says_finished(text: str) -> bool:
    """Tell whether the run as a whole is said to have finished."""
    return _FINISHED.search(text) is not None


def says_handled(text: str) -> bool:
    """Tell whether the program says that it goes on: it tries again, skips, falls back."""
    return _HANDLED.search(text) is not None
