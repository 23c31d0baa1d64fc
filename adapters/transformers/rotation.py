"""Which checkpoints of a `Trainer` its `save_total_limit` deletes. Pure but for `rotate`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from resilience_sdk.adapters.transformers import marks
from resilience_sdk.checkpoint.commit import remove_tree


def find_deletable(oldest_first: Sequence[str], complete: Collection[str], best: str | None, limit: int) -> list[str]:
    """Return what may go, so that `limit` are left.

    Never the newest complete one nor the best. What is not complete goes before what is: it can resume nothing.
    """
    last_good = [name for name in oldest_first if name in complete][-1:]
    kept = {*last_good, *([best] if best in oldest_first else [])}
    doomed = sorted((name for name in oldest_first if name not in kept), key=lambda name: name in complete)
    return doomed[: max(0, len(oldest_first) - max(limit, len(kept)))]


def rotate(output_dir: Path, best: str | None, limit: int | None) -> None:
    """Delete what is over the limit, after a save is complete: until then the one before it is the last good one."""
    if limit is None or limit <= 0:
        return
    # By time, as the trainer does: what another training has left there may have higher numbers.
    paths = sorted(marks.checkpoints_in(output_dir).values(), key=lambda path: path.stat().st_mtime_ns)
    complete = {path.name for path in paths if marks.examine(path).fault is None}
    names = [path.name for path in paths]
    for name in find_deletable(names, complete, None if best is None else Path(best).name, limit):
        remove_tree(output_dir / name)
