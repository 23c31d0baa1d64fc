"""Which checkpoint a resume takes: the newest valid one, and why the newer ones were passed over. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import attrs

from resilience_sdk.checkpoint.manifest import InvalidCheckpointError, Manifest

_STEP_NAME = re.compile(r"step-(?P<step>\d{8,18})")


@attrs.frozen
class Skipped:
    """A checkpoint that a resume passed over.

    `untrusted`: whole, but somebody else could have written it. `rolled_back`: whole, but of after the numbers went
    bad. `quarantined`: whole, but the run fails after it; `created_at` (Unix seconds) then tells which writing of that
    step is meant.
    """

    name: str
    step: int
    why: str
    untrusted: bool = False
    rolled_back: bool = False
    quarantined: bool = False
    created_at: float | None = None

    @property
    def damaged(self) -> bool:
        """Whether it is not what was written."""
        return not (self.untrusted or self.rolled_back or self.quarantined)


@attrs.frozen
class Selection:
    """The outcome: the checkpoint to load (None = none is valid) and the newer ones that were skipped."""

    name: str | None
    manifest: Manifest | None
    skipped: tuple[Skipped, ...]


def step_name(step: int) -> str:
    """Return the directory name of the checkpoint after `step` completed steps."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step that a directory name stands for, or None when it is no checkpoint's name."""
    match = _STEP_NAME.fullmatch(name)
    if match is None:
        return None
    step = int(match["step"])
    return step if step_name(step) == name else None


def select_newest(
    names: Iterable[str],
    examine: Callable[[str], Manifest],
    distrust: Callable[[str, Manifest], str | None] = lambda _name, _manifest: None,
) -> Selection:
    """Return the newest checkpoint among the directory entries `names` that `examine` accepts.

    `examine` returns the manifest of a valid checkpoint and raises `InvalidCheckpointError` otherwise. It is
    asked from the newest down and only until one is valid, since a full examination reads every byte.
    `distrust` returns why a valid one is in quarantine, or None; if there is nothing else, the newest of these is
    taken after all: to start from nothing would be worse.
    """
    steps = {name: step for name in names if (step := step_of(name)) is not None}
    skipped: list[Skipped] = []
    last_resort: tuple[Skipped, Manifest] | None = None
    for name in sorted(steps, key=lambda item: steps[item], reverse=True):
        try:
            manifest = examine(name)
            if manifest.step != steps[name]:
                raise InvalidCheckpointError(f"its manifest is that of step {manifest.step}")
        except InvalidCheckpointError as error:
            skipped.append(Skipped(name, steps[name], error.reason, error.untrusted, error.rolled_back))
            continue
        why = distrust(name, manifest)
        if why is None:
            return Selection(name, manifest, tuple(skipped))
        item = Skipped(name, steps[name], why, quarantined=True, created_at=manifest.created_at)
        last_resort = last_resort or (item, manifest)
        skipped.append(item)
    if last_resort is not None:
        item, manifest = last_resort
        return Selection(item.name, manifest, tuple(other for other in skipped if other is not item))
    return Selection(None, None, tuple(skipped))
