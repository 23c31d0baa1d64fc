"""Kinds of inexactness that are planted in each way in: how many a resume finds, and calls by their names.

Beside them resumes that are exact, in which nothing may be found. What is planted says tests/integration/planted.py.
"""

from __future__ import annotations

import importlib
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import attrs

from tests.bench import processes
from tests.bench.figures import Context, Figure

_QUICK = ("good", "order", "unsaved")
_FOUND, _NAMED = 95.0, 90.0
_AT_ONCE = 2


@attrs.frozen
class _Cell:
    way: str
    kind: str
    ranks: int
    is_planted: bool
    is_found: bool
    is_named: bool
    component: str | None

    @property
    def name(self) -> str:
        return f"{self.way} / {self.kind}" + (f" / {self.ranks} ranks" if self.ranks > 1 else "")


def measure(context: Context) -> list[Figure]:
    """Plant each kind in each way in, with one rank, and those of one rank of two; raises where a job does not end."""
    sys.path.insert(0, str(processes.ROOT / "tests" / "integration"))
    planted = importlib.import_module("planted")
    cases = [(way, kind, 1) for way, kinds in planted.WAYS.items() for kind in kinds]
    cases += [(way, kind, 2) for way in planted.WAYS_ON_RANKS for kind in planted.ON_RANKS]
    if context.quick:
        cases = [(way, kind, ranks) for way, kind, ranks in cases if kind in _QUICK and ranks == 1]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        cells = list(pool.map(lambda case: _strike(planted, context.scratch, *case), cases))
    print(_table(cells), file=sys.stderr)
    shares = [*planted.WAYS, "all ways in"]
    return [
        figure for way in shares for figure in _figures(way, [one for one in cells if way in (one.way, shares[-1])])
    ]


def _strike(planted: ModuleType, scratch: Path, way: str, kind: str, ranks: int) -> _Cell:
    folder = scratch / f"{way}-{kind.replace(' ', '-')}-{ranks}"
    folder.mkdir()
    expected = planted.expected(way, kind, ranks)
    said = planted.strike(folder, way, kind, ranks)
    facts = expected.is_planted, said.is_found(expected), said.is_named(expected), said.resume["component"]
    return _Cell(way, kind, ranks, *facts)


def _figures(way: str, cells: list[_Cell]) -> list[Figure]:
    planted = [one for one in cells if one.is_planted]
    exact = [one for one in cells if not one.is_planted]
    lost = ", ".join(one.name for one in planted if not one.is_found)
    misnamed = ", ".join(f"{one.name} as {one.component}" for one in planted if one.is_found and not one.is_named)
    wrong = [one.name for one in exact if not one.is_named]
    found, named = ([100.0 * sum(one) / max(1, len(one))] for one in (
        [one.is_found for one in planted], [one.is_named for one in planted]))  # fmt: skip
    count = f"{len(planted)} planted" + (f"; lost: {lost}" if lost else "")
    return [
        Figure(f"inexact resumes found, {way}", "ours", "%", tuple(found), least=_FOUND, note=count),
        Figure(f"called by their names, {way}", "ours", "%", tuple(named), least=_NAMED, note=misnamed),
        Figure(f"findings in {len(exact)} exact or unrepeatable ones, {way}", "ours", "", (float(len(wrong)),), 0.0,
               note=", ".join(wrong)),
    ]  # fmt: skip


def _table(cells: list[_Cell]) -> str:
    """Return a line for each kind, with what came of it in each way in."""
    ways = list(dict.fromkeys((one.way, one.ranks) for one in cells))
    by_place = {(one.kind, one.way, one.ranks): one for one in cells}
    words = {None: "", (True, True): "named", (True, False): "found", (False, False): "LOST"}
    lines = ["kind".ljust(16) + "".join(f"{way} x{ranks}".ljust(18) for way, ranks in ways)]
    for kind in dict.fromkeys(one.kind for one in cells):
        found = [by_place.get((kind, *place)) for place in ways]
        shown = (words[None if one is None else (one.is_found, one.is_named)] for one in found)
        lines.append(kind.ljust(16) + "".join(word.ljust(18) for word in shown).rstrip())
    return "\n".join(lines)
