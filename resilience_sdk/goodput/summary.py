"""The figures that a ledger comes to: ETTR, goodput, MTTF with its interval, MTTR, steps that were done again. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from resilience_sdk.goodput.buckets import DEFINITIONS, Bucket
from resilience_sdk.goodput.ledger import Ledger, Standstill, Stretch
from resilience_sdk.goodput.poisson import limits

RATIOS: Mapping[str, str] = {
    "goodput": "productive / wall time",
    "ettr": "(productive + data) / wall time: what a job trains although it waits for data counts, queueing does not",
    "mttf_s": "wall time without idle / faults that nobody injected, with the interval of a Poisson count (95 %)",
    "mttr_s": "mean time from noticing a fault to every rank stepping again, without the time in which no job ran",
}


AT_MOST = "at most "
"""Before a share of useful time in which steps are that were lost, as nobody counted those."""


_TOLD_BY: Mapping[Bucket, str] = {
    Bucket.DATA: "data", Bucket.CHECKPOINT: "saves", Bucket.EVALUATION: "evaluation",
}  # fmt: skip


@attrs.frozen
class Summary:
    """The figures of one run; seconds. None: there is nothing to tell them from."""

    buckets: Mapping[Bucket, float]
    wall_s: float
    goodput: float | None
    ettr: float | None
    faults: int
    """Without those that were injected, which are no failures of anything."""
    injected: int
    mttf_s: float | None
    mttf_between_s: tuple[float, float | None]
    mttr_s: float | None
    lost_steps: int | None
    attempts: tuple[dict[str, Any], ...]
    stretches: tuple[Stretch, ...] = ()
    """The run's time in its order; `account` is the place among `attempts`."""
    standstills: tuple[Standstill, ...] = ()
    """What stood still and went on by itself; `account` is the place among `attempts`."""
    knows_replayed: bool = True
    """Whether `replayed` is known; where it is not, that time is in `productive`, and goodput and ETTR are no more."""

    knows_steps: bool = True
    """Whether it is known where steps begin; else what lies between two of them is in `productive`, unless it is long:
    data, saves and evaluations that no section tells of."""
    seen: frozenset[str] = frozenset()
    """What some rank has told of: `data`, `saves`, `evaluation`."""

    @property
    def is_bound(self) -> bool:
        """Whether goodput and ETTR are no more than what is told, and may be less."""
        return not (self.knows_replayed and self.knows_steps)

    @property
    def at_most(self) -> str:
        """The words before goodput and ETTR where they are bounds, else nothing."""
        return AT_MOST if self.is_bound else ""

    @property
    def unknown(self) -> frozenset[Bucket]:
        """The buckets of which nobody has told: their time, if any, is in `productive`."""
        return _unknown(self.buckets, self.seen, knows_steps=self.knows_steps, knows_replayed=self.knows_replayed)

    def told_buckets(self) -> dict[str, float | None]:
        """Return the buckets by name, None for one that is not known."""
        return self._told({bucket.value: seconds for bucket, seconds in self.buckets.items()})

    def _told(self, buckets: Mapping[str, float]) -> dict[str, float | None]:
        return {**buckets, **{bucket.value: None for bucket in self.unknown}}

    def to_json(self) -> dict[str, Any]:
        """Return what `resilience goodput --json` prints, but for the run directory."""
        low_s, high_s = self.mttf_between_s
        return {
            "wall_s": self.wall_s,
            "buckets": self.told_buckets(),
            "definitions": {bucket.value: text for bucket, text in DEFINITIONS.items()} | dict(RATIOS),
            "goodput": self.goodput,
            "ettr": self.ettr,
            "at_most": self.is_bound,
            "faults": self.faults,
            "injected": self.injected,
            "mttf_s": self.mttf_s,
            "mttf_low_s": low_s,
            "mttf_high_s": high_s,
            "mttr_s": self.mttr_s,
            "lost_steps": self.lost_steps,
            "attempts": [{**attempt, "buckets": self._told(attempt["buckets"])} for attempt in self.attempts],
        }


def summarize(ledger: Ledger, now: float | None = None, *, standing_s: float = 0.0, is_gone: bool = False) -> Summary:
    """Return the figures of a run at `now` that stands for `standing_s`, as `Ledger.read` takes both.

    `is_gone`: nobody uses the run directory; a job that has told no end was killed then, and that is a fault.
    """
    reading = ledger.read(now, standing_s=standing_s)
    ran_s = reading.wall_s - reading.buckets[Bucket.IDLE]
    injected = len(ledger.failures & ledger.injected)
    faults = len(ledger.failures) - injected + (is_gone and ledger.fails_unseen)
    attempts = tuple(
        {
            "job": account.job,
            "attempt": account.attempt,
            "began_at": account.began_at,
            "ended_at": ended_at,
            "wall_s": sum(seconds.values()),
            "buckets": {bucket.value: value for bucket, value in seconds.items()},
            "first_step": account.first_step,
            "steps": account.end_step,
            "completed": account.completed,
            "lost_steps": ledger.lost_steps_of(account) if ledger.steps_are_global else None,
        }
        for account, seconds, ended_at in reading.attempts
    )
    return Summary(
        buckets=reading.buckets,
        wall_s=reading.wall_s,
        goodput=goodput(reading.buckets),
        ettr=ettr(reading.buckets),
        faults=faults,
        injected=injected,
        mttf_s=ran_s / faults if faults else None,
        mttf_between_s=mean_time_between_s(ran_s, faults),
        mttr_s=sum(ledger.recoveries_s) / len(ledger.recoveries_s) if ledger.recoveries_s else None,
        lost_steps=sum(map(ledger.lost_steps_of, ledger.accounts)) if ledger.steps_are_global else None,
        attempts=attempts,
        stretches=reading.stretches,
        standstills=tuple(ledger.standstills),
        knows_replayed=ledger.knows_replayed,
        knows_steps=ledger.knows_steps,
        seen=_seen(ledger),
    )


def unknown_buckets(ledger: Ledger, buckets: Mapping[Bucket, float]) -> frozenset[Bucket]:
    """Return the buckets of which nobody has told."""
    return _unknown(buckets, _seen(ledger), knows_steps=ledger.knows_steps, knows_replayed=ledger.knows_replayed)


def _seen(ledger: Ledger) -> frozenset[str]:
    return frozenset(part for account in ledger.accounts for part in account.seen)


def _unknown(
    buckets: Mapping[Bucket, float], seen: frozenset[str], *, knows_steps: bool, knows_replayed: bool
) -> frozenset[Bucket]:
    hidden = () if knows_steps else (bucket for bucket, part in _TOLD_BY.items() if part not in seen)
    unseen = {bucket for bucket in hidden if not buckets[bucket]}
    return frozenset(unseen if knows_replayed else {Bucket.REPLAYED, *unseen})


def goodput(buckets: Mapping[Bucket, float]) -> float | None:
    """Return the share of steps that count, 0 to 1; None before any time has passed."""
    return _share(buckets[Bucket.PRODUCTIVE], sum(buckets.values()))


def ettr(buckets: Mapping[Bucket, float]) -> float | None:
    """Return the effective training time ratio, 0 to 1; None before any time has passed."""
    return _share(buckets[Bucket.PRODUCTIVE] + buckets[Bucket.DATA], sum(buckets.values()))


def _share(part_s: float, whole_s: float) -> float | None:
    return min(1.0, part_s / whole_s) if whole_s > 0 else None


def mean_time_between_s(exposed_s: float, count: int) -> tuple[float, float | None]:
    """Return the 95 % interval of the mean time between events that were counted in `exposed_s` seconds.

    Without an event there is no upper end.
    """
    least, most = limits(count)
    return exposed_s / most, exposed_s / least if count else None
