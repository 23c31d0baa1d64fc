"""Which checkpoints may be deleted. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from resilience_sdk.checkpoint.select import step_of

# A bad checkpoint is often noticed only after it was loaded: its predecessor must still be there.
LEAST_KEPT = 2


def find_deletable(names: Iterable[str], known_good: Collection[str], keep: int) -> tuple[str, ...]:
    """Return the checkpoints that may go, oldest first.

    `known_good` are those whose bytes this process has written or verified itself. The newest `keep` of them
    stay (never fewer than two), and so does everything that is not older than these: an unverified newer
    one may be good, an invalid newer one is evidence. With fewer than that known good, nothing is deleted.
    """
    steps = {name: step for name in names if (step := step_of(name)) is not None}
    good = sorted((steps[name] for name in known_good if name in steps), reverse=True)
    kept = good[: max(keep, LEAST_KEPT)]
    if len(kept) < max(keep, LEAST_KEPT):
        return ()
    return tuple(name for name, step in sorted(steps.items(), key=lambda item: item[1]) if step < kept[-1])
