"""The same four faults under each peer and under ours: what was printed, when a name was, who went on.

Each has an environment of its own, kept in the folder of `--peers-envs`. A whole run writes `results.json` here and the
page docs/peers.md; one of `--quick`, with a shorter limit, writes neither.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.bench import machine, processes
from tests.bench.figures import Context, Figure
from tests.bench.peers import environment, facts, page, watching
from tests.bench.peers.programs.plan import CULPRIT
from tests.bench.peers.systems import SYSTEMS, Job, System

LIMIT_S, QUICK_LIMIT_S = 100.0, 30.0


def measure(context: Context) -> list[Figure]:
    """Run every fault under every system, one after the other."""
    limit = LIMIT_S if not context.quick else QUICK_LIMIT_S
    looked_up = facts.look(context.peers_envs / "packages")
    if wrong := [name for name, holds in looked_up.items() if not holds]:
        raise RuntimeError(f"docs/comparison.md says what the packages do not: {wrong}")
    found: dict[str, Any] = {"machine": machine.facts(), "limit_s": limit, "facts": looked_up, "systems": {}}
    figures = []
    for system in SYSTEMS:
        seen = _of(system, context, limit)
        found["systems"][system.name] = seen
        figures += [_figure(system.name, fault, one, limit) for fault, one in seen["faults"].items()]
        (context.scratch / "results.json").write_text(json.dumps(found, indent=1))
    found["machine"]["load_after"] = machine.facts()["load"]
    if not context.quick:
        page.FILE.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        subprocess.run([sys.executable, "-m", "tests.generated_docs"], cwd=processes.ROOT, check=True)
    return figures


def _of(system: System, context: Context, limit: float) -> dict[str, Any]:
    """Return what came of one system; `refused` has pip's words where it cannot be had here."""
    about = {"chosen": system.chosen}
    try:
        programs = environment.made(system, context.peers_envs)
    except environment.CannotInstall as error:
        return about | {"refused": str(error), "faults": {}}
    faults = {}
    for fault in page.FAULTS:
        print(f"  {system.name}: {fault}", file=sys.stderr, flush=True)
        job = Job(programs, fault, context.scratch / f"{SYSTEMS.index(system)}-{fault}")
        faults[fault] = watching.watch(system, job, limit)
    return about | {"versions": environment.versions(programs, system), "faults": faults}


def _figure(system: str, fault: str, seen: dict[str, Any], limit: float) -> Figure:
    named = seen["ranks"].get(str(CULPRIT))
    note = f"trained on: {page.went_on(seen)}; end: {page.end(seen, limit)}"
    return Figure(f"{fault}: the rank is named", system, "s", () if named is None else (named,), note=note)
