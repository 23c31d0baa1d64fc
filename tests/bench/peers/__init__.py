"""The same four faults under each peer and under ours: what was printed, when a name was, who went on.

Each has an environment of its own, kept in the folder of `--peers-envs`. A whole run writes `results.json` here and the
page docs/peers.md; one of `--quick`, with a shorter limit, writes neither.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.bench import machine
from tests.bench.figures import Context, Figure
from tests.bench.peers import environment, facts, page, watching
from tests.bench.peers.programs.plan import CULPRIT
from tests.bench.peers.systems import SYSTEMS, Job, System

LIMIT_S, QUICK_LIMIT_S = 100.0, 30.0


def measure(context: Context) -> list[Figure]:
    """Run every fault under every system, one after the other, or so many systems at once as was asked for."""
    limit = LIMIT_S if not context.quick else QUICK_LIMIT_S
    looked_up = facts.look(context.peers_envs / "packages")
    if wrong := [name for name, holds in looked_up.items() if not holds]:
        raise RuntimeError(f"docs/comparison.md says what the packages do not: {wrong}")
    found: dict[str, Any] = {"machine": machine.facts(), "limit_s": limit, "at_once": context.peers_at_once}
    found |= {"facts": looked_up, "systems": {}}
    with ThreadPoolExecutor(context.peers_at_once) as pool:
        for system, seen in zip(SYSTEMS, pool.map(lambda one: _of(one, context, limit), SYSTEMS), strict=True):
            found["systems"][system.name] = seen
            (context.scratch / "results.json").write_text(json.dumps(found, indent=1))
    found["machine"]["load_after"] = machine.facts()["load"]
    if not context.quick:
        page.keep(found)
    return [
        _figure(name, fault, one, limit)
        for name, system in found["systems"].items()
        for fault, one in system["faults"].items()
    ]


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
        if not faults[fault]["struck"]:
            break  # it does not come so far
    return about | {"versions": environment.versions(programs, system), "faults": faults}


def _figure(system: str, fault: str, seen: dict[str, Any], limit: float) -> Figure:
    named = seen["ranks"].get(str(CULPRIT))
    note = f"trained on: {page.went_on(seen)}; end: {page.end(seen, limit)}"
    return Figure(f"{fault}: the rank is named", system, "s", () if named is None else (named,), note=note)
