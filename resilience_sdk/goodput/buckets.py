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
    CHECKPOINT = "checkpoint"
    HANG = "hang"
    STANDING = "standing"
    RESTART = "restart"
    PREEMPTED = "preempted"
    IDLE = "idle"


DEFINITIONS: Mapping[Bucket, str] = {
    Bucket.PRODUCTIVE: "steps that count: done once, and in no other bucket",
    Bucket.REPLAYED: "steps that were lost with an attempt and had to be done again",
    Bucket.STARTUP: "from the start of a job until every rank has completed a step, without rendezvous",
    Bucket.RENDEZVOUS: "nodes waited for one another, at the start and at restarts",
    Bucket.DATA: "the rank that waited longest for its data did so (section data)",
    Bucket.CHECKPOINT: "training stood still for a save (the stall, or section checkpoint or save)",
    Bucket.HANG: "from when a rank stood still until the hang was ended, or went on by itself",
    Bucket.STANDING: "no step is completed for now; what it was is known once it is over",
    Bucket.RESTART: "from a fault until every rank of the next attempt has completed a step, without rendezvous",
    Bucket.PREEMPTED: "from the stop that all ranks agreed on to the end of the attempt, its save included",
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
    checkpoint_s: float = 0.0
    data_s: float = 0.0
    lost_share: float = 0.0
    """Share of its steps that were lost with it, 0 to 1."""


def split_training(seconds: float, known: Trained) -> dict[Bucket, float]:
    """Divide the time in which an attempt trained; the parts add up to it.

    Parts are measured by different clocks and ranks, so that each takes at most what the ones before have left.
    """
    rest = max(0.0, seconds)
    found: dict[Bucket, float] = {}
    for bucket, wanted in (
        (Bucket.HANG, known.hung_s),
        (Bucket.CHECKPOINT, known.checkpoint_s),
        (Bucket.DATA, known.data_s),
    ):
        found[bucket] = min(max(0.0, wanted), rest)
        rest -= found[bucket]
    found[Bucket.REPLAYED] = rest * min(1.0, max(0.0, known.lost_share))
    found[Bucket.PRODUCTIVE] = rest - found[Bucket.REPLAYED]
    return found
