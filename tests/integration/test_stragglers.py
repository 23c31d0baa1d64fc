"""Real ranks that are slow in one thing: that rank and that section are named, and nobody else."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import job
from straggler_runs import RANKS, enough, found_events, least_of, make_nice, named, named_by_incidents, training

from resilience_sdk.cli.main import main

# Each trains on four ranks for some seconds, and says who lacks a processor.
pytestmark = [pytest.mark.slow, pytest.mark.alone]


def test_a_slow_backward_is_named_within_20_steps(tmp_path):
    """200 ms in the backward of rank 2 under DDP: the wall time is equal on all ranks, its own work is not."""
    least = least_of(0.2)
    with training(tmp_path, fault="slow:rank=2,section=bwd,seconds=0.2") as run:
        run.wait(lambda: bool(named(run, least=least)), "a verdict")
        enough(run)
    (found,) = found_events(run, least=least)
    assert (found["ranks"], found["section"], found["kind"]) == ([2], "bwd", "transient")
    assert found["step"] <= 20
    assert found["since_step"] <= 8
    assert found["excess_s"] == pytest.approx(0.2, rel=0.2)
    assert found["waits_least"] is True
    assert not run.incidents()  # it has not lasted


def test_each_rank_is_slow_in_another_thing(tmp_path):
    """Data, forward, optimizer and checkpoint, each slow on one rank: four verdicts, each right, and no other."""
    slow = {"data": 0, "fwd": 1, "optim": 2, "checkpoint": 3}
    fault = ";".join(f"slow:rank={rank},section={section},seconds=0.05" for section, rank in slow.items())
    least = least_of(0.05 / 2)  # per step, and the checkpoint is saved every other one
    with training(tmp_path, "--save", "2", "--pause", "0.005", fault=fault) as run:
        run.wait(lambda: len(named(run, least=least)) >= len(slow), "a verdict on each")
        enough(run)
    assert named(run, least=least) == {((rank,), section) for section, rank in slow.items()}
    (checkpoint,) = [event for event in found_events(run, least=least) if event["section"] == "checkpoint"]
    assert checkpoint["excess_s"] == pytest.approx(0.025, rel=0.4)
    assert named_by_incidents(run) <= {(rank, section) for section, rank in slow.items()}


def test_a_rank_that_is_stopped_now_and_then_is_a_transient_straggler(tmp_path):
    """SIGSTOP and SIGCONT: seen, over when it is over, no incident."""
    with training(tmp_path, "--steps", "100000") as run:
        run.wait(lambda: all((tmp_path / "told" / f"step-{rank}").exists() for rank in range(RANKS)), "a step")
        pid = int((tmp_path / "told" / "rank-1").read_text())
        # A stall lasts for eight usual steps, however slow the machine.
        pause_s = max(0.7, 24 * steps_take_s(run, 16) / 16)
        least = least_of(pause_s / 8)  # one stall in the eight steps of a window
        for _ in range(20):  # where it falls into a wait for the others, no section shows it
            os.kill(pid, signal.SIGSTOP)
            time.sleep(pause_s)  # what is tested is a pause of this length
            os.kill(pid, signal.SIGCONT)
            steps_take_s(run, 16)
            if named(run, least=least):
                break
        found = found_events(run, least=least)
        run.wait(lambda: len(run.events("straggler", what="over", ranks=[1])) >= len(found), "the end of it")
        enough(run)
    assert {tuple(event["ranks"]) for event in found} == {(1,)}
    assert {event["kind"] for event in found} == {"transient"}
    assert not run.incidents()


def steps_take_s(run, steps):
    """Wait until rank 1 has made so many steps, and return the seconds that they took."""
    told, began = run.folder / "told" / "step-1", time.monotonic()
    before = int(told.read_text())
    run.wait(lambda: int(told.read_text()) >= before + steps, f"{steps} steps")
    return time.monotonic() - began


def test_all_ranks_slower_is_told_from_longer_steps(tmp_path):
    """Lengths that vary fourfold, which both ranks tell: from the page to the verdict. Nobody is blamed."""
    (tmp_path / "told").mkdir()
    with job(tmp_path, "--nproc-per-node", "2", "varying_lengths.py", "--slower-from", "160") as run:
        (found,) = run.wait_event("straggler", what="found", kind="global")
        enough(run)
    assert (found["section"], found["ranks"]) == ("fwd", [])
    assert found["step"] >= 160
    assert found["ratio"] == pytest.approx(1.5, rel=0.2)


def wait_found(run, rank):
    """Wait until a rank is found to be slow, in whatever it waits for the processor.

    Others may be found too, where others use the machine: then they really lack a processor.
    """
    run.wait(lambda: any(ranks == (rank,) for ranks, _ in named(run, least=0.0)), f"a verdict on rank {rank}")


def test_a_rank_with_less_cpu_is_named(tmp_path):
    """Another program has its core, and it gives way to that."""
    with training(tmp_path, "--burn", "0.01") as run:
        run.wait(lambda: (tmp_path / "told" / "step-3").exists(), "a step")
        pid = int((tmp_path / "told" / "rank-3").read_text())
        make_nice(pid)
        with crowded(pid):
            wait_found(run, 3)
        enough(run)


@contextlib.contextmanager
def crowded(pid):
    """Keep a process on one core, together with a program that never rests."""
    core = {max(os.sched_getaffinity(pid))}
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as program:
        try:
            os.sched_setaffinity(program.pid, core)
            for thread in os.listdir(f"/proc/{pid}/task"):
                os.sched_setaffinity(int(thread), core)
            yield
        finally:
            program.kill()


@pytest.fixture
def throttle():
    """Return what gives a process a share of one processor, by a control group of its own, or skip."""
    with contextlib.ExitStack() as stack:
        yield lambda pid, share: stack.enter_context(throttled(pid, share))


@contextlib.contextmanager
def throttled(pid, share):
    """Let a process have `share` of a processor; at the end it goes back to where it was, and the group away."""
    own = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path.lstrip("/"))
    period_us = 50_000
    if "cpu" in own:
        parent = Path("/sys/fs/cgroup/cpu") / own["cpu"]
        limits = {"cpu.cfs_period_us": period_us, "cpu.cfs_quota_us": int(share * period_us)}
    else:
        parent = Path("/sys/fs/cgroup") / own.get("", "")
        limits = {"cpu.max": f"{int(share * period_us)} {period_us}"}
    group = parent / f"straggler-{pid}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        try:
            for name, value in limits.items():
                (group / name).write_text(str(value))
            (group / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            pytest.skip(f"the processor cannot be limited by a control group here: {error}")
        yield
    finally:
        with contextlib.suppress(OSError):
            (parent / "cgroup.procs").write_text(str(pid))
        group.rmdir()


def test_a_rank_that_its_control_group_throttles_is_named(tmp_path, throttle):
    """An eighth of a processor, as a container with too small a limit has it."""
    with training(tmp_path, "--burn", "0.02", "--pause", "0.001") as run:
        run.wait(lambda: all((tmp_path / "told" / f"step-{rank}").exists() for rank in range(RANKS)), "a step")
        throttle(int((tmp_path / "told" / "rank-2").read_text()), 0.12)
        wait_found(run, 2)
        enough(run)


def test_listeners_reports_and_settings_of_a_run_with_a_rank_that_never_reports(tmp_path, capsys):
    """Rank 1 does not use the SDK, rank 2 is slow: named, told to all who listen, and switched off in the middle."""
    told, fault = tmp_path / "told", "slow:rank=2,section=fwd,seconds=0.1"
    with training(
        tmp_path, "--mute", "1", "--listen", fault=fault, RESILIENCE_REPORT_INTERVAL="3", RESILIENCE_SCORES_TO_PRINT="2"
    ) as run:
        heard = [told / "verdict-0-found-2", told / "verdict-3-found-2"]
        run.wait(lambda: all(path.exists() for path in heard), "the calls")
        assert heard[0].read_text().startswith("rank 2 (node ")
        run.wait(lambda: all((told / f"report-{rank}").exists() for rank in (0, 2, 3)), "the reports")
        run.wait(lambda: bool(run.incidents()), "the incident")
        assert main(["status", str(run.run_dir)]) == 0
        assert "section fwd" in capsys.readouterr().out
        assert main(["straggler", str(run.run_dir), "--relative-threshold", "0.01"]) == 0
        run.wait_event("straggler", what="settings")
        (run.run_dir / "stragglers" / "settings.json").write_text('{"relative_treshold": 1}')
        run.wait(lambda: "stay as they are" in run.screen, "the refusal")
        assert main(["straggler", str(run.run_dir), "--reset"]) == 0
        assert main(["straggler", str(run.run_dir), "--straggler-detection", "off"]) == 0
        run.wait(lambda: not json.loads((run.run_dir / "stragglers/verdicts.json").read_text())["enabled"], "the end")
        reports = len(run.events("straggler", what="report"))
        before = int((told / "step-0").read_text())
        run.wait(lambda: int((told / "step-0").read_text()) > before + 40, "40 more steps")
        assert len(run.events("straggler", what="report")) == reports
        enough(run)
    assert named(run, least=least_of(0.1)) == {((2,), "fwd")}
    assert re.search(r"Section fwd relative performance:\n.*  Rank=2 Node=\S+ Score=0\.0\d", run.screen)
    assert "did you mean relative_threshold?" in run.screen
    (incident,) = run.incidents()
    assert (incident["kind"], incident["action"], incident["cause"]) == ("slow", "none", "straggler_persistent")
    assert [(c["rank"], c["section"]) for c in incident["culprits"]] == [(2, "fwd")]
    assert not run.left_behind()
