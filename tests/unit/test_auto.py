"""`python -m resilience_sdk.auto`: a script runs as under plain python, and is watched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from resilience_sdk.core.journal import read_journal

PROJECT = Path(__file__).resolve().parent.parent.parent
AUTO = ("-m", "resilience_sdk.auto")
SCRIPT = """
import atexit, json, os, signal, sys, threading
import neighbour
assert "torch" not in sys.modules
atexit.register(print, "atexit")
facts = {
    "name": __name__,
    "file": __file__ if "__file__" in globals() else None,
    "spec": __spec__ and __spec__.name,
    "package": __package__,
    "globals": sorted(globals()),
    "main": sys.modules["__main__"].__dict__ is globals(),
    "argv": sys.argv,
    "path": sys.path[:2],
    "neighbour": neighbour.__file__,
    "annotations": __annotations__,
    "docstring": __doc__,
}
print(json.dumps(facts))
how = sys.argv[1:2]
if how == ["exit"]:
    sys.exit(7)
if how == ["message"]:
    sys.exit("no data")
if how == ["raise"]:
    def innermost():
        raise ValueError("the loss is not a number")
    innermost()
if how == ["kill"]:
    os.kill(os.getpid(), signal.SIGKILL)
if how == ["interrupt"]:
    raise KeyboardInterrupt
if how == ["thread"]:
    threading.Thread(target=lambda: print("thread")).start()
"""


@pytest.fixture
def python(tmp_path):
    """Run python in a folder with a script, a module beside it, and a package; pages and runs are private."""
    for name in ("pages", "pack", "elsewhere"):
        (tmp_path / name).mkdir()
    for folder in (tmp_path, tmp_path / "pack"):
        (folder / "train.py").write_text(SCRIPT)
        (folder / "neighbour.py").write_text("")
    (tmp_path / "pack" / "__init__.py").write_text("")
    env = {
        "PYTHONPATH": str(PROJECT),
        "PATH": os.defpath,
        "RESILIENCE_PAGE_DIR": str(tmp_path / "pages"),
        "RESILIENCE_RUN_DIR": str(tmp_path / "run"),
    }

    def run(*words: str, **settings: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=env | settings, capture_output=True, text=True, timeout=60
        )

    return run


@pytest.mark.parametrize(
    "words",
    [
        ("train.py", "--lr", "0.1", "two words"),
        ("./pack/train.py", "-h"),
        ("-m", "train", "-m", "x"),
        ("-m", "pack.train"),
        ("train.py", "exit"),
        ("train.py", "message"),
        ("train.py", "raise"),
        ("-m", "pack.train", "raise"),
        ("train.py", "interrupt"),
        ("train.py", "kill"),
        ("train.py", "thread"),
    ],
)
def test_a_script_cannot_tell(python, words):
    """Its globals, arguments, path, output, traceback and exit code are those of plain python."""
    plain, auto = python(*words), python(*AUTO, *words)
    assert auto.stdout == plain.stdout
    assert auto.returncode == plain.returncode
    ours = "".join(line for line in auto.stderr.splitlines(True) if not line.startswith("resilience: "))
    assert ours == plain.stderr


def test_the_script_is_watched(python, tmp_path):
    """It has a rank's journal, with the name of the script."""
    assert python(*AUTO, "train.py").returncode == 0
    events = read_journal(tmp_path / "run" / "journal").events
    assert [event["script"] for event in events if event["event"] == "rank_start"] == ["train.py"]


def test_an_uncaught_exception_is_explained(python, tmp_path):
    """The monitor's incident has the exception and the frames of the script."""
    python(*AUTO, "train.py", "raise")
    (report,) = _wait_for(tmp_path / "run/incidents", "*/report.json")
    found = json.loads(report.read_text())
    assert found["cause"] == "user_code_error"
    innermost, outer, *_ = found["culprits"][0]["stack"]
    assert innermost.startswith(f"{tmp_path}/train.py:")
    assert (innermost.split()[1], outer.split()[1]) == ("innermost", "<module>")


def test_switched_off_it_only_runs_the_script(python, tmp_path):
    """One line, and nothing is made."""
    done = python(*AUTO, "train.py", RESILIENCE_DISABLE="1")
    assert done.returncode == 0
    assert done.stderr == "resilience: switched off (RESILIENCE_DISABLE): nothing is watched, recorded or restarted\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "no script given; usage: python -m resilience_sdk.auto"),
        (("-m",), "no module given; usage"),
        (("--lr", "1", "train.py"), "unknown option --lr; usage"),
        (("trian.py",), "script 'trian.py' does not exist; did you mean 'train.py'?"),
    ],
)
def test_bad_usage_is_one_line_and_2(python, words, said):
    """What is wrong and what would be right."""
    done = python(*AUTO, *words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"resilience: {said}")
    assert len(done.stderr.splitlines()) == 1


def test_help(python):
    """`--help` is answered."""
    done = python(*AUTO, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: python -m resilience_sdk.auto [-m] script.py|module [arguments]" in done.stdout


def test_safe_path_keeps_the_scripts_folder_out(python, tmp_path):
    """`-P` and PYTHONSAFEPATH mean the same as without us."""
    (tmp_path / "bare.py").write_text("import sys; print(sys.path[0])")
    if sys.version_info < (3, 11):
        pytest.skip("python has no safe path before 3.11")
    plain, auto = (python(*words, "bare.py", PYTHONSAFEPATH="1") for words in ((), AUTO))
    assert auto.stdout == plain.stdout


def _wait_for(folder: Path, pattern: str) -> list[Path]:
    import time

    until = time.monotonic() + 20
    while not (found := list(folder.glob(pattern))) and time.monotonic() < until:
        time.sleep(0.02)
    return found
