"""The runner: measures what it is asked for, prints a table or JSON.

python -m tests.bench [--quick] [--json] [--only primitives,imports] [--nvrx-python PATH]
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.bench import machine
from tests.bench.figures import Context, Figure, table

# Cheapest first: what follows heats the machine up.
MODULES = (
    "imports",
    "doctor",
    "primitives",
    "preemption",
    "interleavings",
    "attach",
    "adapters",
    "numerics",
    "resume",
    "monitor_cost",
    "stragglers",
    "straggler_fleet",
    "report",
    "history",
    "checkpoints",
    "gpu",
    "restart",
    "preemptions",
    "proven",
    "planted",
    "removed_pages",
    "clean_ends",
    "lightning_signals",
    "hang",
    "rehearsals",
    "time",
    "dashboard",
    "everything",
)
ASKED_FOR = ("peers",)
"""Installs packages and takes long: only by name."""


def main() -> int:
    """Run the chosen measurements; exit code 1 if a target was missed."""
    arguments = _arguments()
    facts = machine.facts()
    figures: list[Figure] = []
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="resilience-bench-", ignore_cleanup_errors=True) as scratch:
        base = arguments.keep or Path(scratch)
        for name in arguments.only:
            print(f"measuring {name} ...", file=sys.stderr, flush=True)
            start = time.monotonic()
            directory = base / name
            directory.mkdir(parents=True)
            context = Context(
                directory,
                arguments.quick,
                arguments.nvrx_python,
                arguments.before,
                arguments.peers_envs,
                arguments.peers_at_once,
            )
            try:
                figures += importlib.import_module(f"tests.bench.{name}").measure(context)
            except Exception as error:
                failures[name] = f"{type(error).__name__}: {error}"
            print(f"  {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
    facts["load_after"] = [round(value, 2) for value in os.getloadavg()]
    document = {
        "machine": facts,
        "command": " ".join(["python", "-m", "tests.bench", *sys.argv[1:]]),
        "figures": [figure.to_json() for figure in figures],
        "failures": failures,
    }
    print(json.dumps(document, indent=2) if arguments.json else _text(document, figures))
    return 1 if failures or any(figure.met is False for figure in figures) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--quick", action="store_true", help="few repetitions: does it work, roughly how fast")
    parser.add_argument(
        "--only", type=_modules, default=MODULES, metavar="NAME,...", help=f"of: {', '.join((*MODULES, *ASKED_FOR))}"
    )
    parser.add_argument("--nvrx-python", metavar="PATH", help="interpreter of an environment with NVRx")
    parser.add_argument(
        "--before", type=Path, metavar="DIR", help="a checkout of another commit, to be measured beside"
    )
    parser.add_argument(
        "--peers-envs",
        type=Path,
        default=Path(tempfile.gettempdir(), "resilience-peers"),
        metavar="DIR",
        help="where the environments of `peers` are made, or are from before; about 1 GB each (default: %(default)s)",
    )
    parser.add_argument(
        "--peers-at-once", type=int, default=1, metavar="N", help="so many peers side by side: sooner done, slower each"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave logs and run directories in DIR")
    return parser.parse_args()


def _modules(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in (*MODULES, *ASKED_FOR):
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join((*MODULES, *ASKED_FOR))}")
    return names


def _text(document: dict[str, Any], figures: list[Figure]) -> str:
    lines = [f"{key}: {value}" for key, value in document["machine"].items()]
    lines += ["", table(figures)]
    lines += [f"FAILED {name}: {error}" for name, error in document["failures"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
