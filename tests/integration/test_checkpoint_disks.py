import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REASONS = {
    "full": "No space left on device",
    "read-only": "Read-only file system",
    "permission": "Permission denied",
    "io-error": "Input/output error",
}
UNSHARE = ["unshare", "--mount", "--propagation", "private"]


def why_not():
    """Return why these disks cannot be made here, or None."""
    if not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "aarch64"):
        return "needs Linux on x86-64 or ARM64"
    if os.geteuid() != 0:
        return "needs root, to mount small file systems"
    if shutil.which("unshare") is None:
        return "needs the program unshare"
    probe = [*UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    done = subprocess.run(probe, capture_output=True, text=True)
    return None if done.returncode == 0 else f"file systems cannot be mounted here: {done.stderr.strip()}"


@pytest.fixture(scope="module")
def outcome():
    if reason := why_not():
        pytest.skip(reason)
    env = {key: value for key, value in os.environ.items() if not key.startswith(("RANK", "WORLD_SIZE", "RESIL"))}
    env["PYTHONPATH"] = str(HERE.parents[1])
    # Not below pytest's own directory: another user must be able to reach it.
    with tempfile.TemporaryDirectory(prefix="resilience-disks-") as root:
        os.chmod(root, 0o755)
        program = [*UNSHARE, sys.executable, str(HERE / "failing_disks.py"), root]
        done = subprocess.run(program, capture_output=True, text=True, env=env, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.parametrize("in_background", [False, True], ids=["at once", "in the background"])
@pytest.mark.parametrize("kind", sorted(REASONS))
def test_a_failing_disk_is_reported_and_survived(outcome, kind, in_background):
    """The training goes on; the last two good checkpoints stay whole; the reason is said and journalled.

    As soon as the disk works again, so does the next save.
    """
    report = outcome[0][f"{kind}-{in_background}"]
    assert report["code"] == 0, outcome[1]
    assert report["saved"] == [True, True]
    assert report["failed"] == [False, False]
    assert report["last good"] == 2
    assert report["valid"] == [1, 2]
    assert report["debris"] == []
    assert {step for step, _ in report["events"]} == {3, 4}
    assert all(REASONS[kind] in error for _, error in report["events"])
    assert f"checkpoint at step 3 failed: {REASONS[kind]}" in outcome[1]
    assert report["lost"].startswith("steps 2 to 3 (2 steps) ARE LOST")
    assert REASONS[kind] in report["lost"]
    assert report["waits"] == ([False, False] if kind in ("full", "io-error") else [])  # time cures no other
    if kind == "io-error":  # the filter of a process cannot be taken off again
        assert report["resumed"] == 2
    else:
        assert report["mended"]
        assert report["resumed"] == 5
