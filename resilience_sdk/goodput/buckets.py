"""The buckets of wall time: each second of a run is in exactly one, by the definition that is printed beside it.

Goodput counts as Google's ml-goodput does (a step that is done again is no progress), ETTR as Meta's study of its
research clusters does (Kokolis et al., HPCA 2025), here over the wall time of the whole chain of jobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

import attrs


class Bucket(str, Enum):
    """What a second was spent on. Values are keys of `resilience goodput --json`."""

    PRODUCTIVE = "productive"
    REPLAYED = "replayed"
    STARTUP = "startup"
    RENDEZVOUS = "rendezvous"
    DATA = "data"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    OUTSIDE = "outside"
    WAITING = "waiting"
    HANG = "hang"
    STANDING = "standing"
    RESTART = "restart"
    PREEMPTED = "preempted"
    LAUNCHER = "launcher"
    IDLE = "idle"


DEFINITIONS: Mapping[Bucket, str] = {
    Bucket.PRODUCTIVE: "inside of steps that count: every rank was in one, done once, and in no other bucket",
    Bucket.REPLAYED: "steps that were lost with an attempt, with all that they took: data, evaluation, saves",
    Bucket.STARTUP: "from the start of a job until every rank has completed a step, without rendezvous",
    Bucket.RENDEZVOUS: "nodes waited for one another, at the start and at restarts",
    Bucket.DATA: "the rank that waited longest for its data did so (section data)",
    Bucket.EVALUATION: "the rank that evaluated longest did so (section eval, or batches of an evaluation)",
    Bucket.CHECKPOINT: "training stood still for a save (the stall, or section checkpoint or save)",
    Bucket.OUTSIDE: "outside of all steps and in no other bucket: between two of them, between epochs, behind the last",
    Bucket.WAITING: "ranks waited for one that took longer than they did",
    Bucket.HANG: "from when a rank stood still until the hang was ended, or went on by itself",
    Bucket.STANDING: "nothing moved, or a rank was stopped, for more than a second and two usual steps",
    Bucket.RESTART: "from a fault until every rank of the next attempt has completed a step, without rendezvous",
    Bucket.PREEMPTED: "from the stop that all ranks agreed on to the end of the attempt, its save included",
    Bucket.LAUNCHER: "the launcher itself, once all ranks had ended and until it said how",
    Bucket.IDLE: "no job ran: queued, or waiting for somebody to start it again",
}


def no_seconds() -> dict[Bucket, float]:
    """Return an empty account."""
    return dict.fromkeys(Bucket, 0.0)


def total(accounts: Iterable[Mapping[Bucket, float]]) -> dict[Bucket, float]:
    """Add up accounts, bucket by bucket."""
    found = no_seconds()
    for account in accounts:
        for bucket, seconds in account.items():
            found[bucket] += seconds
    return found


@attrs.frozen
class Trained:
    """What is known of an attempt's training beyond its length; seconds."""

    hung_s: float = 0.0
    standing_s: float = 0.0
    checkpoint_s: float = 0.0
    evaluation_s: float = 0.0
    data_s: float = 0.0
    waiting_s: float = 0.0
    productive_s: float | None = None
    """In steps, and in nothing of the above; None where nobody has told: then it is what the others leave."""
    lost_share: float = 0.0
    """Share of its steps that were lost with it, 0 to 1."""
    lost: Mapping[Bucket, float] | None = None
    """How much of each bucket was lost with them, where that is known: those are done again with all they took."""


_LOST = (Bucket.PRODUCTIVE, Bucket.DATA, Bucket.EVALUATION, Bucket.WAITING, Bucket.OUTSIDE)
"""What lost steps have taken. A standstill was none of theirs; a save is where it is known which one it was."""


def split_training(seconds: float, known: Trained) -> dict[Bucket, float]:
    """Divide the time in which an attempt trained; the parts add up to it.

    Parts are measured by different clocks and ranks, so that each takes at most what the ones before have left.
    """
    seconds = max(0.0, seconds)
    told = None if known.productive_s is None else min(max(0.0, known.productive_s), seconds)
    rest = seconds if told is None else seconds - told
    found: dict[Bucket, float] = {}
    for bucket, wanted in (
        (Bucket.HANG, known.hung_s),
        (Bucket.STANDING, known.standing_s - known.hung_s),
        (Bucket.CHECKPOINT, known.checkpoint_s),
        (Bucket.EVALUATION, known.evaluation_s),
        (Bucket.DATA, known.data_s),
        (Bucket.WAITING, known.waiting_s),
    ):
        room = rest if bucket is not Bucket.HANG or told is None else seconds  # what hung is known to have been none
        found[bucket] = min(max(0.0, wanted), room)
        rest -= found[bucket]
        if rest < 0:
            told, rest = (told or 0.0) + rest, 0.0
    found[Bucket.PRODUCTIVE], found[Bucket.OUTSIDE] = (rest, 0.0) if told is None else (told, rest)
    found[Bucket.REPLAYED] = 0.0
    share = min(1.0, max(0.0, known.lost_share))
    for bucket in (*_LOST, *(() if known.lost is None else (Bucket.CHECKPOINT,))):
        lost_s = found[bucket] * share if known.lost is None else known.lost.get(bucket, 0.0)
        lost_s = min(max(0.0, lost_s), found[bucket])
        found[bucket] -= lost_s
        found[Bucket.REPLAYED] += lost_s
    return found
