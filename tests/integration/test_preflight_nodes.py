"""`resilience run --preflight` on several hosts: the bad one is named on every screen, and the job goes on without it.

Each host is a network namespace with a launcher in it. What is wrong with one is really so: its link is slow, its
processes get a share of a processor, the way to its peers is closed.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import uuid
from pathlib import Path

import network
import pytest
from harness import Job, job

pytestmark = pytest.mark.slow

CONF = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=3,read_timeout=4,join_timeout=60"
SCRIPT = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], 'runs', flush=True)"
LONG_S = 120.0


@pytest.fixture
def start(tmp_path):
    """Start a launcher on each of these hosts."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with contextlib.ExitStack() as stack:

        def launch(hosts, *words, nnodes="", place="", own=None, env=None) -> list[Job]:
            started = []
            for number, host in enumerate(hosts):
                folder = tmp_path / f"node{number}"
                folder.mkdir()
                options = (
                    *("--run-dir", str(tmp_path / "run"), "--nnodes", nnodes or str(len(hosts)), "--preflight"),
                    *(
                        "--rdzv-backend",
                        "c10d",
                        "--rdzv-id",
                        "preflight",
                        "--rdzv-endpoint",
                        place or f"{hosts[0].name}:29400",
                    ),
                    *("--rdzv-conf", f"{CONF},is_host={int(number == 0)}", "--health-interval", "0"),
                )
                within = (*(own or {}).get(number, ()), *host.within)
                values = (env or {}).get(number)
                run = job(folder, *options, *words, str(script), within=within, env=values)
                started.append(stack.enter_context(run))
                started[-1].run_dir = tmp_path / "run"
            return started

        yield launch


@pytest.fixture
def hosts():
    """Make hosts."""
    if reason := network.why_not():
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        yield lambda count: stack.enter_context(network.network(count))


def screens(nodes) -> str:
    """Return all screens, for a failed assertion."""
    return "\n".join(f"--- node {number}\n{run.screen}" for number, run in enumerate(nodes))


def slow_link(host) -> None:
    """Let the link of a host carry 12 MB/s out, as a cable does that fell back to an old speed."""
    words = ("tc", "-n", host.namespace, "qdisc", "add", "dev", "eth0", "root", "tbf")
    done = subprocess.run(
        [*words, "rate", "100mbit", "burst", "64kb", "latency", "400ms"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"tc cannot shape here: {done.stderr}")


@pytest.fixture
def group():
    """Make a control group for the processor, of which a share may be taken away; yield its directory."""
    made = Path("/sys/fs/cgroup/cpu") / f"preflight-{uuid.uuid4().hex[:8]}"
    try:
        made.mkdir()
        (made / "cpu.cfs_quota_us").write_text("-1")
        (made / "cpu.shares").write_text("20000")  # as if its processes were not in a group of their own
    except OSError as error:
        pytest.skip(f"no control group for the processor here: {error}")
    yield made
    for pid in (made / "cgroup.procs").read_text().split():
        (made.parent / "cgroup.procs").write_text(pid)
    made.rmdir()


def is_in_conference(run) -> bool:
    """Tell whether the process that compares the nodes has loaded torch and asks the store."""
    pids = [pid for pid, command in run.processes().items() if "resilience_sdk.health.pairwise " in command]
    with contextlib.suppress(OSError):
        return any(
            os.readlink(path).startswith("socket:") for pid in pids for path in Path(f"/proc/{pid}/fd").iterdir()
        )
    return False


def test_sound_nodes_start(start, hosts):
    """After one comparison, and nobody is blamed, whatever else the machine does."""
    nodes = start(hosts(3))
    assert [run.finish(LONG_S) for run in nodes] == [0, 0, 0], screens(nodes)
    for run in nodes:
        assert "comparing 3 nodes" in run.screen
        assert "nodes: " not in run.screen, screens(nodes)
        assert "of 3 runs" in run.out
    assert not nodes[0].events("degraded"), nodes[0].events("degraded")


@pytest.mark.release
def test_a_slow_link_is_named_and_the_others_go_on(start, hosts):
    """Four nodes, three are enough: the slow one leaves with 76, the others train without it."""
    four = hosts(4)
    slow_link(four[2])
    nodes = start(four, nnodes="3:4")
    assert [run.finish(LONG_S) for run in nodes] == [0, 0, 76, 0], screens(nodes)
    for number, run in enumerate(nodes):
        assert "nodes: all reduce speed host2" in run.screen, screens(nodes)
        assert ("going on without host2" in run.screen) == (number != 2)
        assert ("of 3 runs" in run.out) == (number != 2)
    assert "this node leaves the job: the preflight leaves out host2" in nodes[2].screen
    (event,) = nodes[0].events("health", probe="nodes")
    assert (event["subject"], event["check"], event["ok"]) == ("host2", "all_reduce_speed", False)
    assert nodes[0].outcome()["verdict"] == "finished"


@pytest.mark.release
def test_a_slow_processor_is_named_and_all_end(start, hosts, group):
    """Three nodes, all are needed: every launcher says who is slow, no rank starts anywhere."""
    nodes = start(hosts(3), own={1: ("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh")})
    nodes[1].wait(lambda: is_in_conference(nodes[1]), "the comparison of nodes", LONG_S)
    (group / "cpu.cfs_quota_us").write_text("5000")  # of 100,000
    nodes[0].wait(lambda: "the preflight leaves out" in nodes[0].screen, "the verdict", LONG_S)
    (group / "cpu.cfs_quota_us").write_text("-1")  # to end does not take so long
    assert [run.finish(LONG_S) for run in nodes] == [76, 76, 76], screens(nodes)
    for run in nodes:
        # What its processes reduce is slow with them.
        assert re.search("FAILED: nodes: (compute|all reduce) speed host1: ", run.screen), screens(nodes)
        assert "runs" not in run.out
    outcome = nodes[0].outcome()
    assert (outcome["verdict"], outcome["attempts"]) == ("hardware", 0)
    assert outcome["reason"].startswith("the preflight leaves out host1: ")


@pytest.mark.release
def test_two_nodes_that_cannot_reach_one_another(start, hosts):
    """Both reach the rendezvous: one of these two, and which one nobody can tell."""
    two = hosts(2)
    for words in (
        ("-n", two[0].namespace, "address", "add", "10.199.8.100/24", "dev", "eth0"),
        ("-n", two[1].namespace, "route", "add", "unreachable", two[0].address),
    ):
        subprocess.run(["ip", *words], check=True, timeout=20)
    nodes = start(two, nnodes="1:2", place="10.199.8.100:29400")
    assert [run.finish(LONG_S) for run in nodes] == [76, 76], screens(nodes)
    for run in nodes:
        assert "nodes: all reduce host0 and host1: one of these two is the reason" in run.screen, screens(nodes)
        assert "runs" not in run.out


def test_what_one_node_refuses_ends_all_at_once(start, hosts):
    """Where all nodes are needed, the others need not wait for one that will never come. It is named: 76."""
    nodes = start(hosts(2), env={1: {"NCCL_SOCKET_IFNAME": "=nosuch0"}})
    assert [run.finish(LONG_S) for run in nodes] == [76, 76], screens(nodes)
    for run in nodes:
        assert (
            "leaves out host1: the preflight found what has to be cured first (network chosen interface)" in run.screen
        )
        assert "runs" not in run.out
