"""The health of a node while a job runs: the real process, beside the stub of the driver."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import attrs
import psutil
import pytest
from harness import PROJECT, job
from stub_driver import StubDriver

from resilience_sdk.core.journal import read_journal
from resilience_sdk.core.words import when
from resilience_sdk.health.findings import signs_near
from resilience_sdk.system.hostinfo import process_start_ticks

_PATIENCE_S = 50.0  # less than the minute that a probe may listen


@attrs.define
class _Watched:
    """A job that is only a process, and the watch over its node."""

    run_dir: Path
    job: subprocess.Popen[bytes]
    watch: subprocess.Popen[bytes]
    said: Path

    def events(self) -> dict[tuple[str, str, str], dict]:
        """Return the newest health event of each check of each subject."""
        events = read_journal(self.run_dir / "journal").events
        return {(event["check"], event["subject"], event["status"]): event for event in events}

    def wait(self, happened: Callable[[], object], what: str) -> None:
        """Wait until something happened; fail with what was said when it does not."""
        deadline = time.monotonic() + _PATIENCE_S
        while not happened():
            assert self.watch.poll() is None, self.said.read_text()
            assert time.monotonic() < deadline, f"{what} did not come: {self.events().keys()} {self.said.read_text()}"
            time.sleep(0.02)


@pytest.fixture
def stub(stub_library, tmp_path) -> StubDriver:
    """A node with two GPUs that are not there, one of them slowed down by heat."""
    return StubDriver(stub_library, tmp_path / "state").changed({"gpus": 2, "1.throttle": 0x40})


@pytest.fixture
def interval_s():
    """Seconds between two looks."""
    return 0.5


@pytest.fixture
def kernel_log(tmp_path):
    """A file in the place of /dev/kmsg, with what the kernel said before the job: a kill, and a lost GPU."""
    path = tmp_path / "kmsg"
    _log(path, OUT_OF_MEMORY.format(os.getpid()), FELL_OFF, age_s=1800.0)
    return path


OUT_OF_MEMORY = "Out of memory: Killed process {} (sleep) total-vm:9kB, anon-rss:1kB, UID:0"
FELL_OFF = "NVRM: Xid (PCI:0000:9b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
DISK = "blk_update_request: I/O error, dev nvme0n1, sector 1234 op 0x0:(READ)"


def _log(path, *messages, age_s=0.0):
    """Add records as the kernel writes them, with its time."""
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    with path.open("a") as file:
        file.writelines(f"4,71,{int(max(0.0, uptime_s - age_s) * 1e6)},-;{message}\n" for message in messages)


@pytest.fixture
def node(stub, tmp_path, interval_s, kernel_log):
    """The watch, with a short interval and no budget, so that a test need not wait for minutes."""
    run_dir = tmp_path / "run"
    (run_dir / "journal").mkdir(parents=True)
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "attempt-2.json").write_text("{}")
    job = subprocess.Popen(["sleep", "600"])
    task = {
        "run_dir": str(run_dir),
        "job": "a-job",
        "interval_s": interval_s,
        "budget": 1e6,
        "pages": str(tmp_path / "pages"),
        "parent_pid": job.pid,
        "parent_ticks": process_start_ticks(job.pid),
        "kernel_log": str(kernel_log),
    }
    said = tmp_path / "said"
    with said.open("wb") as stderr:
        watch = subprocess.Popen(
            [sys.executable, "-m", "resilience_sdk.health.watch"],
            stdin=subprocess.PIPE,
            stderr=stderr,
            cwd=PROJECT,
            env={**os.environ, **stub.environment},
        )
    watch.stdin.write(json.dumps(task).encode() + b"\n")
    watch.stdin.flush()
    try:
        yield _Watched(run_dir, job, watch, said)
    finally:
        watch.stdin.close()
        for process in (job, watch):
            process.kill()
            process.wait()


@pytest.mark.slow
def test_faults_that_come_while_a_job_runs_are_journalled_and_said_once(node, stub):
    """Growth, an Xid and a lost GPU become events with cause and cure; what is in order again does too."""
    node.wait(lambda: ("throttle", "GPU 1", "degraded") in node.events(), "what was wrong from the start")
    stub.changed({"0.ecc_uncorrected_ever": 1, "1.throttle": None, "xid.0": "1:79"})
    for key in (
        ("ecc_uncorrected_aggregate", "GPU 0", "degraded"),
        ("throttle", "GPU 1", "ok"),
        ("xid", "GPU 1", "failed"),
    ):
        node.wait(lambda key=key: key in node.events(), str(key))
    stub.changed({"1.error": 15})
    node.wait(lambda: ("answers", "GPU 1", "failed") in node.events(), "the lost GPU")

    events = node.events()
    lost = events["answers", "GPU 1", "failed"]
    assert (lost["cause"], lost["ok"], lost["job"], lost["attempt"]) == ("gpu_fell_off_bus", False, "a-job", 2)
    assert "leave the node out" in lost["cure"]
    assert events["ecc_uncorrected_aggregate", "GPU 0", "degraded"]["why"].startswith("grew by 1 to 1")
    assert events["throttle", "GPU 1", "ok"]["ok"] is True
    node.wait(lambda: "GPU 1 answers" in node.said.read_text(), "the line, which comes behind the event")
    said = node.said.read_text()
    assert said.count("GPU 1 throttle") == 1, said
    assert "GPU 1 answers: the GPU has fallen off the bus" in said

    # An incident a moment later finds them, the fault of the hardware among the nearest.
    signs = signs_near(lost["t"] + 5, read_journal(node.run_dir / "journal").events)
    assert signs[0].event["cause"] == "gpu_fell_off_bus"
    assert signs[0].before


@pytest.mark.slow
def test_only_kills_of_the_job_in_its_own_time_are_told_as_its(node, kernel_log):
    """One of somebody else is a note on the node; what the kernel said before the job, a lost GPU too, is not told."""
    node.wait(lambda: ("throttle", "GPU 1", "degraded") in node.events(), "the first look")
    _log(kernel_log, OUT_OF_MEMORY.format(os.getpid()), DISK)
    node.wait(lambda: ("kernel_log", "memory kill", "degraded") in node.events(), "the kill of somebody else")
    assert not [key for key in node.events() if key[1] == "host_oom_kill"]
    _log(kernel_log, OUT_OF_MEMORY.format(node.job.pid))
    node.wait(lambda: ("kernel_log", "host_oom_kill", "degraded") in node.events(), "the kill of the job")

    events = node.events()
    told = {subject: event["cause"] for (check, subject, _), event in events.items() if check == "kernel_log"}
    assert told == {"memory kill": None, "host_oom_kill": "host_oom_kill", "storage_io_error": "storage_io_error"}
    note, ours = events["kernel_log", "memory kill", "degraded"], events["kernel_log", "host_oom_kill", "degraded"]
    assert f"of somebody else for memory at {when(note['at'])}: sleep (pid {os.getpid()})" in note["why"]
    assert f"of this job for memory at {when(ours['at'])}: sleep (pid {node.job.pid})" in ours["why"]
    assert (note["what"], ours["what"]) == ("kernel log memory kill", "kernel log host_oom_kill")
    assert (note["cure"], events["kernel_log", "storage_io_error", "degraded"]["ok"]) == (None, False)


def _is_probe(child: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):  # it may end meanwhile
        return "health.probe_main" in str(child.cmdline())
    return False


@pytest.mark.parametrize("interval_s", [60.0])
@pytest.mark.parametrize(
    "ended", ["pipe", pytest.param("job", marks=pytest.mark.slow), pytest.param("watch", marks=pytest.mark.slow)]
)
def test_the_watch_ends_with_its_job_and_with_all_its_probes(node, ended):
    """At once, though a probe may listen to the driver for a minute."""
    watch = psutil.Process(node.watch.pid)
    node.wait(lambda: any(map(_is_probe, watch.children())), "its first look")
    probes = watch.children()
    if ended == "job":
        node.job.kill()
        node.job.wait()
    elif ended == "pipe":
        node.watch.stdin.close()
    else:
        node.watch.terminate()
    assert node.watch.wait(timeout=_PATIENCE_S) == 0
    _, alive = psutil.wait_procs(probes, timeout=_PATIENCE_S)
    assert not alive


@pytest.mark.slow
def test_a_gpu_that_comes_back_is_told_and_the_watch_stays_small(node, stub):
    """It is lost in one look and answers in the next."""
    node.wait(lambda: ("throttle", "GPU 1", "degraded") in node.events(), "the first look")
    stub.changed({"0.nvmlDeviceGetTemperature": 15})
    node.wait(lambda: ("answers", "GPU 0", "failed") in node.events(), "the lost GPU")
    stub.changed({"0.nvmlDeviceGetTemperature": None})
    node.wait(lambda: ("answers", "GPU 0", "ok") in node.events(), "its return")
    assert psutil.Process(node.watch.pid).memory_info().rss < 40 << 20


@pytest.mark.slow
@pytest.mark.parametrize("interval_s", [60.0])
def test_an_xid_is_told_soon_though_the_next_look_is_far(node, stub):
    """Between two looks the watch listens, and an event ends the listening."""
    node.wait(lambda: ("throttle", "GPU 1", "degraded") in node.events(), "the first look")
    stub.changed({"xid.0": "0:119", "xid.1": "1:119"})
    node.wait(lambda: len([key for key in node.events() if key[0] == "xid"]) == 2, "both events")
    assert node.events()["xid", "GPU 0", "failed"]["cause"] == "gpu_gsp_timeout"


_WHY = (sys.executable, "-m", "resilience_sdk", "why")


@pytest.mark.slow
def test_why_names_what_ailed_the_node(stub_library, tmp_path):
    """A rank is killed on a node whose GPU has fallen off the bus: the incident is told with that sign beside it."""
    driver = StubDriver(stub_library, tmp_path / "state").changed({"gpus": 2, "1.error": 15})
    end = tmp_path / "end"
    arguments = ("--nproc-per-node", "2", "--health-interval", "1", "beating.py", str(end), str(tmp_path / "never"))
    with job(tmp_path, *arguments, env=driver.environment) as run:
        run.wait_event("rank_start", count=2)
        fallen = {"check": "answers", "subject": "GPU 1"}
        run.wait(lambda: bool(run.events("health", **fallen)), "the lost GPU", timeout_s=120.0)
        (lost,) = run.events("health", **fallen)
        assert lost["ok"] is False
        os.kill(run.events("rank_start", rank=1)[0]["pid"], signal.SIGKILL)
        run.wait_event("first_beat", attempt=1)
        end.touch()
        assert run.finish() == 0
        assert "GPU 1 answers: the GPU has fallen off the bus" in run.screen
        shown = subprocess.run(
            [*_WHY, str(run.run_dir)], capture_output=True, text=True, cwd=PROJECT, check=True
        ).stdout
        assert re.search(r"  health +\d+ s before, on \S+, gpu answers GPU 1: the GPU has fallen off the bus", shown)
        told = subprocess.run([*_WHY, "--json", str(run.run_dir)], capture_output=True, cwd=PROJECT, check=True).stdout
        (signs,) = json.loads(told)["health"].values()
        assert signs[0]["cause"] == "gpu_fell_off_bus"
        assert signs[0]["after_s"] < 0
