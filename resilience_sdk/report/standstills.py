"""The standstills of a run: a rank was stopped or stuck, and went on by itself, so that no incident tells of it. Pure.

They are told where they matter: where those of a job come to 5 % of its time, or one lasted a minute. Less is what any
machine takes now and then, and would stand beside each good run; a minute in which nobody trained is worth a line in a
run of any length. What lasted less than 10 s is none, as the monitor's first notice comes then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from resilience_sdk.core.words import duration, one_line
from resilience_sdk.goodput.ledger import Standstill
from resilience_sdk.goodput.summary import Summary

_LEAST_S = 10.0
_MATTERS_SHARE, _MATTERS_S = 0.05, 60.0
_DEFAULT_BEAT = "step"  # the name of a block around a step: no place within it


@attrs.frozen
class JobStandstills:
    """The standstills of one job that matter, in the order of time."""

    job_number: int
    """Which job of the run directory it is, from 1."""
    found: tuple[Standstill, ...]
    attempts: Sequence[int]
    """The number of each one's attempt, as its job counts."""
    wall_s: float
    """How long the job has lasted."""

    def sentence(self) -> str:
        """Return who stood where and for how long, and what part of the job that was, as one sentence."""
        total_s = sum(one.seconds for one in self.found)
        part = f"{total_s / self.wall_s:.0%} of the {duration(self.wall_s)} of its job"
        longest = max(self.found, key=lambda one: one.seconds)
        told = words_of(longest, self.attempts[self.found.index(longest)])
        if len(self.found) == 1:
            return as_sentence(f"{told}: {part}")
        times = f"{len(self.found)} times the run stood still and went on by itself, for {duration(total_s)} together"
        return f"{times}: {part}; longest: {told}."

    def to_json(self) -> list[dict[str, Any]]:
        """Return them as `why --json` prints them."""
        return [
            {
                "job_number": self.job_number,
                "attempt": attempt,
                **{name: value for name, value in attrs.asdict(one).items() if name != "account"},
                "seconds": one.seconds,
                "text": words_of(one, attempt),
            }
            for one, attempt in zip(self.found, self.attempts, strict=True)
        ]


def job_numbers(account: Summary) -> list[int]:
    """Return of each attempt which job of the run it belongs to, from 1.

    A job that was queued again has the key of the one before it, but counts its attempts from the beginning.
    """
    numbers: list[int] = []
    before: tuple[object, int] | None = None
    for one in account.attempts:
        is_same = before is not None and one["job"] == before[0] and one["attempt"] > before[1]
        numbers.append((numbers[-1] if numbers else 0) + (not is_same))
        before = one["job"], one["attempt"]
    return numbers


def as_sentence(words: str) -> str:
    """Return words with a capital letter and a full stop."""
    return f"{words[:1].upper()}{words[1:]}."


def words_of(one: Standstill, attempt: int) -> str:
    """Return one standstill as the begin of a sentence."""
    who = f"rank {one.rank}" + (f" and {one.more} more" if one.more else "")
    node = f" on {one_line(one.node)}" if one.node and not one.more else ""
    place = f" in attempt {attempt}" if one.step is None else f" at step {one.step} of attempt {attempt}"
    if one.step is not None and one.step_is_global:
        place = f" at step {one.step} in attempt {attempt}"
    if one.section and one.section != _DEFAULT_BEAT:
        place += f", section {one_line(one.section)}"
    return f"{who}{node} was {one.activity} for {duration(one.seconds)}{place}, and went on by itself"


def standstills_of(account: Summary) -> list[JobStandstills]:
    """Return those of each job in which they matter, in the order of the jobs."""
    numbers = job_numbers(account)
    lasted: dict[int, float] = {}
    for number, attempt in zip(numbers, account.attempts, strict=True):
        lasted[number] = lasted.get(number, 0.0) + attempt["wall_s"]
    of_jobs: dict[int, list[Standstill]] = {}
    for one in account.standstills:
        if one.seconds >= _LEAST_S:
            of_jobs.setdefault(numbers[one.account], []).append(one)
    return [
        JobStandstills(
            number, tuple(found), [account.attempts[one.account]["attempt"] for one in found], lasted[number]
        )
        for number, found in of_jobs.items()
        if _matter(found, lasted[number])
    ]


def _matter(found: Sequence[Standstill], lasted_s: float) -> bool:
    share = sum(one.seconds for one in found) / lasted_s if lasted_s > 0 else 0.0
    return share >= _MATTERS_SHARE or max(one.seconds for one in found) >= _MATTERS_S


def newest_sentence(account: Summary) -> str | None:
    """Return what the newest job of a run tells of its standstills; None where nothing in it matters."""
    numbers, known = job_numbers(account), standstills_of(account)
    return known[-1].sentence() if known and known[-1].job_number == numbers[-1] else None
