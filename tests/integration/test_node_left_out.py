"""A node with broken hardware leaves a job that can do without it; the others go on from the newest checkpoint."""

import pytest
from straggler_runs import RANKS
from stub_driver import StubDriver
from two_launchers import two_launchers

pytestmark = pytest.mark.slow  # two launchers, started twice


def two_nodes(folder, *words, store_on=0, **options):
    """Start a training on two nodes, of which one may go on without the other unless `nnodes` says otherwise."""
    options = {"nnodes": "1:2"} | options
    return two_launchers(folder, *words, store_on=store_on, conf=("last_call_timeout=4",), **options)


def break_rank(nodes, told, on):
    """Break the memory of the rank that runs on node `on`, once a checkpoint is there; return the rank."""
    run = nodes[on]
    run.wait(lambda: all((told / f"step-0-{rank}").exists() for rank in range(2)), "steps of both ranks")
    run.wait(lambda: int((told / "step-0-0").read_text()) > 6, "a checkpoint")
    (rank,) = (rank for rank in range(2) if int((told / f"pid-0-{rank}").read_text()) in run.processes())
    (told / "broken").write_text(f"0 {rank}")
    return rank


@pytest.fixture
def broken(stub_library, tmp_path):
    """The environment of nodes whose driver has counted errors in memory: the words of a rank take no node out."""
    driver = StubDriver(stub_library, tmp_path / "state")
    return driver.changed({"gpus": 1, "0.ecc_uncorrected": 2, "0.field.230": 4}).environment


def test_the_others_go_on_without_the_node_whose_hardware_is_broken(tmp_path, broken):
    """That node's launcher ends with 76 and says why; the other one resumes alone, and its outcome is the job's."""
    told = tmp_path / "told"
    with two_nodes(tmp_path, "nodes_training.py", **broken) as nodes:
        stays, leaves = nodes
        rank = break_rank(nodes, told, on=1)
        assert leaves.finish() == 76, leaves.screen
        stays.wait(lambda: (told / "step-1-0").exists(), "a step of the one that is left")
        (told / "enough").touch()
        assert stays.finish() == 0, stays.screen
        assert not [left for run in nodes for left in run.left_behind()]
    assert "this node leaves the job: gpu_ecc_uncorrectable" in leaves.screen
    assert int((told / "first-1-0").read_text()) > 0  # resumed
    (incident,) = stays.incidents()
    assert (incident["cause"], incident["action"]) == ("gpu_ecc_uncorrectable", "exclude_node")
    assert [culprit["rank"] for culprit in incident["culprits"]] == [rank]
    assert incident["recovered_at"] is not None
    outcome = stays.outcome()
    assert (outcome["verdict"], outcome["exit_code"], outcome["incidents"]) == ("finished", 0, [incident["id"]])


@pytest.mark.parametrize(("nnodes", "store_on"), [("2", 0), ("1:2", 1)], ids=["no-node-to-spare", "has-the-store"])
def test_a_job_that_cannot_do_without_the_node_ends_on_all(tmp_path, broken, nnodes, store_on):
    """Too few nodes would be left, or the store goes with that node: all end with 76, at once."""
    with two_nodes(tmp_path, "nodes_training.py", nnodes=nnodes, store_on=store_on, **broken) as nodes:
        break_rank(nodes, tmp_path / "told", on=1)
        assert [run.finish() for run in nodes] == [76, 76], "\n".join(run.screen for run in nodes)
    outcome = nodes[0].outcome()
    assert (outcome["verdict"], outcome["exit_code"]) == ("hardware", 76)
    assert ("store of the rendezvous" in outcome["reason"]) == (store_on == 1)


@pytest.mark.release
def test_the_others_go_on_without_the_node_that_is_slow(tmp_path):
    """`--stop-if-detected`: all stop at one step, the slow node leaves with 76, the other one starts again without."""
    fault = "slow:section=bwd,seconds=0.2"  # two ranks on one node, in the first attempt only
    with two_nodes(
        tmp_path,
        *("--stop-if-detected", "straggling.py", "--check"),
        ranks=2,
        RESILIENCE_FAULT=";".join(f"{fault},rank={rank}" for rank in (2, 3)),
    ) as nodes:
        first = nodes[0]
        first.wait(lambda: all((tmp_path / "told" / f"rank-{rank}").exists() for rank in range(RANKS)), "all ranks")
        slow_pid = int((tmp_path / "told" / "rank-3").read_text())
        (leaves,) = (run for run in nodes if slow_pid in run.processes())
        (stays,) = (run for run in nodes if run is not leaves)
        assert leaves.finish() == 76, leaves.screen
        stays.wait_event("attempt_start", attempt=1)
        (tmp_path / "told" / "enough").touch()
        assert stays.finish() == 0, stays.screen
    assert "this node leaves the job" in leaves.screen
    assert "going on without the slow node" in stays.screen
    assert stays.outcome()["verdict"] == "finished"
    assert {tuple(event["ranks"]) for event in stays.events("attempt_start", attempt=1)} == {(0, 1)}
