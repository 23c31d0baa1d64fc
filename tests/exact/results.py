"""The kept results, `results.json`, and the tables that are made of them."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.exact import plan
from tests.exact.compare import (
    DRAWN,
    EXACT,
    GENERATORS,
    REFUSED,
    SAID,
    SAMPLES,
    Verdict,
)

FILE = Path(__file__).with_name("results.json")
Document = dict[str, Any]
"""`cells`: key -> what came of it; `loops`: way and name -> the components that the loop tells of."""

_ROWS: Mapping[str, tuple[str, ...]] = {
    "samples, their order, the place in an epoch": (SAMPLES,),
    "samples of a second loader": ("samples of a second loader",),
    "what reading a sample draws at random": (DRAWN,),
    "generators of Python, NumPy and torch": GENERATORS[:3],
    "generators of the program's own": GENERATORS[3:],
    "learning rates": ("learning rates",),
    "losses, weights, optimizer, scaler, open windows": ("losses", "weights", "optimizer and scaler"),
    "buffers of each rank, averages": ("buffers of each rank", "averages"),
    "evaluations, metrics of epochs": ("evaluations", "epoch metrics"),
    "best markers, callbacks": ("best markers", "callbacks"),
    "log records": ("log records",),
    "deque, array, values": ("objects in state",),
}


def read() -> Document:
    """Return what is kept."""
    if not FILE.exists():
        return {"cells": {}, "loops": {}}
    document: Document = json.loads(FILE.read_text(encoding="utf-8"))
    return document


def entry(verdict: Verdict, alone: Verdict | None) -> dict[str, Any]:
    """Return a result as it is kept: what is empty is left out."""
    found = {"result": verdict.result, "differs": dict(verdict.differs), "said": sorted(verdict.said)}
    found |= {"why": verdict.why, "alone": None if alone is None else alone.result}
    return {name: value for name, value in found.items() if value}


def write(document: Document) -> None:
    """Keep these, in the order of the plan; cells that the plan does not have any more are dropped."""
    keys = [cell.key for cell in plan.cells()]
    cells = {key: document["cells"][key] for key in keys if key in document["cells"]}
    whole = {"loops": dict(sorted(document["loops"].items())), "cells": cells}
    FILE.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def keep(key: str, found: Mapping[str, Any], loop: str, components: Iterable[str]) -> None:
    """Keep one more; several processes may do so at once."""
    with FILE.with_name("plan.py").open() as lock:  # which is never replaced
        fcntl.flock(lock, fcntl.LOCK_EX)
        document = read()
        document["cells"][key], document["loops"][loop] = dict(found), [*components]
        write(document)


def summary(cells: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table of how many cells of each way in came to what."""
    names = list(dict.fromkeys([EXACT, SAID, REFUSED, *(cell["result"] for cell in cells.values())]))
    lines = ["| way in | cells | " + " | ".join(names) + " | exact alone |", "|---" * (len(names) + 3) + "|"]
    for way in plan.WAYS:
        of_way = [cell for key, cell in cells.items() if key.startswith(f"{way} / ")]
        if of_way:
            counts = [sum(cell["result"] == name for cell in of_way) for name in names]
            tried = [cell["alone"] for cell in of_way if "alone" in cell]
            alone = f"{tried.count(EXACT)} of {len(tried)}" if tried else "-"
            planned = sum(cell.loop.way == way for cell in plan.cells())
            number = f"{len(of_way)}" if len(of_way) == planned else f"{len(of_way)} of {planned}"
            lines.append(f"| {way} | {number} | " + " | ".join(map(str, counts)) + f" | {alone} |")
    counts = [sum(cell["result"] == name for cell in cells.values()) for name in names]
    tried = [cell["alone"] for cell in cells.values() if "alone" in cell]
    lines.append(
        f"| all | {len(cells)} | " + " | ".join(map(str, counts)) + f" | {tried.count(EXACT)} of {len(tried)} |"
    )
    return "\n".join(lines)


def lost_by_us(cells: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the cells that are exact with the framework alone and not with the SDK."""
    return [key for key, cell in cells.items() if cell.get("alone") == EXACT and cell["result"] != EXACT]


def table(way: str, document: Document | None = None) -> str:
    """Return the rows of a page of the documentation: what was seen of each part of a training state."""
    lines = ["| part of the training state | at a resume | cells |", "|---|---|---|"]
    lines += [f"| {name} | {words} | {cells} |" for name, words, cells in _rows(way, document)]
    return "\n".join(lines)


def matrix(document: Document | None = None) -> str:
    """Return what was seen of each part of a training state in each way in; "both": exact in some loops."""
    found = {way: {name: words for name, words, _ in _rows(way, document)} for way in plan.WAYS}
    names = [*_ROWS, *map(_CHANGED.format, plan.CHANGES)]
    lines = ["| part of the training state | " + " | ".join(found) + " |", "|---" * (len(found) + 1) + "|"]
    for name in names:
        words = [rows.get(name, "-") for rows in found.values()]
        short = ["both" if word.startswith("exact;") else _short(word) for word in words]
        if any(word != "-" for word in words):
            lines.append(f"| {name} | " + " | ".join(short) + " |")
    return "\n".join(lines)


def _short(words: str) -> str:
    """Return what came of it, without the names of loops."""
    return " or ".join(part.partition(":")[0] for part in words.split("; "))


_CHANGED = "resumed with other {}"


def _rows(way: str, document: Document | None) -> list[tuple[str, str, int]]:
    """Return the parts that were seen, what came of each, and in how many cells."""
    document = read() if document is None else document
    same, changed, rows = [], [], []
    for key, cell in document["cells"].items():
        of_way, loop, _, _, change = key.split(" / ")
        if of_way == way:
            (same if change == plan.SAME else changed).append((loop, change, cell))
    for name, components in _ROWS.items():
        having = [row for row in same if {*components} & {*document["loops"].get(f"{way} / {row[0]}", ())}]
        if having:
            said = [loop for loop, _, cell in having if {*components} & {*cell.get("differs", {})}]
            rows.append((name, _words(said, len(having)), len(having)))
    for change in plan.CHANGES:
        results = [(loop, cell["result"]) for loop, one, cell in changed if one == change]
        if results:
            rows.append((_CHANGED.format(change), _words_of_change(results), len(results)))
    return rows


def _words(said: list[str], cells: int) -> str:
    names = ", ".join(dict.fromkeys(said))
    if not said:
        return EXACT
    return f"said: {names}" if len(said) == cells else f"exact; said: {names}"


def _words_of_change(found: list[tuple[str, str]]) -> str:
    """Return what came of loops that were resumed with something changed; one word where all came to the same."""
    by_result: dict[str, list[str]] = {}
    for loop, result in found:
        by_result.setdefault(result, []).append(loop)
    if len(by_result) == 1:
        return next(iter(by_result))
    order = [result for result in (EXACT, SAID, REFUSED) if result in by_result]
    named = [
        result if result == EXACT else f"{result}: {', '.join(dict.fromkeys(by_result[result]))}" for result in order
    ]
    return "; ".join(named)
