"""What is tried: ways in, their loops, and the cells, which are chosen by pairs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any

import attrs

BATCHES = 6  # of an epoch
LENGTH = 24
EPOCHS = 3
SAME = "same"
CHANGES = ("ranks", "batch", "length", "accumulation")
FAULTS = ("kill", "preempt")
MOMENTS = ("mid-epoch", "mid-window", "in an evaluation", "epoch's last step", "behind an epoch", "in a save", "twice")


@attrs.frozen
class Loop:
    """A training as documentation writes it. `options` are read by its script."""

    way: str
    name: str
    options: Mapping[str, Any]
    ranks: int = 1
    accumulate: int = 1
    evaluates: bool = True
    """Whether something follows the steps of an epoch: an evaluation, or its end."""

    def steps(self) -> int:
        """Return how many numbered steps an epoch has: batches, or optimizer steps."""
        return BATCHES // self.accumulate if self.way in STEPS_OF_OPTIMIZER else BATCHES

    @property
    def ends_by_steps(self) -> bool:
        """Whether its number of steps was given, not that of its epochs."""
        return self.way == "Trainer" and self.options["loader"] == "stream"

    def has(self, moment: str) -> bool:
        """Tell whether there is that moment."""
        if moment == "mid-window":
            return self.accumulate > 1
        if moment in ("in an evaluation", "behind an epoch"):
            return self.evaluates
        return True


@attrs.frozen
class Cell:
    """One loop, disturbed in one way."""

    loop: Loop
    moment: str
    fault: str
    change: str

    @property
    def key(self) -> str:
        """The name under which its result is kept."""
        return f"{self.loop.way} / {self.loop.name} / {self.moment} / {self.fault} / {self.change}"

    def every(self) -> int:
        """Return after how many numbered steps a checkpoint is due."""
        steps = self.loop.steps()
        return steps if self.moment == "epoch's last step" else max(1, steps * 2 // 3)

    def faults(self) -> list[list[Any]]:
        """Return where it is disturbed, in the second of three epochs."""
        steps = self.loop.steps()
        saved = self.every() * (2 * steps // self.every() if self.moment == "epoch's last step" else 2)
        if self.moment == "in an evaluation":
            return [["evaluation", 1]]
        if self.moment == "behind an epoch":
            return [["behind", 1]]
        if self.moment == "in a save":
            window = self.loop.accumulate if steps == BATCHES else 1  # for whose end it waits
            return [["save", -(-saved // window) * window - 1]]
        if self.moment == "mid-window" and self.loop.way in STEPS_OF_OPTIMIZER:
            return [["window", saved + 1]]
        at = saved + (2 if self.moment == "mid-window" else 1)
        if self.moment == "twice":
            again = at + (1 if self.fault == "kill" else 3)  # a stop comes some steps later
            return [["step", at], ["step", min(again, EPOCHS * steps - 1)]]
        return [["step", at]]

    def changed(self) -> tuple[int, int, dict[str, Any]]:
        """Return ranks, accumulation and options of what resumes."""
        ranks, accumulate, options = self.loop.ranks, self.loop.accumulate, options_of(self.loop)
        if self.change == "ranks":
            ranks = 3 - ranks
        elif self.change == "batch":
            options["batch"] = (
                options["batch"] * 2 if options.get("norm") else options["batch"] // 2
            )  # which takes no one
        elif self.change == "length":
            options["length"] += 8
        elif self.change == "accumulation":
            accumulate = 2 if accumulate == 1 else 1
        return ranks, accumulate, {**options, "accumulate": accumulate}


STEPS_OF_OPTIMIZER = ("Trainer", "Lightning", "Accelerate", "DeepSpeed", "Megatron")


def options_of(loop: Loop) -> dict[str, Any]:
    """Return all options of an undisturbed one."""
    batch = LENGTH // BATCHES // loop.ranks
    return {**loop.options, "batch": batch, "length": LENGTH, "accumulate": loop.accumulate}


def _own(name: str, loader: str, form: str = "epochs", schedule: str = "epoch", **other: Any) -> Loop:
    parts = {key: other.pop(key) for key in ("ranks", "accumulate") if key in other}
    options = {"loader": loader, "form": form, "schedule": schedule, **other}
    return Loop("start_run", name, options, evaluates=form == "epochs", **parts)


def _trainer(name: str, loader: str = "map", *, ranks: int = 1, accumulate: int = 1, **other: Any) -> Loop:
    options = {key: other.pop(key) for key in ("patience", "saves_matter", "held") if key in other}
    return Loop("Trainer", name, {"loader": loader, **options, "arguments": other}, ranks, accumulate)


def _lightning(name: str, loader: str, schedule: str = "epoch", **other: Any) -> Loop:
    parts = {key: other.pop(key) for key in ("ranks", "accumulate") if key in other}
    options = {"loader": loader, "schedule": schedule, "held": other.pop("held", False)}
    return Loop("Lightning", name, {**options, "arguments": other}, **parts)


def _accelerate(name: str, loader: str, schedule: str = "epoch", *, still: bool = True, **other: Any) -> Loop:
    parts = {key: other.pop(key) for key in ("ranks", "accumulate") if key in other}
    options = {
        "loader": loader,
        "schedule": schedule,
        "still": still,
        "held": other.pop("held", False),
        "config": other,
    }
    return Loop("Accelerate", name, options, **parts)


def _attach(name: str, loader: str, schedule: str = "epoch", **other: Any) -> Loop:
    parts = {key: other.pop(key) for key in ("ranks", "accumulate") if key in other}
    return Loop("attach", name, {"loader": loader, "schedule": schedule, **other}, **parts)


def _deepspeed(name: str, loader: str, stage: int = 1, **other: Any) -> Loop:
    parts = {key: other.pop(key) for key in ("ranks", "accumulate") if key in other}
    return Loop("DeepSpeed", name, {"loader": loader, "stage": stage, **other}, **parts)


def _megatron(name: str, loader: str, **other: Any) -> Loop:
    parts = {key: other.pop(key) for key in ("ranks", "accumulate") if key in other}
    return Loop("Megatron", name, {"loader": loader, **other}, **parts)


_BEST = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "save_total_limit": 1}
LOOPS: tuple[Loop, ...] = (
    _own("shuffled", "map", "steps", "step"),
    _own("workers", "map workers"),
    _own("window", "map", schedule="step", accumulate=3, scaler=True),
    _own("stateful", "stateful", schedule="metric", accumulate=3),
    _own("stateful workers", "stateful workers", optimizer="sgd"),
    _own("stream", "stream", "steps", scaler=True),
    _own("stateful stream", "stateful stream", schedule="metric", optimizer="sgd"),
    _own("order of its own", "map own order", schedule="step", accumulate=3),
    _own("second loader", "map", "steps", "step", second=True, held=True),
    _own("ranks", "map", schedule="metric", ranks=2, norm=True, optimizer="sgd"),
    _own("stateful ranks", "stateful", "steps", "step", ranks=2, accumulate=3),
    _trainer("shuffled", lr_scheduler_type="cosine"),
    _trainer("order of the process", accelerator_config={"use_seedable_sampler": False}, save_strategy="steps"),
    _trainer("workers", held=True, dataloader_num_workers=2, lr_scheduler_type="linear"),
    _trainer("window", accumulate=3),
    _trainer("best", patience=5, lr_scheduler_type="reduce_lr_on_plateau", saves_matter=True, **_BEST),
    _trainer("stream", "stream", eval_strategy="steps", eval_steps=3),
    _trainer("ranks", ranks=2),
    _lightning("shuffled", "map", "metric"),
    _lightning("workers", "map workers", held=True),
    _lightning("stateful", "stateful distributed", "step"),
    _lightning("stateful workers", "stateful workers"),
    _lightning("window", "map", "step", accumulate=3),
    _lightning("stream", "stream"),
    _lightning("stateful stream", "stateful stream", "metric"),
    _lightning("two loaders", "two"),
    _lightning("often", "map", "metric", val_check_interval=1, limit_val_batches=2),
    _lightning("ranks", "map distributed", ranks=2),
    _accelerate("shuffled", "map"),
    _accelerate("data that draw", "map", still=False),
    _accelerate("seedable", "map", "step", use_seedable_sampler=True),
    _accelerate("workers", "map workers", still=False),
    _accelerate("stateful", "map", held=True, use_stateful_dataloader=True),
    _accelerate("window", "map", "step", accumulate=3),
    _accelerate("stream", "stream"),
    _accelerate("ranks", "map", "step", ranks=2),
    _attach("stateful", "stateful"),
    _attach("sampler", "stateful sampler", "step", added=True, held=True),
    _attach("stateful workers", "stateful workers"),
    _attach("plain", "map"),
    _attach("window", "stateful", "step", accumulate=3),
    _attach("stateful stream", "stateful stream"),
    _attach("ranks", "stateful", ranks=2, norm=True, optimizer="sgd"),
    _deepspeed("shuffled", "map", 0),
    _deepspeed("window", "map", accumulate=3, held=True),
    _deepspeed("stateful workers", "stateful distributed workers", 2),
    _deepspeed("repeated", "repeated distributed", accumulate=2),
    _deepspeed("ranks", "map distributed workers", ranks=2, norm=True),
    _megatron("stateful", "stateful"),
    _megatron("window", "stateful", accumulate=3),
    _megatron("by steps", "by steps"),
    _megatron("ranks", "stateful", ranks=2, accumulate=2),
)
HAVE_A_RESUME = ("Trainer", "Lightning", "Accelerate", "DeepSpeed")
"""Ways in with a resume of the framework's own, which a script for it can use."""
WAYS = tuple(dict.fromkeys(loop.way for loop in LOOPS))
CHANGED: Mapping[str, tuple[str, ...]] = {
    "start_run": ("shuffled", "window", "stateful", "stream", "ranks"),
    "Trainer": ("shuffled", "window", "stream", "ranks"),
    "Lightning": ("shuffled", "stateful", "window", "ranks"),
    "Accelerate": ("shuffled", "stateful", "window", "ranks"),
    "attach": ("stateful", "window", "ranks"),
    "DeepSpeed": ("shuffled", "window", "ranks"),
    "Megatron": ("stateful", "window", "ranks"),
}
"""Loops of each way in that are resumed with something changed."""
DAILY = (
    "start_run / workers / behind an epoch / preempt / same",
    "attach / ranks / mid-epoch / kill / length",
    "Trainer / best / twice / preempt / same",
    "Lightning / shuffled / epoch's last step / kill / same",
    "Accelerate / seedable / in an evaluation / kill / same",
    "Accelerate / ranks / in a save / preempt / same",
    "DeepSpeed / window / mid-window / preempt / same",
    "Megatron / stateful / epoch's last step / kill / same",
)
"""What is run each day."""
RELEASED = 40
"""How many more before a release: 15 minutes on two cores."""


@cache
def cells() -> tuple[Cell, ...]:
    """Return all cells, always the same ones in the same order."""
    found: list[Cell] = []
    for way in WAYS:
        loops = [loop for loop in LOOPS if loop.way == way]
        rows = pairwise([loops, MOMENTS, FAULTS], lambda row: row[0].has(row[1]))
        found += [Cell(*row, SAME) for row in rows]
        some = [loop for loop in loops if loop.name in CHANGED.get(way, ())]
        if some:
            rows = pairwise([some, CHANGES, FAULTS], lambda _: True)
            found += [Cell(loop, "mid-epoch", fault, change) for loop, change, fault in rows]
    return tuple(found)


def spread(of: Sequence[Cell], seen: Collection[Cell] = ()) -> list[Cell]:
    """Return these cells in an order in which whatever comes first has seen the most, behind those that were seen."""
    counts: Counter[tuple[str, ...]] = Counter(part for cell in seen for part in _parts(cell))
    left, found = [*of], []
    while left:
        best = min(left, key=lambda cell: sum(counts[part] for part in _parts(cell)))
        left.remove(best)
        found.append(best)
        counts.update(_parts(best))
    return found


def _parts(cell: Cell) -> list[tuple[str, ...]]:
    way, fault = cell.loop.way, cell.fault
    what = cell.moment if cell.change == SAME else cell.change
    return [(way,), (way, cell.loop.name), (way, what), (way, what, fault), (way, cell.loop.name, fault)]


def daily() -> list[Cell]:
    """Return the part that is run each day."""
    by_key = {cell.key: cell for cell in cells()}
    return [by_key[key] for key in DAILY]


def of_release(known: Collection[str]) -> list[Cell]:
    """Return those that are run before a release: of the known ones those that have seen the most together."""
    day = daily()
    return spread([cell for cell in cells() if cell.key in known and cell not in day], day)[:RELEASED]


def pairwise(factors: Sequence[Sequence[Any]], is_allowed: Callable[[Sequence[Any]], bool]) -> list[tuple[Any, ...]]:
    """Return rows in which each pair of values of two factors stands that an allowed row has. Deterministic.

    Greedy: the row that has the most pairs which no row has had yet comes next; of equal ones that whose values were
    chosen least often, then the first.
    """
    rows = [row for row in itertools.product(*factors) if is_allowed(row)]
    pairs = [set(itertools.combinations(enumerate(map(_index, factors, row)), 2)) for row in rows]
    missing = set().union(*pairs) if pairs else set()
    chosen: list[tuple[Any, ...]] = []
    used: Counter[tuple[int, int]] = Counter()
    values = [[*enumerate(map(_index, factors, row))] for row in rows]
    while missing:
        best = max(
            range(len(rows)), key=lambda at: (len(pairs[at] & missing), -sum(used[one] for one in values[at]), -at)
        )
        missing -= pairs[best]
        used.update(values[best])
        chosen.append(rows[best])
    return sorted(chosen, key=lambda row: [_index(factor, value) for factor, value in zip(factors, row, strict=True)])


def _index(factor: Sequence[Any], value: Any) -> int:
    return list(factor).index(value)
