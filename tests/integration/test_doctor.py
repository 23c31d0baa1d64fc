"""`resilience doctor` on a machine with planted faults: each is named with its cure, and none delays the others."""

import json
import os
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from resilience_sdk import health
from resilience_sdk.health import Status, compare
from resilience_sdk.health.findings import report_from_json

PROJECT = Path(__file__).parent.parent.parent
KEPT = ("PATH", "HOME", "LANG", "TMPDIR")
# A machine that is busy with other tests takes longer than one that is looked at before a job; how long that takes is
# measured by `python -m tests.bench --only doctor`.
PATIENT = ("--patience", "10")


def environment(**variables):
    """Return a clean environment, in which the SDK is importable."""
    return {**{name: os.environ[name] for name in KEPT if name in os.environ}, "PYTHONPATH": str(PROJECT), **variables}


def doctor(*words, before=None, **variables):
    """Return the exit code and the findings, by probe, check and subject."""
    done = subprocess.run(
        [sys.executable, "-m", "resilience_sdk", "doctor", "--json", *PATIENT, *map(str, words)],
        env=environment(**variables), capture_output=True, text=True, timeout=200, preexec_fn=before,
    )  # fmt: skip
    assert not done.stderr, done.stderr
    return done.returncode, report_from_json(json.loads(done.stdout))


def stops(report):
    """Return what stands against a job, by check; each has evidence and a cure."""
    found = {finding.check: finding for finding in report.findings if finding.stops}
    assert all(finding.evidence and finding.cure for finding in found.values())
    return found


@pytest.fixture
def mounts():
    """Skip where a test may not mount."""
    done = subprocess.run(["unshare", "--mount", "true"], capture_output=True)
    if done.returncode:
        pytest.skip(f"mounts of one's own need root: {done.stderr.decode().strip()}")


def mounted_doctor(script, *words):
    """Run shell lines and then the doctor in a mount namespace of its own."""
    run = [sys.executable, "-m", "resilience_sdk", "doctor", "--json", *PATIENT, *map(str, words)]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-ec", f'{textwrap.dedent(script)}\nexec "$@"', "sh", *run],
        env=environment(), capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, report_from_json(json.loads(done.stdout))


def test_a_sound_machine_passes(tmp_path):
    """What is not there is told, and is no fault; the run directory stays as it was."""
    code, report = doctor("--run-dir", tmp_path / "run")
    assert (code, stops(report)) == (0, {})
    unseen = {
        (finding.probe, finding.check): finding for finding in report.findings if finding.status is Status.UNAVAILABLE
    }
    if not Path("/proc/driver/nvidia").exists():
        assert "NVIDIA" in unseen["gpu", "driver"].evidence
    assert "no rendezvous is named" in unseen["rendezvous", "resolves"].evidence
    assert list(tmp_path.iterdir()) == []
    page = (PROJECT / "docs" / "health.md").read_text()
    assert [finding.check for finding in report.findings if f"`{finding.check}`" not in page] == []


@pytest.mark.slow
def test_all_faults_at_once(tmp_path, mounts):
    """Each is named with its cure, whatever the others are."""
    (tmp_path / "full").mkdir()
    os.mkfifo(tmp_path / "data")
    plant = f"""
        mount -t tmpfs -o size=1m none /dev/shm
        mount -t tmpfs -o size=1m none {tmp_path}/full
        head -c 2m /dev/zero > {tmp_path}/full/ballast 2>/dev/null || true
        ulimit -n 100
    """
    code, report = mounted_doctor(
        plant, "--run-dir", tmp_path / "full" / "run", "--data", tmp_path / "data", "--rendezvous",
        "no-such-node.invalid:29500", "--limit", "8",
    )  # fmt: skip
    cures = {check: finding.cure for check, finding in stops(report).items()}
    assert code == 1
    assert set(cures) == {"shared_memory", "open_files", "resolves", "answers", "write"}
    assert "--shm-size" in cures["shared_memory"]
    assert "nofile" in cures["open_files"] or "ulimit -n" in cures["open_files"]
    assert "MASTER_ADDR" in cures["resolves"]
    assert "mount it again" in cures["answers"]
    assert "df -h" in cures["write"]


@pytest.mark.slow
def test_a_page_for_people(tmp_path):
    """Where settings came from, and no traceback for who reads only its beginning."""
    done = subprocess.run(
        f"{sys.executable} -m resilience_sdk doctor {' '.join(PATIENT)} --run-dir {tmp_path} | head -1",
        env=environment(RESILIENCE_MAX_RESTARTS="5"), shell=True, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert "a job can start" in done.stdout
    assert done.stderr == ""


@pytest.mark.slow
def test_preflight_finds_the_same(tmp_path, monkeypatch):
    """From Python, in the process that asks."""
    for name in ("MASTER_ADDR", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    report = health.preflight(tmp_path)
    _, told = doctor("--run-dir", tmp_path)
    assert report.ok
    assert {(f.probe, f.check, f.subject) for f in report.findings if f.check != "kernel_log"} == {
        (f.probe, f.check, f.subject) for f in told.findings if f.check != "kernel_log"
    }


@pytest.mark.slow
def test_a_full_tmpfs_as_run_directory(tmp_path, mounts):
    """A write tells what statvfs alone may not: quotas look the same."""
    place = tmp_path / "full"
    place.mkdir()
    plant = f"mount -t tmpfs -o size=1m none {place}; head -c 2m /dev/zero > {place}/ballast 2>/dev/null || true"
    code, report = mounted_doctor(plant, "--run-dir", place / "run")
    found = stops(report)["write"]
    assert (code, found.subject) == (1, str(place / "run"))
    assert "No space left" in found.evidence
    assert "df -h" in found.cure


@pytest.mark.slow
def test_a_read_only_run_directory(tmp_path, mounts):
    """It is told by the mount, and by the write."""
    place = tmp_path / "ro"
    place.mkdir()
    code, report = mounted_doctor(f"mount -t tmpfs -o ro none {place}", "--run-dir", place)
    assert code == 1
    assert "read-only" in stops(report)["file_system"].evidence
    assert "Read-only" in stops(report)["write"].evidence


@pytest.mark.slow
@pytest.mark.parametrize(("size", "status"), [("1m", Status.FAILED), ("64m", Status.DEGRADED)])
def test_a_tiny_dev_shm(tmp_path, mounts, size, status):
    """64 MiB is what containers get by default: it works until a DataLoader has workers."""
    code, report = mounted_doctor(f"mount -t tmpfs -o size={size} none /dev/shm", "--run-dir", tmp_path)
    (found,) = [finding for finding in report.findings if finding.check == "shared_memory"]
    assert (found.status, code) == (status, 1 if status is Status.FAILED else 0)
    assert "--shm-size" in found.cure


@pytest.mark.slow
def test_few_open_files(tmp_path):
    """Too few for torch itself."""

    def limit():
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 2048))

    code, report = doctor("--run-dir", tmp_path, before=limit)
    found = stops(report)["open_files"]
    assert (code, found.value) == (1, 100)
    assert found.cure.startswith("`ulimit -n 2048`")


@pytest.mark.slow
def test_a_master_that_has_no_address(tmp_path):
    """By the variables that a launcher sets."""
    code, report = doctor("--run-dir", tmp_path, MASTER_ADDR="no-such-node.invalid", MASTER_PORT="29500")
    found = stops(report)["resolves"]
    assert (code, found.subject) == (1, "no-such-node.invalid")
    assert "MASTER_ADDR" in found.cure


@pytest.mark.slow
def test_an_interface_that_is_not_there(tmp_path):
    """NCCL would only say that no socket interface was found."""
    code, report = doctor("--run-dir", tmp_path, NCCL_SOCKET_IFNAME="=nosuch0")
    assert code == 1
    assert "unset NCCL_SOCKET_IFNAME" in stops(report)["chosen_interface"].cure


@pytest.mark.slow
def test_a_pipe_in_place_of_a_mount_hangs_alone(tmp_path):
    """Opening it never returns, as on a dead server: the other probes tell what they would without it."""
    os.mkfifo(tmp_path / "data")
    (tmp_path / "good").write_text("x")
    pipe = ("--data", tmp_path / "data", "--patience", "2")
    code, report = doctor("--run-dir", tmp_path / "run", "--data", tmp_path / "good", *pipe)
    found = stops(report)
    assert (code, set(found)) == (1, {"answers"})
    assert found["answers"].subject == str(tmp_path / "data")
    assert "no answer within 7 s" in found["answers"].evidence
    assert "stuck in storage.py" in found["answers"].evidence
    assert "mount" in found["answers"].cure
    _, without = doctor("--run-dir", tmp_path / "run", "--data", tmp_path / "good")
    told = {(f.probe, f.check, f.subject) for f in report.findings if f.subject != str(tmp_path / "data")}
    assert told == {(f.probe, f.check, f.subject) for f in without.findings}


@pytest.mark.slow
def test_an_ignored_signal(tmp_path):
    """A job under such a launcher never hears that it shall leave."""
    command = [sys.executable, "-m", "resilience_sdk", "doctor", *PATIENT, "--json", "--run-dir", str(tmp_path)]
    done = subprocess.run(
        ["sh", "-c", "trap '' TERM; exec \"$@\"", "sh", *command],
        env=environment(), capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    report = report_from_json(json.loads(done.stdout))
    (found,) = [finding for finding in report.findings if finding.check == "signal"]
    assert (found.subject, found.status) == ("SIGTERM", Status.DEGRADED)


@pytest.mark.slow
def test_another_torch_on_one_rank(tmp_path):
    """A rank whose path has another installation first; the reports of all ranks are compared."""
    other = tmp_path / "site" / "torch"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise ImportError('a probe must not import it')")
    (other / "version.py").write_text("__version__ = '2.4.1'\ncuda = None\n")
    _, usual = doctor("--run-dir", tmp_path)
    _, odd = doctor("--run-dir", tmp_path, PYTHONPATH=f"{other.parent}{os.pathsep}{PROJECT}")
    ranks = {"rank 0": usual.findings, "rank 1": usual.findings, "rank 2": odd.findings}
    (found,) = [finding for finding in compare(ranks) if finding.subject == "torch"]
    assert found.stops
    assert found.data["odd"] == ["rank 2"]
    assert "2.4.1 on rank 2" in found.evidence
