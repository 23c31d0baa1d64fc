"""Helpers of this folder, and those of all tests, can be imported."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
from browser import browser  # noqa: F401 - a fixture
from stub_driver import build_stub


@pytest.fixture(scope="session")
def stub_library(tmp_path_factory):
    """The library that stands in for the NVIDIA driver, built once."""
    return build_stub(tmp_path_factory.mktemp("nvml"))
