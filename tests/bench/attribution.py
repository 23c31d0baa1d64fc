"""How often `diagnose` is right on the labelled logs, and how fast it reads.

python -m tests.bench.attribution [--logs DIRECTORY] [--wrong] [--megabytes 200]

Accuracy is counted on the labelled logs beside the checkout and on our own (`tests/labelled`), then on the same logs
changed in ways that do not change their cause (`perturb`). Speed is measured on logs made up here: a training log, one
whose lines all differ, one in which every line has a word of trouble, a failing log repeated, and one single line.
"""

from __future__ import annotations

import argparse
import csv
import io
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs

from resilience_sdk.attribution.diagnosis import diagnose_stream
from resilience_sdk.attribution.log_facts import Verdict
from tests.bench import machine
from tests.bench.perturb import CHANGES

LOGS = Path(__file__).resolve().parents[3] / "shared" / "logs"
OWN_LOGS = Path(__file__).resolve().parents[1] / "labelled"
_GOALS = {"category": 0.95, "action": 0.95, "cause": 0.90}
_SPEED_GOAL_MB_S = 50.0
_SYMPTOMS = frozenset({"nccl_watchdog_timeout", "network_partition", "nccl_remote_error", "store_timeout"})


@attrs.frozen
class Labelled:
    """One log with what is known about it."""

    name: str
    data: bytes
    category: str
    cause: str
    action: str


@attrs.frozen
class Score:
    """How often a set of verdicts was right. `cascades`: a mere symptom was named where there is a cause."""

    total: int
    right: Counter[str]
    cascades: int
    wrong: tuple[str, ...]

    def share(self, what: str) -> float:
        """Return the share that is right in `category`, `action`, `cause` or `both` (category and action)."""
        return self.right[what] / self.total if self.total else 0.0


def labelled_logs(directory: Path = LOGS) -> list[Labelled]:
    """Read the labelled logs; empty when the directory is not there."""
    if not (directory / "labels.tsv").exists():
        return []
    with (directory / "labels.tsv").open(newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    return [
        Labelled(row["file"], (directory / row["file"]).read_bytes(), row["category"], row["cause"], row["action"])
        for row in rows
    ]


def score(logs: list[Labelled], change: Callable[[str, int], str] | None = None) -> Score:
    """Diagnose every log, changed or not, and count."""
    right: Counter[str] = Counter()
    cascades, wrong = 0, []
    for number, log in enumerate(logs):
        data = log.data
        if change is not None:
            data = change(data.decode("utf-8", "replace"), number).encode()
        verdict = diagnose_stream(io.BytesIO(data), log.name)
        right.update(_right(log, verdict))
        cascades += verdict.cause in _SYMPTOMS and log.cause not in _SYMPTOMS
        if verdict.cause != log.cause:
            wrong.append(f"{log.name}: {log.cause}, said {verdict.cause} ({verdict.confidence:.2f})")
    return Score(len(logs), right, cascades, tuple(wrong))


def _right(log: Labelled, verdict: Verdict) -> Iterator[str]:
    same = {
        "category": verdict.category == log.category,
        "action": verdict.action == log.action,
        "cause": verdict.cause == log.cause,
    }
    same["both"] = same["category"] and same["action"]
    yield from (what for what, is_same in same.items() if is_same)


def by_category(logs: list[Labelled]) -> dict[str, tuple[int, Score]]:
    """Return the score of each category on the unchanged logs."""
    categories = dict.fromkeys(sorted(log.category for log in logs))
    chosen = {name: [log for log in logs if log.category == name] for name in categories}
    return {name: (len(of_it), score(of_it)) for name, of_it in chosen.items()}


def training_log(megabytes: float) -> bytes:
    """A healthy run: steps in two common forms, and a warning now and then."""
    dice, out, size, step = random.Random(1), [], 0, 0
    while size < megabytes * 1e6:
        step += 1
        line = (
            f"2026-01-02 03:04:{step % 60:02d} INFO [rank{step % 8}] step {step} loss {dice.random():.4f} lr 1.0e-4\n"
        )
        if step % 3 == 0:
            line += (
                f" iteration {step}/ 500000 | consumed samples: {step * 64} | lm loss: {dice.random():.6E} | "
                f"number of skipped iterations:   0 | number of nan iterations:   0 |\n"
            )
        if step % 1000 == 0:
            line += f"WARNING could not prefetch sample {step}, retrying\n"
        out.append(line)
        size += len(line)
    return "".join(out).encode()


def _words(dice: random.Random) -> list[str]:
    return ["".join(dice.choices("abcdefghijklmnopqrstuvwxyz", k=dice.randint(2, 9))) for _ in range(3000)]


def diverse_log(megabytes: float) -> bytes:
    """Text in which no line resembles another."""
    dice = random.Random(2)
    words = _words(dice)
    return b"".join(" ".join(dice.choices(words, k=20)).encode() + b"\n" for _ in range(int(megabytes * 1e6 / 130)))


def troubled_log(megabytes: float) -> bytes:
    """Text in which every line has a word of trouble and no line resembles another."""
    dice = random.Random(3)
    words = _words(dice)
    lines = int(megabytes * 1e6 / 90)
    return b"".join(b"ERROR " + " ".join(dice.choices(words, k=11)).encode() + b" failed\n" for _ in range(lines))


def raising_log(megabytes: float) -> bytes:
    """Text in which every line is an exception and no line resembles another."""
    dice = random.Random(4)
    words = _words(dice)
    lines = int(megabytes * 1e6 / 85)
    return b"".join(
        b"RuntimeError: CUDA error " + " ".join(dice.choices(words, k=10)).encode() + b"\n" for _ in range(lines)
    )


def identified_log(megabytes: float) -> bytes:
    """Text in which every line has a word of trouble and an identifier of its own."""
    dice = random.Random(5)
    lines = int(megabytes * 1e6 / 65)
    return b"".join(b"request %032x took 7 ms, not cached\n" % dice.getrandbits(128) for _ in range(lines))


def one_line(megabytes: float) -> bytes:
    """A single line with words of trouble all over it."""
    return b"error in step, " * int(megabytes * 1e6 / 15)


def failures_log(megabytes: float) -> bytes:
    """The labelled logs one after another, over and over: nothing but what goes before a failure, and failures."""
    logs = b"\n".join(path.read_bytes() for path in sorted(LOGS.glob("*.txt")))
    return logs * (1 + int(megabytes * 1e6 / len(logs))) if logs else b""


# name -> (maker, share of the asked size, has the goal)
SPEED: dict[str, tuple[Callable[[float], bytes], float, bool]] = {
    "training log": (training_log, 1.0, True),
    "every line different": (diverse_log, 0.1, False),
    "every line an error": (troubled_log, 0.04, False),
    "every line an exception": (raising_log, 0.02, False),
    "an identifier in every line": (identified_log, 0.02, False),
    "failures, over and over": (failures_log, 0.2, False),
    "one line": (one_line, 0.2, False),
}


def speed(make: Callable[[float], bytes], megabytes: float) -> tuple[float, float]:
    """Return megabytes per second of CPU time for a log of that size and for one of half of it: linear when equal."""
    diagnose_stream(io.BytesIO(b"warm up, no error\n"), "warm")
    return _rate(make(megabytes)), _rate(make(megabytes / 2))


def _rate(data: bytes) -> float:
    start = time.process_time()
    diagnose_stream(io.BytesIO(data), "speed")
    return len(data) / 1e6 / max(1e-9, time.process_time() - start)


def main() -> int:
    """Print the tables; exit code 1 when a goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.attribution", description=__doc__)
    parser.add_argument("--logs", type=Path, default=LOGS, help="directory with labels.tsv and the logs")
    parser.add_argument("--wrong", action="store_true", help="name the logs that were judged wrongly")
    parser.add_argument("--megabytes", type=float, default=200.0, help="size of the log for the speed")
    arguments = parser.parse_args()
    missed = False
    for directory in (arguments.logs, OWN_LOGS):
        logs = labelled_logs(directory)
        if logs:
            missed |= _print_accuracy(logs, wrong=arguments.wrong)
        else:
            print(f"no labelled logs in {directory}: accuracy is not measured there")
    missed |= _print_speed(arguments.megabytes)
    return 1 if missed else 0


def _print_accuracy(logs: list[Labelled], *, wrong: bool) -> bool:
    print(f"{'category':<28}{'logs':>6}{'category':>10}{'action':>8}{'cause':>8}")
    for name, (count, found) in by_category(logs).items():
        print(
            f"{name:<28}{count:>6}{found.share('category'):>10.0%}{found.share('action'):>8.0%}{found.share('cause'):>8.0%}"
        )
    plain = score(logs)
    rows = [("all", plain), *((name, score(logs, change)) for name, change in CHANGES.items())]
    print(f"\n{'logs as they are, changed':<28}{'logs':>6}{'category':>10}{'action':>8}{'cause':>8}{'cascades':>10}")
    for name, found in rows:
        shares = f"{found.share('category'):>10.1%}{found.share('action'):>8.1%}{found.share('cause'):>8.1%}"
        print(f"{name:<28}{found.total:>6}{shares}{found.cascades:>10}")
        for line in found.wrong if wrong else ():
            print(f"    {line}")
    return any(plain.share(what) < goal for what, goal in _GOALS.items()) or plain.cascades > 0


def _print_speed(megabytes: float) -> bool:
    facts = machine.facts()
    print(f"\n{'speed (CPU time), MB/s':<28}{'MB':>8}{'whole':>8}{'half':>8}   machine: {facts.get('cpu', '?')}")
    missed = False
    for name, (make, share, has_goal) in SPEED.items():
        size = megabytes * share
        if not make(0.01):
            continue  # the labelled logs are not here
        whole, half = speed(make, size)
        missed |= has_goal and whole < _SPEED_GOAL_MB_S
        print(f"{name:<28}{size:>8.1f}{whole:>8.1f}{half:>8.1f}")
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB, the made-up logs included")
    return missed


if __name__ == "__main__":
    sys.exit(main())
