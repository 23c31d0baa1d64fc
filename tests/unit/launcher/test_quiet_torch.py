"""What torch says as it is loaded belongs to the ranks, not to the launcher."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

LOAD = """
import os, warnings
from resilience_sdk.launcher.main import load_torch
load_torch()
print(os.environ.get("TORCH_CPP_LOG_LEVEL"))
warnings.warn("Failed to initialize NumPy: said by somebody later")
"""


@pytest.mark.slow
@pytest.mark.parametrize("level", [None, "INFO"])
def test_a_missing_numpy_is_not_the_launchers_business(tmp_path, level):
    """Its own import is silent, and leaves the variable and the filters of warnings as they were."""
    (tmp_path / "numpy.py").write_text('raise ModuleNotFoundError("No module named \'numpy\'", name="numpy")')
    path = os.pathsep.join([str(tmp_path), *sys.path])
    own = {} if level is None else {"TORCH_CPP_LOG_LEVEL": level}
    command = [sys.executable, "-c", LOAD]
    done = subprocess.run(command, env={"PYTHONPATH": path, **own}, capture_output=True, text=True, check=True)
    assert done.stdout == f"{level}\n"
    assert done.stderr.count("NumPy") == 1
    assert "said by somebody later" in done.stderr
