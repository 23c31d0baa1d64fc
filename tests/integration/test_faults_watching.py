"""What watches over the ranks fails: its process, or the place where they show themselves. The training goes on."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest
from harness import is_running, job

from resilience_sdk.recorder import page_layout as at
from resilience_sdk.system.hostinfo import process_start_ticks, process_state

pytestmark = pytest.mark.slow  # the watchers are killed, frozen and starved

TWO = ("--nproc-per-node", "2")
LIGHT = ("--start-method", "exec", "beating.py")  # starts in no time: it needs no torch


@pytest.fixture
def bystander():
    """A process of the same user that has nothing to do with the job, and dies of any signal that it gets."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    yield process.pid
    process.kill()
    process.wait()


def steps(run):
    """How many steps each rank of attempt 0 has completed."""
    return [int(path.read_text()) for path in run.told("step-0-*")]


def goes_on(run):
    """Wait until each rank has completed more steps than now."""
    before = steps(run)
    run.wait(lambda: all(now > then + 5 for now, then in zip(steps(run), before, strict=True)), "further steps")


def claim(page, pid, *, rank, attempt=0):
    """Return a copy of a rank's page in which another process claims to be a rank."""
    words = memoryview(bytearray(page)).cast("Q")
    words[at.W_PID], words[at.W_START_TICKS] = pid, process_start_ticks(pid) or 1
    words[at.W_RANK], words[at.W_ATTEMPT] = rank, attempt
    return words.tobytes()


def test_a_monitor_that_is_killed_or_frozen_is_replaced(tmp_path):
    """Beats go on unharmed, another monitor takes over, and a hang after that is still found."""
    end, hang = tmp_path / "end", tmp_path / "hang"
    with job(tmp_path, *TWO, "--heartbeat-timeout", "1.5", *LIGHT, str(end), str(hang)) as run:
        run.wait(lambda: len(steps(run)) == 2, "the first step")
        first = run.monitor_pid()
        os.kill(first, signal.SIGKILL)
        goes_on(run)
        run.wait_event("monitor_replaced")
        second = run.monitor_pid()
        os.kill(second, signal.SIGSTOP)
        goes_on(run)
        run.wait_event("monitor_replaced", count=2)
        assert len({first, second, run.monitor_pid()}) == 3
        run.wait(lambda: not is_running(second), "the end of the frozen monitor")
        goes_on(run)
        hang.touch()
        run.wait_event("recovered")
        end.touch()
        assert run.finish() == 0, run.screen
        (found,) = run.incidents()
        assert [named["rank"] for named in found["culprits"]] == [1]
        assert found["victims"] == [0]
        assert [event["generation"] for event in run.events("monitor_replaced")] == [2, 3]
        assert len(run.events("attempt_start")) == 2
        assert not run.events("degraded")
        assert not run.left_behind()


def test_a_hang_that_lasts_is_reported_once(tmp_path):
    """Under `--on-hang report` nothing is done to it: one incident however often it is seen, and the job may go on.

    Here the rank does come back, as nobody was killed.
    """
    end, hang = tmp_path / "end", tmp_path / "hang"
    options = (*TWO, "--on-hang", "report", "--heartbeat-timeout", "1", "--monitor-interval", "0.1")
    with job(tmp_path, *options, *LIGHT, str(end), str(hang)) as run:
        run.wait(lambda: len(steps(run)) == 2, "the first step")
        hang.touch()
        run.wait_event("confirmed")
        looked = run.page_directory() / "monitor.json"
        seen = set()
        run.wait(lambda: seen.add(looked.stat().st_mtime_ns) or len(seen) > 10, "ten more looks")
        hang.unlink()
        goes_on(run)
        end.touch()
        assert run.finish() == 0, run.screen
        (found,) = run.incidents()
        assert ([named["rank"] for named in found["culprits"]], found["action"]) == ([1], "none")
        assert len(run.events("confirmed")) == 1
        assert not run.events("signal_sent")
        assert "nothing is done to it" in run.screen
        assert not run.left_behind()


def test_garbage_among_the_pages_is_refused_and_signals_nobody(tmp_path, bystander):
    """Random bytes, and pages that claim another process: said in the journal, believed by nobody.

    A hang is found as ever, the right ranks get the signals, and neither bystander nor pid 1 do.
    """
    end, hang = tmp_path / "end", tmp_path / "hang"
    options = (*TWO, "--heartbeat-timeout", "1.5", "training.py", "--until", str(end), "--hang-when", str(hang))
    with subprocess.Popen(["true"]) as ended, job(tmp_path, *options) as run:
        ended.wait()
        run.wait(lambda: len(steps(run)) == 2, "the first step")
        pages = run.page_directory()
        real = next(pages.glob("a0-r1-*.page")).read_bytes()
        rank_pid = int(run.told("rank-0-0")[0].read_text())
        garbage = {
            "nonsense.page": b"x",
            "a0-r1-77777.page": os.urandom(at.PAGE_BYTES),
            "a0-r0-88888.page": b"",
            "a0-r1-1.page": claim(real, 1, rank=1),
            f"a0-r1-{bystander}.page": claim(real, bystander, rank=1),
            f"a9-r1-{bystander}.page": claim(real, bystander, rank=1, attempt=9),
            f"a3-r1-{rank_pid}.page": claim(real, rank_pid, rank=1, attempt=3),
            f"a0-r0-{rank_pid + 1}.page": claim(real, rank_pid, rank=1),
            # These claim a process that is gone, which a page of a dead rank may well do.
            f"a0-r1-{ended.pid}.page": claim(real, ended.pid, rank=1),
            f"a8-r0-{ended.pid}.page": claim(real, ended.pid, rank=0, attempt=8),
        }
        for name, content in garbage.items():
            (pages / name).touch(mode=0o600)
            (pages / name).write_bytes(content)
        (pages / "a0-r3-1.page").symlink_to("/etc/passwd")
        refused = len(garbage) + 1 - 2
        run.wait_event("degraded", what="page refused", count=refused)
        goes_on(run)
        hang.touch()
        run.wait_event("recovered")
        end.touch()
        assert run.finish() == 0, run.screen
        assert len(run.events("degraded")) == refused
        (found,) = run.incidents()
        assert ([named["rank"] for named in found["culprits"]], found["victims"]) == ([1], [0])
        ranks = {int(path.read_text()) for path in run.told("rank-0-*")}
        assert {event["pid"] for event in run.events("signal_sent") if "pid" in event} <= ranks
        assert process_state(bystander) in ("R", "S")
        assert not run.left_behind()


@pytest.fixture
def tiny(tmp_path):
    """A memory file system without room for a single page."""
    if os.geteuid() != 0:
        pytest.skip("a file system can be mounted by root only")
    place = tmp_path / "tiny"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32k,mode=0700", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, timeout=20).returncode:
        pytest.skip("no file system can be mounted here")
    yield place
    with contextlib.suppress(subprocess.CalledProcessError):
        subprocess.run(["umount", "--lazy", str(place)], check=True, timeout=20)


def test_a_full_page_directory_leaves_the_training_unwatched(tmp_path, tiny):
    """One clear line names the place, the reason and the cure; the ranks run to their end."""
    end = tmp_path / "end"
    with job(tmp_path, *TWO, *LIGHT, str(end), "-", pages=tiny) as run:
        run.wait(lambda: len(steps(run)) == 2, "the first step")
        goes_on(run)
        end.touch()
        assert run.finish() == 0, run.screen
        lines = [line for line in run.screen.splitlines() if "unwatched" in line or "not watched" in line]
        assert len(lines) == 1, run.screen
        assert str(tiny) in lines[0]
        assert "KiB free" in lines[0]
        assert "RESILIENCE_PAGE_DIR" in lines[0]
        assert "Traceback" not in run.screen
        assert [event["what"] for event in run.events("degraded")] == ["pages"]
        assert sorted(run.out.splitlines()) == [f"rank {rank} finished attempt 0" for rank in (0, 1)]
        assert not run.left_behind()


def test_a_page_directory_that_fills_up_while_ranks_run(tmp_path, tiny):
    """Pages have their space from the start: no rank dies of it, and the job ends as ever."""
    end = tmp_path / "end"
    subprocess.run(["mount", "-o", "remount,size=2m", str(tiny)], check=True, timeout=20)
    with job(tmp_path, *TWO, *LIGHT, str(end), "-", pages=tiny) as run:
        run.wait(lambda: len(steps(run)) == 2, "the first step")
        with contextlib.suppress(OSError), (tiny / "filler").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        goes_on(run)
        end.touch()
        assert run.finish() == 0, run.screen
        assert not run.incidents()
        assert not run.left_behind()
