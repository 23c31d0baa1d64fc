import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
def test_a_writer_killed_anywhere_leaves_a_valid_newest(tmp_path):
    """SIGKILL before each file operation of a save, and at random times: nothing damaged is ever visible.

    Of a save by the thread that trains, and of one in the background.

    After each, the newest valid checkpoint is at least the last committed one, two good ones are left, and the
    next resume takes the newest and removes the debris.
    """
    env = {key: value for key, value in os.environ.items() if not key.startswith(("RANK", "WORLD_SIZE"))}
    env["PYTHONPATH"] = str(HERE.parents[1])
    program = [sys.executable, str(HERE / "killed_writer.py"), str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["faults"] == []
    assert result["killed"] > 50
