"""One process writes the checkpoints of a run directory; its hold ends with it, and with its last checkpointer."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys

import pytest

from resilience_sdk.checkpoint import store as writer_lease
from resilience_sdk.checkpoint.store import CheckpointStore, Claim, hold_checkpoints
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.errors import CheckpointError, DirectoryInUseError
from resilience_sdk.system.hostinfo import host_name, process_start_ticks

OWN = Claim("job", alone=True)


@pytest.fixture
def run_dir(tmp_path):
    return RunDirectory.create(tmp_path / "run")


def rewrite(run_dir, **changes):
    """Change what the lease says."""
    run_dir.writer.write_text(json.dumps(json.loads(run_dir.writer.read_text()) | changes))


def in_child(action):
    """Return whether `action` went well in a forked child, which ends as any program does."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


def test_checkpointers_of_one_process_share_the_hold(run_dir, tmp_path):
    """It is theirs until the last of them is gone, whatever path they name; then anybody may have it."""
    (tmp_path / "link").symlink_to(run_dir.path)
    first = hold_checkpoints(run_dir, OWN)
    assert hold_checkpoints(RunDirectory(tmp_path / "link"), OWN) is first
    assert json.loads(run_dir.writer.read_text())["pid"] == os.getpid()
    del first
    gc.collect()
    assert not run_dir.writer.exists()


@pytest.mark.parametrize("job", ["another", "job"])
def test_another_living_process_is_refused(run_dir, job):
    """The message names directory, job, host, process and cures; two processes may have one job key."""
    with subprocess.Popen(["sleep", "60"]) as other:
        hold = hold_checkpoints(run_dir, Claim(job, alone=True))
        rewrite(run_dir, pid=other.pid, start_ticks=process_start_ticks(other.pid))
        del hold  # what it finds is not its own any more, so it leaves it
        gc.collect()
        with pytest.raises(DirectoryInUseError) as refused:
            hold_checkpoints(run_dir, OWN)
        for word in (str(run_dir.path), f"job {job} (host {host_name()}, pid {other.pid})", "read_only=True"):
            assert word in str(refused.value)
        other.kill()
        other.wait()
        hold_checkpoints(run_dir, OWN).check()


@contextlib.contextmanager
def held_by_another(run_dir):
    """Leave a directory that a living process holds; yield that process's id."""
    hold = hold_checkpoints(run_dir, OWN)
    with subprocess.Popen(["sleep", "60"]) as other:
        rewrite(run_dir, pid=other.pid, start_ticks=process_start_ticks(other.pid))
        del hold  # what it finds is not its own any more, so it leaves it
        gc.collect()
        yield other.pid
        other.kill()


def test_who_started_this_process_is_of_its_job(run_dir):
    """A parent that looked at the checkpoints before it spawned the ranks does not keep them out."""
    with held_by_another(run_dir) as pid:
        hold_checkpoints(run_dir, Claim("job", alone=True, kin=frozenset({pid}))).check()


def test_an_attempt_of_our_launcher_does_not_wait_for_the_last_one(run_dir):
    """A process that cannot be ended (stuck in the kernel) must not end its job; the launcher counts the attempts."""
    with held_by_another(run_dir):
        hold_checkpoints(run_dir, Claim("job", alone=False)).check()


def test_a_forked_child_writes_under_its_parents_hold_and_leaves_it(run_dir):
    """Ranks may be forked after the checkpointer was used; one that ends takes nothing away."""
    hold = hold_checkpoints(run_dir, OWN)
    before = run_dir.writer.read_bytes()

    def use():
        own = hold_checkpoints(run_dir, Claim("another", alone=True))
        assert own is hold
        own.check()
        import multiprocessing.util

        multiprocessing.util._exit_function()  # what ends children of multiprocessing

    assert in_child(use)
    assert run_dir.writer.read_bytes() == before


def test_it_is_given_up_at_the_end_of_the_process(run_dir):
    """Another host need not wait a minute for a job that ended well."""
    code = (
        "import sys\nfrom resilience_sdk.checkpoint.store import Claim, hold_checkpoints\n"
        "from resilience_sdk.core.run_directory import RunDirectory\n"
        "run_dir = RunDirectory(RunDirectory.open(sys.argv[1]).path)\n"
        "hold = hold_checkpoints(run_dir, Claim('job', alone=True))\nprint(run_dir.writer.exists())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run_dir.path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "True\n", done.stderr
    assert not run_dir.writer.exists()


def test_who_was_silent_for_too_long_saves_no_more(run_dir, monkeypatch):
    """Frozen for a minute, it lost the directory to another job: its saves fail, and leave that one's alone."""
    monkeypatch.setattr(writer_lease, "RENEW_INTERVAL_S", 0.01)
    hold = hold_checkpoints(run_dir, OWN)
    rewrite(run_dir, job="another")
    store = CheckpointStore(run_dir.checkpoints, keep=2, group_readable=False)
    store.hold = hold
    assert hold._lost.wait(30)
    with pytest.raises(CheckpointError, match="another process writes"):
        store.begin(7, "token")
    assert not list(run_dir.checkpoints.glob("*7*"))


def test_a_second_checkpointer_does_not_clean_what_the_first_is_writing(run_dir):
    """What a killed writer left goes, what is in flight stays."""
    stores = [CheckpointStore(run_dir.checkpoints, keep=2, group_readable=False) for _ in range(2)]
    for store in stores:
        store.hold = hold_checkpoints(run_dir, OWN)
    in_flight = stores[0].begin(3, "aa11")
    leftover = run_dir.checkpoints / in_flight.name.replace("aa11", "bb22")
    leftover.mkdir()
    stores[1].clean()
    assert (in_flight.is_dir(), leftover.exists()) == (True, False)


def test_without_threads_it_holds_all_the_same(run_dir, monkeypatch, capsys):
    """One line; on this host the process itself is the proof."""

    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(writer_lease.threading.Thread, "start", refuse)
    hold_checkpoints(run_dir, OWN).check()
    assert capsys.readouterr().err.count("is not renewed (can't start new thread)") == 1
