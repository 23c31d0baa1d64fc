"""Helpers of this folder, and those of all tests, can be imported."""

import sys
from pathlib import Path

sys.path[0:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
