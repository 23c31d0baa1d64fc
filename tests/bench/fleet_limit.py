"""How often anything at all could find that everybody has become slower, where lengths vary fourfold from step to step.

Then nothing that ranks have in common tells a slower step from a longer one. What is left is the ratio of the
likelihoods of the same trace with and without the change, told the distribution of the steps, when the change came and
how large it is; a detector knows none of the three. Told how long healthy steps are, too, it is the test of Neyman and
Pearson, which no test beats; without that it takes the likeliest length, from the steps before the change. It is asked
once, after 100 steps, with one false flag in 1,000. `python -m tests.bench.fleet_limit` prints the table.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.bench.straggler_fleet import BASELINE_STEPS, COMMON, LENGTHS, SLOWER, WITHIN

_LEVELS = np.linspace(-0.2, 0.2, 81)  # of the healthy steps, in logarithms: nobody is told how long they are
_FALSE = 1e-3

Array = Any
Ratios = Callable[[int, float, float, np.random.Generator], Array]


def log_density(values: Array) -> Array:
    """Return the logarithm of the density of a step's logarithm: uniform lengths and what is common to a step."""
    width = np.log(LENGTHS)
    below, above = (torch.special.ndtr(torch.from_numpy(edge / COMMON)).numpy() for edge in (values, values - width))
    return np.log(np.maximum((below - above) / width, 1e-300))


def steps(traces: int, count: int, rng: np.random.Generator) -> Array:
    """Return the logarithms of healthy steps, (traces, count)."""
    return rng.uniform(0.0, np.log(LENGTHS), (traces, count)) + COMMON * rng.standard_normal((traces, count))


def ratios_of_a_known_level(traces: int, by: float, assumed: float, rng: np.random.Generator) -> Array:
    """Return the same as `ratios`, told how long healthy steps are."""
    after = steps(traces, WITHIN, rng) + np.log1p(by)
    return (log_density(after - np.log1p(assumed)) - log_density(after)).sum(axis=1)


def ratios(traces: int, by: float, assumed: float, rng: np.random.Generator) -> Array:
    """Return the logarithm of the likelihood ratio of each of so many traces that are slower `by`, (traces,)."""
    before, after = steps(traces, BASELINE_STEPS, rng), steps(traces, WITHIN, rng) + np.log1p(by)
    same = changed = np.full(traces, -np.inf)
    for level in _LEVELS:
        base = log_density(before - level).sum(axis=1)
        same = np.maximum(same, base + log_density(after - level).sum(axis=1))
        changed = np.maximum(changed, base + log_density(after - level - np.log1p(assumed)).sum(axis=1))
    return changed - same


def recall(ratios_of: Ratios, by: float, traces: int, rng: np.random.Generator) -> float:
    """Return the share of the slower traces that a test finds."""
    threshold = np.quantile(ratios_of(traces, 0.0, by, rng), 1.0 - _FALSE)
    return float((ratios_of(traces, by, by, rng) > threshold).mean())


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.fleet_limit", description=__doc__)
    parser.add_argument("--traces", type=int, default=10_000)
    traces = parser.parse_args().traces
    rng = np.random.default_rng(7)
    print("| all slower by | no test finds more than | not told how long steps are |")
    print("|---|---|---|")
    for by in SLOWER:
        most = recall(ratios_of_a_known_level, by, traces, rng)
        print(f"| {by:.0%} | {most:.1%} | {recall(ratios, by, traces, rng):.1%} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
