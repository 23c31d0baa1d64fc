"""What is said of a job's time, held against what its ranks have written down themselves, at the end and each 2 s.

Twelve jobs of two ranks: primitives, `start_run`, an unchanged script, Lightning, the Trainer and Accelerate, with slow
data, evaluations, saves, stops, kills, a preemption and a killed launcher. Each bucket may be off by 0.5 s and 2 % of
the wall time, goodput and ETTR by 2 points at the end and 5 in the middle, lost steps by none.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import attrs

from resilience_sdk.core.journal import read_journal
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.goodput.buckets import Bucket
from resilience_sdk.goodput.summary import Summary
from resilience_sdk.report.run_view import look_at
from tests.bench import processes
from tests.bench.figures import Context, Figure

SCRIPT = processes.PROGRAMS / "timed.py"
_EACH_S, _PATIENCE_S = 2.0, 300.0
_ONE_MOMENT_S = 1.0
_OFF_S, _OFF_SHARE = 0.5, 0.02
_END_POINTS, _MIDDLE_POINTS = 2.0, 5.0
Span = tuple[float, float]
# What is compared together: nobody can tell a hang from a standstill before it is over, and the launcher's own time
# begins where the last process of the job has ended.
GROUPS = {
    "productive": ("productive",), "replayed": ("replayed",), "start": ("startup", "rendezvous", "restart"),
    "data": ("data",), "evaluation": ("evaluation",), "checkpoint": ("checkpoint",),
    "stood": ("hang", "standing", "waiting"), "outside": ("outside", "launcher"), "preempted": ("preempted",),
    "idle": ("idle",),
}  # fmt: skip


@attrs.frozen
class Job:
    """One job, and what is done to it: `(step of rank 0, what, seconds)`."""

    name: str
    kind: str
    words: str
    strikes: tuple[tuple[int, str, float], ...] = ()
    is_bound: bool = False
    """Whether goodput is said as "at most": then it has to be no less than the truth."""


JOBS = (
    Job("slow data, evaluation, saves", "primitives", "steps=60 data=0.1 eval_every=25 eval=2 save_every=20 save=1"),
    Job("stops of 3 and 8 s", "primitives", "steps=70", ((20, "stop", 3.0), (45, "stop", 8.0))),
    Job("stops of 14 and 20 s", "primitives", "steps=60", ((20, "stop", 14.0), (40, "stop", 20.0))),
    Job("kill, slow data", "primitives", "steps=70 data=0.15 save_every=20 save=0.5", ((33, "kill", 0.0),)),
    Job("work behind the loop", "run", "steps=50 data=0.05 behind=6 eval_every=20 eval=2 save_every=20"),
    Job("kill", "run", "steps=70 data=0.1 save_every=20", ((33, "kill", 0.0),)),
    Job("preempted, started again", "run", "steps=70 save_every=50", ((30, "preempt", 4.0),)),
    Job("launcher killed", "run", "steps=70 save_every=20", ((33, "launcher", 6.0),)),
    Job("own saves", "unchanged", "steps=60 eval_every=25 eval=3 save_every=20 save=2", is_bound=True),
    Job("validation, a stop", "lightning", "steps=60 data=0.05 eval_every=25 eval=2", ((40, "stop", 5.0),)),
    Job("evaluation, kill", "transformers", "steps=60 eval_every=20 eval=2 save_every=15", ((37, "kill", 0.0),)),
    Job("slow data, a stop", "accelerate", "steps=60 data=0.15", ((30, "stop", 6.0),)),
)


_QUICK = (0, 1, 7)


@attrs.define
class Process:
    """One rank of one attempt, as it has written down what it did."""

    rank: int
    acts: list[tuple[str, float, float, int]]

    def spans(self, what: str) -> list[Span]:
        """Return when it did something."""
        return [(began, ended) for name, began, ended, _ in self.acts if name == what]

    @property
    def began(self) -> float:
        """When its script began."""
        return self.acts[0][1]


@attrs.define
class Truth:
    """What was really done, by buckets."""

    seconds: dict[str, float]
    wall_s: float
    lost_steps: int
    has_trained: bool

    @property
    def goodput(self) -> float:
        """The share of steps that count."""
        return self.seconds["productive"] / self.wall_s if self.wall_s else 0.0

    @property
    def ettr(self) -> float:
        """The share of those and of data."""
        return (self.seconds["productive"] + self.seconds["data"]) / self.wall_s if self.wall_s else 0.0


@attrs.define
class Record:
    """What happened to a job from outside. Times are Unix seconds."""

    stops: list[list[float]] = attrs.field(factory=list)
    ends: list[tuple[str, float]] = attrs.field(factory=list)  # how, and when, an attempt was ended
    asked: list[tuple[float, Summary]] = attrs.field(factory=list)


def measure(context: Context) -> list[Figure]:
    """Run the jobs one after another; they would slow one another down."""
    jobs = [JOBS[number] for number in _QUICK] if context.quick else JOBS
    figures = []
    for number, job in enumerate(jobs):
        figures += _measured(context.scratch / f"time-{number}", job)
    return figures


def _measured(folder: Path, job: Job) -> list[Figure]:
    out = folder / "out"
    out.mkdir(parents=True)
    record, run_dir = Record(), folder / "run"
    command = [
        *processes.resilience_run(f"--run-dir={run_dir}", "--nproc-per-node=2", "--max-restarts=2"),
        str(SCRIPT), str(out), job.kind, *job.words.split(),
    ]  # fmt: skip
    strikes = list(job.strikes)
    env = processes.environment(RESILIENCE_PAGE_DIR=str(_made(folder / "pages")))
    while True:
        with processes.started(command, env, folder / "log") as process:
            again_s = _watch(process, out, run_dir, strikes, record)
        if again_s is None:
            break
        time.sleep(again_s)
    return list(_compared(job, out, run_dir, record))


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    folder.chmod(0o700)
    return folder


def _watch(
    process: subprocess.Popen[bytes], out: Path, run_dir: Path, strikes: list[tuple[int, str, float]], record: Record
) -> float | None:
    """Strike when it is time and ask each 2 s; return how long to wait before it is started again, None: it is over."""
    end, asked = time.monotonic() + _PATIENCE_S, time.monotonic()
    stopped: tuple[int, float] | None = None
    while process.poll() is None and time.monotonic() < end:
        now = time.monotonic()
        if stopped is not None and now >= stopped[1]:
            os.kill(stopped[0], signal.SIGCONT)
            record.stops[-1].append(time.time())
            stopped = None
        if now - asked >= _EACH_S:
            asked = now
            with contextlib.suppress(Exception):  # before there is anything to be read
                began, view = time.time(), look_at(RunDirectory(run_dir))
                said = view.account()
                if time.time() - began < _ONE_MOMENT_S:  # else it has read of one moment and tells of another
                    record.asked.append((began, said))
        if strikes and stopped is None and (pid := _reached(out, strikes[0][0])) is not None:
            _, what, seconds = strikes.pop(0)
            if what == "stop":
                os.kill(pid, signal.SIGSTOP)
                record.stops.append([time.time()])
                stopped = pid, time.monotonic() + seconds
            elif what == "kill":
                os.kill(pid, signal.SIGKILL)
                record.ends.append((what, time.time()))
            else:
                record.ends.append((what, time.time()))
                os.kill(process.pid, signal.SIGTERM if what == "preempt" else signal.SIGKILL)
                process.wait(60)
                record.ends.append(("left", time.time()))
                return seconds
        time.sleep(0.02)
    return None


def _reached(out: Path, step: int) -> int | None:
    """Return the pid of rank 1 once that is in so late a step."""
    newest = max(out.glob("rank-1-*.jsonl"), key=lambda path: path.stat().st_mtime, default=None)
    if newest is None or '["step", ' not in (text := newest.read_text()):
        return None
    steps = [act[3] for act in map(json.loads, text.splitlines()) if act[0] == "step"]
    return int(newest.stem.rpartition("-")[2]) if steps and max(steps) >= step else None


# -- the truth


def truth(out: Path, run_dir: Path, record: Record, at: float | None = None) -> Truth:
    """Return what was really done, up to a moment."""
    events = read_journal(run_dir / "journal").events
    starts = [event["t"] for event in events if event["event"] == "run_start"]
    over = [event["t"] for event in events if event["event"] == "decision" and event.get("verdict") == "finished"]
    end = (over or [events[-1]["t"]])[-1] if at is None else min([at, *over])
    attempts = _attempts(out)
    found = dict.fromkeys(GROUPS, 0.0)
    lost_steps, trained_until, has_trained = 0, starts[0], False
    for number, ranks in enumerate(attempts):
        if ranks[0].began > end:
            break
        first = max((min(one.spans("step"), default=(0.0, end + 1.0))[1] for one in ranks), default=end)
        following = attempts[number + 1] if number + 1 < len(attempts) else None
        last = max(ended for one in ranks for _, _, ended, _ in one.acts)
        struck = [(how, t) for how, t in record.ends if how != "left" and ranks[0].began < t]
        was_ended = struck[0] if struck and following is not None else None
        until = was_ended[1] if was_ended is not None else end
        started = [t for t in starts if t <= ranks[0].began and t >= trained_until]
        if started:  # another job
            found["idle"] += started[-1] - trained_until
            trained_until = started[-1]
        if first > end:
            found["start"] += end - trained_until
            trained_until = end
            break
        found["start"] += first - trained_until
        until = min(until, end)
        has_trained = True
        resumed = following[0].acts if following is not None and following[0].began <= end else []
        kept = next((step for what, _, _, step in resumed if what == "resume"), None)
        stops = [(s[0], s[1] if len(s) > 1 else end) for s in record.stops]
        if was_ended is not None and was_ended[0] == "preempt" and until < end:
            until = min(end, max(t for one in ranks for _, t in one.spans("step")))
            # Behind its last word the launcher writes the page, which is no time of the run.
            left = min(end, next(e["t"] for e in events if e["event"] == "decision" and e.get("exit_code") is not None))
            found["preempted"] += left - until
            last = left
        spent = _spent(ranks, first, until, stops)
        if kept is not None:
            done = [(ended, step) for one in ranks[:1] for what, _, ended, step in one.acts if what == "step"]
            completed = max((step + 1 for _, step in done), default=0)
            lost_steps += max(0, min(len(done), completed - kept))
            kept_at = max((ended for ended, step in done if step < kept), default=first)
            saves = [
                ended for one in ranks for what, _, ended, step in one.acts if what == "checkpoint" and step < kept
            ]
            kept_at = max([kept_at, *saves]) if completed > kept else until
            behind = _spent(ranks, max(first, kept_at), until, stops)
            for name in ("productive", "data", "evaluation", "checkpoint", "outside"):
                spent[name] -= behind[name]
                found["replayed"] += behind[name]
        for name, seconds in spent.items():
            found[name] += seconds
        trained_until = max(until, last) if was_ended is not None and was_ended[0] == "preempt" else until
    return Truth(found, end - starts[0], lost_steps, has_trained)


def _attempts(out: Path) -> list[list[Process]]:
    ranks: dict[int, list[Process]] = {}
    for path in out.glob("rank-*.jsonl"):
        rank = int(path.stem.split("-")[1])
        acts = [tuple(json.loads(line)) for line in path.read_text().splitlines() if line.endswith("]")]
        if acts:
            ranks.setdefault(rank, []).append(Process(rank, acts))
    for told in ranks.values():
        told.sort(key=lambda one: one.began)
    return [list(pair) for pair in zip(*(ranks[rank] for rank in sorted(ranks)), strict=False)]


def _spent(ranks: Sequence[Process], began: float, ended: float, stops: Iterable[Span]) -> dict[str, float]:
    """Return what the time of an attempt was spent on."""
    stood = _within(stops, began, ended)

    def of(what: str, over: Callable[[Iterable[float]], float] = max) -> float:
        return over(_length(_without(_within(one.spans(what), began, ended), stood)) for one in ranks)

    together = [(began, ended)]
    for one in ranks:
        together = _common(together, one.spans("step"))
    found = dict.fromkeys(GROUPS, 0.0)
    found["productive"] = _length(_without(together, stood))
    found |= {name: of(name) for name in ("data", "evaluation", "checkpoint")}
    found["stood"] = _length(stood)
    found["outside"] = max(0.0, ended - began - sum(found.values()))
    return found


def _within(spans: Iterable[Span], began: float, ended: float) -> list[Span]:
    return [(max(a, began), min(b, ended)) for a, b in spans if min(b, ended) > max(a, began)]


def _common(some: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    return [part for a, b in others for part in _within(some, a, b)]


def _without(spans: Sequence[Span], taken: Iterable[Span]) -> list[Span]:
    for began, ended in taken:
        spans = [part for a, b in spans for part in ((a, min(b, began)), (max(a, ended), b)) if part[1] > part[0]]
    return list(spans)


def _length(spans: Iterable[Span]) -> float:
    return sum(ended - began for began, ended in spans)


# -- the comparison


def _compared(job: Job, out: Path, run_dir: Path, record: Record) -> Iterable[Figure]:
    said, true = look_at(RunDirectory(run_dir)).account(), truth(out, run_dir, record)
    name = f"{job.kind}: {job.name}"
    if not true.has_trained or not _is_complete(out):
        raise RuntimeError(f"{name} did not train to its end")
    groups = {group: sum(said.buckets[Bucket(one)] for one in names) for group, names in GROUPS.items()}
    allowed = _OFF_S + _OFF_SHARE * true.wall_s
    worst = max(groups, key=lambda group: abs(groups[group] - true.seconds[group]))
    told = ", ".join(
        f"{g} {groups[g]:.1f}/{true.seconds[g]:.1f}" for g in groups if max(groups[g], true.seconds[g]) > 0.05
    )
    print(f"{name}: wall {said.wall_s:.1f}/{true.wall_s:.1f} s, said/true: {told}", file=sys.stderr, flush=True)
    if job.is_bound:
        missing = 100 * ((true.goodput or 0.0) - (said.goodput or 0.0))
        note = f"said {said.at_most}{said.goodput or 0.0:.1%}, true {true.goodput:.1%}"
        yield Figure(f"{name}: goodput below the truth", "ours", "points", (missing,), 1.0, note=note)
        yield Figure(f"{name}: said as a bound", "ours", "", (float(said.is_bound),), least=1.0)
        return
    off_s = abs(groups[worst] - true.seconds[worst])
    yield Figure(f"{name}: worst bucket", "ours", "s", (off_s,), allowed, note=f"{worst}; {told}")
    ends = [100 * abs((said.goodput or 0.0) - true.goodput), 100 * abs((said.ettr or 0.0) - true.ettr)]
    note = f"goodput {said.goodput or 0.0:.1%} of {true.goodput:.1%}, ETTR {said.ettr or 0.0:.1%} of {true.ettr:.1%}"
    yield Figure(f"{name}: goodput and ETTR", "ours", "points", (max(ends),), _END_POINTS, note=note)
    middle = [
        (at, *_middle(one, truth(out, run_dir, record, at))) for at, one in record.asked if _is_clear(at, out, record)
    ]
    if middle:
        at, off, words = max(middle, key=lambda one: one[1])
        note = f"asked {len(middle)} times; {at - record.asked[0][0]:.0f} s behind the first: {words}"
        yield Figure(f"{name}: the same in mid-run", "ours", "points", (off,), _MIDDLE_POINTS, note=note)
    if said.lost_steps is not None:
        off_steps = float(abs(said.lost_steps - true.lost_steps))
        yield Figure(
            f"{name}: lost steps", "ours", "", (off_steps,), 0.0, note=f"{said.lost_steps} of {true.lost_steps}"
        )


def _is_complete(out: Path) -> bool:
    return all(one.acts[-1][0] == "end" for one in _attempts(out)[-1])


def _middle(said: Summary, true: Truth) -> tuple[float, str]:
    goodput, ettr = 100 * abs((said.goodput or 0.0) - true.goodput), 100 * abs((said.ettr or 0.0) - true.ettr)
    words = f"goodput {said.goodput or 0.0:.1%} of {true.goodput:.1%}, ETTR {said.ettr or 0.0:.1%} of {true.ettr:.1%}"
    return max(goodput, ettr), words


def _is_clear(at: float, out: Path, record: Record) -> bool:
    """Tell whether it is known by then what is lost: not between a fault and the first step behind it."""
    firsts = [max(min(one.spans("step"), default=(at, at + 1e9))[1] for one in ranks) for ranks in _attempts(out)]
    faults = [t for how, t in record.ends if how != "left"]
    return not any(t - 0.1 <= at < min((f for f in firsts if f > t), default=at + 1.0) + 1.5 for t in faults)
