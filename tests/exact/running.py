"""Runs the cells: undisturbed trainings, which cells of one loop share, and disturbed ones beside them."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.core.journal import Event
from resilience_sdk.core.resume_limits import read_limits
from tests.exact import compare, plan
from tests.exact.compare import Told, Verdict

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
from harness import job

_LOOPS = Path(__file__).parent / "loops"
_FRAMEWORKS = {"Trainer": "transformers", "Lightning": "lightning", "Accelerate": "accelerate"}
_PATIENCE_S = 300.0  # an end is waited for, so it is the failure alone that takes as long
_MAX_STARTS = 6
_NEVER = 1000  # more steps than there are


@attrs.frozen
class Start:
    """One start of a training, that has ended."""

    code: int
    screen: str
    limits: tuple[str, ...]
    """Keys of what was said not to be repeated, over all starts in this run directory."""
    findings: tuple[str, ...]
    """What the resumes' own proof called not exact."""


@attrs.frozen
class Result:
    """What came of a cell, and of the framework alone where that was asked for and it has a resume."""

    cell: plan.Cell
    verdict: Verdict
    alone: Verdict | None
    seconds: float


class Runner:
    """Runs cells in directories below one."""

    def __init__(self, folder: Path, *, alone: bool = False, keep: bool = False) -> None:
        self._folder, self._alone, self._keep = folder, alone, keep
        self._undisturbed: dict[tuple[str, str, int, bool], Told] = {}
        self._locks: defaultdict[tuple[str, str, int, bool], threading.Lock] = defaultdict(threading.Lock)

    def run(self, cell: plan.Cell) -> Result:
        """Run a cell."""
        began_s = time.monotonic()
        verdict = self._verdict(cell, alone=False)
        alone = None
        if self._alone and cell.loop.way in plan.HAVE_A_RESUME and cell.change == plan.SAME:
            alone = self._verdict(cell, alone=True)
        return Result(cell, verdict, alone, time.monotonic() - began_s)

    def _verdict(self, cell: plan.Cell, *, alone: bool) -> Verdict:
        try:
            return self._judge(cell, alone=alone)
        except AssertionError as error:
            return Verdict(compare.BROKEN, why=str(error)[-2000:])

    def _judge(self, cell: plan.Cell, *, alone: bool) -> Verdict:
        every = cell.every() if cell.loop.options.get("saves_matter") else _NEVER
        undisturbed = self.undisturbed(cell.loop, every, alone=alone)
        if alone:
            pair = compare.differences(self.undisturbed(cell.loop, every), undisturbed)
            assert not pair, f"undisturbed, with the SDK and without it: {pair}"
        name = cell.key.replace(" / ", "-").replace(" ", "_").replace("'", "")
        training = Training(self._made(name + ("-alone" if alone else "")), cell.loop, alone)
        try:
            return self._disturb(cell, training, undisturbed)
        finally:
            if not self._keep:
                shutil.rmtree(training.folder, ignore_errors=True)

    def _disturb(self, cell: plan.Cell, training: Training, undisturbed: Told) -> Verdict:
        options = {**plan.options_of(cell.loop), "every": cell.every(), "fault": cell.fault, "faults": cell.faults()}
        options["victim"] = cell.loop.ranks - 1 if cell.moment != "in a save" else 0
        is_changed = cell.change != plan.SAME
        first = training.start(options, cell.loop.ranks, restarts=0 if is_changed else 3)
        starts = [first]
        if is_changed:
            assert first.code != 0, f"the fault has not come\n{first.screen}"
            ranks, _, changed = cell.changed()
            starts.append(training.start({**options, **changed, "faults": []}, ranks, restarts=0))
            if starts[-1].code != 0:
                return self._refused(starts[-1])
        else:
            while starts[-1].code == 75 and len(starts) < _MAX_STARTS:
                starts.append(training.start(options, cell.loop.ranks, restarts=3))
            assert starts[-1].code == 0, f"left with {starts[-1].code}\n{starts[-1].screen}"
        assert training.faults_struck() == len(options["faults"]), "a fault has not come"
        told, said = training.told(), starts[-1].limits
        if is_changed:
            screen = starts[-1].screen
            since = compare.resumed_in(told)
            return compare.judge_changed(
                told, cell.change, said, screen, changed["length"], since=since, ends_by_steps=cell.loop.ends_by_steps
            )
        verdict = compare.judge(undisturbed, told, said)
        findings = starts[-1].findings
        assert verdict.result != compare.EXACT or not findings, f"all is equal, and called not exact: {findings}"
        return verdict

    def _refused(self, start: Start) -> Verdict:
        line = next(
            (line for line in start.screen.splitlines() if "ConfigError" in line or "CheckpointError" in line), ""
        )
        assert line, f"left with {start.code}\n{start.screen}"
        return Verdict(compare.REFUSED, why=line.strip()[-300:])

    def undisturbed(self, loop: plan.Loop, every: int, *, alone: bool = False) -> Told:
        """Return what an undisturbed one told, with the SDK or without; `every` says when it saves."""
        key = (loop.way, loop.name, every, alone)
        with self._locks[key]:  # cells of one loop may run at once
            if key not in self._undisturbed:
                self._undisturbed[key] = self._run_undisturbed(loop, every, alone)
        return self._undisturbed[key]

    def _run_undisturbed(self, loop: plan.Loop, every: int, alone: bool) -> Told:
        name = f"undisturbed-{loop.way}-{loop.name}-{every}{'-alone' if alone else ''}".replace(" ", "_")
        done = self._folder / name / "done"
        if done.exists():  # of a run before, in a directory that was kept
            return Training(done.parent, loop, alone, loop.ranks).told()
        training = Training(self._made(name), loop, alone)
        options = {**plan.options_of(loop), "every": every, "fault": "kill", "faults": [], "victim": 0}
        start = training.start(options, loop.ranks, restarts=0)
        assert start.code == 0, f"undisturbed, left with {start.code}\n{start.screen}"
        done.touch()
        return training.told()

    def components(self, loop: plan.Loop) -> list[str]:
        """Return what the undisturbed one told of."""
        told = next(
            told for (way, name, *_), told in list(self._undisturbed.items()) if (way, name) == (loop.way, loop.name)
        )
        having = {component for rank in range(len(told.ranks)) for component, _ in told.values(rank)}
        return [name for name in compare.COMPONENTS if name in having]

    def _made(self, name: str) -> Path:
        folder = self._folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder


@attrs.define
class Training:
    """A training in a directory of its own, over all of its starts."""

    folder: Path
    loop: plan.Loop
    alone: bool
    _most_ranks: int = 0
    _starts: int = 0

    def start(self, options: dict[str, Any], ranks: int, *, restarts: int) -> Start:
        """Start it, and wait for its end."""
        self._most_ranks = max(self._most_ranks, ranks)
        own = {"alone": self.alone, "scratch": str(self.folder), "start": self._starts}
        self._starts += 1
        document = json.dumps({**options, **own})
        script = _LOOPS / f"loop_{self.loop.way.lower()}.py"
        words = ("--nproc-per-node", str(ranks), "--max-restarts", str(restarts), str(script), document)
        env = {"RESILIENCE_DISABLE": "1"} if self.alone else {}
        framework = _FRAMEWORKS.get(self.loop.way, "torch")
        with job(self.folder, *words, env=env, framework=framework, forked=True) as run:
            code = run.finish(_PATIENCE_S)
            if not (run.run_dir / "journal").is_dir():
                return Start(code, run.screen, (), ())
            limits = read_limits(run.events(Event.RESUME_LIMIT.value))
            findings = [str(event) for event in run.events(Event.RESUME_NOT_EXACT.value)]
            return Start(code, run.screen, tuple(limit.key for limit in limits), tuple(findings))

    def told(self) -> Told:
        """Return what its ranks told so far."""
        files = [self.folder / "told" / f"rank-{rank}" for rank in range(self._most_ranks)]
        return Told.of(file.read_text() if file.exists() else "" for file in files)

    def faults_struck(self) -> int:
        """Return how many faults have struck."""
        return len([*(self.folder / "told").glob("fault-*")])
