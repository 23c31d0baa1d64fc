"""One training is preempted at random moments and started again, until it is done: nothing is lost on the way.

Each time somebody (one rank, all ranks, the launcher, the whole process tree) gets SIGTERM: while the job comes up,
in a step, in an evaluation, while a checkpoint is written, and once more in the last save. The figures are times; a
promise that does not hold ends the measurement with what was seen.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import attrs

from resilience_sdk.checkpoint.store import verify_checkpoint
from tests.bench.figures import Context, Figure
from tests.bench.processes import PROGRAMS
from tests.integration.harness import Job, job

SEED = 20
RANKS = 2
_STEPS_EACH = 40  # more than the job gets done from one preemption to the next
_MOMENTS = ("start-up", "step", "evaluation", "save", "last save")
_WHOM = ("one rank", "all ranks", "the launcher", "the whole tree")
_START_S = 3.0  # about what a start takes


@attrs.frozen
class Strike:
    """One preemption: when it comes, and who is told. `delay_s` goes by after what marks the moment."""

    moment: str
    whom: str
    step: int
    delay_s: float

    @classmethod
    def draw(cls, rng: random.Random, *, moments: tuple[str, ...] = _MOMENTS) -> Strike:
        """Return one at random."""
        moment = rng.choice(moments)
        delays = {"start-up": _START_S, "step": 0.05, "last save": 0.05, "evaluation": 0.15, "save": 0.1}
        return cls(moment, rng.choice(_WHOM), rng.randrange(10), rng.uniform(0.0, delays[moment]))


@attrs.frozen
class Stop:
    """What came of one: the step at which all ranks stopped; None where it came before a check could answer."""

    strike: Strike
    step: int | None
    start_s: float | None  # from the start of the launcher to the first step of all ranks
    exit_s: float | None  # from the signal to the end of the launcher


def measure(context: Context) -> list[Figure]:
    """Preempt one run over and over; raises AssertionError when something was lost."""
    wanted = context.repeats(50, 3)
    steps = _STEPS_EACH * wanted
    reference = _folder(context.scratch / "undisturbed")
    with job(reference, *_options(reference, steps)) as run:
        assert run.finish(300.0) == 0, run.screen
    struck = _folder(context.scratch / "struck")
    stops = _strike(struck, steps, wanted)
    with _started(struck, steps, wanted) as run:
        assert run.finish(300.0) == 0, run.screen
        assert (run.run_dir / "finished").exists()
    for rank in range(RANKS):
        # Every step was done once, and gave what it gives when nobody disturbs.
        assert _lines(struck, rank) == _lines(reference, rank), f"the losses of rank {rank} differ"
        assert (struck / f"weights-{rank}").read_text() == (reference / f"weights-{rank}").read_text()
    return _figures(stops, steps)


def _figures(stops: list[Stop], steps: int) -> list[Figure]:
    agreed = [stop for stop in stops if stop.step is not None]
    kinds = Counter(stop.strike.moment for stop in agreed)
    note = f"{len(agreed)} agreed stops ({', '.join(f'{kinds[kind]} {kind}' for kind in _MOMENTS)}), 0 steps lost"
    early = len(stops) - len(agreed)
    return [
        Figure("preempted, signal to exit", "ours", "s", _times(stop.exit_s for stop in agreed), note=note),
        Figure(
            "preempted while coming up, signal to exit",
            "ours",
            "s",
            _times(stop.exit_s for stop in stops if stop.step is None),
            note=f"{early} signals before a check could answer; nothing was lost but that start",
        ),
        Figure(
            "resumed, start to first step",
            "ours",
            "s",
            _times(stop.start_s for stop in stops),
            note=f"{steps} steps in {len(stops) + 1} starts: losses and weights equal to the undisturbed run's",
        ),
    ]


def _times(values: Iterator[float | None]) -> tuple[float, ...]:
    return tuple(value for value in values if value is not None)


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def _options(folder: Path, steps: int) -> list[str]:
    options = [f"--nproc-per-node={RANKS}", "--max-restarts=100"]
    return [*options, str(PROGRAMS / "preempted.py"), str(folder), str(steps)]


@contextlib.contextmanager
def _started(folder: Path, steps: int, number: int) -> Iterator[Job]:
    with job(folder, *_options(folder, steps), env={"START": str(number)}) as run:
        yield run


def _strike(folder: Path, steps: int, wanted: int) -> list[Stop]:
    """Preempt and start again so often; return what came of it."""
    rng = random.Random(SEED)
    stops: list[Stop] = []
    number = 0
    while len(stops) < wanted:
        with _started(folder, steps, number) as run:
            life = _Life(run, number, time.monotonic())
            before = _newest(run)
            stops.append(life.take(Strike.draw(rng)))
            while run.process.poll() is None:  # a rank was ended by itself while coming up, and came again
                stops.append(life.take(Strike.draw(rng, moments=_MOMENTS[1:])))
            stop = stops[-1]
            if stop.step is None:
                assert _newest(run) == before, "a start that did nothing changed the newest checkpoint"
            resumed = run.events("resume")
            assert not resumed or max(event["step"] for event in resumed) <= (_newest(run) or 0)
            assert not run.events("ckpt_skip"), "a checkpoint was passed over, or a save left out"
            left = run.left_behind()
            assert not left, left
        number += 1
    return stops


class _Life:
    """One start of the job, from the launcher's first moment to its end."""

    def __init__(self, run: Job, number: int, begun_s: float) -> None:
        self.run = run
        self.number = number
        self.begun_s = begun_s
        self.attempt = 0

    def take(self, strike: Strike) -> Stop:
        """Strike, see what comes of it, check what was promised."""
        run = self.run
        self._await(strike)
        _sleep_until_over(run, strike.delay_s)
        struck_s = time.monotonic()
        self._send(strike.whom)
        if strike.moment == "last save":
            run.wait(lambda: bool(self._signs("last-save-*")) or run.process.poll() is not None, "the last save")
            self._send(strike.whom)
        again = f"told/{self.number}.{self.attempt + 1}-step-0-*"
        while run.process.poll() is None and len(list(run.folder.glob(again))) < RANKS:
            assert time.monotonic() < struck_s + 60, f"{strike} had no effect:\n{run.screen}"
            time.sleep(0.002)
        ended_s = time.monotonic()
        firsts = [float(path.read_text()) for path in self._signs("step-0-*")]
        start_s = max(firsts) - self.begun_s if len(firsts) == RANKS and self.attempt == 0 else None
        code = run.process.poll()
        exit_s = None if code is None else ended_s - struck_s
        step = self._stopped_at(code)
        stop = Stop(strike, step, start_s, exit_s)
        print(f"  {self.number}.{self.attempt} {stop} code {code}", file=sys.stderr, flush=True)
        self.attempt += 1
        return stop

    def _stopped_at(self, code: int | None) -> int | None:
        """Return the step at which all ranks stopped, after checking what was promised; None if none had begun."""
        run = self.run
        stops = [event for event in run.events("stop_agreed") if event["t"] >= _wall_of(self.begun_s)]
        if not stops:
            assert not self._signs("step-*"), f"ended with {code} after steps, and without a stop:\n{run.screen}"
            # While the launcher or Python itself was loading, or a rank that had no handler yet and was started again.
            assert code in (None, 75, -signal.SIGTERM), f"{code}\n{run.screen}"
            return None
        assert code == 75, f"{code}\n{run.screen}"
        assert sorted(event["rank"] for event in stops) == list(range(RANKS)), stops
        assert len({(event["step"], event["check"]) for event in stops}) == 1, stops
        step = int(stops[0]["step"])
        assert _newest(run) == step, f"stopped at step {step}, the newest checkpoint is {_newest(run)}\n{run.screen}"
        assert run.outcome()["verdict"] == "preempted"
        assert run.incidents()[-1]["lost_steps"] == 0, run.incidents()[-1]
        return step

    def _await(self, strike: Strike) -> None:
        run = self.run
        if strike.moment == "start-up":
            if strike.whom in ("one rank", "all ranks"):
                run.wait(lambda: len(self._signs("rank-*")) == RANKS, "the ranks")
            return
        run.wait(lambda: bool(self._signs(f"step-{strike.step}-*")), f"step {strike.step}")
        if strike.moment in ("evaluation", "save"):
            seen = set(self._signs(f"{strike.moment}-*"))
            times = {path: path.stat().st_mtime_ns for path in seen}
            run.wait(
                lambda: any(times.get(path) != path.stat().st_mtime_ns for path in self._signs(f"{strike.moment}-*")),
                strike.moment,
            )

    def _send(self, whom: str) -> None:
        ranks = sorted(self._signs("rank-*"))
        chosen = {
            "one rank": [int(path.read_text()) for path in ranks[1:]],
            "all ranks": [int(path.read_text()) for path in ranks],
            "the launcher": [self.run.process.pid],
            "the whole tree": sorted(self.run.processes()) if whom == "the whole tree" else [],
        }[whom]
        for pid in chosen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def _signs(self, name: str) -> list[Path]:
        return self.run.told(f"{self.number}.{self.attempt}-{name}")


def _sleep_until_over(run: Job, seconds: float) -> None:
    with contextlib.suppress(Exception):
        run.process.wait(seconds)


def _wall_of(monotonic_s: float) -> float:
    return time.time() - (time.monotonic() - monotonic_s)


def _newest(run: Job) -> int | None:
    """Return the step of the newest checkpoint, after reading every byte of it; nothing unfinished may pass for one."""
    paths = sorted((run.run_dir / "checkpoints").glob("step-*"))
    return verify_checkpoint(paths[-1]).step if paths else None


def _lines(folder: Path, rank: int) -> list[str]:
    return (folder / f"losses-{rank}").read_text().splitlines()
