"""Whether the framework of an adapter is here: a test without it is skipped, or fails where that is asked.

`TEST_EVERY_ADAPTER=1`, which `.ci/run` sets, asks: there every adapter has to be tested.
"""

from __future__ import annotations

import importlib.util
import os

import pytest

DEMAND = "TEST_EVERY_ADAPTER"


def is_here(module: str) -> bool:
    """Tell whether a module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def require(module: str, package: str | None = None) -> None:
    """Skip the calling test where the framework is missing; fail it with `TEST_EVERY_ADAPTER=1`."""
    if is_here(module):
        return
    reason = f"{module} is not installed: pip install {package or module}"
    if os.environ.get(DEMAND) == "1":
        pytest.fail(reason)
    pytest.skip(reason)
