"""What a person, a disk or another job gets wrong: one line that names the thing, the value and the cure.

Never a traceback from inside, and never silence.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import attrs
import pytest
from harness import PROJECT, SCRIPTS, job

from resilience_sdk.core.lease import Lease
from resilience_sdk.core.run_directory import RunDirectory

NOBODY = 65534
_KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "VIRTUAL_ENV")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def environment(**settings):
    """An environment in which nothing is set but what a test sets."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return {**kept, "PYTHONPATH": str(PROJECT), **settings}


@pytest.fixture(scope="module")
def passable():
    """A directory that other users may go through: those of pytest are closed again by each session that starts."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


# -- the command line

RENDEZVOUS = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "h:1")
# name: (arguments of `run`, environment, what is said)
USAGE = {
    "unknown option": (["--heartbeat-timout", "3", "light.py"], {}, ["--heartbeat-timout", "--heartbeat-timeout?"]),
    "unknown option of torchrun": (["--nproc_per_nodes", "2", "light.py"], {}, ["--nproc_per_node?"]),
    "option after =": (["--on-hnag=kill", "light.py"], {}, ["unknown option --on-hnag;", "--on-hang?"]),
    "no script": (["--nproc-per-node", "2"], {}, ["no script given", "usage: resilience run"]),
    "missing value": (["--heartbeat-timeout"], {}, ["--heartbeat-timeout", "expected one argument"]),
    "missing script": (["lihgt.py"], {}, ["'lihgt.py' does not exist", "light.py"]),
    "missing folder": (["no/where/train.py"], {}, ["there is no folder 'no/where'"]),
    "no number": (["--heartbeat-timeout", "soon", "light.py"], {}, ["--heartbeat-timeout", "'soon'", "seconds"]),
    "negative": (["--heartbeat-timeout=-3", "light.py"], {}, ["--heartbeat-timeout", "-3"]),
    "not finite": (["--hang-cap", "nan", "light.py"], {}, ["--hang-cap", "nan"]),
    "no choice": (["--on-hang", "restrat", "light.py"], {}, ["--on-hang", "restrat", "restart"]),
    "no count": (["--max-restarts", "-1", "light.py"], {}, ["--max-restarts", "-1"]),
    "no ranks": (["--nproc-per-node", "many", "light.py"], {}, ["--nproc-per-node", "many"]),
    "no nodes": (["--nnodes", "x", "light.py"], {}, ["--nnodes", "'x'", "MIN:MAX"]),
    "zero ranks": (["--nproc-per-node", "0", "light.py"], {}, ["--nproc-per-node 0", "1 rank or more", "auto"]),
    "ranks below zero": (["--nproc-per-node", "-1", "light.py"], {}, ["--nproc-per-node -1", "1 rank or more"]),
    "zero ranks by variable": (["light.py"], {"PET_NPROC_PER_NODE": "0"}, ["--nproc-per-node 0"]),
    "zero nodes": (["--nnodes", "0", "light.py"], {}, ["--nnodes 0", "MIN:MAX"]),
    "nodes below zero": (["--nnodes=-1", "light.py"], {}, ["--nnodes -1", "MIN:MAX"]),
    "more nodes than the most": (["--nnodes", "3:2", "light.py"], {}, ["--nnodes 3:2", "MIN:MAX"]),
    "no such node": (
        ["--nnodes", "2", "--node-rank", "2", "--master-addr", "localhost", "light.py"],
        {},
        ["--node-rank 2", "--nnodes 2", "0 to 1"],
    ),
    "node below zero": (["--nnodes", "2", "--node-rank=-1", "light.py"], {}, ["--node-rank -1", "0 to 1"]),
    "no port": (["--nnodes", "2", "--master-port", "65536", "light.py"], {}, ["--master-port 65536", "65535"]),
    "no time to join": (
        ["--nnodes", "2", *RENDEZVOUS, "--rdzv-conf", "join_timeout=-5", "light.py"],
        {},
        ["--rdzv-conf join_timeout=-5", "above 0"],
    ),
    "no interval": (["--monitor-interval=-1", "light.py"], {}, ["--monitor-interval", "-1"]),
    "no rendezvous": (["--rdzv-backend", "bogus", "light.py"], {}, ["--rdzv-backend", "'bogus'", "c10d"]),
    "no signal": (["--dump-signal", "SIGWHAT", "light.py"], {}, ["--dump-signal", "SIGWHAT"]),
    "no pairs": (["--section-timeouts", "checkpoint", "light.py"], {}, ["--section-timeouts", "checkpoint:"]),
    "unknown variable": (
        ["light.py"],
        {"RESILIENCE_HEARTBEAT_TIMOUT": "3"},
        ["RESILIENCE_HEARTBEAT_TIMOUT='3'", "RESILIENCE_HEARTBEAT_TIMEOUT?"],
    ),
    "bad variable": (["light.py"], {"RESILIENCE_TIMEOUT_FLOOR": "low"}, ["RESILIENCE_TIMEOUT_FLOOR", "'low'"]),
    "bad fault": (["light.py"], {"RESILIENCE_FAULT": "hag:rank=1"}, ["RESILIENCE_FAULT", "'hag'", "'hang'"]),
    "bad fault value": (["light.py"], {"RESILIENCE_FAULT": "hang:rank=one"}, ["RESILIENCE_FAULT", "rank=one"]),
    "missing config": (["--config", "no.yaml", "light.py"], {}, ["no.yaml"]),
    "missing config by name": (["light.py"], {"RESILIENCE_CONFIG": "no.toml"}, ["RESILIENCE_CONFIG", "no.toml"]),
}  # fmt: skip
_TENFOLD = ", ".join(["*{0}"] * 10)
BOMB = "a: &a [x]\n" + "".join(
    f"{name}: &{name} [{_TENFOLD.format(before)}]\n" for before, name in zip("abcdefghij", "bcdefghijk", strict=True)
)
BOMB_OF_MERGES = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{_TENFOLD.format(before)}]}}\n"
    for before, name in zip("abcdefghij", "bcdefghijk", strict=True)
)
CONFIGS = {
    "unknown key": ("a.yaml", "heartbeat_timout: 3\n", ["a.yaml", "heartbeat_timout", "heartbeat_timeout"]),
    "bad value": ("b.toml", 'timeout_floor = "low"\n', ["b.toml", "timeout_floor", "'low'"]),
    "no YAML": ("c.yaml", "a: [1, 2\n", ["c.yaml"]),
    "no TOML": ("d.toml", "a = = 1\n", ["d.toml"]),
    "no mapping": ("e.yaml", "- 1\n- 2\n", ["e.yaml"]),
    "code": ("f.yaml", "!!python/object/apply:os.system ['true']\n", ["f.yaml"]),
    "a directory": ("", "", ["cannot", "directory"]),
    "aliases without end": ("g.yaml", BOMB, ["g.yaml", "10,000 values", "aliases"]),
    "merges without end": ("h.yaml", BOMB_OF_MERGES, ["h.yaml", "10,000 values", "aliases"]),
    "holds itself": ("i.yaml", "a: &a [*a]\n", ["i.yaml", "aliases"]),
    "nested": ("j.yaml", "a: " + "[" * 20_000, ["j.yaml", "not valid YAML"]),
    "nested TOML": ("k.toml", "a = " + "[" * 20_000, ["k.toml", "not valid TOML"]),
    "huge": ("l.yaml", "# much\n" * 200_000, ["l.yaml", "1 MiB"]),
    "binary": ("m.yaml", "\0\1\2", ["m.yaml", "not valid YAML"]),
    "a long value": ("n.yaml", f"timeout_floor: {'x' * 500_000}\n", ["n.yaml", "timeout_floor", "..."]),
    "a broken tag": ("o.yaml", "timeout_floor: !!bool maybe\n", ["o.yaml", "not valid YAML"]),
}


@attrs.define
class Cases:
    """Command lines that are run together."""

    asked: list = attrs.field(factory=list)
    names: list = attrs.field(factory=list)

    def add(self, name, argv, *, uid=None, **env):
        """Ask for one."""
        self.names.append(name)
        self.asked.append({"argv": [str(word) for word in argv], "env": env} | ({} if uid is None else {"uid": uid}))

    def run(self):
        """Run all and return `{name: (code, out, err)}`."""
        done = subprocess.run(
            [sys.executable, "cases.py"],
            cwd=SCRIPTS,
            env=environment(),
            input=json.dumps(self.asked),
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        return dict(zip(self.names, json.loads(done.stdout), strict=True))


@pytest.fixture(scope="module")
def refused(passable):
    """Everything that `run` must refuse before it starts a rank."""
    folder = passable / "refused"
    folder.mkdir(mode=0o755)
    cases = Cases()
    runs = folder / "runs"
    for name, (argv, env, _) in USAGE.items():
        cases.add(name, ["run", "--run-dir", runs, *argv], **env)
    for name, (file, text, _) in CONFIGS.items():
        path = folder / file if not file else write(folder / file, text)
        cases.add(f"config: {name}", ["run", "--config", path, "--run-dir", runs, "light.py"])
    os.mkfifo(folder / "fifo.yaml")
    for name, path in (("a FIFO", folder / "fifo.yaml"), ("a device", "/dev/zero")):
        cases.add(f"config: {name}", ["run", "--config", path, "--run-dir", runs, "light.py"])
    write(folder / "file", "")
    cases.add("run directory is a file", ["run", "--run-dir", folder / "file", "light.py"])
    cases.add("run directory below a file", ["run", "--run-dir", folder / "file" / "x", "light.py"])
    cases.add("run directory in /proc", ["run", "--run-dir", "/proc/x", "light.py"])
    (folder / "open").mkdir()
    (folder / "open" / "mine").touch()
    (folder / "open").chmod(0o777)
    cases.add("run directory of everybody", ["run", "--run-dir", folder / "open", "light.py"])
    used = RunDirectory.create(folder / "used")
    lease = Lease.acquire(used, "another-job")
    cases.add("run directory in use", ["run", "--run-dir", used.path, "light.py"])
    if os.geteuid() == 0:
        (folder / "secret").mkdir(mode=0o700)
        cases.add("run directory of another", ["run", "--run-dir", folder / "secret", "light.py"], uid=NOBODY)
        cases.add("parent of another", ["run", "--run-dir", folder / "new", "light.py"], uid=NOBODY)
    results = cases.run()
    lease.release()
    assert not runs.exists(), "a bad command line must leave nothing behind"
    return results


def check_refused(result, *says):
    """Exit code 2, nothing on standard output, and a few lines of ours that say all this."""
    code, out, err = result
    assert code == 2, err
    assert out == ""
    assert err
    assert "Traceback" not in err
    lines = err.splitlines()
    assert all(line.startswith("resilience: ") for line in lines), err
    assert len(lines) <= 2, err
    for text in says:
        assert text in err


@pytest.mark.parametrize("name", USAGE)
def test_a_bad_command_line_is_refused(refused, name):
    """Unknown options and variables with the nearest match, bad values with what is expected; nothing is made."""
    check_refused(refused[name], *USAGE[name][2])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_bad_configuration_file_is_refused(refused, name):
    """File, key, value and nearest match; and nothing in it is executed."""
    check_refused(refused[f"config: {name}"], *CONFIGS[name][2])


@pytest.mark.parametrize("name", ["a FIFO", "a device"])
def test_a_configuration_that_is_no_file_is_refused_at_once(refused, name):
    """One would wait for a writer for ever, the other gives bytes without end."""
    check_refused(refused[f"config: {name}"], f"it is {name}", "regular file")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("run directory is a file", ["is not a directory"]),
        ("run directory below a file", ["file is not a directory", "--run-dir"]),
        ("run directory in /proc", ["/proc/x"]),
        ("run directory of everybody", ["can be written by other users", "chmod go-w"]),
        ("run directory in use", ["in use by job another-job", "name another directory with --run-dir"]),
        pytest.param("run directory of another", ["belongs to root", "--run-dir"], marks=needs_root),
        pytest.param("parent of another", ["Permission denied", "--run-dir"], marks=needs_root),
    ],
)
def test_a_bad_run_directory_is_refused(refused, name, says):
    """The directory, why it cannot be used, and the cure."""
    check_refused(refused[name], *says)


# -- the commands that read


def used_run(path: Path) -> RunDirectory:
    """A run directory as a job leaves it, with one incident."""
    run = RunDirectory.create(path)
    facts = {"v": 1, "mono_ns": 1, "host": "h", "boot_id": "b", "job": "j", "attempt": 0, "rank": None, "step": None}
    events = [facts | {"t": 10.0 + n, "event": event} for n, event in enumerate(["run_start", "attempt_start"])]
    write(run.journal / "h-launcher-1.jsonl", "".join(json.dumps(event) + "\n" for event in events))
    (run.incidents / "0001-hang").mkdir()
    write(run.incidents / "0001-hang" / "report.json", json.dumps({"id": "0001-hang", "kind": "hang"}))
    return run


GARBAGE = {
    "text": b"not json at all",
    "torn": b'{"id": "0001-hang", "kind": "ha',
    "list": b"[1, 2, 3]",
    "binary": bytes(range(256)) * 20,
    "nested": b"[" * 100_000,
    "types": b'{"id": 7, "kind": [], "culprits": {"a": 1}, "evidence": "x", "detected_at": "yesterday", "victims": 3}',
    "control": b'{"id": "0001-hang", "kind": "hang", "cause": "\\u001b[2J\\u001b]0;owned\\u0007"}',
    "empty": b"",
}
READING = ("status", "why", "outcome", "report")


@pytest.fixture(scope="module")
def read(passable):
    """Everything that the reading commands must survive, or refuse."""
    folder = passable / "read"
    folder.mkdir(mode=0o755)
    cases = Cases()
    write(folder / "file", "")
    (folder / "empty").mkdir()
    private = used_run(folder / "private")
    for command in READING:
        cases.add(f"{command} missing", [command, folder / "missing"])
        cases.add(f"{command} file", [command, folder / "file"])
        cases.add(f"{command} empty", [command, folder / "empty"])
        cases.add(f"{command} option", [command, "--jsno", private.path])
        if os.geteuid() == 0:
            cases.add(f"{command} private", [command, private.path], uid=NOBODY)
    if os.geteuid() == 0:
        shared = used_run(folder / "shared")
        for path in (shared.path, *shared.path.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        shared.incidents.chmod(0o700)
        cases.add("report shared", ["report", shared.path, "--json"], uid=NOBODY)
    for name, data in GARBAGE.items():
        for where in ("report", "journal", "outcome", "lease", "timeouts"):
            run = used_run(folder / f"{where}-{name}")
            place = {"report": run.incidents / "0001-hang" / "report.json", "journal": run.journal / "h-x-2.jsonl"}
            (place.get(where) or run.path / f"{where}.json").write_bytes(data)
            for command in READING:
                cases.add(f"{command} {where} {name}", [command, run.path])
                cases.add(f"{command} {where} {name} json", [command, "--json", run.path])
    return cases.run()


@pytest.mark.parametrize("command", READING)
def test_a_directory_that_cannot_be_read_is_refused(read, command):
    """Missing, a file, no run directory, a mistyped option, or another user's: path, reason and cure."""
    check_refused(read[f"{command} missing"], "there is no run directory", "missing")
    check_refused(read[f"{command} file"], "is a file; name the run directory")
    check_refused(read[f"{command} empty"], "no run directory", "--run-dir")
    code, _, err = read[f"{command} option"]
    assert code == 2
    assert "--jsno" in err
    assert "Traceback" not in err


@needs_root
@pytest.mark.parametrize("command", READING)
def test_another_users_directory_is_refused(read, command):
    """Who may read it, or what to ask for."""
    check_refused(read[f"{command} private"], "cannot read", "Permission denied", "group_readable")


@needs_root
def test_a_part_that_may_not_be_read_is_named(read):
    """Of a directory that another user shares but for its incidents, the rest is told."""
    code, out, err = read["report shared"]
    assert (code, err) == (0, "")
    (problem,) = json.loads(out)["problems"]
    assert problem.startswith("incidents: cannot read /")
    assert problem.endswith("incidents: Permission denied")


@pytest.mark.parametrize("where", ["report", "journal", "outcome", "lease", "timeouts"])
@pytest.mark.parametrize("command", READING)
def test_garbage_in_a_file_is_no_traceback(read, command, where):
    """Whatever stands in one file, the command says what it can, or that the file is bad; JSON stays JSON."""
    for name in GARBAGE:
        for suffix in ("", " json"):
            code, out, err = read[f"{command} {where} {name}{suffix}"]
            assert "Traceback" not in out + err, (name, out, err)
            assert "\x1b" not in out + err, name
            assert code in (0, 1, 2), (name, err)
            assert out or err, name
            if suffix and code == 0:
                assert isinstance(json.loads(out), dict)


def test_an_unreadable_report_is_named(read):
    """`why` shows that there was an incident, and which file cannot be read."""
    for name in ("text", "torn", "list", "binary", "nested", "empty"):
        code, out, err = read[f"why report {name}"]
        assert code == 0, err
        assert "0001-hang" in out
        assert "report.json" in out + err


def test_a_torn_journal_line_is_counted(read):
    """`status` says that lines were torn, and works with the rest."""
    code, out, _ = read["status journal torn json"]
    assert code == 0
    assert '"torn' in out


# -- ranks that are already launched, and implicit starts

SCRIPT = """
import sys
from resilience_sdk import heartbeat
for _ in range(3):
    with heartbeat():
        pass
print("trained")
"""


@pytest.fixture
def train(tmp_path):
    """Run a tiny training of one rank under nobody's launcher; return `(out, our lines)`."""
    (tmp_path / "pages").mkdir()

    def run(*, code: str = SCRIPT, **env: str) -> tuple[str, list[str]]:
        settings = {"RESILIENCE_PAGE_DIR": str(tmp_path / "pages"), "RESILIENCE_RUN_DIR": str(tmp_path / "run")}
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env=environment(**settings | env),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout, done.stderr.splitlines()

    return run


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"RESILIENCE_TIMEOUT_FLOOR": "low"}, ["RESILIENCE_TIMEOUT_FLOOR", "'low'"]),
        ({"RESILIENCE_HEARTBEAT_TIMOUT": "3"}, ["RESILIENCE_HEARTBEAT_TIMOUT", "RESILIENCE_HEARTBEAT_TIMEOUT?"]),
        ({"RESILIENCE_FAULT": "hag:rank=1"}, ["RESILIENCE_FAULT", "'hag'", "'hang'", "ignored"]),
        ({"RESILIENCE_CONFIG": "no.yaml"}, ["RESILIENCE_CONFIG", "no.yaml"]),
        ({"RESILIENCE_PAGE_DIR": "/no/where"}, ["not watched", "/no/where", "RESILIENCE_PAGE_DIR"]),
        ({"RESILIENCE_RUN_DIR": "/proc/x"}, ["not watched", "/proc/x", "RESILIENCE_RUN_DIR"]),
    ],
)
def test_in_a_rank_a_mistake_is_one_line(train, env, says):
    """A training that has begun is not ended by a typo in a shell profile: one line, and the default."""
    out, lines = train(**env)
    assert out == "trained\n"
    (line,) = lines
    assert line.startswith("resilience: ")
    for text in says:
        assert text in line


@needs_root
def test_a_rank_that_may_not_use_its_run_directory_trains_on(train, tmp_path):
    """Another user's directory: one line with the cure."""
    for above in (tmp_path, *list(tmp_path.parents)[:3]):
        above.chmod(above.stat().st_mode | 0o011)
    RunDirectory.create(tmp_path / "run")
    (tmp_path / "pages").chmod(0o777)
    become = f"""
import os
import resilience_sdk.rank, resilience_sdk.heartbeats, resilience_sdk.core.settings, multiprocessing.util
import resilience_sdk.monitor.spawn, attr, attrs, json, signal, socket, threading, difflib, pwd
os.setgroups([]); os.setresgid({NOBODY}, {NOBODY}, {NOBODY}); os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
"""
    out, lines = train(code=become + SCRIPT)
    assert out == "trained\n"
    (line,) = lines
    assert "not watched" in line
    assert "belongs to root" in line


def test_a_run_directory_in_use_gets_a_number(train, tmp_path):
    """Under a foreign launcher two jobs in one directory would mix: the second one takes `<name>.2`, and says so."""
    lease = Lease.acquire(RunDirectory.create(tmp_path / "run"), "another-job")
    out, lines = train()
    lease.release()
    assert out == "trained\n"
    (line,) = lines
    assert f"{tmp_path}/run is in use by another job" in line
    assert f"{tmp_path}/run.2" in line
    assert (tmp_path / "run.2" / "journal").is_dir()
    assert not list((tmp_path / "run" / "journal").glob("*.jsonl"))


def test_the_real_command_ends_with_2(tmp_path):
    """Not only the function: `python -m resilience_sdk run` is refused in the same way."""
    with job(
        tmp_path, "run", "--heartbeat-timout", "3", "light.py", command=(sys.executable, "-m", "resilience_sdk")
    ) as run:
        assert run.finish() == 2
        assert "did you mean --heartbeat-timeout?" in run.screen
        assert not run.run_dir.exists()
