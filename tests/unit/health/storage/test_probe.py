"""The probe of a directory, with real directories."""

import errno
import os
import resource
import signal
import subprocess
import sys

import pytest

from resilience_sdk.health.findings import Status
from resilience_sdk.health.grading import GIB
from resilience_sdk.health.probes import Context
from resilience_sdk.health.storage import probe as storage
from resilience_sdk.health.storage import timing
from resilience_sdk.health.storage.mounts import Mount

LOCAL = Mount("/", "ext4", "/dev/vda", is_read_only=False)
NFS = Mount("/data", "nfs4", "server:/export", is_read_only=False)


def look(path, mount=LOCAL, elsewhere=False):
    """Return what is said of a run directory, by check."""
    return {finding.check: finding for finding in storage.run_directory(str(path), mount, elsewhere=elsewhere)}


def test_a_good_directory(tmp_path):
    """Everything that is measured is told, and nothing is left behind."""
    found = look(tmp_path)
    assert set(found) >= {"file_system", "free_space", "metadata", "write", "read"}
    assert not any(finding.stops for finding in found.values())
    assert found["write"].data["bytes"] == timing.BYTES
    assert os.listdir(tmp_path) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from resilience_sdk.health.storage import timing
Path.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
timing.metadata(Path(sys.argv[1]))
"""


def test_what_a_killed_probe_left_is_removed_by_the_next(tmp_path):
    """Once it is so old that no probe can be at work there; other people's things stay."""
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=60)
    (left,) = tmp_path.iterdir()
    assert os.listdir(left) == ["0.new"]
    (tmp_path / ".resilience-probe-file").touch()
    foreign = tmp_path / ".resilience-probe-with-files-of-others"
    foreign.mkdir()
    (foreign / "thesis.tex").touch()
    (tmp_path / "train.py").touch()
    assert timing.remove_left(tmp_path) == 0  # somebody may be at work there
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    look(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [foreign.name, "train.py"]
    assert os.listdir(foreign) == ["thesis.tex"]


def test_a_directory_that_is_not_there_yet(tmp_path):
    """It is the nearest one above it that counts; nothing is made."""
    found = look(tmp_path / "runs" / "new")
    assert f"will be made in {tmp_path}" in found["write"].evidence
    assert found["write"].status is not Status.FAILED
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("make", [lambda path: path.write_text(""), os.mkfifo], ids=["file", "pipe"])
def test_something_else_in_its_place(tmp_path, make):
    """Is told at once: nobody opens it."""
    make(tmp_path / "run")
    found = look(tmp_path / "run")
    assert found["write"].stops
    assert "is not a directory" in found["write"].evidence


@pytest.mark.parametrize("below", ["", "runs/new"])
def test_a_directory_that_may_not_be_used(tmp_path, below):
    """The cure is a right, whether it cannot be written or not even be looked into."""
    tmp_path.chmod(0o500 if not below else 0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may write everywhere
    try:
        found = look(tmp_path / below)
    finally:
        os.seteuid(user)
        tmp_path.chmod(0o700)
    assert found["write"].stops
    assert "chmod" in found["write"].cure


def test_each_error_of_the_system_has_its_cure():
    """Those that a person can do something about."""
    for number, word in (
        (errno.ENOSPC, "df -h"),
        (errno.EDQUOT, "quota"),
        (errno.EROFS, "mount"),
        (errno.EIO, "dmesg"),
    ):
        found = storage._cannot("/run", "write", OSError(number, os.strerror(number)))
        assert found.stops
        assert word in found.cure
        assert os.strerror(number) in found.evidence


def test_a_checkpoint_must_fit_twice(tmp_path):
    """The old one is removed after the new one is complete."""
    step = tmp_path / "checkpoints" / "step-00000010"
    step.mkdir(parents=True)
    with (step / "payload").open("wb") as file:
        file.truncate(4 * GIB)  # a sparse file: no disk is filled
    found = look(tmp_path)["free_space"]
    assert found.threshold == 2 * 4 * GIB
    assert "a checkpoint takes 4 GiB" in found.evidence


@pytest.mark.parametrize(
    ("mount", "elsewhere", "status"),
    [
        (LOCAL, False, Status.OK),
        (LOCAL, True, Status.DEGRADED),
        (NFS, True, Status.OK),
        (Mount("/dev/shm", "tmpfs", "tmpfs", is_read_only=False), False, Status.DEGRADED),
        (Mount("/", "ext4", "/dev/vda", is_read_only=True), False, Status.FAILED),
        (None, True, Status.UNAVAILABLE),
    ],
)
def test_the_file_system_must_outlive_the_job(tmp_path, mount, elsewhere, status):
    """And be seen by all its nodes."""
    assert look(tmp_path, mount, elsewhere)["file_system"].status is status


@pytest.mark.parametrize(
    ("rate", "status"),
    [
        (timing.Rate(timing.BYTES, 0.01), Status.OK),
        (timing.Rate(timing.BYTES, 3.0), Status.DEGRADED),
        (timing.Rate(10, 0.01), Status.OK),
        (timing.Rate(10, 3.0), Status.DEGRADED),
    ],
    ids=["fast", "slow", "little", "little and late"],
)
def test_a_rate_is_judged_by_what_was_waited_for(rate, status):
    """A file of ten bytes says nothing of a rate, but three seconds for it do."""
    found = storage._rate("/run", "read", rate, NFS)
    assert found.status is status
    assert ("server:/export" in found.cure) is (status is Status.DEGRADED)


def test_data_is_read_and_never_written(tmp_path):
    """The first file with something in it, however deep."""
    (tmp_path / "empty").touch()
    deep = tmp_path / "shards" / "a"
    deep.mkdir(parents=True)
    (deep / "0.bin").write_bytes(b"x" * 1000)
    before = sorted(tmp_path.rglob("*"))
    (found,) = storage.data(str(tmp_path), LOCAL)
    assert (found.check, found.status, found.data["bytes"]) == ("read", Status.OK, 1000)
    assert sorted(tmp_path.rglob("*")) == before


def test_data_that_is_not_there_stops_the_job(tmp_path):
    """As an unmounted file system looks."""
    (found,) = storage.data(str(tmp_path / "gone"), LOCAL)
    assert found.stops
    assert "mount it" in found.cure


def test_the_probe_knows_which_directory_it_writes(tmp_path):
    """The run directory it does, what the job reads it does not."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "x").write_text("1")
    context = Context(run_dir=str(tmp_path), data_dirs=(str(data),), only=str(data))
    assert {finding.check for finding in storage.probe(context)} == {"read"}
    context = Context(run_dir=str(tmp_path), data_dirs=(str(data),), only=str(tmp_path))
    assert "write" in {finding.check for finding in storage.probe(context)}


def test_a_write_that_fails_leaves_nothing_behind(tmp_path):
    """Not even where there are no files without a name."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (timing.BYTES // 2, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            timing.write_and_read(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert os.listdir(tmp_path) == []
