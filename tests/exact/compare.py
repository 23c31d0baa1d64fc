"""Compares what a disturbed training told with an undisturbed one, and says what came of its resume. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import attrs

EXACT, SAID, REFUSED, SILENT, BROKEN = "exact", "said", "refused", "SILENT", "BROKEN"

SAMPLES, DRAWN = "samples", "drawn for samples"
GENERATORS = ("python", "numpy", "torch", "own generator")
EFFECTS = (
    "learning rates",
    "losses",
    "weights",
    "buffers of each rank",
    "averages",
    "optimizer and scaler",
    "evaluations",
    "epoch metrics",
    "log records",
    "best markers",
    "callbacks",
    "objects in state",
    "end",
)
COMPONENTS = (SAMPLES, "samples of a second loader", DRAWN, *GENERATORS, *EFFECTS)
"""What a training state consists of, as loops tell it: causes first."""
UNCOMPARED = ("fault", "start", "epoch")

LIMITS: Mapping[str, tuple[str, ...]] = {
    "augmentation in workers": (DRAWN,),
    "workers' generators": (DRAWN,),
    "accelerate workers": (DRAWN,),
    "accelerate draws": (DRAWN, *GENERATORS),
    "order of workers": (SAMPLES,),
    "attached loader": (SAMPLES, *GENERATORS),
    "steps iterator": (DRAWN, *GENERATORS),
    "accumulation window": ("weights",),
    "state by rank": ("objects in state", SAMPLES),
    "swa": ("learning rates",),
    "metrics": ("epoch metrics",),
}
"""What each limit that is said makes other; a key that is missing here excuses nothing."""
CHANGED_LIMITS: Mapping[str, tuple[str, ...]] = {
    "ranks": (
        *("saved by 2 ranks", "saved by 1 ranks", "limit:ranks", "limit:other ranks"),
        *("limit:accelerate batch", "limit:deepspeed batch", "limit:megatron ranks"),
    ),
    "batch": (
        *("limit:other batch", "limit:ranks", "limit:batch"),
        *("limit:accelerate batch", "limit:deepspeed batch", "limit:megatron batch"),
    ),
    "length": ("limit:other length", "limit:length", "limit:accelerate length", "limit:deepspeed length"),
    "accumulation": (
        *("limit:ranks", "limit:batch", "limit:accelerate accumulation"),
        *("limit:deepspeed accumulation", "limit:deepspeed batch", "limit:megatron batch"),
    ),
}
"""Lines, or keys of limits, of which one has to be said where something was changed for a resume."""


@attrs.frozen
class Told:
    """What the ranks of a training told: of each rank its lines, in the order in which they came."""

    ranks: tuple[tuple[tuple[str, Any, Any], ...], ...]

    @classmethod
    def of(cls, texts: Iterable[str]) -> Told:
        """Read the files of its ranks; a line that a kill cut short says nothing."""
        return cls(tuple(tuple(_lines(text)) for text in texts))

    def values(self, rank: int) -> dict[tuple[str, str], list[Any]]:
        """Return what was told of each component and key, each time that it was."""
        found: dict[tuple[str, str], list[Any]] = {}
        for component, key, value in self.ranks[rank]:
            if component not in UNCOMPARED:
                found.setdefault((component, json.dumps(key)), []).append(value)
        return found


def _lines(text: str) -> Iterable[tuple[str, Any, Any]]:
    for line in text.split("\n")[:-1]:
        try:
            component, key, value = json.loads(line)
        except ValueError:
            continue
        yield component, key, value


@attrs.frozen
class Verdict:
    """What came of a cell. `differs`: component -> where it differs first; `said`: keys of limits."""

    result: str
    differs: Mapping[str, str] = attrs.field(factory=dict)
    said: tuple[str, ...] = ()
    why: str = ""


def differences(undisturbed: Told, other: Told) -> dict[str, str]:
    """Return what differs, by component, with the first place.

    What was told twice has to be right each time: a step that is lost was made, too.
    """
    found: dict[str, str] = {}
    for rank in range(len(undisturbed.ranks)):
        wanted, given = undisturbed.values(rank), other.values(rank)
        for component, key in [*wanted, *(name for name in given if name not in wanted)]:
            one = [json.dumps(value, sort_keys=True) for value in wanted.get((component, key), [])]
            two = [json.dumps(value, sort_keys=True) for value in given.get((component, key), [])]
            if not one or not two or {*one} != {*two}:
                what = "is missing" if not two else "came additionally" if not one else "is other"
                found.setdefault(component, f"rank {rank}, {key}: {what}")
    order = {name: at for at, name in enumerate(COMPONENTS)}
    return dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))


def excused(said: Collection[str]) -> set[str]:
    """Return the components that may differ by what was said, with all that follows from them."""
    roots = {component for key in said for component in LIMITS.get(key, ())}
    if roots & {*GENERATORS}:
        roots |= {SAMPLES, *GENERATORS}
    if roots & {SAMPLES, "samples of a second loader"}:
        roots |= {DRAWN}
    return roots | {*EFFECTS} if roots else set()


def judge(undisturbed: Told, other: Told, said: Sequence[str]) -> Verdict:
    """Judge a training that was resumed as it was."""
    differs = differences(undisturbed, other)
    if not differs:
        return Verdict(EXACT, said=tuple(said))
    left = [component for component in differs if component not in excused(said)]
    return Verdict(SILENT if left else SAID, differs, tuple(said))


def judge_changed(
    other: Told, change: str, said: Sequence[str], lines: str, length: int, *, since: int, ends_by_steps: bool
) -> Verdict:
    """Judge one that was resumed with something changed: each sample of each epoch once, or it is said.

    `since` is the number of epochs of which nothing was trained with the change, see `resumed_in`; one that
    `ends_by_steps` may end within an epoch.
    """
    due = CHANGED_LIMITS[change]
    if any(f"limit:{key}" in due for key in said) or any(line in lines for line in due):
        return Verdict(SAID, said=tuple(said))
    wrong = coverage(other, length, since, is_cut=ends_by_steps)
    return Verdict(SILENT if wrong else EXACT, {SAMPLES: wrong} if wrong else {}, tuple(said))


def resumed_in(told: Told) -> int:
    """Return the first epoch of which the last start has trained something."""
    steps = [(start, epoch) for lines in told.ranks for start, _, epoch, _ in _steps(lines)]
    last = max(start for start, _ in steps)
    return min(epoch for start, epoch in steps if start == last)


def coverage(told: Told, length: int, since: int, *, is_cut: bool = False) -> str:
    """Say which epochs have samples twice or not at all, by what each start made that counts; empty if none has.

    Where it `is_cut`, the last epoch need not have all.
    """
    began: dict[int, int] = {}  # number of a start -> the step from which it went on
    for lines in told.ranks:
        for start, step, _, _ in _steps(lines):
            began[start] = min(step, began.get(start, step))
    counts: dict[int, Counter[int]] = {}
    for lines in told.ranks:
        for start, step, epoch, samples in _steps(lines):
            if all(step < at for later, at in began.items() if later > start):
                counts.setdefault(epoch, Counter()).update(samples)
    found = []
    for epoch, of_samples in sorted(counts.items()):
        twice = sum(count > 1 for count in of_samples.values())
        never = 0 if is_cut and epoch == max(counts) else length - len(of_samples)
        if epoch >= since and (twice or never):
            found.append(f"epoch {epoch}: {twice} samples twice, {never} never")
    return "; ".join(found)


def _steps(lines: Iterable[tuple[str, Any, Any]]) -> Iterable[tuple[int, int, int, list[int]]]:
    """Yield the start, the step, the epoch and the samples of each batch."""
    start = step = epoch = 0
    for component, key, value in lines:
        if component == "start":
            start = value
        elif component == "epoch":
            step, epoch = key, value
        elif component == SAMPLES:
            yield start, step, epoch, value
