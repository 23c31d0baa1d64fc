"""Scripts written from the guides of NVIDIA's resiliency extension 0.4.1, unchanged, under what stands in its place."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import PROJECT, SCRIPTS, job

sys.path.insert(0, str(Path(__file__).parents[1]))
from adapter_frameworks import require

pytestmark = pytest.mark.slow
RANKS = ("--provide-nvrx", "--nproc-per-node", "2")
NVRX = SCRIPTS / "nvrx"
SECTIONS = "setup:60,step:2,checkpointing:2.5,forward:null"


def told(folder: Path, name: str):
    return json.loads((folder / "told" / name).read_text())


def test_a_hang_between_heartbeats_is_ended_and_timeouts_are_kept_over_jobs(tmp_path):
    """One rank sleeps: it is named and killed, the next attempt ends well; its timeouts win in the second job.

    There a configured one is far longer, and all ranks hang alike, of which no collective tells.
    """
    with job(tmp_path, *RANKS, "--ft-rank-heartbeat-timeout", "2", "nvrx/heartbeats.py", env={"HANG": "5:1"}) as run:
        assert run.finish() == 0, run.screen
        [hang] = run.incidents()
        assert (hang["kind"], [each["rank"] for each in hang["culprits"]]) == ("hang", [1])
        assert "--ft-rank-heartbeat-timeout=2 became heartbeat_timeout=2" in run.screen
        # What users of the original search their logs for stands beside our lines.
        assert re.search(r"rank 1: Did not get subsequent heartbeat\. Waited \d+\.\d\d seconds\.$", run.screen, re.M)
        pids = {e["pid"] for e in run.events("rank_start", attempt=0)}
        closed = {int(pid) for pid in re.findall(r"Sending process (\d+) closing signal SIGTERM", run.screen)}
        assert closed & pids
    first = [told(tmp_path, f"heartbeats-{rank}") for rank in (0, 1)]
    assert first[0]["state"] == first[1]["state"]
    assert first[0]["timeouts"]["were_calculated"]
    (tmp_path / "run" / "finished").unlink()
    short = ("--ft-param-workload_check_interval", "1.5", "--ft-rank-heartbeat-timeout", "999")
    with job(tmp_path, *RANKS, *short, "nvrx/heartbeats.py", env={"HANG": "5:all"}) as run:
        assert run.finish() == 0, run.screen
        assert [each["kind"] for each in run.incidents()] == ["hang", "hang"]
        assert "timeout=1.5" in run.screen
    second = told(tmp_path, "heartbeats-0")
    assert "were_calculated=True" in second["began"]
    assert second["timeouts"]["subsequent"] != first[0]["timeouts"]["subsequent"]


@pytest.mark.parametrize(
    ("hang", "section"),
    [
        ("outside", "between sections"),
        ("step", "step"),
        pytest.param("forward", "forward", marks=pytest.mark.release),
        pytest.param("checkpointing", "checkpointing", marks=pytest.mark.release),
    ],
)
def test_a_hang_is_ended_by_the_timeout_of_where_it_is(tmp_path, hang, section):
    """In a section, in one around it, or outside of all; what was measured is what the state has in the end."""
    options = ("--ft-rank-section-timeouts", SECTIONS, "--ft_rank_out_of_section_timeout=2")
    with job(tmp_path, *RANKS, *options, "nvrx/sections.py", env={"HANG": hang}) as run:
        assert run.finish() == 0, run.screen
        [incident] = run.incidents()
        assert [(each["rank"], each["section"]) for each in incident["culprits"]] == [(1, section)]
        assert incident["detection_latency_s"] < 20
    ends = [told(tmp_path, f"sections-{rank}") for rank in (0, 1)]
    assert ends[0] == ends[1]
    assert ends[0]["began"] == {
        "section": {"setup": 60, "step": 2, "checkpointing": 2.5, "forward": None},
        "out_of_section": 2,
    }
    found = ends[0]["state"]["current_timeouts"]["section"]
    assert found["calculated_sections"] == ["checkpointing", "step"]
    assert found["section"]["checkpointing"] >= 0.5
    assert found["section"]["setup"] == 60


@pytest.mark.release
def test_states_of_the_original_are_taken(tmp_path):
    """The same script under the original, with two ranks, keeps timeouts that count here."""
    if not (python := os.environ.get("NVRX_PYTHON")):
        pytest.skip("NVRX_PYTHON names no Python with nvidia_resiliency_ext 0.4.1")
    theirs = (python, "-m", "nvidia_resiliency_ext.fault_tolerance.launcher", "--standalone", "--nproc-per-node=2")
    script, env = NVRX / "heartbeats.py", {**os.environ, "TOLD": str(tmp_path / "told")}
    env.pop("PYTHONPATH", None)
    (tmp_path / "told").mkdir()
    subprocess.run([*theirs, "--ft-rank-heartbeat-timeout=60", script], env=env, timeout=120, check=True)
    kept = json.loads((tmp_path / "told" / "ft_state.json").read_text())["current_timeouts"]["heartbeat"]
    with job(tmp_path, *RANKS, "nvrx/heartbeats.py") as run:
        assert run.finish() == 0, run.screen
    assert told(tmp_path, "heartbeats-0")["began"].startswith(f"HeartbeatTimeouts(initial={kept['initial']:.2f}, ")


def test_a_rank_that_never_beats_is_ended(tmp_path):
    """The first heartbeat has a timeout of its own, which holds where no rank sends one."""
    options = ("--max-restarts", "0", "--ft-initial-rank-heartbeat-timeout", "2")
    with job(tmp_path, *RANKS, *options, "nvrx/heartbeats.py", env={"HANG": "0:all"}) as run:
        assert run.finish() == 1, run.screen
        [incident] = run.incidents()
        assert incident["kind"] == "hang"


@pytest.mark.parametrize(
    "when", ["after", *(pytest.param(n, marks=pytest.mark.release) for n in ("before", "late", "around"))]
)
def test_an_end_is_no_hang(tmp_path, when):
    """Before the first heartbeat, or long after the shutdown: all ranks leave with 0, nobody is ended.

    Nor is a client that begins late: the time to the first heartbeat counts from its start; nor a section without a
    timeout, in which heartbeats come.
    """
    options = ("--ft-initial-rank-heartbeat-timeout", "2", "--ft-rank-heartbeat-timeout", "2", "--max-restarts", "0")
    with job(tmp_path, *RANKS, *options, "nvrx/ends.py", env={"WHEN": when}) as run:
        assert run.finish() == 0, run.screen
        assert run.incidents() == []


def test_under_its_own_launcher(tmp_path):
    """One line of a job script finds `ft_launcher`; it takes its options and a file, and restarts nothing unasked."""
    place = command("nvrx", "--json")
    assert command("nvrx") == place["path"]
    config = tmp_path / "ft.yaml"
    config.write_text("train: {fault_tolerance: {rank_heartbeat_timeout: 2, node_health_check_interval: 7}}\n")
    options = (
        *("--nproc-per-node=2", f"--ft-cfg-path={config}", "--term-timeout=9", "--workers_stop_timeout", "5"),
        *("--ft-restart-policy=any-failed", f"--ft-per-cycle-applog-prefix={tmp_path}/logs/job.log"),
        *("--ft-enable-log-server", "true", "--ignore-missing-fault-tol-cfg", "--rdzv-backend=c10d", "--standalone"),
    )
    path = os.pathsep.join((place["path"], str(Path(sys.executable).parent), os.environ["PATH"]))
    script = NVRX / "heartbeats.py"
    env = {"PATH": path, "HANG": "5:1"}
    with job(tmp_path, *options, script, env=env, command=("ft_launcher",)) as run:
        assert run.finish() == 1, run.screen  # no restart is its default
        [hang] = run.incidents()
        assert [each["rank"] for each in hang["culprits"]] == [1]
        for said in (
            "--term-timeout=9 became preempt_time=9",
            "--workers_stop_timeout=5 became term_grace=5",
            "node_health_check_interval=7 became health_interval=7",
            "--ft-enable-log-server=true has no counterpart",
        ):
            assert said in run.screen
    assert list((tmp_path / "logs").rglob("stdout.log"))
    with job(tmp_path, "--max-restarts", "1", *options, script, env=env, command=("ft_launcher",)) as run:
        assert run.finish() == 0, run.screen


def command(*words: str):
    env = {**os.environ, "PYTHONPATH": str(PROJECT)}
    done = subprocess.run(
        [sys.executable, "-m", "resilience_sdk", *words],
        capture_output=True,
        text=True,
        env=env,
        timeout=60,
        check=True,
    )
    return json.loads(done.stdout) if "--json" in words else done.stdout.strip()


def test_the_straggler_is_named_on_rank_0(tmp_path):
    """By the section in which it is slow, with its node, in reports that come by themselves; the others get none."""
    with job(tmp_path, "--provide-nvrx", "--nproc-per-node", "3", "nvrx/stragglers.py") as run:
        assert run.finish() == 0, run.screen
    found = told(tmp_path, "stragglers-0")
    assert found["reports"] >= 1
    assert (found["relative"], found["who"]) == (["Trainer.forward"], [[1, "node-a"]])
    assert set(found["gpus"]) == {0}
    assert [told(tmp_path, f"stragglers-{rank}")["reports"] for rank in (1, 2)] == [0, 0]


@pytest.mark.parametrize(
    ("request_", "code", "verdict"),
    [("ShutdownWorkload", 77, "stop"), ("ExcludeThisNode", 76, "hardware"), ("Continue", 1, "give_up")],
)
def test_a_request_counts_when_the_attempt_fails(tmp_path, request_, code, verdict):
    """It is no failure itself; why is told, without what is secret in it."""
    env = {"REQUEST": request_, "EXIT": "5"}
    with job(tmp_path, "--provide-nvrx", "--max-restarts", "1", "nvrx/requests.py", env=env) as run:
        assert run.finish() == code, run.screen
        outcome = run.outcome()
        assert outcome["verdict"] == verdict
        if request_ != "Continue":
            assert "a rank asked " in outcome["reason"]
            assert "the data is bad" in outcome["reason"]
            assert "abcdefgh12345678" not in run.screen + json.dumps(outcome)


def test_a_request_of_an_attempt_that_ends_well_counts_for_nothing(tmp_path):
    """As there: it is looked at when ranks are to start again."""
    env = {"REQUEST": "ShutdownWorkload", "EXIT": "0"}
    with job(tmp_path, "--provide-nvrx", "nvrx/requests.py", env=env) as run:
        assert run.finish() == 0, run.screen


@pytest.mark.parametrize("sections", [pytest.param("", marks=pytest.mark.release), "1"])
def test_the_callbacks_of_lightning(tmp_path, sections):
    """Unchanged; training is complete, which the flag of the original says."""
    require("lightning.pytorch", "lightning")
    flag = tmp_path / "flag"
    env = {"FAULT_TOL_FINISHED_FLAG_FILE": str(flag), "SECTIONS": sections}
    with job(tmp_path, *RANKS, "nvrx/lightning_script.py", env=env) as run:
        assert run.finish() == 0, run.screen
        assert run.events("first_beat")
        assert "ft_launcher" not in run.screen
    assert [told(tmp_path, f"lightning-{rank}") for rank in (0, 1)] == [8, 8]
    assert flag.exists()


def test_refused_where_the_real_one_is_installed(tmp_path):
    """Which of the two is meant must not depend on the order of a path; nothing is started."""
    (tmp_path / "site" / "nvidia_resiliency_ext" / "fault_tolerance").mkdir(parents=True)
    env = {"PYTHONPATH": os.pathsep.join((str(PROJECT), str(tmp_path / "site")))}
    with job(tmp_path, *RANKS, "nvrx/heartbeats.py", env=env, fresh=True) as run:
        assert run.finish() == 2
        assert "nvidia_resiliency_ext itself is installed" in run.screen
        assert "pip uninstall nvidia-resiliency-ext" in run.screen
