"""What earlier jobs left behind, from process tables and from real processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import needed
import pytest

from resilience_sdk.health.findings import Status
from resilience_sdk.health.host import leftovers
from resilience_sdk.health.host.leftovers import Process


def process(pid, state="S", parent=1, start=0, uid=1000, name="python"):
    """Return a line of a process table."""
    return Process(pid=pid, name=name, state=state, parent=parent, start=start, uid=uid)


def test_waiting_for_a_disk_for_a_moment_is_not_stuck():
    """Only what is in D state in both looks, and is the same process."""
    first = [process(1, "D"), process(2, "D", start=5), process(3, "S"), process(4, "D")]
    second = [process(1, "R"), process(2, "D", start=6), process(3, "D"), process(4, "D")]
    assert [found.pid for found in leftovers.stuck(first, second)] == [4]


def test_a_stuck_process_is_named_with_its_place():
    """Nobody can end it but a reboot, or the return of what it waits for."""
    found = leftovers.stuck_finding([process(4, "D")], {4: "nfs_wait_bit_killable"})
    assert found.status is Status.DEGRADED
    assert "4 (python in nfs_wait_bit_killable)" in found.evidence
    assert leftovers.stuck_finding([], {}).status is Status.OK


def test_many_zombies_are_their_parents_fault():
    """A few are normal."""
    few = [process(n, "Z", parent=7) for n in range(3)]
    many = [process(n, "Z", parent=7) for n in range(200)]
    assert leftovers.zombies(few).status is Status.OK
    found = leftovers.zombies(many)
    assert (found.status, found.value) == (Status.DEGRADED, 200)
    assert "docker run --init" in found.cure


@pytest.mark.parametrize(
    ("variables", "uid", "is_left"),
    [
        ({"RANK": "3", "TORCHELASTIC_RUN_ID": "abc"}, 1000, True),
        ({"RANK": "3", "RESILIENCE_INTERNAL_JOB": "slurm-7.0"}, 1000, True),
        ({"TORCHELASTIC_RUN_ID": "abc"}, 1000, False),
        ({"RANK": "3"}, 1000, False),
        ({"RANK": "3", "TORCHELASTIC_RUN_ID": "abc"}, 1001, False),
    ],
)
def test_a_rank_whose_parent_is_init_has_lost_its_launcher(variables, uid, is_left):
    """Only our own, and only what a launcher marked as a rank."""
    found = leftovers.orphans([process(9)], uid, {9: variables})
    assert (found.status is Status.DEGRADED) is is_left
    assert ("kill 9" in found.cure) is is_left


@pytest.mark.parametrize(
    ("first", "is_left"),
    [
        ("/sbin/init", True),
        ("/usr/bin/tini\0--\0python\0t.py", True),
        ("/opt/bin/python3.11\0/opt/bin/torchrun", False),
    ],
)
def test_in_a_container_whose_launcher_is_process_1_its_ranks_are_no_leftovers(tmp_path, monkeypatch, first, is_left):
    """Nobody must be told to kill the job that runs."""
    monkeypatch.setattr(leftovers, "_PAUSE_S", 0.0)
    for pid, parent in ((1, 0), (9, 1)):
        place = tmp_path / "proc" / str(pid)
        place.mkdir(parents=True)
        (place / "stat").write_text(f"{pid} (python) S {parent} " + " ".join(["7"] * 30))
        (place / "environ").write_text("RANK=0\0TORCHELASTIC_RUN_ID=abc")
    (tmp_path / "proc/1/cmdline").write_text(first)
    found = {finding.check: finding for finding in leftovers.probe(str(tmp_path), os.getuid())}["leftover_ranks"]
    assert found.data["pids"] == ([9] if is_left else [])


def test_this_process_is_in_the_table():
    """The real files are in the form that is read."""
    (found,) = [entry for entry in leftovers.processes("/") if entry.pid == os.getpid()]
    assert (found.parent, found.uid) == (os.getppid(), os.getuid())


@pytest.fixture
def orphan():
    """Yield the pid of a sleeping process with a rank's variables, whose parent is gone."""
    program = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(100)'], stdout=2)\n"
        "print(child.pid, flush=True)"
    )
    env = {**os.environ, "RANK": "1", "TORCHELASTIC_RUN_ID": "left-behind"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], env=env, stdout=subprocess.PIPE, text=True, timeout=60, check=True
    )
    pid = int(done.stdout)
    yield pid
    os.kill(pid, signal.SIGKILL)


def test_a_real_orphan_is_found(orphan):
    """Where it becomes a child of init, and not of a subreaper."""
    parent = next(entry.parent for entry in leftovers.processes("/") if entry.pid == orphan)
    if parent != 1:
        pytest.skip(f"orphans become children of {parent} here")
    if leftovers._is_launcher(Path("/proc/1/cmdline").read_text()):
        pytest.skip("process 1 may be a launcher here")
    found = {finding.check: finding for finding in leftovers.probe("/", os.getuid())}["leftover_ranks"]
    assert orphan in found.data["pids"]
    assert f"{orphan} (python" in found.evidence
    assert "rank 1 of job left-behind" in found.evidence


def test_a_real_process_in_d_state_is_found(tmp_path):
    """The parent of a vfork waits for its child in the kernel, as for a dead mount."""
    source = tmp_path / "stuck.c"
    source.write_text("#include <unistd.h>\nint main(void) { if (vfork() == 0) { pause(); _exit(0); } return 0; }\n")
    subprocess.run(
        [needed.program("gcc", "gcc libc6-dev"), "-w", "-o", str(tmp_path / "stuck"), str(source)],
        check=True,
        timeout=60,
    )
    stuck = subprocess.Popen([str(tmp_path / "stuck")], start_new_session=True)
    try:
        until = time.monotonic() + 20
        while time.monotonic() < until:
            found = {finding.check: finding for finding in leftovers.probe("/", os.getuid())}["stuck_processes"]
            if stuck.pid in found.data["pids"]:
                break
        assert stuck.pid in found.data["pids"]
        assert found.status is Status.DEGRADED
    finally:
        os.killpg(stuck.pid, signal.SIGKILL)
        stuck.wait(10)
