"""The network fails, no rank does: nobody is blamed."""

import network
import pytest
from harness import job

pytestmark = pytest.mark.slow  # a link is cut, and given up


@pytest.fixture
def hosts():
    """Two hosts."""
    if reason := network.why_not():
        pytest.skip(reason)
    with network.network(2) as made:
        yield made


def test_a_cut_link_is_a_network_partition_without_culprits(tmp_path, hosts):
    """Both ranks stand in one all_reduce and the link between them is down: no rank is named.

    They are restarted; with the link up again the next attempt finishes.
    """
    cut = tmp_path / "cut"
    options = ("--nproc-per-node", "2", "--heartbeat-timeout", "2", "--max-restarts", "1")
    script = ("partitioned.py", hosts[1].namespace, hosts[0].address, str(cut))
    with job(tmp_path, *options, *script, within=hosts[0].within) as run:
        run.wait(lambda: len(run.told("ready-*")) == 2, "the last step before the cut")
        hosts[1].cut()
        cut.touch()
        run.wait_event("confirmed")
        hosts[1].restore()
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
