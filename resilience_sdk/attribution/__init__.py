"""Attribution: from facts to a cause, in the one list of causes that `taxonomy` holds. Pure but for `diagnose`.

In come exits, exceptions, the order of deaths and logs; out comes a `Verdict`: cause, culprit, next action, confidence
and the lines that say so. `exceptions` and `exits` decide what one death means, `first_death` who died of its own;
`log_scan` picks the lines of a log, `log_signs` and `log_reader` say what they mean, `tracebacks` puts several ranks'
together, `root_cause` decides which of all that was the first fault, `diagnosis` does the reading. The data are
`exceptions.toml` and `causes/*.toml`: each rule with its source and an example.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resilience_sdk.attribution.diagnosis import diagnose
    from resilience_sdk.attribution.log_facts import Quote, Suspect, Verdict

# Looked up at the first use: the monitor and the launcher need the rules, not the reading of logs.
_PUBLIC = {"Quote": "log_facts", "Suspect": "log_facts", "Verdict": "log_facts", "diagnose": "diagnosis"}

__all__ = ["Quote", "Suspect", "Verdict", "diagnose"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
