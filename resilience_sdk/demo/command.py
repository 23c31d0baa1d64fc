"""The demo's command: runs the scenarios one after the other, and says which promises were kept."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.core import environ
from resilience_sdk.errors import EXIT_PREEMPTED, RunDirectoryError
from resilience_sdk.faults import Plan
from resilience_sdk.incidents import IncidentStore
from resilience_sdk.incidents.record import Incident
from resilience_sdk.system import programs

RANKS = 2
CHECKPOINT_EVERY = 25


@attrs.frozen
class Scenario:
    """One run of the demo, and the fault that strikes in it."""

    name: str
    fault: Plan | None = None

    @property
    def incident_kind(self) -> str | None:
        """What the run directory must call it."""
        return None if self.fault is None else _INCIDENTS[self.fault.kind]

    @property
    def stops(self) -> bool:
        """Whether the job leaves, to be started again by whoever asked it to."""
        return self.fault is not None and self.fault.kind == "preempt"


_INCIDENTS = {"hang": "hang", "kill": "crash", "preempt": "preemption"}

# Blocked in C and past every signal handler; dead without a word; asked to leave. All between two checkpoints.
SCENARIOS = (
    Scenario("undisturbed"),
    Scenario("hung", Plan("hang", "c", rank=1, step=40)),
    Scenario("killed", Plan("kill", "sigkill", rank=0, step=90)),
    Scenario("preempted", Plan("preempt", rank=1, step=60)),
)


@attrs.frozen
class ScenarioOutcome:
    """What one run left behind. `results`: what each rank wrote at its end, by rank."""

    exit_code: int | None  # None: it was still running when its time was up
    seconds: float
    results: Mapping[int, Mapping[str, Any]]
    incidents: tuple[Incident, ...]
    first_exit_code: int | None = None
    """How the first start of a job left that was then started again."""


def broken_promises(scenario: Scenario, outcome: ScenarioOutcome, reference: ScenarioOutcome) -> list[str]:
    """Return one sentence per promise that did not hold; empty when all of them did."""
    broken = _ending(outcome)
    if scenario.fault is None:
        if outcome.incidents:
            broken.append(f"nothing was wrong, and {len(outcome.incidents)} incidents were reported")
        return broken
    if len(outcome.incidents) != 1:
        broken.append(f"{len(outcome.incidents)} incidents were reported for one fault")
    if outcome.incidents:
        broken += _report(scenario, outcome)
    for rank, result in outcome.results.items():
        for what in ("loss", "parameters"):
            expected = reference.results.get(rank, {}).get(what)
            if result.get(what) != expected:
                broken.append(f"rank {rank} ended with other {what}: {result.get(what)}, not {expected}")
    return broken


def _ending(outcome: ScenarioOutcome) -> list[str]:
    if outcome.exit_code is None:
        return [f"it did not end within {outcome.seconds:.0f} s"]
    broken = [] if outcome.exit_code == 0 else [f"it left with code {outcome.exit_code}"]
    missing = [str(rank) for rank in range(RANKS) if rank not in outcome.results]
    return broken + ([f"no result from rank {', '.join(missing)}"] if missing else [])


def _report(scenario: Scenario, outcome: ScenarioOutcome) -> list[str]:
    """Hold the report against the fault that is known to have struck."""
    fault, incident = scenario.fault, outcome.incidents[0]
    assert fault is not None
    broken = []
    if incident.kind != scenario.incident_kind:
        broken.append(f"it was called {incident.kind}, not {scenario.incident_kind}")
    if scenario.stops:
        return broken + _stop(fault.step or 0, outcome)
    named = [culprit.rank for culprit in incident.culprits]
    if named != [fault.rank]:
        broken.append(f"it named rank {named or 'nobody'}, not {fault.rank}")
    if incident.detection_latency_s is None:
        broken.append("it does not say how long detection took")
    if incident.recovery_s is None:
        broken.append("it does not say when training went on")
    first_steps = {result.get("first_step") for result in outcome.results.values()}
    resumed_at = (fault.step or 0) // CHECKPOINT_EVERY * CHECKPOINT_EVERY
    if outcome.results and first_steps != {resumed_at}:
        broken.append(f"it went on at step {first_steps}, not at the checkpoint of step {resumed_at}")
    steps = (fault.step or 0) - resumed_at
    # When a rank is killed at the beginning of a step, another may not have ended the step before yet.
    if incident.lost_steps != steps and (fault.kind, incident.lost_steps) != ("kill", steps - 1):
        broken.append(f"it counted {incident.lost_steps} lost steps, not {steps}")
    return broken


def _stop(asked_at: int, outcome: ScenarioOutcome) -> list[str]:
    """Hold a stop against what was promised: agreed soon, saved, and nothing lost."""
    broken = []
    if outcome.first_exit_code != EXIT_PREEMPTED:
        broken.append(f"it stopped with code {outcome.first_exit_code}, not {EXIT_PREEMPTED}")
    if (lost := outcome.incidents[0].lost_steps) != 0:
        broken.append(f"it counted {lost} lost steps, not 0")
    first_steps = {result.get("first_step") for result in outcome.results.values()}
    if len(first_steps) > 1 or not all(isinstance(step, int) and step > asked_at for step in first_steps):
        broken.append(f"it went on at step {first_steps}, not at one after step {asked_at}, when it was asked to leave")
    return broken


SCRIPT = Path(__file__).with_name("train.py")
_LONGEST_RUN_S = 240.0
_LONGEST_GOODBYE_S = 20.0
# A demo cannot wait half a minute to see that something is wrong; real runs keep the defaults.
_OPTIONS = {
    "nproc-per-node": RANKS,
    "max-restarts": 1,
    "checkpoint-every": CHECKPOINT_EVERY,
    "stuck-after": 4,
    "term-grace": 1,
    "monitor-interval": 0.1,
}


def run_scenario(scenario: Scenario, directory: Path) -> ScenarioOutcome:
    """Run the training with the scenario's fault; its output goes to `directory/output.log`.

    One that was asked to leave is started again, as its scheduler would. Raises OSError when the directory cannot be
    written. A run that does not end is ended.
    """
    directory.mkdir(parents=True)
    start = time.monotonic()
    environment = _environment(scenario)
    exit_code, first_exit_code = _start(directory, environment), None
    if scenario.stops:
        first_exit_code = exit_code
        exit_code = _start(directory, {name: value for name, value in environment.items() if name != environ.FAULT})
    return ScenarioOutcome(
        exit_code=exit_code,
        seconds=time.monotonic() - start,
        results=_results(directory / "results"),
        # On a machine with other work one rank may really be slower, which no promise excludes.
        incidents=tuple(incident for incident in IncidentStore(directory / "run").all() if incident.kind != "slow"),
        first_exit_code=first_exit_code,
    )


def _start(directory: Path, environment: Mapping[str, str]) -> int | None:
    """Run the job once; return its exit code, or None when it did not end by itself."""
    with open(directory / "output.log", "ab") as log:
        process = programs.start(
            programs.COMMAND,
            *words(directory),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            own_session=False,
        )
        try:
            return process.wait(_LONGEST_RUN_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            programs.end(process, _LONGEST_GOODBYE_S)


def words(directory: Path) -> list[str]:
    """Return the words of the command of a run."""
    options = [f"--{name}={value}" for name, value in _OPTIONS.items()]
    script = [str(SCRIPT), "--out", str(directory / "results")]
    return ["run", f"--run-dir={directory / 'run'}", *options, *script]


def _environment(scenario: Scenario) -> dict[str, str]:
    inherited = environ.outside_of_jobs(environ.environment())
    env = {name: value for name, value in inherited.items() if not name.startswith(environ.PREFIX)}
    env["OMP_NUM_THREADS"] = "1"
    env["CUDA_VISIBLE_DEVICES"] = ""
    env[environ.JOB_ID] = f"demo-{uuid.uuid4().hex[:12]}"
    if scenario.fault is not None:
        env[environ.FAULT] = str(scenario.fault)
    return env


def _results(directory: Path) -> Mapping[int, Mapping[str, Any]]:
    found = {}
    for rank in range(RANKS):
        with contextlib.suppress(FileNotFoundError):
            found[rank] = json.loads((directory / f"rank-{rank}.json").read_text())
    return found


_COLUMNS = ("run", "fault", "culprit", "detected", "recovered", "lost", "held-out loss", "result")


@attrs.frozen
class ScenarioVerdict:
    """One run, what it left behind, and which promises it broke."""

    scenario: Scenario
    outcome: ScenarioOutcome
    broken: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return one entry of `runs` of `resilience demo --json`."""
        result = self.outcome.results.get(0, {})
        return {
            "name": self.scenario.name,
            "fault": None if self.scenario.fault is None else str(self.scenario.fault),
            "exit_code": self.outcome.exit_code,
            "seconds": round(self.outcome.seconds, 3),
            "resumed_at_step": result.get("first_step") or None,
            "loss": _loss(self.outcome),
            "loss_hex": result.get("loss"),
            "parameters_sha256": result.get("parameters"),
            "incidents": [incident.to_json() for incident in self.outcome.incidents],
            "broken": list(self.broken),
        }


def main(argv: Sequence[str]) -> int:
    """Run the demo and return its exit code: 0 only if every promise held, 1 if one did not.

    Raises RunDirectoryError when `--keep` names a directory that holds something. A demo that is interrupted keeps
    only what `--keep` names.
    """
    arguments = _parser().parse_args(list(argv))
    talk = sys.stderr if arguments.json else sys.stdout
    is_named = arguments.keep is not None
    directory = _empty_directory(arguments.keep) if is_named else Path(tempfile.mkdtemp(prefix="resilience-demo-"))
    kept = directory if is_named else None
    try:
        verdicts = _run_all(directory, talk)
        kept = None if arguments.no_keep else directory
    finally:
        if kept is None:
            shutil.rmtree(directory, ignore_errors=True)
    ok = all(not verdict.broken for verdict in verdicts)
    if arguments.json:
        document: dict[str, Any] = {"ok": ok, "ranks": RANKS, "kept": None if kept is None else str(kept)}
        document["runs"] = [verdict.to_json() for verdict in verdicts]
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        sys.stdout.write(_table(verdicts))
        sys.stdout.write(_conclusion(verdicts, kept))
    return 0 if ok else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="resilience demo",
        description=f"Trains a small model on {RANKS} CPU ranks, hung, killed and preempted; about a minute.",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    place = parser.add_mutually_exclusive_group()
    place.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="write the runs to DIR (default: a new directory below the temporary one, named at the end)",
    )
    place.add_argument("--no-keep", action="store_true", help="throw the runs away at the end")
    return parser


def _empty_directory(path: Path) -> Path:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise RunDirectoryError(f"--keep {path}: something is there already; name a new or empty directory")
    return path.absolute()


def _run_all(directory: Path, talk: Any) -> list[ScenarioVerdict]:
    verdicts: list[ScenarioVerdict] = []
    for number, scenario in enumerate(SCENARIOS, 1):
        fault = "no fault" if scenario.fault is None else f"RESILIENCE_FAULT={scenario.fault}"
        talk.write(f"{number}/{len(SCENARIOS)} {scenario.name}: {fault} ... ")
        talk.flush()
        outcome = run_scenario(scenario, directory / scenario.name)
        reference = verdicts[0].outcome if verdicts else outcome
        broken = tuple(broken_promises(scenario, outcome, reference))
        verdicts.append(ScenarioVerdict(scenario, outcome, broken))
        talk.write(f"{'every promise kept' if not broken else 'NOT every promise kept'}, in {outcome.seconds:.1f} s\n")
        if broken:
            talk.write(_last_lines(directory / scenario.name / "output.log"))
        if broken and not verdicts[1:]:
            break  # without a reference there is nothing to compare with
    return verdicts


def _last_lines(path: Path, count: int = 15) -> str:
    lines = path.read_text(errors="replace").splitlines()[-count:]
    return "".join(f"    | {line}\n" for line in lines)


def _row(verdict: ScenarioVerdict) -> tuple[str, ...]:
    scenario, outcome = verdict.scenario, verdict.outcome
    loss = _loss(outcome)
    shown_loss = "-" if loss is None else f"{loss:.6f}"
    if scenario.fault is None:
        return (
            scenario.name,
            "-",
            "-",
            "-",
            "-",
            "-",
            shown_loss,
            "failed" if verdict.broken else "reference",
        )
    incident = outcome.incidents[0] if outcome.incidents else None
    return (
        scenario.name,
        f"{scenario.fault.kind} rank {scenario.fault.rank}",
        _culprits(incident.culprits) if incident and not scenario.stops else "-",
        _seconds(incident.detection_latency_s) if incident else "-",
        _seconds(incident.recovery_s) if incident else "-",
        "-" if incident is None or incident.lost_steps is None else f"{incident.lost_steps} steps",
        shown_loss,
        "FAILED" if verdict.broken else "same bits",
    )


def _culprits(culprits: Sequence[Any]) -> str:
    return ", ".join(f"rank {culprit.rank}" for culprit in culprits) or "nobody"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def _loss(outcome: ScenarioOutcome) -> float | None:
    shown = outcome.results.get(0, {}).get("loss")
    return None if shown is None else float.fromhex(shown)


def _table(verdicts: Sequence[ScenarioVerdict]) -> str:
    rows = [_COLUMNS, *(_row(verdict) for verdict in verdicts)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n" + "".join(f"{line.rstrip()}\n" for line in lines) + "\n"


def _conclusion(verdicts: Sequence[ScenarioVerdict], kept: Path | None) -> str:
    broken = [f"{verdict.scenario.name}: {sentence}" for verdict in verdicts for sentence in verdict.broken]
    if broken:
        text = "Not every promise held:\n" + "".join(f"  {sentence}\n" for sentence in broken)
    else:
        text = (
            "Every promise held: the rank was named, training went on by itself from its last checkpoint,\n"
            "and the final loss and every parameter are those of the undisturbed run, bit for bit.\n"
        )
    if kept is None:
        return text
    shown = next((one.scenario.name for one in verdicts if one.scenario.fault is not None), verdicts[0].scenario.name)
    return f"{text}The runs are in {kept}; try: resilience why {kept / shown / 'run'}\n"
