"""The adapters: what each adds to a step of its framework.

Sections by hooks cost what `straggler.attach` costs, whoever puts them on; `attach` measures that too. So each adapter
is paired with its framework that has the sections already, and its own part is held against the target: as all of it,
without the look at each loss (`numerics` off), and as functions in its place that do nothing.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import attrs

from tests.bench import processes
from tests.bench.figures import Context, Figure


@attrs.frozen
class Adapter:
    """One adapter: `programs/adapter_<name>.py ROUNDS STEPS` prints nanoseconds as `{step, sections, added, empty}`.

    `empty`: functions that do nothing in the place of the adapter's, one for each place.
    """

    name: str
    module: str
    target_us: float


ADAPTERS = (
    Adapter("pytorch", "torch", 10.0),
    Adapter("lightning", "lightning.pytorch", 30.0),
    Adapter("accelerate", "accelerate", 10.0),
    Adapter("transformers", "transformers", 30.0),
    Adapter("megatron", "megatron.core", 10.0),
)


def measure(context: Context) -> list[Figure]:
    """Measure the adapters whose frameworks are here."""
    return [
        figure
        for adapter in ADAPTERS
        if importlib.util.find_spec(adapter.module.partition(".")[0])
        for figure in _measure(context, adapter)
    ]


def _measure(context: Context, adapter: Adapter) -> list[Figure]:
    found = _run(context, adapter)
    alone = _run(context, adapter, RESILIENCE_NUMERICS="off")
    name = adapter.name
    return [
        Figure(f"{name}: a step without us", name, "us", found["step"]),
        Figure(f"{name}: its sections add", "ours", "us", found["sections"]),
        Figure(f"{name}: the adapter adds beside them", "ours", "us", found["added"]),
        Figure(f"{name}: the same, losses not looked at", "ours", "us", alone["added"], adapter.target_us),
        Figure(f"{name}: empty functions in its place", "Python", "us", found["empty"]),
    ]


def _run(context: Context, adapter: Adapter, **settings: str) -> dict[str, tuple[float, ...]]:
    program = processes.PROGRAMS / f"adapter_{adapter.name}.py"
    done = subprocess.run(
        [sys.executable, str(program), str(context.repeats(15, 5)), str(context.repeats(60, 60))],
        env=processes.environment(RESILIENCE_RUN_DIR=str(context.scratch / adapter.name), **settings),
        cwd=context.scratch,
        stdout=subprocess.PIPE,
        check=True,
        timeout=240,
    )
    found = json.loads(done.stdout.splitlines()[-1])  # before it frameworks tell what they have found
    return {key: tuple(ns / 1000 for ns in samples) for key, samples in found.items()}
