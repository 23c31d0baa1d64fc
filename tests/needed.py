"""Libraries and programs that some tests need: a test without is skipped with the reason, or fails where that is asked.

`TEST_EVERY_TOOL=1`, which `.ci/run` sets, asks: there nothing that it has installed may be missed silently.
"""

from __future__ import annotations

import importlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

DEMAND = "TEST_EVERY_TOOL"


def library(module: str, extra: str) -> Any:
    """Return a module that one of our extras brings."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        return missing(f"{module} is missing ({error}): pip install 'resilience-sdk[{extra}]'")


def program(name: str, package: str) -> str:
    """Return where a program of a Debian package is."""
    return shutil.which(name) or missing(f"{name} is missing: apt-get install {package}")


def fetched(variable: str, what: str) -> Path:
    """Return the file that a variable names: `.ci/run` fetches what neither Debian nor the index of Python has."""
    path = os.environ.get(variable)
    return Path(path) if path else missing(f"{variable} names no {what}: .ci/run shows how to fetch it")


def missing(why: str) -> Any:
    """Skip the test, or the whole module that is loaded; fail where that is asked."""
    if os.environ.get(DEMAND) == "1":
        pytest.fail(why, pytrace=False)
    pytest.skip(why, allow_module_level=True)
