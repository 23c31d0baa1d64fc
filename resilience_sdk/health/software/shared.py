"""What must be the same for every rank beside the versions: settings, and the variables of the libraries. Pure.

Reports are written into files that others may read, so values that are secrets are redacted: two tokens count as equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.journal import redact
from resilience_sdk.settings import Settings

PROBE = "software"
PREFIXES = ("NCCL_", "TORCH_", "PYTORCH_", "GLOO_", "CUDA_", "CUBLAS_", "OMP_", "MKL_", "UCX_", "FI_", "NVTE_")
# Nodes and ranks differ in these by their nature.
OF_ONE_NODE = frozenset({"CUDA_VISIBLE_DEVICES", "NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"})
_SETTINGS_OF_ONE_NODE = frozenset({"straggler_role"})


def shown_values(effective: Settings) -> dict[str, Any]:
    """Return all settings by name, those that are secrets redacted. A section may be called `forward_pass`."""
    values = effective.to_json()
    return {name: value if isinstance(value, dict) else redact(value, name) for name, value in values.items()}


def settings(effective: Settings) -> Iterator[Finding]:
    """Yield the settings that somebody set, and from where."""
    names = sorted(effective.explicit - _SETTINGS_OF_ONE_NODE)
    same = {name: value for name, value in shown_values(effective).items() if name in names}
    told = ", ".join(f"{name} from {effective.sources.get(name, 'code')}" for name in names)
    yield Finding(
        probe=PROBE,
        check="settings",
        status=Status.OK,
        value=len(names),
        unit="set",
        evidence=told or "all at their defaults",
        data={"same": same},
    )


def variables(env: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the variables that change how torch and the communication libraries work."""
    same = redact({name: env[name] for name in sorted(env) if name.startswith(PREFIXES) and name not in OF_ONE_NODE})
    yield Finding(
        probe=PROBE,
        check="environment",
        status=Status.OK,
        value=len(same),
        unit="set",
        evidence=", ".join(f"{name}={value}" for name, value in same.items()) or "none of NCCL, torch or gloo is set",
        data={"same": same},
    )
