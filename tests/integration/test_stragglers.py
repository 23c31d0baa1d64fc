"""Real ranks that are slow in one thing: that rank and that section are named, and nobody else."""

import contextlib
import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest
from harness import job

from resilience_sdk.cli.main import main

pytestmark = pytest.mark.slow  # each trains on four ranks for some seconds

RANKS = 4


@contextlib.contextmanager
def training(folder, *args, fault="", options=(), ranks=RANKS, **env):
    """Start `straggling.py` with these arguments on four ranks."""
    env |= {"RESILIENCE_FAULT": fault} if fault else {}
    with job(folder, *options, "--nproc-per-node", str(ranks), "straggling.py", *args, env=env) as run:
        yield run


def enough(run):
    """Have the training end; it must end well."""
    (run.folder / "told" / "enough").touch()
    assert run.finish() == 0, run.screen


def named(run, **facts):
    """Return who was found to be slow in what."""
    return {(tuple(event["ranks"]), event["section"]) for event in run.events("straggler", what="found", **facts)}


def test_a_slow_backward_is_named_within_20_steps(tmp_path):
    """200 ms in the backward of rank 2 under DDP: the wall time is equal on all ranks, its own work is not."""
    with training(tmp_path, fault="slow:rank=2,section=bwd,seconds=0.2") as run:
        (found,) = run.wait_event("straggler", what="found")
        enough(run)
    assert (found["ranks"], found["section"], found["kind"]) == ([2], "bwd", "transient")
    assert found["step"] <= 20
    assert found["since_step"] <= 8
    assert found["excess_s"] == pytest.approx(0.2, rel=0.2)
    assert found["waits_least"] is True
    assert named(run) == {((2,), "bwd")}
    assert not run.incidents()  # it has not lasted


def test_each_rank_is_slow_in_another_thing(tmp_path):
    """Data, forward, optimizer and checkpoint, each slow on one rank: four verdicts, each right, and no other."""
    slow = {"data": 0, "fwd": 1, "optim": 2, "checkpoint": 3}
    fault = ";".join(f"slow:rank={rank},section={section},seconds=0.05" for section, rank in slow.items())
    with training(tmp_path, "--save", "2", "--pause", "0.005", fault=fault) as run:
        run.wait(lambda: len(named(run)) >= len(slow), "a verdict on each")
        enough(run)
    assert named(run) == {((rank,), section) for section, rank in slow.items()}
    (checkpoint,) = run.events("straggler", what="found", section="checkpoint")
    assert checkpoint["excess_s"] == pytest.approx(0.025, rel=0.4)  # per step, and it is saved every other one


def test_a_rank_that_is_stopped_now_and_then_is_a_transient_straggler(tmp_path):
    """SIGSTOP and SIGCONT: seen, over when it is over, no incident."""
    with training(tmp_path) as run:
        run.wait(lambda: all((tmp_path / "told" / f"step-{rank}").exists() for rank in range(RANKS)), "a step")
        pid = int((tmp_path / "told" / "rank-1").read_text())
        deadline = time.monotonic() + 20
        while not named(run) and time.monotonic() < deadline:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.7)  # what is tested is a pause of this length
            os.kill(pid, signal.SIGCONT)
            step = int((tmp_path / "told" / "step-1").read_text())
            run.wait(lambda before=step: int((tmp_path / "told" / "step-1").read_text()) > before + 16, "16 steps")
        found = run.events("straggler", what="found")
        run.wait_event("straggler", what="over", count=len(found))
        enough(run)
    assert {tuple(event["ranks"]) for event in found} == {(1,)}
    assert {event["kind"] for event in found} == {"transient"}
    assert not run.incidents()


def test_a_rank_with_less_cpu_is_named(tmp_path):
    """One rank is nicer than the others, and so gets the processor last."""
    with training(tmp_path, "--burn", "0.03", "--pause", "0.001") as run:
        run.wait(lambda: (tmp_path / "told" / "step-3").exists(), "a step")
        pid = int((tmp_path / "told" / "rank-3").read_text())
        make_nice(pid)
        run.wait(lambda: bool(named(run)), "the verdict")
        enough(run)
    assert {ranks for ranks, _ in named(run)} == {(3,)}  # in whatever it waits for the processor


def make_nice(pid):
    """Give a process what the others leave, or skip where that is not to be had."""
    os.setpriority(os.PRIO_PROCESS, pid, 19)
    groups = Path("/proc/sys/kernel/sched_autogroup_enabled")
    if groups.exists() and groups.read_text().strip() == "1":  # then sessions compete, not processes
        try:
            Path(f"/proc/{pid}/autogroup").write_text("19")
        except OSError as error:
            pytest.skip(f"the kernel groups processes by session, and does not let us be nice: {error}")


def test_listeners_reports_and_settings_of_a_run_with_a_rank_that_never_reports(tmp_path, capsys):
    """Rank 1 does not use the SDK, rank 2 is slow: named, told to all who listen, and switched off in the middle."""
    told, fault = tmp_path / "told", "slow:rank=2,section=fwd,seconds=0.1"
    with training(
        tmp_path, "--mute", "1", "--listen", fault=fault, RESILIENCE_REPORT_INTERVAL="3", RESILIENCE_SCORES_TO_PRINT="2"
    ) as run:
        run.wait(lambda: (told / "verdict-0-found").exists() and (told / "verdict-3-found").exists(), "the calls")
        assert (told / "verdict-0-found").read_text().startswith("rank 2 (node ")
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
    assert named(run) == {((2,), "fwd")}
    assert re.search(r"Section fwd relative performance:\n.*  Rank=2 Node=\S+ Score=0\.0\d", run.screen)
    assert "did you mean relative_threshold?" in run.screen
    (incident,) = run.incidents()
    assert (incident["kind"], incident["action"], incident["cause"]) == ("slow", "none", "straggler_persistent")
    assert [(c["rank"], c["section"]) for c in incident["culprits"]] == [(2, "fwd")]
    assert not run.left_behind()


def test_two_nodes_and_a_stop_that_leaves_the_slow_one_out(tmp_path):
    """The slow rank is on the other node: that node is named on both, all ranks stop at one step, exit code 76."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    told, run_dir = tmp_path / "told", tmp_path / "run"
    told.mkdir()
    with contextlib.ExitStack() as stack:
        nodes = []
        for node in range(2):
            folder = tmp_path / f"node{node}"
            folder.mkdir()
            options = (
                *("--run-dir", str(run_dir), "--nnodes", "2", "--node-rank", str(node), "--rdzv-backend", "c10d"),
                *("--rdzv-id", "slow", "--rdzv-endpoint", f"localhost:{port}", "--stop-if-detected"),
            )
            fault = "slow:rank=3,section=bwd,seconds=0.1"
            nodes.append(
                stack.enter_context(training(folder, "--check", fault=fault, options=options, ranks=2, TOLD=str(told)))
            )
            nodes[-1].run_dir = run_dir
        codes = [run.finish() for run in nodes]
        screens = "\n".join(run.screen for run in nodes)
        assert codes == [76, 76], screens
        assert not [left for run in nodes for left in run.left_behind()]
    run = nodes[0]
    assert named(run) == {((3,), "bwd")}
    assert len({path.read_text() for path in told.glob("left-*")}) == 1
    assert len(list(told.glob("left-*"))) == RANKS
    (incident,) = run.incidents()
    (culprit,) = incident["culprits"]
    assert (incident["kind"], incident["action"], culprit["rank"]) == ("slow", "exclude_node", 3)
    assert culprit["node"].endswith("#1")
    outcome = run.outcome()
    assert (outcome["verdict"], outcome["exit_code"], outcome["incidents"]) == ("hardware", 76, [incident["id"]])
    assert culprit["node"] in outcome["reason"]
