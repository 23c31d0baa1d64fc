"""The entry point by which a trainer gets the callback with no code: `RESILIENCE_AUTO=1`."""

from __future__ import annotations

from typing import Any

from resilience_sdk import environ
from resilience_sdk.adapters.lightning.callback import ResilienceCallback


class AutomaticCallback(ResilienceCallback):
    """The callback that nobody asked for in code: it steps aside where somebody has put in another one of ours."""

    is_automatic = True


def callbacks_from_environment() -> list[Any]:
    """Return what Lightning adds to every trainer: our callback if `RESILIENCE_AUTO=1`, else nothing."""
    return [AutomaticCallback()] if environ.is_automatic(environ.environment()) else []
