"""The probe of a directory, with real directories; and which file system holds a path, from a table of mounts."""

import errno
import os
import resource
import signal
import subprocess
import sys

import pytest

from resilience_sdk.core.words import GIB
from resilience_sdk.health import storage
from resilience_sdk.health.findings import Status
from resilience_sdk.health.probes import Context
from resilience_sdk.system.mounts import Mount, mount_of

TABLE = """22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
23 22 0:21 / /proc rw,nosuid - proc proc rw
30 22 0:40 / /data rw - nfs4 server:/export rw,vers=4.2
31 30 0:41 / /data/scratch rw - tmpfs tmpfs rw
32 22 0:42 / /my\\040models ro,relatime - lustre mds@tcp:/fs rw
33 22 0:43 / /mnt rw - ext4 /dev/vdb rw
34 33 0:44 / /mnt rw - beegfs beegfs_nodev rw
35 22 0:45 / /old rw - xfs /dev/vdc ro,norecovery
not a line
"""


@pytest.mark.parametrize(
    ("path", "text", "is_shared", "is_read_only"),
    [
        ("/home/me/runs", "ext4 on /", False, False),
        ("/data/set", "nfs4 on /data", True, False),
        ("/data/../home", "ext4 on /", False, False),
        ("/database", "ext4 on /", False, False),
        ("/data/scratch/x", "tmpfs on /data/scratch", False, False),
        ("/my models/7b", "lustre on /my models", True, True),
        ("/mnt/a", "beegfs on /mnt", True, False),
        ("/old/x", "xfs on /old", False, True),
    ],
)
def test_the_deepest_and_newest_mount_holds_a_path(machine, path, text, is_shared, is_read_only):
    """Names that only begin alike do not count; read-only is said of the mount, or of the file system."""
    mount = mount_of(path, machine({"/proc/self/mountinfo": TABLE}))
    assert (str(mount), mount.is_shared, mount.is_read_only) == (text, is_shared, is_read_only)
    assert mount_of("/proc/1/stat", "/").kind == "proc"  # the real file is in the form that is read


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
    assert found["write"].data["bytes"] == storage.BYTES
    assert os.listdir(tmp_path) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from resilience_sdk.health import storage
Path.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
storage.metadata(Path(sys.argv[1]))
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
    assert storage.remove_left(tmp_path) == 0  # somebody may be at work there
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    look(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [foreign.name, "train.py"]
    assert os.listdir(foreign) == ["thesis.tex"]


def test_a_directory_that_is_not_there_yet(tmp_path):
    """It is the nearest one above it that counts; nothing is made. What is none is told at once: nobody opens it."""
    found = look(tmp_path / "runs" / "new")
    assert f"will be made in {tmp_path}" in found["write"].evidence
    assert found["write"].status is not Status.FAILED
    assert os.listdir(tmp_path) == []
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    for name in ("file", "pipe"):
        found = look(tmp_path / name)["write"]
        assert (found.stops, "is not a directory" in found.evidence) == (True, True)


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


@pytest.mark.parametrize(
    ("name", "word"), [("ENOSPC", "df -h"), ("EDQUOT", "quota"), ("EROFS", "mount"), ("EIO", "dmesg")]
)
def test_each_error_of_the_system_has_its_cure(name, word):
    """Those that a person can do something about."""
    number = getattr(errno, name)
    found = storage.cannot("/run", "write", OSError(number, os.strerror(number)))
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
    ("count", "took_s", "status"),
    [(storage.BYTES, 0.01, "ok"), (storage.BYTES, 3.0, "degraded"), (10, 0.01, "ok"), (10, 3.0, "degraded")],
)
def test_a_rate_is_judged_by_what_was_waited_for(count, took_s, status):
    """A file of ten bytes says nothing of a rate, but three seconds for it do."""
    found = storage.rate("/run", "read", storage.Throughput(count, took_s), NFS)
    assert found.status == status
    assert ("server:/export" in found.cure) is (status == "degraded")


def test_data_is_read_and_never_written(tmp_path):
    """The first file with something in it, however deep; a path that is not there looks as if it were not mounted."""
    (tmp_path / "empty").touch()
    deep = tmp_path / "shards" / "a"
    deep.mkdir(parents=True)
    (deep / "0.bin").write_bytes(b"x" * 1000)
    before = sorted(tmp_path.rglob("*"))
    found = storage.data(str(tmp_path), LOCAL)
    assert (found.check, found.status, found.data["bytes"]) == ("read", Status.OK, 1000)
    gone = storage.data(str(tmp_path / "gone"), LOCAL)
    assert (gone.stops, "mount it" in gone.cure) == (True, True)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_probe_knows_which_directory_it_writes(tmp_path):
    """The run directory it does, what the job reads it does not."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "x").write_text("1")
    for only, checks in ((data, {"read"}), (tmp_path, {"file_system", "write"})):
        context = Context(run_dir=str(tmp_path), data_dirs=(str(data),), only=str(only))
        found = {finding.check for finding in storage.probe(context)}
        assert found >= checks
        assert ("write" in found) is ("write" in checks)


def test_a_write_that_fails_leaves_nothing_behind(tmp_path):
    """Not even where there are no files without a name."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (storage.BYTES // 2, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            storage.write_and_read(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert os.listdir(tmp_path) == []
