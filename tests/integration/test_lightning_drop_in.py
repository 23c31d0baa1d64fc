"""The snippets of NVIDIA's and NeMo's documentation, of which only the import has changed, on two gloo ranks."""

from __future__ import annotations

import csv
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from adapter_frameworks import require
from harness import job

pytestmark = pytest.mark.slow
RANKS = ("--nproc-per-node", "2")


@pytest.fixture(autouse=True)
def frameworks():
    """What all of these need."""
    require("lightning.pytorch", "lightning")
    require("torchdata")


def told(folder, name):
    return json.loads((folder / "told" / name).read_text())


def test_reports_preemption_and_the_finished_flag(tmp_path):
    """Scores have the form of the original; a signal to one rank saves `last.ckpt`; the resume finishes, also twice.

    Under NVIDIA's launcher one line says what is lost, and names ours.
    """
    flag = tmp_path / "flag"
    env = {"FAULT_TOL_FINISHED_FLAG_FILE": str(flag), "RESILIENCE_FAULT": "slow:rank=1,section=fwd,seconds=0.03"}
    with job(tmp_path, *RANKS, "lightning_drop_in.py", "1000000", env=env) as run:
        run.wait(lambda: "Straggler report processing time: " in run.screen, "a report")
        run.wait(lambda: "StragglerId(rank=1, node=" in run.screen, "the straggler")
        assert "resilience: Straggler report processing time: " not in run.screen  # by the job's monitor, once more
        os.kill(told(tmp_path, "start-1")["pid"], signal.SIGTERM)
        assert run.finish(30.0) == 75, run.screen
        screen = run.screen
        assert "Preemption detected, saving checkpoint and exiting" in screen
        assert "Rank=1 Node=" in screen
        assert not flag.exists()
    assert (tmp_path / "exp" / "last.ckpt").exists()
    stopped = {told(tmp_path, f"step-{rank}")["step"] for rank in (0, 1)}
    assert len(stopped) == 1, screen
    [at] = stopped
    del env["RESILIENCE_FAULT"]
    env["FT_RANK_MONITOR_IPC_SOCKET"] = "/tmp/none.socket"  # as under NVIDIA's launcher
    with job(tmp_path, *RANKS, "lightning_drop_in.py", str(at + 3), env=env) as run:
        assert run.finish() == 0, run.screen
        assert [told(tmp_path, f"start-{rank}")["step"] for rank in (0, 1)] == [at, at]
        assert [told(tmp_path, f"end-{rank}")["step"] for rank in (0, 1)] == [at + 3, at + 3]
        assert flag.exists()
        assert run.incidents()[-1]["kind"] == "preemption"  # of before; nothing since
        [line] = [line for line in run.screen.splitlines() if "STARTED BY ft_launcher" in line]
        assert "resilience run" in line
    flag.unlink()
    (tmp_path / "run" / "finished").unlink()
    with job(tmp_path, *RANKS, "lightning_drop_in.py", str(at + 3), env=env) as run:
        assert run.finish() == 0, run.screen
        assert [told(tmp_path, f"end-{rank}")["step"] for rank in (0, 1)] == [at + 3, at + 3]
        assert flag.exists()


def test_a_rehearsed_fault_scores_for_the_loggers_and_another_signal(tmp_path):
    """A rank is killed as planned, the next attempt logs scores to the trainer's logger, and SIGUSR1 stops all."""
    with job(tmp_path, *RANKS, "--max-restarts", "1", "lightning_nemo.py", "2") as run:
        again = "starting the ranks again"
        run.wait(lambda: again in run.screen, "a restart")
        assert "simulated fault: SIGKILL to rank 1 now" in run.screen
        logged = "\nStraggler report processing time: "  # by the callback; the launcher's own lines have a prefix
        run.wait(lambda: logged in run.screen.rpartition(again)[2], "a report")
        os.kill(told(tmp_path, "start-0")["pid"], signal.SIGUSR1)
        assert run.finish(30.0) == 75, run.screen
        assert f"Received signal {signal.SIGUSR1:d}, initiating graceful stop" in run.screen
        crash, stop = run.incidents()
        assert (crash["kind"], [each["rank"] for each in crash["culprits"]]) == ("crash", [1])
        assert stop["kind"] == "preemption"
    assert (tmp_path / "last.ckpt").exists()
    with (tmp_path / "1" / "metrics.csv").open() as file:
        scores = [float(row["section_relative_perf/fwd/min"]) for row in csv.DictReader(file)]
    assert scores
    assert all(0 < score <= 1 for score in scores)


@pytest.mark.release
def test_the_recipe_stops_at_its_threshold_and_at_nothing_else(tmp_path):
    """Of five ranks one that is 8 % slow is named, by an incident too, and no more; at a score of 0.6 all stop, saved.

    0.7 is the recipe's threshold; the node is named, and the code says that it is to be left out.
    """
    with job(tmp_path, "--nproc-per-node", "5", "--max-restarts", "1", "lightning_threshold.py") as run:
        run.wait(lambda: run.incidents(), "an incident of the rank that is 8 % slow")
        [named] = run.incidents()
        assert (named["kind"], named["action"]) == ("slow", "none"), run.screen
        assert [(each["rank"], each["section"]) for each in named["culprits"]] == [(3, "fwd")]
        reports = len(run.events("straggler", what="report"))
        run.wait(lambda: len(run.events("straggler", what="report")) >= reports + 2, "two reports more")
        assert not run.events("preempt_notice"), run.screen
        for score in run.events("straggler", what="report"):
            assert score["scores"].get("overall_relative_perf/min", 1.0) > 0.7
        (tmp_path / "told" / "slower").touch()
        assert run.finish(60.0) == 76, run.screen
        [incident] = run.incidents()
        assert (incident["id"], incident["kind"], incident["action"]) == (named["id"], "slow", "exclude_node")
        assert [each["rank"] for each in incident["culprits"]] == [3]
        assert "below 0.7 (stop_below_relative), slow in section fwd" in run.screen
        assert "leave out node" in run.screen
        assert run.screen.count("GPU kernels are not timed here") == 1
        assert "starting the ranks again" not in run.screen
    [stopped] = {told(tmp_path, f"step-{rank}")["step"] for rank in range(5)}
    assert torch.load(tmp_path / "last.ckpt", weights_only=False)["global_step"] == stopped


def test_gpu_scores_have_their_tables_and_metrics_and_stop_the_job(tmp_path):
    """By the kernels of one step now and then; a rank whose kernels are slow is named, and all stop, in NVRx's words.

    Operators of the CPU stand in for kernels. What timing them costs is said by rank 0, once.
    """
    with job(tmp_path, *RANKS, "lightning_kernels.py") as run:
        for said in ("GPU relative performance:", "GPU individual performance:", "GPU kernels are timed in one step"):
            run.wait(lambda said=said: said in run.screen, said)
        (tmp_path / "told" / "slower").touch()
        assert run.finish() == 76, run.screen
        screen = run.screen
        assert (
            "STRAGGLER DETECTION WARNING: Some GPUs have worse relative performance. "
            "Affected ranks: {StragglerId(rank=1, node='"
        ) in screen
        last = screen.rpartition("STRAGGLER DETECTION WARNING: ")[2]
        for table in ("GPU relative performance:\n  Rank=1 Node=", "GPU individual performance:\n  Rank="):
            assert table in last
        assert screen.index("Straggler report processing time: ") < screen.index("Detected stragglers. Terminating")
        assert screen.count("Detected stragglers. Terminating training...") == 1
        assert screen.count("GPU kernels are timed in one step every ") == 1
        assert "GPU kernels are not timed here" in screen  # the device of the trainer is a CPU
        [incident] = run.incidents()
        assert [each["rank"] for each in incident["culprits"]] == [1]
        assert "of its GPU" in incident["evidence"][0]["text"]
    with (tmp_path / "scores" / "metrics.csv").open() as file:
        *_, row = [row for row in csv.DictReader(file) if row.get("gpu_relative_perf/min")]
    relative = [float(row[f"gpu_relative_perf/{name}"]) for name in ("min", "median", "max")]
    assert 0 < relative[0] < 0.2 < relative[2] <= 1
    assert relative[0] <= relative[1] <= relative[2]
    assert all(0 < float(row[f"gpu_individual_perf/{name}"]) <= 1 for name in ("min", "median", "max"))
    assert (tmp_path / "last.ckpt").exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_scores_of_a_real_device(tmp_path):
    """The callback alone has kernels timed on it; both tables come of them, and sections are not spoken of."""
    with job(tmp_path, "--nproc-per-node", "1", "lightning_kernels.py", "cuda") as run:
        for table in ("GPU relative performance:\n  Rank=0 Node=", "GPU individual performance:\n  Rank=0 Node="):
            run.wait(lambda table=table: table in run.screen, table)
        assert "GPU kernels are not timed here" not in run.screen
        assert "the times of GPU kernels are not known" not in run.screen
        assert "GPU kernels are timed in one step every " in run.screen
