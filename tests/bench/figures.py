"""What a measurement is: samples, their spread, and the target they are held against."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs


@attrs.frozen
class Context:
    """What every measurement needs to know."""

    scratch: Path
    quick: bool
    nvrx_python: str | None
    before: Path | None = None
    """A checkout of another commit, to be measured beside this one."""
    peers_envs: Path = Path("peers-envs")
    """Where the environments of the peers are kept."""
    peers_at_once: int = 1

    def repeats(self, full: int, quick: int) -> int:
        """Return how often to measure."""
        return quick if self.quick else full


@attrs.frozen
class Figure:
    """One measured quantity of one system."""

    name: str
    system: str
    unit: str
    samples: tuple[float, ...]
    target: float | None = None  # an upper bound for the median
    target_p95: float | None = None
    note: str = ""
    least: float | None = None  # a lower bound for the median

    @property
    def median(self) -> float | None:
        """The middle of the samples; None without any."""
        return statistics.median(self.samples) if self.samples else None

    @property
    def p95(self) -> float | None:
        """The nearest-rank 95th percentile."""
        if not self.samples:
            return None
        return sorted(self.samples)[math.ceil(0.95 * len(self.samples)) - 1]

    @property
    def met(self) -> bool | None:
        """Whether the targets are met; None where there are none."""
        if self.target is None and self.least is None:
            return None
        if self.median is None or self.p95 is None:
            return False
        is_low = self.target is None or self.median <= self.target
        is_high = self.least is None or self.median >= self.least
        return is_low and is_high and (self.target_p95 is None or self.p95 <= self.target_p95)

    def to_json(self) -> dict[str, Any]:
        """Return the figure with its spread."""
        return {
            "name": self.name,
            "system": self.system,
            "unit": self.unit,
            "median": self.median,
            "min": min(self.samples, default=None),
            "max": max(self.samples, default=None),
            "p95": self.p95,
            "samples": len(self.samples),
            "target": self.target,
            "target_p95": self.target_p95,
            "least": self.least,
            "met": self.met,
            "note": self.note,
        }

    def row(self) -> tuple[str, ...]:
        """Return the cells of one printed line."""
        target = "" if self.target is None else f"<= {shown(self.target)}"
        if self.least is not None:
            target += f">= {shown(self.least)}"
        if self.target_p95 is not None:
            target += f" (p95 <= {shown(self.target_p95)})"
        spread = f"{shown(min(self.samples))} .. {shown(max(self.samples))}" if len(self.samples) > 1 else ""
        verdict = {None: "", True: "met", False: "MISSED"}[self.met]
        median = "-" if self.median is None else shown(self.median)
        return (
            self.name,
            self.system,
            f"{median} {self.unit}",
            spread,
            str(len(self.samples)),
            target,
            verdict,
            self.note,
        )


def table(figures: Sequence[Figure]) -> str:
    """Return all figures as aligned text."""
    head = ("figure", "system", "median", "min .. max", "n", "target", "", "note")
    rows = [head, *(figure.row() for figure in figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n" for row in rows
    )


def shown(value: float) -> str:
    """Return a number with three significant digits."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
