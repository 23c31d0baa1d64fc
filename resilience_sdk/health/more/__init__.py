"""Probes of one file each: every module here is one, and what another package offers as `resilience_sdk.probes`.

Such a module has `PROBE`, its row of the table, and `probe(context)`, its function. The doctor and the preflight run
them with the others.
"""

from __future__ import annotations

import importlib
import pkgutil
from importlib import metadata
from types import ModuleType

import attrs

from resilience_sdk.core.console import say_once
from resilience_sdk.health.probes import PROBES, Probe

GROUP = "resilience_sdk.probes"
"""The group of entry points; each names a module."""


def found() -> list[Probe]:
    """Return the probes of these modules by name. One that cannot be used is said once, and left out."""
    names = [f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__)]
    names += [point.value for point in metadata.entry_points(group=GROUP)]
    probes: dict[str, Probe] = {}
    for name in names:
        try:
            probe = _probe_of(importlib.import_module(name))
            if probe.name in {*PROBES, *probes}:
                raise ValueError(f"there is a probe {probe.name!r} already")
            probes[probe.name] = probe
        except Exception as error:  # noqa: BLE001 - whatever is wrong with it, the node is looked at by the others
            say_once(f"probe {name}", f"the probe {name} is left out: {type(error).__name__}: {error}")
    return [probes[name] for name in sorted(probes)]


def _probe_of(module: ModuleType) -> Probe:
    row = getattr(module, "PROBE", None)
    if not isinstance(row, Probe) or not callable(getattr(module, "probe", None)):
        raise TypeError("expected PROBE = Probe(name=..., about=..., deadline_s=..., checks={...}) and probe(context)")
    if row.deadline_s <= 0:
        raise ValueError(f"deadline_s={row.deadline_s}: expected seconds above zero")
    return attrs.evolve(row, function=f"{module.__name__}:probe")
