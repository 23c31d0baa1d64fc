"""The command: runs the scenarios one after the other and prints what happened."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.demo.launch import run_scenario
from resilience_sdk.demo.promises import RANKS, SCENARIOS, Outcome, Scenario, broken_promises
from resilience_sdk.errors import RunDirectoryError

_COLUMNS = ("run", "fault", "culprit", "detected", "recovered", "lost", "held-out loss", "result")


@attrs.frozen
class Verdict:
    """One run, what it left behind, and which promises it broke."""

    scenario: Scenario
    outcome: Outcome
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

    Raises RunDirectoryError when `--keep` names a directory that holds something.
    """
    arguments = _parser().parse_args(list(argv))
    talk = sys.stderr if arguments.json else sys.stdout
    if arguments.keep is None:
        with tempfile.TemporaryDirectory(prefix="resilience-demo-") as scratch:
            verdicts = _run_all(Path(scratch), talk)
    else:
        verdicts = _run_all(_empty_directory(arguments.keep), talk)
    ok = all(not verdict.broken for verdict in verdicts)
    if arguments.json:
        document = {"ok": ok, "ranks": RANKS, "runs": [verdict.to_json() for verdict in verdicts]}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        sys.stdout.write(_table(verdicts))
        sys.stdout.write(_conclusion(verdicts, arguments.keep))
    return 0 if ok else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="resilience demo",
        description=f"Trains a small model on {RANKS} CPU ranks, hung, killed and preempted; about a minute.",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="write the runs to DIR and leave them there (default: deleted)",
    )
    return parser


def _empty_directory(path: Path) -> Path:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise RunDirectoryError(f"--keep {path}: something is there already; name a new or empty directory")
    return path.absolute()


def _run_all(directory: Path, talk: Any) -> list[Verdict]:
    verdicts: list[Verdict] = []
    for number, scenario in enumerate(SCENARIOS, 1):
        fault = "no fault" if scenario.fault is None else f"RESILIENCE_FAULT={scenario.fault}"
        talk.write(f"{number}/{len(SCENARIOS)} {scenario.name}: {fault} ... ")
        talk.flush()
        outcome = run_scenario(scenario, directory / scenario.name)
        reference = verdicts[0].outcome if verdicts else outcome
        broken = tuple(broken_promises(scenario, outcome, reference))
        verdicts.append(Verdict(scenario, outcome, broken))
        talk.write(f"{outcome.seconds:.1f} s, {'as promised' if not broken else 'NOT as promised'}\n")
        if broken:
            talk.write(_last_lines(directory / scenario.name / "output.log"))
        if broken and not verdicts[1:]:
            break  # without a reference there is nothing to compare with
    return verdicts


def _last_lines(path: Path, count: int = 15) -> str:
    lines = path.read_text(errors="replace").splitlines()[-count:]
    return "".join(f"    | {line}\n" for line in lines)


def _row(verdict: Verdict) -> tuple[str, ...]:
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


def _loss(outcome: Outcome) -> float | None:
    shown = outcome.results.get(0, {}).get("loss")
    return None if shown is None else float.fromhex(shown)


def _table(verdicts: Sequence[Verdict]) -> str:
    rows = [_COLUMNS, *(_row(verdict) for verdict in verdicts)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n" + "".join(f"{line.rstrip()}\n" for line in lines) + "\n"


def _conclusion(verdicts: Sequence[Verdict], kept: Path | None) -> str:
    broken = [f"{verdict.scenario.name}: {sentence}" for verdict in verdicts for sentence in verdict.broken]
    if broken:
        text = "Not every promise held:\n" + "".join(f"  {sentence}\n" for sentence in broken)
    else:
        text = (
            "Every promise held: the rank was named, training went on by itself from its last checkpoint,\n"
            "and the final loss and every parameter are those of the undisturbed run, bit for bit.\n"
        )
    where = "To read the reports afterwards, use --keep DIR.\n"
    if kept is not None:
        where = f"The reports are in {kept}/*/run/incidents.\n"
    return text + where
