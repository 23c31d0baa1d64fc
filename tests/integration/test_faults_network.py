"""The network fails, no rank does: nobody is blamed."""

import os
import shutil
import subprocess
import uuid

import pytest
from harness import job

OURS, THEIRS = "10.199.7.1", "10.199.7.2"


def ip(*words):
    """Run one `ip` command."""
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@pytest.fixture
def namespaces():
    """Names of two network namespaces that are joined by a link: nothing of it is seen outside of them."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces need root and the command `ip`")
    names = [f"fault-{side}-{uuid.uuid4().hex[:8]}" for side in "ab"]
    made = []
    try:
        for name in names:
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespace can be made here: {error.stderr.decode().strip()}")
            made.append(name)
        first, second = names
        ip("-n", first, "link", "add", "one", "type", "veth", "peer", "name", "two", "netns", second)
        for name, device, address in ((first, "one", OURS), (second, "two", THEIRS)):
            ip("-n", name, "address", "add", f"{address}/24", "dev", device)
            ip("-n", name, "link", "set", device, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield first, second
    finally:
        for name in made:
            ip("netns", "delete", name)


def test_a_cut_link_is_a_network_partition_without_culprits(tmp_path, namespaces):
    """Both ranks stand in one all_reduce and the link between them is down: no rank is named.

    They are restarted; with the link up again the next attempt finishes.
    """
    first, second = namespaces
    cut = tmp_path / "cut"
    options = ("--nproc-per-node", "2", "--heartbeat-timeout", "2", "--max-restarts", "1")
    script = ("partitioned.py", second, OURS, str(cut))
    with job(tmp_path, *options, *script, within=("ip", "netns", "exec", first)) as run:
        run.wait(lambda: len(run.told("ready-*")) == 2, "the last step before the cut")
        ip("-n", first, "link", "set", "one", "down")
        cut.touch()
        run.wait_event("confirmed")
        ip("-n", first, "link", "set", "one", "up")
        assert run.finish() == 0, run.screen
        (found,) = run.incidents()
        assert found["culprits"] == []
        assert found["victims"] == [0, 1]
        assert (found["category"], found["cause"]) == ("network", "network_partition")
        assert found["confidence"] >= 0.8
        assert "ranks 0, 1 all wait in the same collective, number 6 (all_reduce" in found["evidence"][0]["text"]
        assert found["recovered_at"]
        assert "HANG: no single rank is to blame (network: network_partition)" in run.screen
        assert all("all_reduce" in run.incident_file(found, f"stacks/rank-{rank}.txt") for rank in (0, 1))
        assert not run.left_behind()
