"""Rehearsals of the examples: what comes of each promise under each fault, and how long it takes and was said to."""

from __future__ import annotations

from collections.abc import Iterator

from tests import rehearsals
from tests.adapter_frameworks import is_here
from tests.bench.figures import Context, Figure


def measure(context: Context) -> list[Figure]:
    """Rehearse every fault on every example; with `--quick` those that tell most of it."""
    return [figure for name in rehearsals.REHEARSED for figure in _of(name, context)]


def _of(name: str, context: Context) -> Iterator[Figure]:
    example = rehearsals.REHEARSED[name]
    if example.needs is not None and not is_here(example.needs[0]):
        yield Figure("rehearsal", name, "s", (), note=f"not run: {example.needs[0]} is not installed")
        return
    folder = context.scratch / name
    folder.mkdir()
    faults = example.telling if context.quick else rehearsals.ALL
    done = rehearsals.rehearse(folder, *faults, script=rehearsals.EXAMPLES / name)
    (folder / "said").write_text(done.screen)
    surprises = done.surprises(example.skips)
    counts = ", ".join(f"{done.count(result)} {result}" for result in ("PASS", "FAIL", "SKIPPED"))
    said_s = done.document["estimated_seconds"] or 0.0
    yield Figure("rehearsal", name, "s", (done.document["seconds"],), note=f"{said_s:.0f} s were said; {counts}")
    yield Figure("not as it should be", name, "promises", (len(surprises),), target=0, note="; ".join(surprises))
