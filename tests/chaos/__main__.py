"""The runner: draws faults from a seed, strikes, and prints what came of each kind; exit code 1 if a promise broke."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import attrs

from tests.chaos.episodes import Result, Verdict, run_episode, undisturbed
from tests.chaos.faults import KINDS, NOT_TWICE, Fault, draw, most_steps
from tests.integration import network

_EACH = 5  # faults of an episode
_STEPS = most_steps(_EACH) + 15


def main() -> int:
    """Run episodes until the time or the number of faults is reached."""
    arguments = _arguments()
    rng = random.Random(arguments.seed)
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="resilience-chaos-", ignore_cleanup_errors=True) as scratch:
        base = arguments.keep or Path(scratch)
        reference = _folder(base / "undisturbed")
        undisturbed(reference, _STEPS)
        until_s = time.monotonic() + 60.0 * arguments.minutes
        left = arguments.faults
        while left > 0 and time.monotonic() < until_s:
            faults = draw(rng, min(_EACH, left), arguments.only)
            left -= len(faults)
            folder = _folder(base / f"episode-{len(results):03d}")
            results.append(run_episode(folder, reference, faults, _STEPS))
            _tell(len(results) - 1, faults, results[-1])
    return _report(results, arguments)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="no episode begins after it (60)")
    parser.add_argument("--faults", type=int, default=200, help="how many faults at most (200)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (0)")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(KINDS), help="kinds, by comma")
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="a new directory in which everything stays")
    arguments = parser.parse_args()
    if (why_not := network.why_not()) is not None:
        print(f"no links are cut: {why_not}", file=sys.stderr)
        arguments.only = [kind for kind in arguments.only if kind not in KINDS or not KINDS[kind].needs_network]
    if unknown := sorted(set(arguments.only) - set(KINDS)):
        parser.error(f"--only: no kind {', '.join(unknown)}; known: {', '.join(KINDS)}")
    if set(arguments.only) <= NOT_TWICE:
        parser.error(f"--only: {', '.join(sorted(NOT_TWICE))} cannot follow one another: name another kind, too")
    return arguments


def _folder(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def _tell(number: int, faults: Sequence[Fault], result: Result) -> None:
    words = ", ".join(f"{fault.kind} (rank {fault.rank}, step {fault.step})" for fault in faults)
    print(f"{number:3} {'ok   ' if result.is_good else 'WRONG'} {result.seconds:5.1f} s  {words}", file=sys.stderr)
    for verdict in result.verdicts:
        for wrong in verdict.wrong:
            print(f"      {verdict.fault.kind}: {wrong}", file=sys.stderr)
    for wrong in result.wrong:
        print(f"      {wrong}", file=sys.stderr, flush=True)


def _report(results: Sequence[Result], arguments: argparse.Namespace) -> int:
    by_kind: dict[str, list[Verdict]] = {kind: [] for kind in KINDS}
    for result in results:
        for verdict in result.verdicts:
            by_kind[verdict.fault.kind].append(verdict)
    good = sum(result.is_good for result in results)
    found = {
        "seed": arguments.seed,
        "episodes": len(results),
        "good_episodes": good,
        "faults": sum(map(len, by_kind.values())),
        "rightly_told": sum(not verdict.wrong for told in by_kind.values() for verdict in told),
        "torn": sum(result.torn for result in results),
        "seconds": round(sum(result.seconds for result in results), 1),
        "kinds": {kind: _kind(verdicts) for kind, verdicts in by_kind.items() if verdicts},
        "wrong": [attrs.asdict(result) for result in results if not result.is_good],
    }
    print(json.dumps(found, indent=1) if arguments.json else _table(found))
    return 0 if good == len(results) > 0 else 1


def _kind(verdicts: Sequence[Verdict]) -> dict[str, object]:
    took = sorted(verdict.recovery_s for verdict in verdicts if verdict.recovery_s is not None)
    return {
        "faults": len(verdicts),
        "rightly_told": sum(not verdict.wrong for verdict in verdicts),
        "recovery_s": [round(took[0], 2), round(statistics.median(took), 2), round(took[-1], 2)] if took else None,
    }


def _table(found: dict[str, object]) -> str:
    lines = [f"{'kind':22} {'faults':>6} {'right':>6}  noticed to all ranks stepping (s): median (least, most)"]
    kinds: dict[str, dict[str, object]] = found["kinds"]  # type: ignore[assignment]
    for kind, told in kinds.items():
        took: list[float] | None = told["recovery_s"]  # type: ignore[assignment]
        words = "-" if took is None else f"{took[1]} ({took[0]}, {took[2]})"
        lines.append(f"{kind:22} {told['faults']:>6} {told['rightly_told']:>6}  {words}")
    lines.append(
        f"seed {found['seed']}: {found['good_episodes']} of {found['episodes']} episodes good, "
        f"{found['rightly_told']} of {found['faults']} faults rightly told, {found['torn']} checkpoints torn, "
        f"{found['seconds']} s"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
