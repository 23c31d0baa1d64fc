"""NVIDIA's resiliency extension by its name, for scripts that import it: what they find is the SDK.

It stands in a directory of its own, which `resilience run --provide-nvrx` puts first on the PYTHONPATH of its ranks,
and which nobody finds otherwise. Its submodules hold the names of `resilience_sdk.adapters.nvrx` and the callbacks of
`resilience_sdk.adapters.lightning`; those that have no counterpart say so, and name what to use instead.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__version__ = "0.4.1"  # whose interface it is: Megatron-LM asks before it uses what newer ones have
__path__: list[str] = []  # which makes a package of this module, with nothing to be found in files

_FAULT_TOLERANCE = "resilience_sdk.adapters.nvrx.client"
_STRAGGLER = "resilience_sdk.adapters.nvrx.detector"
_CALLBACKS = "resilience_sdk.adapters.lightning"
PROVIDED = {
    "fault_tolerance": _FAULT_TOLERANCE,
    "fault_tolerance.config": _FAULT_TOLERANCE,
    "fault_tolerance.data": _FAULT_TOLERANCE,
    "fault_tolerance.rank_monitor_client": _FAULT_TOLERANCE,
    "straggler": _STRAGGLER,
    "straggler.reporting": _STRAGGLER,
    "straggler.statistics": _STRAGGLER,
    "straggler.straggler": _STRAGGLER,
    "attribution": None,
    "attribution.straggler": _STRAGGLER,
    "attribution.straggler.reporting": _STRAGGLER,
    "attribution.straggler.statistics": _STRAGGLER,
    "attribution.straggler.straggler": _STRAGGLER,
    "ptl_resiliency": _CALLBACKS,
    "ptl_resiliency.fault_tolerance_callback": _CALLBACKS,
    "ptl_resiliency.fault_tolerance_sections_callback": _CALLBACKS,
    "ptl_resiliency.straggler_det_callback": _CALLBACKS,
}
"""Submodule -> the module whose names it has; None: only submodules."""
_SAVES = (
    "resilience_sdk.checkpoint.Checkpointer saves in the background (checkpoint_async), in torch's own formats, and "
    "resumes from the newest good one"
)
_RESTART = (
    "`resilience run` starts the ranks again by itself, from a server with torch loaded, in a fraction of a second; "
    "wrap nothing"
)
ELSEWHERE = {
    "checkpointing": _SAVES,
    "ptl_resiliency.local_checkpoint_callback": _SAVES,
    "inprocess": _RESTART,
    "attribution": "`resilience why` and `resilience diagnose` tell who is at fault and why, without a service",
    "shared_utils": "it is internal there; `resilience doctor` and the watch of the node have the health checks",
    "fault_tolerance": "it is internal there; the client, its configuration and its requests are in fault_tolerance",
    "skills": "it has no counterpart",
    "services": "it has no counterpart",
}
"""Submodule, with all below it, that is not provided -> what to use instead."""


class _Finder(MetaPathFinder, Loader):
    """Finds the submodules, and makes each of the names of its counterpart."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != __name__ or not name:
            return None
        if name in PROVIDED:
            return ModuleSpec(fullname, self, origin=__file__, is_package=True)
        instead = [why for prefix, why in ELSEWHERE.items() if f"{name}.".startswith(f"{prefix}.")]
        if instead:
            # Without `name`: from one that has it, `from nvidia_resiliency_ext import ...` makes an error of its own.
            raise ModuleNotFoundError(f"{fullname} is not provided by resilience_sdk: {instead[0]} (see docs/nvrx.md)")
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        home = PROVIDED[module.__name__.partition(".")[2]]
        if home is None:
            return
        found = importlib.import_module(home)
        module.__dict__.update({name: getattr(found, name) for name in found.__all__})
        module.__dict__["__all__"] = list(found.__all__)


sys.meta_path.append(_Finder())
