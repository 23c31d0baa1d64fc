"""One episode: a training is struck by its faults, started again, and what it leaves behind is held against each."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.checkpoint.store import InvalidCheckpointError, verify_checkpoint
from resilience_sdk.core.journal import read_journal
from tests.chaos.faults import RANKS, SLOW_S, Fault, jobs
from tests.integration.harness import Job, job
from tests.integration.network import Host, network

_PROGRAM = Path(__file__).with_name("training.py")
_DEADLINE_S, _SAVE_S, _STARTUP_S = 4.0, 8.0, 40.0
_EXIT_CODES = {"launcher killed": -signal.SIGKILL, "job asked to leave": 75, "rank asked to leave": 75}
_LEAST_SLOW_S = SLOW_S / 4  # on a busy machine any rank may lack a processor for some milliseconds of each step
_PAUSE_S = 1.0  # far below the deadline
_OPTIONS = (
    *(f"--nproc-per-node={RANKS}", "--max-restarts=100"),
    *(f"--heartbeat-timeout={_DEADLINE_S}", f"--out-of-section-timeout={_DEADLINE_S}"),
    f"--section-timeouts=checkpoint:{_SAVE_S}",  # no step is open in a save, and ranks that all wait have 300 s
    f"--initial-heartbeat-timeout={_STARTUP_S}",
)


@attrs.frozen
class Verdict:
    """What came of one fault; `wrong` says what did not hold, and is empty where everything did."""

    fault: Fault
    wrong: tuple[str, ...]
    recovery_s: float | None


@attrs.frozen
class Result:
    """What came of one episode. `wrong` is about the training as a whole."""

    verdicts: tuple[Verdict, ...]
    wrong: tuple[str, ...]
    torn: int
    """Checkpoints that were torn."""
    seconds: float

    @property
    def is_good(self) -> bool:
        """Whether every promise held."""
        return not self.wrong and not any(verdict.wrong for verdict in self.verdicts)


@attrs.define
class _Seen:
    """What was noted on the way."""

    left: list[str] = attrs.field(factory=list)
    torn: list[tuple[int, float]] = attrs.field(factory=list)
    """Steps of checkpoints that were torn, and when (Unix time)."""
    monitors: int = 0
    """How many monitors were killed."""


def undisturbed(folder: Path, steps: int) -> None:
    """Train with nobody in the way; raises AssertionError where even that fails."""
    with job(folder, *_OPTIONS, str(_PROGRAM), str(folder), str(steps)) as run:
        assert run.finish() == 0, run.screen


def run_episode(folder: Path, reference: Path, faults: Sequence[Fault], steps: int) -> Result:
    """Strike a training with these faults, and judge what it has left; `reference` is the undisturbed one."""
    began_s, seen = time.monotonic(), _Seen()
    wrong: list[str] = []
    try:
        with network(2) if any(fault.owes.needs_network for fault in faults) else contextlib.nullcontext(()) as hosts:
            for number, attempts in enumerate(jobs(faults)):
                _run_job(folder, steps, attempts, seen, number, hosts)
    except AssertionError as error:  # what comes after it is not the fault's own doing
        wrong.append(f"it did not go on: {str(error)[-1500:]}")
    run_dir = folder / "run"
    wrong += [f"left behind: {one}" for one in seen.left]
    if not wrong:
        wrong += _differences(folder, reference, steps)
    wrong += _torn_that_were_loaded(run_dir, seen)
    wrong += _unbalanced(run_dir)
    verdicts, unexpected = _judge(run_dir, faults)
    wrong += unexpected
    return Result(tuple(verdicts), tuple(wrong), len(seen.torn), time.monotonic() - began_s)


def _run_job(
    folder: Path,
    steps: int,
    attempts: Sequence[Sequence[Fault]],
    seen: _Seen,
    number: int,
    hosts: Sequence[Host],
) -> None:
    plans = [plan for at, group in enumerate(attempts) for fault in group if (plan := fault.plan(at)) is not None]
    env = {"RESILIENCE_FAULT": ";".join(plans)} if plans else {}
    words = [str(_PROGRAM), str(folder), str(steps)]
    if hosts:
        words += [hosts[1].namespace, hosts[0].address]
    outside = [(fault, at) for at, group in enumerate(attempts) for fault in group if fault.owes.plan is None]
    for fault, at in outside:
        _due(folder, fault, at).touch()
    with job(folder, *_OPTIONS, *words, env=env, within=hosts[0].within if hosts else ()) as run:
        for fault, at in outside:
            _Striker(run, folder, seen, hosts).strike(fault, at)
        code = run.finish()
        last = attempts[-1][-1].kind if attempts[-1] else None
        due = _EXIT_CODES.get(last or "", 0)
        assert code == due, f"job {number} left with {code} instead of {due}:\n{run.screen}"
        seen.left += run.left_behind()


def _due(folder: Path, fault: Fault, attempt: int) -> Path:
    """Return the file that keeps the rank from going past the step, as long as it is there."""
    return folder / f"due-{fault.rank}-{attempt}-{fault.step}"


@attrs.frozen
class _Striker:
    """Strikes one running job from outside."""

    run: Job
    folder: Path
    seen: _Seen
    hosts: Sequence[Host]

    def strike(self, fault: Fault, attempt: int) -> None:
        """Wait until the rank has done the step before in that attempt, and strike."""
        pid, due = self._pid_at(fault, attempt), _due(self.folder, fault, attempt)
        try:
            with contextlib.suppress(ProcessLookupError):  # it may have ended since: the other faults have no mercy
                self._strike(fault, pid, due)
        finally:
            due.unlink(missing_ok=True)

    def _strike(self, fault: Fault, pid: int, due: Path) -> None:
        if fault.kind == "sigkill":
            os.kill(pid, signal.SIGKILL)
        elif fault.kind == "stopped from outside":
            os.kill(pid, signal.SIGSTOP)
        elif fault.kind == "pause":
            os.kill(pid, signal.SIGSTOP)
            time.sleep(_PAUSE_S)  # that it lasts is the fault
            os.kill(pid, signal.SIGCONT)
        elif fault.kind == "torn checkpoint":
            os.kill(pid, signal.SIGKILL)
            self._tear()
        elif fault.kind == "monitor killed":
            self.seen.monitors += 1
            before = len(self.run.events("monitor_replaced"))
            os.kill(self.run.monitor_pid(), signal.SIGKILL)
            due.unlink()
            self.run.wait_event("monitor_replaced", count=before + 1)
        elif fault.kind == "link cut":
            before = len(self.run.events("attempt_end"))  # earlier, and the ranks would go on before they are ended
            self.hosts[1].cut()
            due.unlink()
            self.run.wait_event("attempt_end", count=before + 1)
            self.hosts[1].restore()
        elif fault.kind == "job asked to leave":
            self.run.process.send_signal(signal.SIGTERM)
        elif fault.kind == "launcher killed":
            self.run.process.kill()
        else:
            raise ValueError(f"nobody knows how to strike {fault.kind!r} from outside")

    def _pid_at(self, fault: Fault, attempt: int) -> int:
        """Return the pid of the rank once it is at the step."""
        path, found = self.folder / f"step-{fault.rank}", [0]

        def is_there() -> bool:
            with contextlib.suppress(FileNotFoundError):
                at, pid, step = map(int, path.read_text().split())
                found[0] = pid
                return at == attempt and step >= fault.step - 1 and self._is_of_this_job(pid)
            return False

        self.run.wait(is_there, f"step {fault.step} of attempt {attempt}, for {fault}")
        return found[0]

    def _is_of_this_job(self, pid: int) -> bool:
        """Whether it is no rank of the job before: attempts count from 0 in each."""
        return pid in self.run.processes()

    def _tear(self) -> None:
        """Cut the largest file of the newest checkpoint in half, as a machine that crashed does."""
        checkpoints = sorted((self.run.run_dir / "checkpoints").glob("step-*"))
        if checkpoints:
            largest = max(checkpoints[-1].rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else -1)
            os.truncate(largest, largest.stat().st_size // 2)
            self.seen.torn.append((_step_of(checkpoints[-1]), time.time()))


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.partition("-")[2])


def _lines(path: Path) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for line in path.read_text().splitlines():
        step, _, loss = line.partition(" ")
        if loss.count("x") == 1 and "p" in loss:  # a line that a kill cut short says nothing
            found.setdefault(int(step), set()).add(loss)
    return found


def _differences(folder: Path, reference: Path, steps: int) -> Iterator[str]:
    """Yield what is not as in the undisturbed training; a step that was done twice must have the same loss twice."""
    for rank in range(RANKS):
        told, due = _lines(folder / f"losses-{rank}"), _lines(reference / f"losses-{rank}")
        other = sorted(step for step in range(steps) if told.get(step) != due.get(step))
        if other:
            yield f"the losses of rank {rank} differ from step {other[0]} on ({len(other)} of {steps} steps)"
        if not (folder / f"weights-{rank}").exists():
            yield f"rank {rank} has no weights"
        elif (folder / f"weights-{rank}").read_text() != (reference / f"weights-{rank}").read_text():
            yield f"the weights of rank {rank} differ"


def _events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in read_journal(run_dir / "journal").events if event["event"] == name]


def _torn_that_were_loaded(run_dir: Path, seen: _Seen) -> Iterator[str]:
    for step, at in seen.torn:
        resumed = next((event for event in _events(run_dir, "resume") if event["t"] >= at), None)
        if resumed is not None and resumed.get("step") == step:
            yield f"the torn checkpoint after {step} steps was loaded"
    for checkpoint in sorted((run_dir / "checkpoints").glob("step-*")):
        try:
            verify_checkpoint(checkpoint)
        except InvalidCheckpointError as error:
            yield f"{checkpoint.name} was left torn: {error}"


def _unbalanced(run_dir: Path) -> Iterator[str]:
    """Yield where the account of time does not hold."""
    command = [sys.executable, "-m", "resilience_sdk", "goodput", "--json", str(run_dir)]
    told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    whole = sum(seconds for seconds in told["buckets"].values() if seconds is not None)
    if abs(whole - told["wall_s"]) > 0.01 + 1e-6 * told["wall_s"]:
        yield f"the buckets sum to {whole:.3f} s of {told['wall_s']:.3f} s"
    if not told["goodput"] or not 0.0 < told["goodput"] <= 1.0:
        yield f"a goodput of {told['goodput']}"


def _judge(run_dir: Path, faults: Sequence[Fault]) -> tuple[list[Verdict], list[str]]:
    """Return the verdict on each fault, and what was told of that nobody did."""
    everything = [json.loads(path.read_text()) for path in sorted(run_dir.glob("incidents/[0-9]*/report.json"))]
    incidents = [one for one in everything if one["kind"] != "slow"]  # of one that lasts, beside its events
    struck = {(event.get("rank"), event.get("step")) for event in _events(run_dir, "fault_injected")}
    verdicts: list[Verdict] = []
    at = 0
    for fault in faults:
        if fault.owes.plan is not None and (fault.rank, fault.step) not in struck:
            verdicts.append(Verdict(fault, ("it never struck: its step had passed",), None))
        elif fault.kind == "slow":
            due = sum(one.kind == "slow" and one.rank == fault.rank for one in faults)
            told = sum(fault.rank in event["ranks"] for event in _found_slow(run_dir))
            verdicts.append(Verdict(fault, () if told >= due else (f"{told} events straggler tell of {due}",), None))
        elif fault.owes.incident is None:
            verdicts.append(Verdict(fault, _untold(fault, run_dir, faults), None))
        elif at < len(incidents):
            verdicts.append(_held_against(fault, incidents[at]))
            at += 1
        else:
            verdicts.append(Verdict(fault, ("it has no incident",), None))
    wrong = [f"an incident that nobody made: {one['kind']} {one['cause']}" for one in incidents[at:]]
    stood = {fault.rank for fault in faults if fault.kind == "pause"}
    slow = {fault.rank for fault in faults if fault.kind == "slow"}
    blamed = {culprit["rank"] for one in everything if one["kind"] == "slow" for culprit in one["culprits"]} - slow
    blamed |= {rank for event in _found_slow(run_dir) for rank in set(event["ranks"]) - _slowed(run_dir, event)}
    return verdicts, wrong + [f"rank {rank} was called slow" for rank in sorted(blamed - stood)]


def _found_slow(run_dir: Path) -> list[dict[str, Any]]:
    """Return which ranks were found slow, where it costs so much that it is nothing that a busy machine does."""
    found = [event for event in _events(run_dir, "straggler") if event.get("what") == "found"]
    return [event for event in found if event["excess_s"] >= _LEAST_SLOW_S]


def _slowed(run_dir: Path, found: Mapping[str, Any]) -> set[int]:
    """Return the ranks that were made slow in the attempt of that event."""
    return {
        event["rank"]
        for event in _events(run_dir, "fault_injected")
        if "=slow:" in event["by"] and (event["job"], event["attempt"]) == (found["job"], found["attempt"])
    }


def _untold(fault: Fault, run_dir: Path, faults: Sequence[Fault]) -> tuple[str, ...]:
    """Return what is wrong where fewer events tell of a kind of fault than there were of it."""
    name = fault.owes.told_by
    if name is None:
        return ()
    due, told = sum(one.kind == fault.kind for one in faults), len(_events(run_dir, name))
    return () if told >= due else (f"{told} events {name} tell of {due}",)


def _held_against(fault: Fault, incident: dict[str, Any]) -> Verdict:
    owes, wrong = fault.owes, []
    if incident["kind"] != owes.incident:
        wrong.append(f"it was called {incident['kind']} ({incident['cause']})")
    elif owes.causes and incident["cause"] not in owes.causes:
        wrong.append(f"its cause was called {incident['cause']}")
    named = [culprit["rank"] for culprit in incident["culprits"]]
    if owes.names_rank and named != [fault.rank]:
        wrong.append(f"ranks {named} were named")
    if owes.ends == "attempt" and incident["recovered_at"] is None:
        wrong.append("nobody has told that it is over")
    if not owes.names_rank and named:
        wrong.append(f"ranks {named} were blamed")
    if owes.ends == "job" and incident["lost_steps"] not in (0, None):
        wrong.append(f"the stop lost {incident['lost_steps']} steps")
    return Verdict(fault, tuple(wrong), incident["recovery_s"])
