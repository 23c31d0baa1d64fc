"""Planning a job: how often to save, and how much of its time is expected to be useful. Pure.

Failures come at a constant rate (exponential times between them). A save holds training up for `write_s`; what is saved
counts `persist_s` later. After a failure pass `detect_s` until somebody notices and `restart_s` until the first step.

Sources: Young 1974 (first order), Daly 2006 (higher order), Kokolis et al., HPCA 2025 (rates and ETTR of two research
clusters with 16,000 and 8,000 A100).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping

import attrs

from resilience_sdk.core.console import doing

DAY_S = 86400.0
RATES: Mapping[str, float] = {"rsc-1": 6.50, "rsc-2": 2.34}
"""Failures per 1,000 node-days of the two clusters in Kokolis et al."""
_DRAWS = 20_000
_BATCHES = 20
_MOST_FAILED_STARTS = 1000


@attrs.frozen
class PlannedJob:
    """What a plan is made for; seconds."""

    mttf_s: float
    write_s: float = 0.0
    restart_s: float = 0.0
    detect_s: float = 0.0
    persist_s: float = 0.0


def mttf_s(nodes: int, failures_per_1000_node_days: float) -> float:
    """Return the mean time between failures of a job on so many nodes."""
    return DAY_S * 1000.0 / (nodes * failures_per_1000_node_days)


def young_s(job: PlannedJob) -> float:
    """Return Young's interval between saves: sqrt(2 w M)."""
    return math.sqrt(2.0 * job.write_s * job.mttf_s)


def daly_s(job: PlannedJob) -> float:
    """Return Daly's interval: sqrt(2 w M) (1 + sqrt(w / 2M) / 3 + w / 2M / 9) - w, and M where w >= 2 M."""
    share = job.write_s / (2.0 * job.mttf_s)
    if share >= 1.0:
        return job.mttf_s
    return young_s(job) * (1.0 + math.sqrt(share) / 3.0 + share / 9.0) - job.write_s


def expected_ettr(job: PlannedJob, interval_s: float) -> float:
    """Return the expected share of useful time when a save follows every `interval_s` of training.

    The renewal form: between two failures as many intervals count as were saved; after each one comes what it takes
    until the next step. With d = interval + write that is
    interval exp(-persist / M) / ((M + detect + restart) (exp(d / M) - 1)). A start may fail as well, which makes it
    longer: M (exp(restart / M) - 1) stands for restart.
    """
    mean_s = job.mttf_s
    if interval_s <= 0 or max(interval_s + job.write_s, job.restart_s) > 600.0 * mean_s:
        return 0.0
    start_s = mean_s * math.expm1(job.restart_s / mean_s)
    started_again_s = job.detect_s * math.exp(job.restart_s / mean_s)
    saved_s = interval_s * math.exp(-job.persist_s / mean_s) / math.expm1((interval_s + job.write_s) / mean_s)
    return min(1.0, saved_s / (mean_s + start_s + started_again_s))


def simulated_ettr(job: PlannedJob, interval_s: float, *, seed: int = 0) -> tuple[float, float, float]:
    """Return the mean share of useful time of 20,000 simulated failures, and its 95 % interval.

    Nothing of the closed form is used: failures are drawn, also during starts, and saves are counted.
    """
    draw = random.Random(seed)  # noqa: S311 - a simulation
    shares = []
    for batch in range(_BATCHES):
        doing("simulating failures: batch", batch + 1, _BATCHES)
        useful_s = wall_s = 0.0
        for trained_s, passed_s in _lives(job, interval_s, draw, _DRAWS // _BATCHES):
            useful_s += trained_s
            wall_s += passed_s
        shares.append(useful_s / wall_s)
    mean = sum(shares) / len(shares)
    deviation = math.sqrt(sum((share - mean) ** 2 for share in shares) / (len(shares) - 1))
    half = 2.093 * deviation / math.sqrt(len(shares))  # Student's t for 20 batches
    return mean, mean - half, mean + half


def _lives(job: PlannedJob, interval_s: float, draw: random.Random, count: int) -> Iterator[tuple[float, float]]:
    """Yield what each attempt has saved, and the wall time from its first step to that of the next one."""
    rate = 1.0 / job.mttf_s
    for _ in range(count):
        life_s = draw.expovariate(rate)
        saved = max(0, math.floor((life_s - job.persist_s) / (interval_s + job.write_s)))
        passed_s = life_s + job.detect_s
        for _ in range(_MOST_FAILED_STARTS):
            start_s = draw.expovariate(rate)
            if start_s >= job.restart_s:
                break
            passed_s += start_s + job.detect_s
        yield saved * interval_s, passed_s + job.restart_s


def best_interval_s(job: PlannedJob) -> float:
    """Return the interval with the highest expected ETTR, where a save costs something; found by golden section."""
    low, high = math.log(1e-3), math.log(max(1.0, 20.0 * job.mttf_s))
    ratio = (math.sqrt(5.0) - 1.0) / 2.0
    for _ in range(80):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if expected_ettr(job, math.exp(left)) < expected_ettr(job, math.exp(right)):
            low = left
        else:
            high = right
    return math.exp(0.5 * (low + high))
