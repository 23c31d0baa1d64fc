"""How long the files of tests take, written down by a whole run and compared with what is committed.

`tests/durations.tsv` is of `.ci/run` on two idle cores. pytest writes such a file where `TEST_DURATIONS` names one
(tests/conftest.py), and starts first what takes longest by the committed one. `.ci/run` ends with the comparison:

    python -m tests.durations NEW [COMMITTED]

Growth is printed and fails nothing: machines differ by a factor of two, so each file is held against what it would take
if all files of its lane had become slower alike.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import attrs

COMMITTED = Path(__file__).parent / "durations.tsv"
MARKS: Mapping[str, frozenset[str]] = {
    "fast": frozenset(),
    "slow": frozenset({"slow"}),
    "alone": frozenset({"slow", "alone"}),
    "release": frozenset({"slow", "release"}),
}
"""Each lane, with the marks by which its tests are chosen."""
MIN_GROWTH_S, MIN_GROWTH = 5.0, 1.3

Durations = Mapping[tuple[str, str], float]
"""Seconds of a lane's tests in a file, with all that was made for them."""


def lane_of(marks: Collection[str]) -> str:
    """Return the lane of a test that has these marks, among other words."""
    return next((lane for lane in ("release", "alone", "slow") if lane in marks), "fast")


def lanes_of(expression: str) -> frozenset[str]:
    """Return the lanes of which an expression of `pytest -m` chooses tests."""
    names = {name for marks in MARKS.values() for name in marks} | {"gpu"}
    try:
        chosen = [
            lane
            for lane, marks in MARKS.items()
            if eval(expression or "True", {"__builtins__": {}}, {name: name in marks for name in names})
        ]
    except Exception:
        return frozenset(MARKS)  # of another mark, or not for us to judge
    return frozenset(chosen)


@attrs.frozen
class Growth:
    """One file that takes longer than its lane's other files let expect."""

    lane: str
    file: str
    expected_s: float
    """What was committed, as long as this run took for all files; 0 where the file is new."""
    now_s: float


def pace(before: Durations, now: Durations, lane: str) -> float:
    """Return how many times longer a lane takes than before: the half of its seconds that has grown less ends there.

    Unlike the ratio of the sums, a file that has grown does not move it.
    """
    both = sorted((now[key] / before[key], before[key]) for key in now if key[0] == lane and before.get(key, 0.0) > 0.0)
    half = sum(seconds for _, seconds in both) / 2
    for times, seconds in both:
        half -= seconds
        if half <= 0:
            return times
    return 1.0


def growth(before: Durations, now: Durations) -> list[Growth]:
    """Return the files that have grown against the others of their lane, those that cost most first."""
    found = []
    for lane in MARKS:
        slower = pace(before, now, lane)
        for (of, file), seconds in now.items():
            expected = before.get((of, file), 0.0) * slower
            if of == lane and seconds > expected * MIN_GROWTH and seconds - expected > MIN_GROWTH_S:
                found.append(Growth(lane, file, expected, seconds))
    return sorted(found, key=lambda one: one.expected_s - one.now_s)


def report(before: Durations, now: Durations) -> Iterator[str]:
    """Yield the lines for who reads the end of a run: each lane, and what has grown in it."""
    grown = growth(before, now)
    for lane in MARKS:
        total = sum(seconds for (of, _), seconds in now.items() if of == lane)
        if not total:
            continue
        was = sum(seconds for (of, _), seconds in before.items() if of == lane)
        yield (
            f"{lane}: {total:.0f} s of tests, {was:.0f} s when durations were committed; "
            f"files took {pace(before, now, lane):.2f} times as long"
        )
        for one in grown:
            if one.lane == lane:
                than = f"expected {one.expected_s:.1f} s" if one.expected_s else "new"
                yield f"  grown: {one.file} {one.now_s:.1f} s ({than})"


def expected(committed: Durations, lanes: Collection[str], scopes: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Return how long each scope will take: of what its files take in these lanes, the part of its own tests.

    One with a file that has never been timed may take any time, and is to begin first.
    """
    tests = Counter(nodeid.partition("::")[0] for nodeids in scopes.values() for nodeid in nodeids)
    of_test = {}
    for file, number in tests.items():
        known = [committed[lane, file] for lane in lanes if (lane, file) in committed]
        of_test[file] = sum(known) / number if known else math.inf
    return {scope: sum(of_test[nodeid.partition("::")[0]] for nodeid in nodeids) for scope, nodeids in scopes.items()}


def read(path: Path) -> dict[tuple[str, str], float]:
    """Return what a file says; nothing where there is none."""
    if not path.exists():
        return {}
    lines = (line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()[1:])
    return {(lane, file): float(seconds) for lane, file, seconds in lines}


def write(path: Path, durations: Durations) -> None:
    """Add to a file what was measured, by lane and file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    order = list(MARKS)
    known = sorted({**read(path), **durations}.items(), key=lambda item: (order.index(item[0][0]), item[0][1]))
    lines = ["lane\tfile\tseconds", *(f"{lane}\t{file}\t{seconds:.1f}" for (lane, file), seconds in known)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


class Recorder:
    """Adds up what each file takes in the process that hears of all tests, whichever process runs them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: dict[tuple[str, str], float] = defaultdict(float)

    def pytest_runtest_logreport(self, report) -> None:
        self._seconds[lane_of(report.keywords), report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        write(self._path, self._seconds)


if __name__ == "__main__":
    for line in report(read(Path(sys.argv[2]) if len(sys.argv) > 2 else COMMITTED), read(Path(sys.argv[1]))):
        print(line)
