"""Helpers of this folder can be imported by its tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from recording import Recording


@pytest.fixture
def recording(tmp_path):
    """This process records into a page of its own, which can be read back."""
    with Recording(tmp_path) as started:
        yield started
