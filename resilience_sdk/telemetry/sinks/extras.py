"""Importing the library of a sink, or saying how to get it."""

from __future__ import annotations

import importlib
from typing import Any

from resilience_sdk.errors import MissingExtraError


def load(module: str, *, extra: str) -> Any:
    """Import `module`; raise MissingExtraError with the cure where it, or something that it needs, is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        cure = f"pip install 'resilience-sdk[{extra}]'"
        raise MissingExtraError(f"{module} cannot be imported ({error}): {cure}") from error
