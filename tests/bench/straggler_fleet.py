"""Simulated fleets: who is found slow, how soon, and how often nobody was.

The production code (`straggler.detector.Judge`) reads traces that numpy makes; the rules of others are applied to the
same windows. `python -m tests.bench.straggler_fleet --sizes 8,64 --models lognormal` prints the whole table.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np

from resilience_sdk.straggler.detector import Judge
from resilience_sdk.straggler.verdicts import FOUND, SlowVerdict
from resilience_sdk.straggler.windowing import WINDOW_STEPS, RankPlace, SectionWindow, Window
from tests.bench.figures import Context, Figure, shown

MODELS = ("lognormal", "student-t", "lengths", "told-lengths")
"""3 % of lognormal jitter; the same with Student-t(3) tails; lognormal, and sequences whose length varies fourfold
from step to step; the same traces, of which the training tells the lengths (`straggler.work`). All with 1 % of spikes
of + 50 % on average and 4 % that a step has in common."""
TOLD = "told-"
SIZES = (8, 64, 512, 4096, 16384)
SLOWER = (0.03, 0.05, 0.10, 0.20, 0.50)
SCOPES = ("rank", "node", "all")
RANKS_PER_NODE = 8
BASELINE_STEPS = 20 * WINDOW_STEPS  # before somebody becomes slow
WITHIN = 100  # steps in which it is to be found
COMMON = 0.04  # standard deviation of what a step has in common, in logarithms
LENGTHS = 4.0  # the longest sequences, in those of the shortest
_RUN = 200  # clean windows of one run
_STEP_S = 0.1

Array = Any


@attrs.frozen
class Trial:
    """One trace, and who becomes slow in it by how much."""

    durations: Array
    """(steps, ranks), seconds."""
    slower: dict[int, float]
    onset: int
    amounts: Array | None = None
    """(steps,), as the training tells them."""


@attrs.define
class Tally:
    """What one rule made of several traces."""

    there: int = 0
    found: int = 0
    wrong: int = 0
    clean: int = 0
    false: int = 0
    delays: list[int] = attrs.Factory(list)

    @property
    def recall(self) -> float:
        """Share of what was there that was found in time."""
        return self.found / self.there if self.there else float("nan")

    @property
    def precision(self) -> float:
        """Share of what was found that was there."""
        return self.found / (self.found + self.wrong) if self.found + self.wrong else float("nan")

    @property
    def false_per_1000(self) -> float:
        """False flags per 1,000 clean windows."""
        return 1000.0 * self.false / self.clean if self.clean else float("nan")


def jitter(model: str, steps: int, ranks: int, rng: np.random.Generator) -> tuple[Array, Array | None]:
    """Return the durations of a healthy fleet, (steps, ranks), in seconds, and the amounts of work that are told."""
    shape = (steps, ranks)
    own = rng.standard_t(3, shape) if model == "student-t" else rng.standard_normal(shape)
    times = np.exp(0.03 * own)
    spikes = rng.random(shape) < 0.01
    times[spikes] *= 1.0 + rng.exponential(0.5, int(spikes.sum()))
    times *= np.exp(COMMON * rng.standard_normal((steps, 1)))
    lengths = None
    if model.removeprefix(TOLD) == "lengths":
        lengths = np.exp(rng.uniform(0.0, np.log(LENGTHS), steps))
        times *= law(lengths)[:, np.newaxis]
    return _STEP_S * times, lengths if model.startswith(TOLD) else None


def law(lengths: Array) -> Array:
    """Return how long steps of these lengths take. Others may be tried here, such as one with a part by the square."""
    return lengths


def trial(model: str, ranks: int, slower: dict[int, float], rng: np.random.Generator) -> Trial:
    """Return a trace in which `slower` (rank -> share) sets in somewhere in a window, with 100 steps after it."""
    onset = BASELINE_STEPS + int(rng.integers(WINDOW_STEPS))
    steps = (onset + WITHIN) // WINDOW_STEPS * WINDOW_STEPS
    durations, amounts = jitter(model, steps, ranks, rng)
    for rank, by in slower.items():
        durations[onset:, rank] *= 1.0 + by
    return Trial(durations, slower, onset, amounts)


def verdicts(durations: Array, amounts: Array | None = None) -> Iterator[tuple[int, SlowVerdict]]:
    """Yield (steps that were seen, verdict) as the judge finds them."""
    steps, ranks = durations.shape
    judge = Judge({rank: RankPlace(f"node{rank // RANKS_PER_NODE}") for rank in range(ranks)})
    for first in range(0, steps - WINDOW_STEPS + 1, WINDOW_STEPS):
        rows = durations[first : first + WINDOW_STEPS].T.tolist()
        told = {} if amounts is None else dict.fromkeys(range(ranks), amounts[first : first + WINDOW_STEPS].tolist())
        for change in judge.add(Window(first, (SectionWindow("fwd", "compute", dict(enumerate(rows)), told),))):
            if change.what == FOUND:
                yield first + WINDOW_STEPS, change.verdict


def clean_windows(model: str, ranks: int, windows: int, rng: np.random.Generator) -> dict[str, Tally]:
    """Return false flags of every rule over so many windows of a healthy fleet."""
    tallies: dict[str, Tally] = {}
    while windows > 0:
        count = min(_RUN, windows)
        windows -= count
        durations, amounts = jitter(model, count * WINDOW_STEPS, ranks, rng)
        flags = {"ours": len(list(verdicts(durations, amounts)))}
        for name, flagged in peers(durations).items():
            flags[name] = int(flagged.any(axis=1).sum())
        for name, false in flags.items():
            tally = tallies.setdefault(name, Tally())
            tally.clean += count
            tally.false += false
    return tallies


def count_ours(sample: Trial, scope: str, tally: Tally) -> None:
    """Add what our verdicts make of one trace. A rank, a node or everybody counts once, when it is named."""
    pending = set(_groups(sample, scope))
    tally.there += len(pending)
    for seen, verdict in verdicts(sample.durations, sample.amounts):
        named = () if verdict.kind == "global" else verdict.ranks
        if seen > sample.onset and named in pending:
            pending.discard(named)
            tally.found += 1
            tally.delays.append(seen - sample.onset)
        elif seen <= sample.onset or not named or not set(named) <= sample.slower.keys() or scope == "all":
            tally.wrong += 1


def count_peers(sample: Trial, scope: str, tallies: dict[str, Tally]) -> None:
    """Add what the rules of others make of one trace; `all` is found when half of the ranks are flagged at once."""
    groups = _groups(sample, scope)
    first = -(-sample.onset // WINDOW_STEPS)  # the first window that is slow throughout
    for name, flagged in peers(sample.durations).items():
        tally = tallies.setdefault(name, Tally())
        tally.there += len(groups)
        innocent = np.ones(flagged.shape, bool)
        innocent[first - 1 :, list(sample.slower)] = False
        tally.wrong += int((flagged & innocent).any(axis=1).sum())
        for group in groups:
            of_group = flagged[first:, list(group)] if group else flagged[first:]
            hits = np.flatnonzero(of_group.mean(axis=1) >= 0.5)
            if hits.size:
                tally.found += 1
                tally.delays.append((first + int(hits[0]) + 1) * WINDOW_STEPS - sample.onset)


def peers(durations: Array) -> dict[str, Array]:
    """Return rule -> whether it flags, (windows, ranks), on the same windows of 8 steps."""
    windows = durations.reshape(-1, WINDOW_STEPS, durations.shape[1])
    medians, means = np.median(windows, axis=1), windows.mean(axis=1)
    relative = medians.min(axis=1, keepdims=True) / medians
    individual = np.minimum.accumulate(medians, axis=0) / medians
    far = means > means.mean(axis=1, keepdims=True) + 3.0 * means.std(axis=1, ddof=1, keepdims=True)
    return {
        "NVRx 0.75": (relative < 0.75) | (individual < 0.75),
        "NVRx 0.7": (relative < 0.7) | (individual < 0.7),
        "mean + 3 sigma": far,
    }


def _groups(sample: Trial, scope: str) -> list[tuple[int, ...]]:
    if scope == "all":
        return [()]
    if scope == "rank":
        return [(rank,) for rank in sample.slower]
    nodes: dict[int, list[int]] = {}
    for rank in sample.slower:
        nodes.setdefault(rank // RANKS_PER_NODE, []).append(rank)
    return [tuple(sorted(ranks)) for ranks in nodes.values()]


def slow_ones(scope: str, ranks: int, by: float, rng: np.random.Generator) -> dict[int, float]:
    """Choose who becomes slow: one rank or node, and in a large fleet one in 256, to get more out of a trace."""
    if scope == "all":
        return dict.fromkeys(range(ranks), by)
    if scope == "rank":
        return {int(rank): by for rank in rng.choice(ranks, max(1, ranks // 256), replace=False)}
    nodes = ranks // RANKS_PER_NODE
    chosen = rng.choice(nodes, max(1, nodes // 256), replace=False)
    return {int(node) * RANKS_PER_NODE + at: by for node in chosen for at in range(RANKS_PER_NODE)}


def cell(model: str, ranks: int, scope: str, by: float, trials: int, rng: np.random.Generator) -> dict[str, Tally]:
    """Return what every rule makes of so many traces of one kind."""
    tallies = {"ours": Tally()}
    for _ in range(trials):
        sample = trial(model, ranks, slow_ones(scope, ranks, by, rng), rng)
        count_ours(sample, scope, tallies["ours"])
        count_peers(sample, scope, tallies)
    return tallies


def measure(context: Context) -> list[Figure]:
    """Measure false flags and recall at a few sizes; `main` prints more."""
    figures = []
    rng = np.random.default_rng(7)
    for ranks in (8, 64) if context.quick else (8, 64, 512):
        for model in MODELS:
            clean = clean_windows(model, ranks, context.repeats(4000, 400) * 8 // min(ranks, 64), rng)
            for name, tally in clean.items():
                figures.append(
                    _figure(f"false flags, {model}, {ranks} ranks", name, tally.false_per_1000, 1.0, "/1,000")
                )
            scope = "all" if model.startswith(TOLD) else "rank"  # ranks are compared without what is told
            for by, most_missed in ((0.05, 20.0), (0.10, 2.0)):
                found = cell(model, ranks, scope, by, context.repeats(60, 10), rng)
                for name, tally in found.items():
                    missed = 100.0 * (1.0 - tally.recall)
                    label = f"missed +{by:.0%} {scope}, {model}, {ranks}"
                    figures.append(_figure(label, name, missed, most_missed, "%"))
    return figures


def _figure(name: str, system: str, value: float, target: float, unit: str) -> Figure:
    return Figure(name, system, unit, (value,), target=target if system == "ours" else None)


def main() -> int:
    """Print the table for the chosen sizes and models."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.straggler_fleet", description=__doc__)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), metavar="N,...")
    parser.add_argument("--models", default=",".join(MODELS), metavar="NAME,...")
    parser.add_argument("--scopes", default=",".join(SCOPES), metavar="NAME,...")
    parser.add_argument("--rank-windows", type=int, default=2_000_000, help="clean windows times ranks, at each size")
    parser.add_argument("--slower", default=",".join(map(str, SLOWER)), metavar="SHARE,...")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trials", type=int, default=4096, help="trials times ranks of each kind, at least 2 trials")
    arguments = parser.parse_args()
    print("| model | ranks | rule | false / 1,000 clean | slower | recall | precision | delay, steps |")
    print("|---|---|---|---|---|---|---|---|")
    for model in arguments.models.split(","):
        for ranks in map(int, arguments.sizes.split(",")):
            rng = np.random.default_rng([ranks, MODELS.index(model.removeprefix(TOLD)), arguments.seed])
            start = time.monotonic()
            windows = min(10_000, arguments.rank_windows // ranks)
            for name, tally in clean_windows(model, ranks, windows, rng).items():
                print(f"| {model} | {ranks} | {name} | {shown(tally.false_per_1000)} of {windows} | | | | |")
            trials = max(2, min(100, arguments.trials // ranks))
            for scope in arguments.scopes.split(","):
                if scope != "node" or ranks > RANKS_PER_NODE:
                    for by in map(float, arguments.slower.split(",")):
                        for name, tally in cell(model, ranks, scope, by, trials, rng).items():
                            delay = shown(float(np.median(tally.delays))) if tally.delays else "-"
                            print(
                                f"| {model} | {ranks} | {name} | | {scope} + {by:.0%} | {tally.recall:.2f} of "
                                f"{tally.there} | {tally.precision:.2f} | {delay} |",
                                flush=True,
                            )
            print(f"{model} {ranks}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
