"""docs/security.md against what strace and ss see of a live run: neither may know more than the other.

Only `always` is demanded of a row; what is there `only` with something may be seen, too.
"""

from __future__ import annotations

import fnmatch
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import attrs
import needed
import psutil
import pytest
import traced_run
from harness import PROJECT, Job, job
from traced_run import Call, Traced

from resilience_sdk.core.settings import Settings

pytestmark = pytest.mark.slow
_TABLE_LINE = re.compile(r"\|(.+)\|\s*$")
_SPAN = re.compile(r"`([^`]+)`")
_TEMPORARY = re.compile(r"\.(.+)\.\d+")
_COMMANDS = {
    "monitor.main": "monitor",
    "launcher.forkserver_main": "fork server",
    "health.watch": "health watch",
    "report.closing": "summary",
    "health.probe_main": "probes",
    "--from-launcher": "exporter",
    "resilience_sdk.launcher": "launcher",
}
_FORKED = {"child of fork server": "ranks", "child of monitor": "monitor", "child of launcher": "launcher"}
_SENDERS = {
    "launcher, fork server": {("launcher", "ranks"), ("fork server", "ranks")},
    "monitor": {("monitor", "ranks")},
    "launcher, rank": {("launcher", "monitor"), ("ranks", "monitor")},
    "doctor, watch, preflight": {("health watch", "probes")},
    "launcher": {("launcher", "preflight")},
    "preflight across nodes": set(),
    "supervise": set(),
    "rank": {("ranks", "ranks")},
    "rehearse": set(),
}
_OF_THE_SCRIPT = "what the script itself writes"
_OPTIONS = ("--nproc-per-node", "2", "--health-interval", "1")  # the watch begins one interval after the start
_C_LIBRARY = {"SIGRTMIN": 32}


@attrs.frozen
class Seen:
    """The trace of a run with a rank that was killed, and who listened where while it ran."""

    run: Job
    trace: Traced
    listening: tuple[tuple[int, str], ...]
    """pid and address of each listening socket, as ss had them."""

    def role(self, pid: int) -> str:
        """Return what the documentation calls a process."""
        role = self.trace.roles.get(pid, "nobody of this job")
        return _FORKED.get(role, role)

    def of(self, *names: str) -> list[tuple[str, Call]]:
        """Return the calls of these names, each with the role of who made it."""
        return [(self.role(call.pid), call) for call in self.trace.calls if call.name in names]


def table(page: str, heading: str, first: str) -> list[dict[str, str]]:
    """Return the rows of the table below a heading whose first column is called `first`."""
    section = (PROJECT / "docs" / page).read_text().partition(f"# {heading}\n")[2]
    lines = section[section.index(f"| {first} |") :].splitlines()
    rows = []
    for line in lines:
        found = _TABLE_LINE.match(line)
        if found is None:
            break
        rows.append([cell.strip() for cell in found[1].split("|")])
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


def is_always(row: dict[str, str]) -> bool:
    """Tell whether a row is there whatever the settings; each says one or the other."""
    when = row["when"]
    assert when.startswith(("always", "only", "wherever")), f"{row}: neither `always` nor `only with ...`"
    return when.startswith("always")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Run two ranks under strace, kill one of them, and end when the watch has looked at the node."""
    if (why := traced_run.why_not()) is not None:
        needed.missing(why)
    folder = tmp_path_factory.mktemp("traced")
    until, prefix = folder / "until", folder / "trace"
    with job(folder, *_OPTIONS, "training.py", "--until", str(until), within=traced_run.command(prefix)) as run:
        run.wait(lambda: _running(run, "health.probe_main"), "the watch's look at the node")  # while the ranks start
        run.wait_event("first_beat", count=2)
        (victim,) = run.told("rank-0-1")
        os.kill(int(victim.read_text()), signal.SIGKILL)
        run.wait_event("recovered")
        run.wait(lambda: not _running(run, "health.probe_main"), "the end of that")
        listening = tuple(_listening({process.pid for process in _processes(run)}))
        until.touch()
        assert run.finish() == 0, run.screen
    return Seen(run, traced_run.read(prefix, _COMMANDS), listening)


def test_every_process_is_in_its_table(seen: Seen) -> None:
    """And each that is always there was there."""
    documented = {row["process"]: is_always(row) for row in table("security.md", "Processes", "process")}
    found = {seen.role(pid) for pid in seen.trace.roles}
    assert found <= documented.keys(), {pid: role for pid, role in seen.trace.roles.items() if "unknown" in role}
    assert {role for role, always in documented.items() if always} <= found


def test_every_socket_is_in_its_table(seen: Seen) -> None:
    """What listens for other hosts is torch's, and nobody is talked to but this machine and its name server."""
    documented = {row["socket"]: is_always(row) for row in table("security.md", "Sockets", "socket")}
    found = {_socket(role, call, seen) for role, call in seen.of("bind", "listen", "connect", "socketpair")}
    asked = table("security.md", "Hosts that are asked or sent to", "who")
    assert [row["who"] for row in asked if not row["when"].startswith("only")] == ["ranks, by torch"]
    found.discard("ranks, by torch")
    assert found <= documented.keys()
    assert {row for row, always in documented.items() if always} <= found
    for pid, address in seen.listening:
        assert seen.role(pid) == "ranks", f"{seen.role(pid)} listens on {address}"
    assert len([address for _, address in seen.listening if not address.startswith("127.")]) == 1  # torch's store


def test_every_file_is_in_its_table(seen: Seen) -> None:
    """By its place: nothing is written elsewhere."""
    rows = table("security.md", "Files", "place")
    places = {row["place"].partition(":")[0].partition(",")[0]: row for row in rows}
    in_run_dir = {name for row in rows if "run directory: " in row["place"] for name in _names(row["place"])}
    page_files = {name for row in _page_files() for name in _names(row["file"])}
    strange: set[str] = set()
    found: dict[str, set[str]] = defaultdict(set)
    for role, call in seen.of(*traced_run.CALLS):
        if (path := call.writes) is None or path == "unavailable":  # of a process that was killed in the call
            continue
        place, name = _place(path, seen)
        found[place].add(name)
        known = {"the run directory": in_run_dir, "the job's page directory": page_files}.get(place, {"*"})
        if place not in {*places, _OF_THE_SCRIPT} or (name and not any(fnmatch.fnmatch(name, one) for one in known)):
            strange.add(f"{role}: {call.name} {path}")
    assert not strange
    assert {place for place, row in places.items() if is_always(row)} <= found.keys()
    always = {
        name for row in rows if is_always(row) and "run directory" in row["place"] for name in _names(row["place"])
    }
    assert always <= found["the run directory"]


def test_every_signal_is_in_its_tables(seen: Seen) -> None:
    """Those that are sent, and those that are handled or ignored."""
    sent = {row["from"]: row for row in table("security.md", "Signals", "from")}
    assert sent.keys() == _SENDERS.keys()
    found = set()
    for role, call in seen.of("kill", "tkill", "tgkill", "rt_sigqueueinfo", "pidfd_send_signal"):
        told = re.match(r"-?(\d+)(?:<[^>]*>)?, (?:\d+, )?(\w+)", call.arguments)
        assert told is not None, call
        if told[2] == "0":
            continue  # a question, no signal
        ways = [
            row
            for row, pairs in _SENDERS.items()
            if (role, seen.role(int(told[1]))) in pairs and _number(told[2]) in _signals(sent[row]["which"])
        ]
        assert ways, f"{role} sends {seen.role(int(told[1]))} {call.arguments}"
        found.add(ways[0])
    assert {row for row in sent if is_always(sent[row])} <= found

    handled = table("security.md", "Signals", "process")
    of_all = [row for row in handled if row["process"] == "each of them"]
    everybody = set().union(*(_signals(row["signals"]) for row in of_all))
    documented: dict[str, set[int]] = defaultdict(set)
    demanded: dict[str, set[int]] = defaultdict(set)
    for row in handled:
        documented[row["process"]] |= _signals(row["signals"])
        if is_always(row) and row["process"] != "each of them":
            demanded[row["process"]] |= _signals(row["signals"])
    observed: dict[str, set[int]] = defaultdict(set)
    for role, call in seen.of("rt_sigaction"):
        told = re.match(r"(\w+), \{sa_handler=(\w+)", call.arguments)
        if told is not None and told[2] != "SIG_DFL":
            observed[role].add(_number(told[1]))
    for role, numbers in observed.items():
        assert numbers <= documented[role] | everybody, f"{role}: {sorted(numbers - documented[role] - everybody)}"
        assert demanded[role] <= numbers, f"{role}: {sorted(demanded[role] - numbers)}"
    assert set().union(*(_signals(row["signals"]) for row in of_all if is_always(row))) <= set().union(
        *observed.values()
    )


def test_nothing_is_unpickled_without_a_checkpoint(tmp_path: Path) -> None:
    """As the section on pickle says: by no process of a run on one node that can be asked."""
    told = tmp_path / "unpickled"
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "def hear(event, arguments):\n"
        "    if event == 'pickle.find_class':\n"
        f"        open({str(told)!r}, 'a').write(f'{{sys.argv}} {{arguments}}\\n')\n"
        "sys.addaudithook(hear)\n"
        f"open({str(tmp_path / 'heard')!r}, 'a').write('x')\n"
    )
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{PROJECT}"}
    with job(tmp_path, "--nproc-per-node", "2", "training.py", "--steps", "3", env=env) as run:
        assert run.finish() == 0, run.screen
    assert len((tmp_path / "heard").read_text()) >= 2  # launcher and fork server, from which the ranks are forked
    assert not told.exists(), told.read_text()


def _socket(role: str, call: Call, seen: Seen) -> str:
    """Return the row that a call belongs to, or what there is no row for."""
    store = {_port(other.arguments) for _, other in seen.of("bind") if re.search(r'"::"|"0\.0\.0\.0"', other.arguments)}
    bound = [other for _, other in seen.of("bind") if other.pid == call.pid]
    if call.name == "socketpair" and role == "launcher":
        return "socket pair of launcher and fork server"
    if call.name == "connect" and re.search(r'sun_path="(/var)?/run/', call.arguments):
        return "this machine's name service"
    listens = any(other.pid == call.pid for _, other in seen.of("listen"))
    if call.name == "bind" and role == "launcher" and '"127.0.0.1"' in call.arguments and not listens:
        return "a port that is bound, never listened on, and closed"
    if role == "ranks":
        if "AF_NETLINK" in call.arguments:
            return "the kernel's list of network interfaces (netlink)"
        if call.name == "connect" and _port(call.arguments) == 53:
            return "ranks, by torch"
        if call.name == "listen":
            (call,) = [other for other in bound if other.arguments.split(",")[0] == call.arguments.split(",")[0]]
        if _port(call.arguments) in store:
            return "**torch's** store of the ranks"
        if _own_address(call.arguments):
            return "**gloo's and NCCL's** connections"
    return f"{role}: {call.name}({call.arguments})"


def _own_address(arguments: str) -> bool:
    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    told = [text.removeprefix("::ffff:") for text in re.findall(r'"([^"]*)"', arguments)]
    return any(text in own or text.startswith("127.") for text in told)


def _port(arguments: str) -> int:
    found = re.search(r"htons\((\d+)\)", arguments)
    return int(found[1]) if found is not None else -1


def _place(path: str, seen: Seen) -> tuple[str, str]:
    """Return the place of a file, as the table names it, and what it is called there."""
    for place, directory in (("the run directory", seen.run.run_dir), ("the job's page directory", seen.run.pages)):
        if path == str(directory) or path.startswith(f"{directory}/"):
            name = path[len(str(directory)) :].strip("/")
            if place == "the job's page directory":
                name = "/".join(name.split("/")[2:])  # below USER/JOB
            return place, _without_temporary(name.partition("/")[0])
    if path.startswith(f"{seen.run.folder}/told/"):
        return _OF_THE_SCRIPT, ""
    if "/__pycache__" in path:
        return "`__pycache__` beside Python's sources", ""
    if Path(path).parent == Path(tempfile.gettempdir()):
        return "the temporary directory", ""
    return f"`{path}`", ""


def _without_temporary(name: str) -> str:
    found = _TEMPORARY.fullmatch(name)
    return found[1] if found is not None else name


def _names(cell: str) -> list[str]:
    return [re.sub(r"<[^>]*>", "*", name).rstrip("/") for name in _SPAN.findall(cell)]


def _page_files() -> list[dict[str, str]]:
    return table("design.md", "Files in the job's page directory", "file")


def _signals(cell: str) -> set[int]:
    """Return the numbers of the signals that a cell names, by name, number or setting."""
    numbers = set()
    for name in _SPAN.findall(cell):
        if name == "dump_signal":
            numbers.add(Settings().dump_signal)
        elif name.isdecimal() or name in signal.Signals.__members__:
            numbers.add(_number(name))
    return numbers


def _number(name: str) -> int:
    """Return a signal's number; strace counts real-time ones from 32, whatever the C library keeps for itself."""
    if name.isdecimal():
        return int(name)
    if name.startswith("SIGRT_"):
        return 32 + int(name[len("SIGRT_") :])
    return _C_LIBRARY.get(name) or signal.Signals[name].value


def _processes(run: Job) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in run.processes() if psutil.pid_exists(pid)]


def _running(run: Job, part: str) -> bool:
    return any(part in command for command in run.processes().values())


def _listening(pids: set[int]) -> list[tuple[int, str]]:
    """Return who listens where among these processes."""
    shown = subprocess.run(
        [needed.program("ss", "iproute2"), "-Htulnpx"], capture_output=True, text=True, check=True
    ).stdout
    return [
        (int(pid), line.split()[4])
        for line in shown.splitlines()
        if line.split()[1] in ("LISTEN", "UNCONN")
        for pid in re.findall(r"pid=(\d+)", line)
        if int(pid) in pids
    ]


if sys.platform != "linux":
    pytest.skip("strace and ss are Linux's", allow_module_level=True)
