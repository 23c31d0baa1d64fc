"""Bad input of every kind: one clear line that names the thing, the value and the cure; never a traceback of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.harness import PROJECT, SCRIPTS, job

TRAINING = SCRIPTS / "beating.py"


def resilience(*words: str, env: dict[str, str] | None = None, cwd: Path | None = None):
    """Run the command line to its end."""
    return subprocess.run(
        [sys.executable, "-m", "resilience_sdk", *words],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": ":".join([str(PROJECT), *sys.path]), **(env or {})},
        cwd=cwd or SCRIPTS,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def refused(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    """Assert exit code 2 and one explanation with all these parts, and nothing from inside."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in done.stderr


# Command line, extra environment, and what the one explanation must name.
REFUSED: list[tuple[list[str], dict[str, str], list[str]]] = [
    (["run", "--nproc-per-nod", "2", "beating.py"], {}, ["--nproc-per-nod", "--nproc-per-node"]),
    (["run", "--heartbeat-timeot", "3", "beating.py"], {}, ["--heartbeat-timeot", "--heartbeat-timeout"]),
    (["run", "--heartbeat-timeout", "soon", "beating.py"], {}, ["heartbeat", "soon"]),
    (["run", "--on-hang", "explode", "beating.py"], {}, ["on-hang", "explode", "restart"]),
    (["run", "--section-timeouts", "checkpoint=900", "beating.py"], {}, ["section", "checkpoint=900"]),
    (["run", "--dump-signal", "SIGNOPE", "beating.py"], {}, ["dump", "SIGNOPE"]),
    (["run", "--config", "/nowhere/settings.yaml", "beating.py"], {}, ["/nowhere/settings.yaml"]),
    (["run", "beatin.py"], {}, ["beatin.py", "beating.py"]),
    (["run"], {}, ["script"]),
    (["runn", "beating.py"], {}, ["runn", "run"]),
    (["status", "/nowhere/at/all"], {}, ["/nowhere/at/all"]),
    (["why", "beating.py"], {}, ["beating.py"]),
    (["run", "beating.py"], {"RESILIENCE_HEARTBEAT_TIMEOT": "3"}, ["HEARTBEAT_TIMEOT", "RESILIENCE_HEARTBEAT_TIMEOUT"]),
    (["run", "beating.py"], {"RESILIENCE_MAX_RESTARTS": "many"}, ["RESILIENCE_MAX_RESTARTS", "many"]),
    (["run", "beating.py"], {"RESILIENCE_FAULT": "hong:rank=1"}, ["hong", "hang"]),
    (["run", "beating.py"], {"RESILIENCE_FAULT": "hang:rank=one"}, ["rank", "one"]),
    (["run", "beating.py"], {"RESILIENCE_CONFIG": "/nowhere.toml"}, ["/nowhere.toml"]),
    (["run", "--config", "key.yaml", "beating.py"], {}, ["key.yaml", "heartbeat_timeot", "heartbeat_timeout"]),
    (["run", "--config", "value.yaml", "beating.py"], {}, ["value.yaml", "heartbeat_timeout", "never"]),
    (["run", "--config", "value.toml", "beating.py"], {}, ["value.toml", "max_restarts", "-1"]),
    (["run", "--config", "torn.yaml", "beating.py"], {}, ["torn.yaml"]),
    (["run", "--config", "nvrx.yaml", "beating.py"], {}, ["rank_heartbeat_timeout", "soon"]),
]
FILES = {
    "key.yaml": "heartbeat_timeot: 3\n",
    "value.yaml": "heartbeat_timeout: never\n",
    "value.toml": "max_restarts = -1\n",
    "torn.yaml": "{[broken\n",
    "nvrx.yaml": "fault_tolerance:\n  rank_heartbeat_timeout: soon\n",
}
# All in one process, because each launcher has to import torch.
RUN_ALL = """
import contextlib, io, json, os, sys
from resilience_sdk.cli.main import main

answers = []
for words, extra in json.load(sys.stdin):
    os.environ.update(extra)
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            code = main(words)
        except SystemExit as left:
            code = left.code
        except BaseException as error:
            code = f"Traceback: {error!r}"
    for name in extra:
        del os.environ[name]
    answers.append((code, said.getvalue()))
json.dump(answers, sys.stdout)
"""


def test_everything_is_checked_before_anything_starts(tmp_path):
    """Options, values, variables, files and paths: exit 2, with the thing, the value and the nearest match."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "beating.py").write_text("raise SystemExit('started')\n")
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL],
        input=json.dumps([(words, extra) for words, extra, _ in REFUSED]),
        env={"PATH": os.environ["PATH"], "PYTHONPATH": ":".join([str(PROJECT), *sys.path])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    for (words, extra, parts), (code, said) in zip(REFUSED, json.loads(done.stdout), strict=True):
        assert code == 2, (words, extra, code, said)
        assert "Traceback" not in said, said
        assert all(part in said for part in parts), (words, extra, said)
    assert not (tmp_path / "resilience-runs").exists()


def test_in_a_rank_a_bad_variable_is_one_warning(tmp_path):
    """A running training is not ended by a typo in a shell profile: one line, and the default holds."""
    code = "from resilience_sdk import heartbeat\nwith heartbeat(): pass\nprint('trained')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": ":".join([str(PROJECT), *sys.path]),
            "RESILIENCE_HEARTBEAT_TIMEOUT": "soon",
            "RESILIENCE_FAULT": "hong",
            "RESILIENCE_RUN_DIR": str(tmp_path / "run"),
            "RESILIENCE_PAGE_DIR": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert done.stderr.count("RESILIENCE_HEARTBEAT_TIMEOUT") == 1
    assert done.stderr.count("RESILIENCE_FAULT is ignored") == 1
    assert "Traceback" not in done.stderr


def test_a_run_directory_in_use_is_refused(tmp_path):
    """A second job on the directory of a living one is told who uses it, and starts nothing."""
    with job(tmp_path, str(TRAINING), str(tmp_path / "end"), str(tmp_path / "beats")) as first:
        first.wait_event("first_beat")
        refused(resilience("run", "--run-dir", str(first.run_dir), str(TRAINING)), "in use", str(first.run_dir))
        (tmp_path / "end").touch()
        assert first.finish() == 0


AS_ANOTHER_USER = """
import os, sys
from resilience_sdk.cli.main import main

main(["status", sys.argv[1]])  # loads what the command needs, which the other user may not be able to read
sys.stdout.flush()
os.setresuid(65534, 65534, 65534)
sys.exit(main(["status", sys.argv[1]]))
"""


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="needs root to become another user")
def test_a_directory_that_cannot_be_read_is_named(tmp_path):
    """Who may not read a run directory is told so, and whom to ask."""
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    (run / "journal").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", AS_ANOTHER_USER, str(run)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": ":".join([str(PROJECT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    refused(done, str(run))


def test_torn_and_misshapen_files_are_named_not_fatal(tmp_path):
    """A torn journal line is skipped and counted, a garbage report is there and says so."""
    run = tmp_path / "run"
    incident = run / "incidents" / "0001-hang"
    incident.mkdir(parents=True)
    (run / "journal").mkdir()
    (run / "checkpoints").mkdir()
    whole = {"v": 1, "t": 1.0, "event": "run_start", "job": "j", "attempt": 0, "rank": None}
    (run / "journal" / "a.jsonl").write_text(json.dumps(whole) + "\n" + '{"v":1,"t":2.0,"eve')
    (run / "journal" / "b.jsonl").write_bytes(b"\xff\xfe\0garbage\n[1,2]\n{}\n")
    (incident / "report.json").write_text('{"id": "0001-hang", "culprits": 7, "victims": "x"')
    (run / "outcome.json").write_text("not json")
    for words in (["status"], ["why"], ["status", "--json"], ["why", "--json"]):
        done = resilience(*words, str(run))
        assert "Traceback" not in done.stderr, done.stderr
        assert done.stdout.strip()
        if words[-1] == "--json":
            json.loads(done.stdout)
    assert "4" in resilience("status", str(run)).stdout + resilience("status", str(run)).stderr
    assert json.loads(resilience("why", "--json", str(run)).stdout)["incidents"][0]["id"] == "0001-hang"
    refused(resilience("outcome", str(run)), "outcome.json")
