"""What is no file under the name of a file, a FIFO, socket, device or directory, blocks no command and no launcher."""

import contextlib
import io
import os
import shutil
import signal
import socket
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from launcher_runs import SCRIPTS, launch

from resilience_sdk.cli import main as cli

ONE = ["--nproc-per-node", "1", "--max-restarts", "0"]
CODE = "exit-code"
LATER_S = 120
MAX_S = 10  # an open that waits, waits for ever
FILES = (
    "journal/zz.jsonl",
    "lease.json",
    "timeouts.json",
    "outcome.json",
    "writer.json",
    "preempt",
    "report.html",
    "incidents/0001-crash/report.json",
    "incidents/0001-crash/stacks/rank-0.txt",
    "incidents/0001-crash/pages/rank-0.json",
    "checkpoints/step-00000120/manifest.json",
    "stragglers/report.json",
)
READ_BY_COMMANDS = FILES[:2] + FILES[3:4] + FILES[7:8]
KINDS = ("fifo", "socket", "directory", "device", "link")
COMMANDS = (["status"], ["why"], ["goodput"], ["outcome"], ["report"], ["top", "--once"], ["diagnose"], ["preempt"])
WORDS = {"fifo": "a FIFO", "socket": "a socket", "directory": "a directory", "device": "a device", "link": "a FIFO"}


def put(path: Path, kind: str) -> None:
    """Put something of that kind in the place of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(path.parent)  # the name of a socket may have 107 bytes
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
        os.chdir(here)
    elif kind == "directory":
        path.mkdir()
    elif kind == "device":
        if os.geteuid() != 0:
            pytest.skip("devices are made by root alone")
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(5, 0))  # a terminal: to read from it waits for somebody
    else:
        fifo = path.with_name(f"fifo-of-{path.name}")
        if not fifo.exists():
            os.mkfifo(fifo)
        path.symlink_to(fifo)


def answers(commands: Sequence[Sequence[str]], out: Path) -> tuple[list[int], str]:
    """Run command lines in a child of this process that is killed when one waits; return their codes, and what is said.

    One that was killed for it has no code.
    """
    pid = os.fork()
    if not pid:
        with open(out, "wb", buffering=0) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        try:
            for argv in commands:
                signal.alarm(MAX_S)
                print(CODE, cli.main(argv), flush=True)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    lines = out.read_text(errors="replace").splitlines()
    return [int(line.split()[1]) for line in lines if line.startswith(CODE)], "\n".join(lines)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run with an incident."""
    place = tmp_path_factory.mktemp("other-kinds")
    run = launch(place, *ONE, "--checkpoint-every", "1", "dying.py", "raise")
    assert run.finish() != 0
    assert run.incidents()
    for argv in COMMANDS[:-1]:  # loads what the children then have
        with contextlib.redirect_stdout(io.StringIO()):
            cli.main([*argv, str(run.run_dir)])
    return run.run_dir


@pytest.fixture
def copied(finished_run: Path, tmp_path: Path) -> Path:
    """Return a copy of the run, in which things can be put."""
    target = tmp_path / "run"
    shutil.copytree(finished_run, target)
    target.chmod(0o700)
    return target


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FILES)
def test_no_command_waits(copied: Path, tmp_path: Path, name: str, kind: str):
    """Every command that reads a run directory answers, whatever stands under the name of a file in it."""
    put(copied / name, kind)
    codes, said = answers([[*argv, str(copied)] for argv in COMMANDS], tmp_path / "said")
    assert len(codes) == len(COMMANDS), said
    assert set(codes) <= {0, 1, 2}, said
    assert "Traceback" not in said
    if name in READ_BY_COMMANDS:
        assert f"it is {WORDS[kind]}, not a file" in said
        assert name.rpartition("/")[2] in said


IN_THE_WAY = (
    *("timeouts.json", "outcome.json", "preempt", "report.html", "journal/zz.jsonl", "incidents/.lock"),
    *("stragglers/verdicts.json", "logs"),
)


@pytest.mark.slow
def test_a_job_goes_on_over_what_is_no_file(tmp_path: Path):
    """Launcher, monitor and ranks begin, restart and end as ever, and say what they cannot read or write."""
    run_dir = tmp_path / "run"
    for name in ("", "journal", "incidents", "checkpoints"):
        (run_dir / name).mkdir(mode=0o700)
    for name in IN_THE_WAY:
        put(run_dir / name, "fifo")
    run = launch(tmp_path, "--nproc-per-node", "1", "--max-restarts", "1", "dying.py", "raise", run_dir=run_dir)
    assert run.finish(LATER_S) == 77, run.err  # the same error twice
    assert len(run.incidents()) == 2
    assert run.outcome()["verdict"] == "stop"
    assert f"{run_dir / 'timeouts.json'} is not read: it is a FIFO, not a file; remove it" in run.err
    assert "no logs of the ranks can be written" in run.err
    assert "Traceback" not in run.err.replace("Traceback (most recent call last):\n  File", "", 2)


@pytest.mark.slow
def test_a_lease_that_is_no_file_refuses_the_job_at_once(tmp_path: Path):
    """Whether another job is there cannot be known; the line names the path and the cure."""
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    put(run_dir / "lease.json", "fifo")
    run = launch(tmp_path, *ONE, "dying.py", "raise", run_dir=run_dir)
    assert run.finish(LATER_S) == 2
    assert f"cannot write {run_dir / 'lease.json'}: it is a FIFO, not a file; remove it, or name another" in run.err


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "words",
    [
        ["run", "--config", "PATH", str(SCRIPTS / "dying.py")],
        ["diagnose", "PATH"],
        ["history", "--db", "PATH"],
        ["nodes", "--db", "PATH"],
    ],
    ids=lambda words: words[0],
)
def test_a_path_that_is_named_is_refused_at_once(tmp_path: Path, words: list[str], kind: str):
    """Of a configuration, a log, a database: by its name, with what it is."""
    put(tmp_path / "named", kind)
    argv = [word.replace("PATH", str(tmp_path / "named")) for word in words]
    codes, said = answers([argv], tmp_path / "said")
    if words[0] == "diagnose" and kind == "directory":
        assert codes == [2]
        assert "there is no file in" in said
        return
    assert codes == [2], said
    assert str(tmp_path / "named") in said
    assert f"it is {WORDS[kind]}" in said


def test_a_pipe_of_the_users_shell_is_a_log(tmp_path: Path):
    """`resilience diagnose <(kubectl logs pod)`: it has a writer."""
    reading, writing = os.pipe()
    os.write(writing, b"RuntimeError: CUDA out of memory. Tried to allocate 20 MiB\n")
    os.close(writing)
    codes, said = answers([["diagnose", f"/dev/fd/{reading}"]], tmp_path / "said")
    os.close(reading)
    assert codes == [0], said
    assert "gpu_out_of_memory" in said or "out of memory" in said
