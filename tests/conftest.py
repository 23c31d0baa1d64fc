"""Helpers of this folder can be imported by all tests."""

import gc
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def pytest_collection_finish():
    """Leave what was imported until now, with frameworks most of what there is, out of all collections of garbage."""
    gc.collect()
    gc.freeze()
