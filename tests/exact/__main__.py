"""The runner: disturbs trainings, compares them with undisturbed ones, prints what came of it, keeps the results.

python -m tests.exact [--only start_run,Trainer] [--cells "twice / kill"] [--missing] [--alone] [--write]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tests.exact import compare, plan, results
from tests.exact.running import Result, Runner


def main() -> int:
    """Run the chosen cells; exit code 1 where one is silent, broken, or exact without the SDK alone."""
    arguments = _arguments()
    document = results.read()
    cells = plan.daily() if arguments.daily else [*plan.cells()]
    if arguments.missing:
        cells = [cell for cell in cells if cell.key not in document["cells"]]
    cells = [cell for cell in cells if cell.loop.way in arguments.only and arguments.cells in cell.key]
    seen = [cell for cell in plan.cells() if cell.key in document["cells"]]
    cells = plan.spread(cells, seen)  # one that is cut short has seen the most
    if arguments.list:
        print("\n".join(cell.key for cell in cells))
        return 0
    found: dict[str, dict[str, object]] = {}
    until_s = time.monotonic() + 60.0 * arguments.minutes
    with tempfile.TemporaryDirectory(prefix="resilience-exact-", ignore_cleanup_errors=True) as scratch:
        runner = Runner(arguments.keep or Path(scratch), alone=arguments.alone, keep=arguments.keep is not None)

        def run(cell: plan.Cell) -> Result | None:
            return runner.run(cell) if time.monotonic() < until_s else None

        pool = ThreadPoolExecutor(arguments.jobs)
        for done in as_completed([pool.submit(run, cell) for cell in cells]):
            result = done.result()
            if result is None:
                continue
            cell = result.cell
            _tell(result)
            found[cell.key] = results.entry(result.verdict, result.alone)
            if arguments.write and result.verdict.result != compare.BROKEN:
                loop = f"{cell.loop.way} / {cell.loop.name}"
                results.keep(cell.key, found[cell.key], loop, runner.components(cell.loop))
    return _report(found, len(cells))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.exact", description=__doc__)
    parser.add_argument("--only", type=_ways, default=plan.WAYS, metavar="WAY,...", help=f"of: {', '.join(plan.WAYS)}")
    parser.add_argument("--cells", default="", metavar="WORDS", help="those whose names have these words")
    parser.add_argument("--daily", action="store_true", help="the part that is run each day")
    parser.add_argument("--missing", action="store_true", help="those that have no result yet")
    parser.add_argument("--list", action="store_true", help="print their names, and run none")
    parser.add_argument("--alone", action="store_true", help="beside each, the framework's own resume without the SDK")
    parser.add_argument("--minutes", type=float, default=60.0, help="no cell begins after it (60)")
    parser.add_argument("--jobs", type=int, default=3, help="how many cells at once (3): most of their time they wait")
    parser.add_argument("--write", action="store_true", help="keep the results in results.json")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where all stays; what is undisturbed there is used")
    return parser.parse_args()


def _ways(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in plan.WAYS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(plan.WAYS)}")
    return names


def _tell(result: Result) -> None:
    alone = "" if result.alone is None else f"  alone: {result.alone.result}"
    words = f"{result.verdict.result:8} {result.seconds:5.1f} s  {result.cell.key}{alone}"
    print(words, file=sys.stderr, flush=True)
    if result.verdict.result in (compare.SILENT, compare.SAID):
        for component, place in result.verdict.differs.items():
            print(f"           {component}: {place}", file=sys.stderr)
        print(f"           said: {', '.join(result.verdict.said) or 'nothing'}", file=sys.stderr, flush=True)
    for verdict in (result.verdict, result.alone):
        if verdict is not None and verdict.why:
            print(f"           {verdict.why}", file=sys.stderr, flush=True)


def _report(found: dict[str, dict[str, object]], wanted: int) -> int:
    print(results.summary(found))
    wrong = [key for key, cell in found.items() if cell["result"] in (compare.SILENT, compare.BROKEN)]
    lost = results.lost_by_us(found)
    for key in wrong:
        print(f"{found[key]['result']}: {key}")
    for key in lost:
        print(f"exact without the SDK, {found[key]['result']} with it: {key}")
    if len(found) < wanted:
        print(f"{len(found)} of {wanted} cells in this time")
    return 1 if wrong or lost or len(found) < wanted else 0


if __name__ == "__main__":
    sys.exit(main())
