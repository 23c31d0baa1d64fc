"""The batch script: what it says, what bash reads in it, and which values are refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilience_sdk.cli.main import main
from resilience_sdk.cli.slurm import (
    ASKED_AND_FAILED,
    BatchScript,
    directive_value,
    node_script,
    quote,
    sort_words,
    time_limit_s,
)
from resilience_sdk.errors import ConfigError

PROJECT = Path(__file__).parents[3]
# All that a process can be given as an argument: any bytes but NUL.
arguments = st.lists(st.binary(max_size=12).map(lambda raw: os.fsdecode(raw.replace(b"\0", b"\n"))), max_size=4)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A script to be run, in a folder and an environment of its own."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("RESILIENCE_", "SLURM_", "PET_"))]:
        monkeypatch.delenv(name)
    (tmp_path / "train.py").write_text("")
    return "train.py"


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the batch script for these words, which bash can read."""
    assert main(["slurm", *words]) == 0
    text = capsys.readouterr().out
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""
    return text


def directives(text: str) -> list[str]:
    """Return what stands in the `#SBATCH` lines."""
    return [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]


def test_one_node(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without options: signal a minute before the end, requeue, one log, no rendezvous."""
    text = printed(capsys, script, "--lr", "1")
    assert directives(text) == [
        *("job-name=train", "nodes=1", "ntasks-per-node=1", "signal=TERM@60", "requeue", "open-mode=append"),
    ]
    assert "--rdzv" not in text
    assert "train.py --lr 1\n" in text


def test_the_job_finds_the_sdk_as_who_printed_its_script(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By PYTHONPATH, where that was the way (`pip install --target`), whatever environment the job gets."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert "PYTHONPATH" not in printed(capsys, script)
    monkeypatch.setenv("PYTHONPATH", "/my own/modules")
    assert "PYTHONPATH" not in printed(capsys, script)
    monkeypatch.setenv("PYTHONPATH", f"/my own/modules:{PROJECT}")
    assert f"\nexport PYTHONPATH='/my own/modules:{PROJECT}'  #" in printed(capsys, script)
    assert "PYTHONPATH" not in printed(capsys, "--python", "/other/python", script)


def test_several_nodes(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Options of sbatch stand in the script, one rank per GPU, and the nodes meet on the first of them."""
    options = ["--nodes=2", "-p", "gpu", "--gpus-per-node", "a100:4", "--time", "4:00:00", "--exclude", "n[1-3]"]
    text = printed(capsys, *options, "--sbatch", "hint=nomultithread", "--sbatch", "spread-job", script)
    wanted = {"nodes=2", "partition=gpu", "gpus-per-node=a100:4", "time=4:00:00", "exclude=n[1-3]"}
    assert wanted | {"hint=nomultithread", "spread-job"} <= set(directives(text))
    assert "--nproc-per-node 4 train.py" in text
    assert '--rdzv-endpoint "$head:$port"' in text


def test_signal_and_grace_agree(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whichever is given, the launcher is told the time that Slurm leaves it."""
    assert "signal=TERM@120" in directives(printed(capsys, "--preempt-time", "2min", script))
    assert "--preempt-time 300 train.py" in printed(capsys, "--signal", "TERM@300", script)
    both = printed(capsys, "--signal=USR1@90", "--preempt-signals", "SIGTERM,SIGUSR1,SIGUSR2", script)
    assert "signal=USR1@90" in directives(both)
    assert "trap asked=yes TERM USR1 USR2\n" in both


def test_the_run_directory_is_named_once(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is absolute, and tasks of an array have one each."""
    text = printed(capsys, "--run-dir", "runs/a b", "--array=0-3", script)
    assert f"run_dir='{tmp_path}/runs/a b'/\"$SLURM_ARRAY_TASK_ID\"\n" in text
    assert text.count("--run-dir") == 1


def test_json_names_the_parts(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` holds the script and what it was made of."""
    assert main(["slurm", "--json", "--max-job-retries", "5", script]) == 0
    told = json.loads(capsys.readouterr().out)
    assert sorted(told) == ["command", "directives", "retries", "run_dir", "script"]
    assert told["command"][-1] == "train.py"
    assert told["retries"] == 5
    assert told["directives"]["requeue"] is None
    assert told["script"].startswith("#!/bin/bash\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--partitoin", "gpu"], "did you mean --partition?"),
        (["--nprocpernode", "2"], "did you mean --nproc-per-node?"),
        (["--wckey=x"], "--sbatch wckey=x"),
        (["--nnodes", "2"], "give --nodes"),
        (["--rdzv-endpoint", "a:1"], "the script takes the rendezvous"),
        (["--fresh"], "every requeue would start over"),
        (["--nodes", "two"], "--nodes 'two': expected a number"),
        (["--time", "4h"], "--time '4h': expected minutes"),
        (["--time", "1"], "the job would stop at once"),
        (["--gpus-per-node", "all"], "--gpus-per-node 'all': expected a number"),
        (["--nproc-per-node", "gpus"], "expected a number, or one of auto"),
        (["--exclusive=user"], "takes no value"),
        (["--nodes"], "--nodes: a value is missing"),
        (["--signal", "TREM@60"], "did you mean TERM?"),
        (["--signal", "USR1@60"], "--preempt-signals SIGTERM,SIGUSR1"),
        (["--signal", "B:TERM@60"], "only the launchers can use the signal"),
        (["--signal", "TERM@x"], "expected NAME@SECONDS"),
        (["--signal", "TERM@30", "--preempt-time", "60"], "give --preempt-time 30 or less"),
        (["--preempt-time", "2d"], "Slurm's --signal allows 65535 s"),
        (["--heartbeat-timeout", "-1"], "above 0 s"),
        (["--comment", 'a "b"'], "a #SBATCH line cannot hold quotes"),
    ],
)
def test_mistakes(script: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line that names option, value and cure; nothing is printed that could be submitted."""
    rest = [] if words == ["--nodes"] else [script]
    assert main(["slurm", *words, *rest]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err
    assert len(said.err.splitlines()) == 1


def test_no_script(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Missing or misspelt, it is noticed now and not when the job starts."""
    assert main(["slurm", "--nodes", "2"]) == 2
    assert "no script given" in capsys.readouterr().err
    assert main(["slurm", "trian.py"]) == 2
    assert "did you mean 'train.py'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("1:30", 90), ("1:00:05", 3605), ("2-3", 183600), ("1-0:10", 87000), ("0-1:2:3", 3723)],
)
def test_time_limits_are_read_as_slurm_reads_them(text: str, seconds: float) -> None:
    """One number is minutes, two are minutes and seconds, but hours first where there are days."""
    assert time_limit_s(text) == seconds
    assert time_limit_s("UNLIMITED") == float("inf")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("one_node.sh", "--cpus-per-task 4 --time 30"),
        ("two_nodes.sh", "--nodes 2 --gpus-per-node 8 --cpus-per-task 64 --time 4:00:00 --run-dir /shared/runs/plane"),
    ],
)
def test_examples_are_what_is_printed(
    script: str, name: str, options: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both files in `examples/slurm/` come from this command as it is now."""
    monkeypatch.chdir(PROJECT)
    text = printed(capsys, *options.split(), "--python", "python", "examples/full_run.py")
    assert (PROJECT / "examples" / "slurm" / name).read_text() == text


@given(words=arguments)
@settings(deadline=None, max_examples=40)
def test_every_argument_survives_bash(words: list[str]) -> None:
    """Whatever bytes the words hold, the program that bash starts gets these words."""
    text = "printf '%s\\0' . " + " ".join(map(quote, words))
    assert "\r" not in text
    read = subprocess.run(["bash", "-c", os.fsencode(text)], capture_output=True, check=True).stdout
    assert read.split(b"\0")[1:-1] == [os.fsencode(word) for word in words]


@given(words=arguments)
@settings(deadline=None, max_examples=20)
def test_the_whole_script_stays_readable(words: list[str]) -> None:
    """No argument breaks out of the script, or becomes one of its directives."""
    made = BatchScript({"nodes": "1"}, ("train.py", *words), "/bin/python", None, False, False, 2).text()
    assert directives(made) == ["nodes=1"]
    assert subprocess.run(["bash", "-n"], input=os.fsencode(made), capture_output=True).stderr == b""


@given(value=st.text(max_size=12))
def test_a_directive_holds_its_value_or_is_refused(value: str) -> None:
    """What is written is one line and the value itself, in double quotes where there is more than plain letters."""
    forbidden = (
        not value or set(value) & set("\"'\\") or any(ord(letter) < 32 or ord(letter) == 127 for letter in value)
    )
    if forbidden:
        with pytest.raises(ConfigError, match="--comment"):
            directive_value("comment", value)
    else:
        assert directive_value("comment", value) in (value, f'"{value}"')


def test_words_after_the_script_are_its_own() -> None:
    """Options of the script are never taken for ours, also where they have the same name."""
    words = sort_words(
        ["--max-restarts", "1", "-r3", "-m", "a.b", "--time", "5"], {"--max-restarts": True, "-r": True, "-m": False}
    )
    assert words.run == ["--max-restarts", "1", "-r3", "-m"]
    assert words.script == ["a.b", "--time", "5"]
    assert words.sbatch == {}


def after(
    tmp_path: Path,
    *codes: int,
    state: str = "RUNNING",
    saves: str = "",
    away: int = 0,
    python: str = "/bin/python",
    shown: str | None = None,
    **more: str,
) -> tuple[int, list[str]]:
    """Run a script whose srun leaves with these codes in turn; return its own code and what was asked of Slurm.

    `saves` is a checkpoint that each run makes; the controller does not answer the first `away` questions.
    """
    made = BatchScript({}, ("train.py",), python, str(tmp_path / "run"), False, False, 2).text()
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "codes").write_text("".join(f"{code}\n" for code in codes))
    tools = tmp_path / "bin"
    tools.mkdir(exist_ok=True)
    asked = tmp_path / "asked"
    asked.write_text("")
    (tmp_path / "away").write_text("x\n" * away)
    saved = tmp_path / "run" / "checkpoints" / saves
    save = f"mkdir -p {saved}; touch {saved}/manifest.json; " if saves else ""
    code = f"code=$(head -n 1 {tmp_path}/codes); sed -i 1d {tmp_path}/codes"
    silent = f"if [ -s {tmp_path}/away ]; then sed -i 1d {tmp_path}/away; exit 1; fi"
    answer = f"{silent}; echo 'JobId=7 {shown or f'JobState={state} Reason=None'}'"
    for name, body in {
        "srun": f"{save}{code}; echo srun >> {asked}; exit $code",
        "scontrol": 'case "$1 $2" in "show hostnames") tr , "\\n" <<< "$3";; "show node") [[ $3 = n* ]];; '
        f'"show "*) {answer};; *) echo "$@" >> {asked};; esac',
        "sleep": f"echo sleep $1 >> {tmp_path}/slept",
    }.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    env = {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", **more}
    done = subprocess.run(["bash", "-c", made], env=env, capture_output=True, text=True, timeout=30, cwd=tmp_path)
    return done.returncode, asked.read_text().splitlines()


@pytest.mark.parametrize("code", [0, 2, 77, 130])
def test_final_exit_codes_end_the_job(tmp_path: Path, code: int) -> None:
    """Finished, bad usage, stop and a person's interrupt are neither repeated nor requeued."""
    assert after(tmp_path, code) == (code, ["srun"])


def test_a_preempted_job_is_requeued_unless_it_was_cancelled(tmp_path: Path) -> None:
    """75 goes back into the queue, as often as it comes after a new checkpoint; a job that is being ended does not."""
    for number in range(5):
        assert after(tmp_path, 75, saves=f"step-{number:08}") == (75, ["srun", "requeue 7"])
    assert after(tmp_path, 75, saves="step-00000007", state="CANCELLED") == (75, ["srun"])


def test_a_job_that_is_preempted_for_nothing_does_not_come_back_for_ever(tmp_path: Path) -> None:
    """Three in a row within a minute and without a checkpoint end it; what a person then requeues begins to count anew.

    A checkpoint in between is a new beginning too.
    """
    again, over = (75, ["srun", "requeue 7"]), (75, ["srun"])
    assert [after(tmp_path, 75) for _ in range(3)] == [again, again, over]
    assert [after(tmp_path, 75, saves=name) for name in ("", "", "step-00000001", "", "", "")] == [again] * 5 + [over]


def test_a_controller_that_is_away_for_a_moment_is_asked_again(tmp_path: Path) -> None:
    """Where it does not answer at all nothing is requeued blindly: the job may have been cancelled."""
    assert after(tmp_path, 75, away=3) == (75, ["srun", "requeue 7"])
    assert (tmp_path / "slept").read_text().split() == ["sleep", "1", "sleep", "2", "sleep", "4"]
    assert after(tmp_path, 75, away=9, saves="step-00000001") == (75, ["srun"])


def test_a_task_of_an_array_is_requeued_alone(tmp_path: Path) -> None:
    """One task has the number of the whole array as its job id; requeuing that would stop its siblings."""
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    assert after(tmp_path, 75, **array) == (75, ["srun", "requeue 7_3"])


def test_hardware_is_requeued_within_a_budget(tmp_path: Path) -> None:
    """76 is requeued twice; the third says which node to exclude."""
    for _ in range(2):
        assert after(tmp_path, 76) == (76, ["srun", "requeue 7"])
    assert after(tmp_path, 76) == (76, ["srun"])
    assert after(tmp_path, 76) == (76, ["srun", "requeue 7"])  # a person has requeued it


def test_suspect_nodes_are_left_out_when_the_job_comes_back(tmp_path: Path) -> None:
    """Beside those that it leaves out already, each once; not those of another cluster, which Slurm does not know."""
    sdk = tmp_path / "python"
    answer = f'echo "$@" >> {tmp_path}/questions; echo n3,elsewhere,n4'
    sdk.write_text(f'#!/bin/bash\nif [ "$3" = nodes ]; then {answer}; fi\n')
    sdk.chmod(0o755)
    told = ["srun", "requeue 7", "update JobId=7 ExcNodeList=n3,n4"]
    assert after(tmp_path, 75, python=str(sdk), saves="step-00000001") == (75, told)
    questions = (tmp_path / "questions").read_text()
    assert questions == f"-m resilience_sdk nodes --exclude-list --after {tmp_path}/run\n"
    shown = "JobState=RUNNING ExcNodeList=n1,n3 Reason=None"
    told[-1] = "update JobId=7 ExcNodeList=n1,n3,n4"
    assert after(tmp_path, 76, python=str(sdk), shown=shown) == (76, told)
    shown = "JobState=RUNNING ExcNodeList=n3,n4 Reason=None"
    assert after(tmp_path, 76, python=str(sdk), shown=shown) == (76, told[:2])


def test_a_history_that_does_not_answer_costs_a_job_nothing(tmp_path: Path) -> None:
    """It is asked before the job is looked at, so that one which is cancelled meanwhile is not requeued."""
    sdk = tmp_path / "python"
    sdk.write_text(f'#!/bin/bash\nif [ "$3" = nodes ]; then touch {tmp_path}/cancelled; echo n3; exit 124; fi\n')
    sdk.chmod(0o755)
    assert after(tmp_path, 75, python=str(sdk), saves="step-00000001") == (75, ["srun", "requeue 7"])
    state = f"$([ -e {tmp_path}/cancelled ] && echo CANCELLED || echo RUNNING)"
    (tmp_path / "cancelled").unlink()
    shown = f"'\"JobState={state}\"' Reason=None"
    assert after(tmp_path, 75, python=str(sdk), saves="step-00000002", shown=shown) == (75, ["srun"])


def test_other_failures_are_retried_in_the_allocation(tmp_path: Path) -> None:
    """A killed launcher and a spent budget: twice more, and what comes then counts."""
    killed = 128 + signal.SIGKILL
    assert after(tmp_path, killed, 0) == (0, ["srun", "srun"])
    assert after(tmp_path, 1, killed, 1) == (1, ["srun", "srun", "srun"])
    assert after(tmp_path, killed, 75) == (75, ["srun", "srun", "requeue 7"])


def on_a_node(tmp_path: Path, command: str, *signals: str) -> tuple[int, bool]:
    """Run what a node runs around a launcher that is this shell command; return its code and whether it ended the step.

    `$PPID` of the command is the process that Slurm would signal.
    """
    tools = tmp_path / "bin"
    tools.mkdir(exist_ok=True)
    (tools / "scancel").write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/ended\n')
    (tools / "scancel").chmod(0o755)
    env = {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2"}
    words = ["bash", "-c", node_script(("TERM", *signals)), "launch", "bash", "-c", command]
    code = subprocess.run(words, env=env, timeout=30, cwd=tmp_path).returncode
    ended = tmp_path / "ended"
    assert not ended.exists() or ended.read_text() == "--signal=KILL 7.2\n"
    return code, ended.exists()


def test_what_failed_when_it_was_to_leave_is_requeued_within_a_budget(tmp_path: Path) -> None:
    """A retry in the allocation would be cut off, and a free requeue would burn the next one: it stood still, say.

    The budget counts from the newest checkpoint.
    """
    assert on_a_node(tmp_path, "exit 1") == (1, False)
    assert on_a_node(tmp_path, "kill $PPID; exit 1") == (ASKED_AND_FAILED, False)
    again, over = (1, ["srun", "requeue 7"]), (1, ["srun"])
    names = ("", "step-00000001", "", "")
    assert [after(tmp_path, ASKED_AND_FAILED, saves=name) for name in names] == [again, again, again, over]


@pytest.mark.parametrize("code", [0, 2, 75, 76, 77, 130])
def test_what_a_launcher_says_is_what_a_node_says(tmp_path: Path, code: int) -> None:
    """Also where it was asked to leave, by the signal of Slurm, which does not end the shell around it."""
    assert on_a_node(tmp_path, f"exit {code}") == (code, False)
    assert on_a_node(tmp_path, f"kill $PPID; exit {code}") == (code, False)
    assert on_a_node(tmp_path, f"kill -USR1 $PPID; exit {code}", "USR1") == (code, False)
    assert on_a_node(tmp_path, f"kill -INT $PPID; kill -HUP $PPID; exit {code}") == (code, False)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_killed_launcher_ends_its_step_unless_it_was_to_leave(tmp_path: Path, number: int) -> None:
    """Launchers on other nodes would wait for it. After Slurm's signal it counts as preempted, or nothing would requeue
    the job.
    """
    assert on_a_node(tmp_path, f"kill $PPID; kill -{number:d} $$") == (75, False)
    assert on_a_node(tmp_path, f"kill -{number:d} $$") == (128 + number, True)


@pytest.mark.skipif(
    shutil.which("shellcheck") is None, reason="shellcheck is missing (Debian: apt-get install shellcheck)"
)
@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--nodes", "2", "--run-dir", "runs/a b", "--array", "0-3"],
        ["--signal", "USR1@9", "--preempt-signals", "SIGUSR1"],
    ],
)
def test_shellcheck_finds_nothing(script: str, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Not even in matters of style."""
    text = printed(capsys, *options, script, "it's", "two words")
    done = subprocess.run(["shellcheck", "--severity=style", "-"], input=text, capture_output=True, text=True)
    assert done.stdout == ""
