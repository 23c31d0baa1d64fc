"""Which Lightning a callback is made for: the class `Callback` of each of the two packages that is loaded.

`lightning.pytorch` and `pytorch_lightning` are copies of one another, and neither knows the other's classes. A callback
of ours is one of both, as far as they are there.
"""

from __future__ import annotations

import sys
from typing import Any

from resilience_sdk.adapters._base import framework
from resilience_sdk.adapters._late import Late
from resilience_sdk.errors import MissingExtraError

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


class LateCallback(Late):
    """A class that becomes a `Callback` of the framework when its first object is made."""

    @classmethod
    def framework_bases(cls) -> tuple[type, ...]:
        """Return the `Callback` of each package that is there; raises MissingExtraError without Lightning."""
        return _callback_classes()


def _callback_classes() -> tuple[type, ...]:
    loaded = [sys.modules[name] for name in PACKAGES if hasattr(sys.modules.get(name), "Callback")]
    if not loaded:
        loaded = [_import_one()]
    return tuple(module.Callback for module in loaded)


def _import_one() -> Any:
    try:
        return framework(PACKAGES[0], "lightning")
    except MissingExtraError:
        if "pytorch_lightning" not in sys.modules and not _is_installed("pytorch_lightning"):
            raise
        return framework(PACKAGES[1], "pytorch_lightning")


def _is_installed(name: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(name) is not None
