"""The lease: one job at a time, and a dead one is no obstacle."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import attrs
import pytest

from resilience_sdk.core.lease import STALE_AFTER_S, Lease, current_holder, renewed_after_s
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.errors import RunDirectoryError
from resilience_sdk.system.hostinfo import process_start_ticks


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run")


def _age(run: RunDirectory, seconds: float) -> None:
    at = run.lease.stat().st_mtime - seconds
    os.utime(run.lease, (at, at))


def _rewrite(run: RunDirectory, **changes: Any) -> None:
    stat = run.lease.stat()
    run.lease.write_text(json.dumps({**json.loads(run.lease.read_text()), **changes}))
    os.utime(run.lease, (stat.st_atime, stat.st_mtime))


def _leftovers(run: RunDirectory) -> list[str]:
    return [name for name in os.listdir(run.path) if name.startswith(".lease")]


def test_a_live_job_keeps_others_out(run: RunDirectory) -> None:
    """The refusal names the job, where it runs and the cure; after a release the way is free."""
    lease = Lease.acquire(run, "job-a")
    with pytest.raises(RunDirectoryError, match=r"in use by job job-a .*--run-dir"):
        Lease.acquire(run, "job-b")
    holder = current_holder(run)
    assert holder == lease.holder
    lease.release()
    assert current_holder(run) is None
    Lease.acquire(run, "job-b")
    assert _leftovers(run) == []


def test_a_lease_on_another_host_ends_by_age_alone(run: RunDirectory) -> None:
    """Nothing can be proven about another host's process."""
    Lease.acquire(run, "job-a")
    _rewrite(run, host="elsewhere", pid=1 << 22)
    _age(run, STALE_AFTER_S - 10)
    with pytest.raises(RunDirectoryError, match="in use"):
        Lease.acquire(run, "job-b")
    _age(run, 20)
    assert Lease.acquire(run, "job-b").renew()


@pytest.mark.parametrize("where", [{"boot_id": "another"}, {"pid_namespace": "pid:[1]"}])
def test_another_boot_or_container_proves_nothing(run: RunDirectory, where: dict[str, str]) -> None:
    """The same pid in another container is another process."""
    Lease.acquire(run, "job-a")
    _rewrite(run, start_ticks=1, **where)
    with pytest.raises(RunDirectoryError, match="in use"):
        Lease.acquire(run, "job-b")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="start times are from /proc")
def test_a_reused_pid_is_another_process(run: RunDirectory) -> None:
    """Same pid, other start: the job that wrote the lease is gone."""
    Lease.acquire(run, "job-a")
    _rewrite(run, start_ticks=1)
    Lease.acquire(run, "job-b")


def test_a_killed_job_is_no_obstacle(run: RunDirectory) -> None:
    """A real process takes the lease and is killed; the next job starts at once."""
    code = (
        "import sys\nfrom resilience_sdk.core.lease import Lease\n"
        "from resilience_sdk.core.run_directory import RunDirectory\n"
        f"lease = Lease.acquire(RunDirectory.open({str(run.path)!r}), 'job-a')\n"
        "print('held', flush=True)\nsys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(RunDirectoryError, match=f"pid {process.pid}"):
            Lease.acquire(run, "job-b")
        process.kill()
        process.wait()
        Lease.acquire(run, "job-b")


def test_the_same_job_returns_at_once(run: RunDirectory) -> None:
    """A requeued job, or another node of it, need not wait for itself."""
    first = Lease.acquire(run, "slurm-1.0")
    _rewrite(run, host="elsewhere")
    second = Lease.acquire(run, "slurm-1.0")
    assert first.renew()
    assert second.renew()


def test_all_nodes_of_a_job_keep_the_lease_alive(run: RunDirectory) -> None:
    """Whoever of the job finds it old renews it, so the death of one launcher does not free the directory."""
    Lease.acquire(run, "job")
    node = Lease.acquire(run, "job")
    _rewrite(run, host="elsewhere")
    young = run.lease.read_bytes()
    assert node.renew()
    assert run.lease.read_bytes() == young
    _age(run, 15)
    assert node.renew()
    assert json.loads(run.lease.read_text())["host"] == node.holder.host


def test_a_lost_lease_is_noticed(run: RunDirectory) -> None:
    """A launcher that was frozen for longer than the lease learns that another job has the directory."""
    frozen = Lease.acquire(run, "job-a")
    _age(run, STALE_AFTER_S + 1)
    other = Lease.acquire(run, "job-b")
    assert not frozen.renew()
    frozen.release()
    assert other.renew()
    assert json.loads(run.lease.read_text())["job"] == "job-b"


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"job": 3}', b"\xff"])
def test_a_torn_lease_blocks_only_while_it_is_young(run: RunDirectory, text: bytes) -> None:
    """Its writer may be about to fill it; later it is a leftover."""
    run.lease.write_bytes(text)
    assert current_holder(run) is None
    with pytest.raises(RunDirectoryError, match="remove that file"):
        Lease.acquire(run, "job-a")
    _age(run, STALE_AFTER_S + 1)
    Lease.acquire(run, "job-a")


def test_one_of_many_wins_a_stale_lease(run: RunDirectory) -> None:
    """Jobs that see the same stale lease at the same moment do not both get the directory."""
    Lease.acquire(run, "old")
    _rewrite(run, host="elsewhere")
    _age(run, STALE_AFTER_S + 1)
    won: list[str] = []

    def take(job: str) -> None:
        try:
            Lease.acquire(run, job)
            won.append(job)
        except RunDirectoryError:
            pass

    threads = [threading.Thread(target=take, args=(f"job-{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [json.loads(run.lease.read_text())["job"]]
    assert _leftovers(run) == []


def test_a_vanished_directory_is_said_once(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """Renewing never ends a run."""
    lease = Lease.acquire(run, "job")
    run.set_aside()
    assert lease.renew()
    assert lease.renew()
    lease.release()
    assert len(capsys.readouterr().err.splitlines()) == 1
    with pytest.raises(RunDirectoryError, match="cannot write"):
        Lease.acquire(run, "job")


def test_an_old_lease_without_extras_is_read(run: RunDirectory) -> None:
    """Missing facts are unknown, so only the age counts."""
    run.lease.write_text(json.dumps({"job": "job-a"}))
    holder = current_holder(run)
    assert holder is not None
    assert attrs.asdict(holder)["pid"] is None
    with pytest.raises(RunDirectoryError, match="in use by job job-a"):
        Lease.acquire(run, "job-b")


def test_a_full_disk_leaves_no_lease_that_nobody_holds(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that was made and could not be filled is taken back: it would keep everybody out for a minute."""

    def full(*_args: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(RunDirectoryError, match="No space"):
        patch.setattr(os, "write", full)
        Lease.acquire(run, "job-a")
    assert not run.lease.exists()
    assert Lease.acquire(run, "job-b").holder.job == "job-b"


def test_a_job_of_one_process_does_not_meet_itself(run: RunDirectory) -> None:
    """Two runs on one host under one RESILIENCE_JOB_ID are two jobs; its own past, and another host, are not."""
    Lease.acquire(run, "job")
    with subprocess.Popen(["sleep", "60"]) as other:
        _rewrite(run, pid=other.pid, start_ticks=process_start_ticks(other.pid))
        with pytest.raises(RunDirectoryError, match=f"in use by job job .*pid {other.pid}"):
            Lease.acquire(run, "job", alone=True)
        assert Lease.acquire(run, "job").holder.pid == os.getpid()
        _rewrite(run, pid=other.pid, start_ticks=process_start_ticks(other.pid), host="elsewhere")
        Lease.acquire(run, "job", alone=True)
        _rewrite(run, pid=other.pid, start_ticks=process_start_ticks(other.pid))
        other.kill()
    assert Lease.acquire(run, "job", alone=True).holder.pid == os.getpid()


def test_a_lease_that_is_left_tells_how_long_its_job_lived_on(run: RunDirectory, tmp_path: Path) -> None:
    """Beyond the journal's last word; a copy of the directory, whose files are all new, makes no job live longer."""
    assert renewed_after_s(run) is None
    Lease.acquire(run, "job-a")
    assert renewed_after_s(run) == 0.0
    journal = run.journal / "a-launcher-1.jsonl"
    journal.write_text("{}\n")
    written_at = run.lease.stat().st_mtime
    os.utime(journal, (written_at - 25.0, written_at - 25.0))
    assert renewed_after_s(run) == pytest.approx(25.0)
    copied = Path(shutil.copytree(run.path, tmp_path / "copy", copy_function=shutil.copyfile))
    found = renewed_after_s(RunDirectory.open(copied))
    assert found is not None
    assert found < 5.0
