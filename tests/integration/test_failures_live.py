"""Four gloo ranks fail in as many ways as a training does: each has its cause, its culprit and its action, and goes on.

One job fails in another way in every attempt and finishes at the end; so its ways cost a second each. Needs root:
disks that are full or read-only are real mounts, memory is short in a real control group.
"""

import contextlib
import os
import subprocess
import uuid
from pathlib import Path

import pytest
from harness import job

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts and control groups need root"),
]

FOUR = ("--nproc-per-node", "4")
CGROUPS = Path("/sys/fs/cgroup")
# way, category, cause, action; the action is what was done where the first of its kind is tried again
WAYS = (
    ("raises", "user", "user_code_error", "restart"),
    ("shapes", "user", "user_code_error", "restart"),
    ("sigkill", "process", "rank_killed_sigkill", "restart"),
    ("segfault", "process", "rank_segfault", "restart"),
    ("all_raise", "user", "user_code_error", "restart"),
    ("bus", "process", "rank_bus_error", "restart"),
    ("abort", "process", "rank_abort", "restart"),
    ("refused_memory", "host", "host_oom_alloc", "restart"),
    ("worker_killed", "data", "dataloader_worker_killed", "restart"),
    ("no_space", "storage", "storage_full", "wait"),
    ("worker_crashes", "data", "dataloader_worker_segfault", "restart"),
    ("small_shm", "data", "dataloader_shm_bus_error", "restart"),
    ("stuck_reading", "hang", None, None),
    ("read_only", "storage", "storage_readonly", "wait"),
    ("leaves_early", "user", "user_uneven_inputs", "restart"),
    ("other_operation", "user", "user_collective_mismatch", "restart"),
    ("corrupt", "checkpoint", "checkpoint_corrupt", "rollback"),
    ("input_output", "storage", "storage_io_error", "wait"),
    ("missing_key", "checkpoint", "checkpoint_incompatible", "restart"),
    ("no_permission", "storage", "storage_permission", "restart"),
    ("port_taken", "network", "port_in_use", "restart"),
    ("no_name", "network", "dns_failure", "restart"),
    ("not_a_number", "numerics", "nan_grad_anomaly", "rollback"),
)


@contextlib.contextmanager
def small_disks(folder):
    """Mount a disk with no room for one more file and one that takes no writes."""
    try:
        for name, limit in (("tiny", "nr_inodes=1"), ("fixed", "size=4m")):
            (folder / name).mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", limit, "tmpfs", folder / name], check=True)
        subprocess.run(["mount", "-o", "remount,ro", folder / "fixed"], check=True)
        yield
    finally:
        for name in ("tiny", "fixed"):
            subprocess.run(["umount", folder / name], check=False)


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """The job, over now; the disks were mended while the launcher waited for them."""
    folder = tmp_path_factory.mktemp("failures")
    pages = folder / "pages"  # one rank gets a /dev/shm of its own
    pages.mkdir(mode=0o700)
    options = ("--max-restarts", "60", "--heartbeat-timeout", "2", "--section-timeouts", "data:2", "--term-grace", "2")
    ways = ",".join(way for way, *_ in WAYS)
    with small_disks(folder), job(folder, *FOUR, *options, "failing_ranks.py", ways, pages=pages) as run:
        for name, mend in (("tiny", "nr_inodes=1000"), ("fixed", "rw")):
            tried = f"resilience: waiting for {folder / name}/"
            run.wait(lambda tried=tried: tried in run.screen, f"the launcher at {name}")
            subprocess.run(["mount", "-o", f"remount,{mend}", folder / name], check=True)
        code = run.finish(400)
        yield run, code


def test_the_job_gets_over_everything(failed):
    """Every fault is one incident, every one is recovered from, and the training finishes."""
    run, code = failed
    assert code == 0, run.screen
    assert [found["attempt"] for found in run.incidents()] == list(range(len(WAYS)))
    assert all(found["recovered_at"] for found in run.incidents())
    assert not run.events("degraded")
    assert not run.left_behind()


@pytest.mark.parametrize("number", range(len(WAYS)), ids=[way for way, *_ in WAYS])
def test_each_failure_has_its_cause_culprit_and_action(failed, number):
    """The one rank that failed is named, or all of them where all did; the others are victims."""
    way, category, cause, action = WAYS[number]
    found = failed[0].incidents()[number]
    if way == "worker_crashes" and "egmentation fault" not in str(found["evidence"]):
        cause = "dataloader_worker_killed"  # torch looked before it was told of the signal: all that is known then
    assert (found["category"], found["cause"]) == (category, cause or found["cause"]), found["evidence"]
    assert found["action"] == (action or found["action"])
    everyone = [0, 1, 2, 3]
    culprits = everyone if way == "all_raise" else [2]
    assert [named["rank"] for named in found["culprits"]] == culprits
    assert found["victims"] == [rank for rank in everyone if rank not in culprits]
    assert found["evidence"]


@pytest.mark.parametrize("way", ["segfault", "bus", "abort"])
def test_a_crash_in_native_code_shows_the_line_of_the_program(failed, way):
    """The interpreter writes the stack as the signal comes."""
    found = failed[0].incidents()[[name for name, *_ in WAYS].index(way)]
    assert any("failing_ranks.py" in frame for frame in found["culprits"][0]["stack"])


def test_a_disk_is_waited_for_until_it_takes_writes(failed):
    """The probe fails first and works then; the decision says what it waits for."""
    run, _ = failed
    tries = {event["what"]: event for event in run.events("health") if "to take writes" in event.get("what", "")}
    for name in ("tiny", "fixed"):
        (event,) = [tries[what] for what in tries if f"/{name}/" in what]
        assert event["ok"]
        assert event["waited_s"] >= 1
    waits = [event["waits_for"] for event in run.events("decision") if event["waits_for"]]
    assert any("/tiny/checkpoint.pt to take writes" in what for what in waits)


def test_a_kill_for_memory_is_told_from_other_kills(tmp_path):
    """By the kernel's log, where that may be read: the rank was in a control group of its own."""
    group = CGROUPS / "memory" / f"resilience-test-{uuid.uuid4().hex[:8]}"
    if not os.access("/dev/kmsg", os.R_OK) or not os.access(group.parent, os.W_OK):
        pytest.skip("the kernel's log or its memory groups cannot be used here")
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(64 << 20))
        script = ("failing_ranks.py", "killed_for_memory")
        with job(tmp_path, *FOUR, *script, env={"SMALL_GROUP": str(group)}) as run:
            assert run.finish() == 0, run.screen
            (found,) = run.incidents()
            assert (found["category"], found["cause"]) == ("host", "host_oom_kill")
            assert [named["rank"] for named in found["culprits"]] == [2]
            assert any(item["source"] == "kernel" for item in found["evidence"])
    finally:
        group.rmdir()


def test_the_last_lines_say_what_was_decided_and_why(tmp_path):
    """The verdict, the fault as the rank told it and its cause, what to do. The same error twice is not retried."""
    with job(tmp_path, *FOUR, "failing_ranks.py", "missing_key,missing_key,missing_key") as run:
        assert run.finish() == 77, run.screen
        last = run.last_lines()
        assert "stopped, not to be retried: the same error ended two attempts in a row" in last
        fault = next(line for line in last.splitlines() if "last fault: " in line)
        for part in ("rank 2", "RuntimeError: Error(s) in loading state_dict", "Missing key(s)"):
            assert part in fault
        assert fault.endswith(": checkpoint_incompatible")
        assert "fix the program" in last
        (decision,) = run.events("decision", verdict="stop")
        assert decision["reason"] in last
        assert len(run.incidents()) == 2
