"""A script cannot tell our workers from torchrun's: every fact that it can observe is compared.

What differs for a reason is listed here, and in docs/launcher.md.
"""

import pytest
from launches import LAUNCHERS, differences

pytestmark = pytest.mark.slow  # each way to start, under torchrun and under ours

RELEASE = pytest.mark.release
OURS = [
    ("guarded", "forkserver"),
    ("unguarded", "forkserver"),
    pytest.param("module", "forkserver", marks=RELEASE),
    ("guarded", "exec"),
]
# Per launch: the store's port, the run's name and what is derived from it, and the probe's own folders.
PER_LAUNCH = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "PROBE_OUT", "RESILIENCE_PAGE_DIR")
# Known: our own variables, and a store for each attempt instead of one that outlives it.
KNOWN = ("TORCHELASTIC_USE_AGENT_STORE", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
OUR_VARIABLES = ("RESILIENCE_RUN_DIR", "RESILIENCE_INTERNAL_")
# Known of a rank that is watched: its helper thread, its dump signal, its records of exceptions and of crashes,
# its wait for torch.optim, and streams that write elsewhere what their descriptor refuses. Of its descriptors there are
# more.
WATCHED = (
    "/task_count",
    "/process/threads",
    "/status/SigCgt",
    "/excepthook_is_default",
    "/interpreter/faulthandler",
    "/interpreter/meta_path",
    "/streams/stdout",
    "/streams/stderr",
)


def unexpected(theirs, mine):
    """Return the differences that have no reason."""
    found = differences(theirs, mine)
    allowed = {f"/environment/{name}" for name in (*PER_LAUNCH, *KNOWN)}
    prefixes = ("/draws/", *(f"/environment/{name}" for name in OUR_VARIABLES))
    return {path: both for path, both in found.items() if path not in allowed and not path.startswith(prefixes)}


@pytest.mark.parametrize(("probe", "ours"), OURS)
def test_every_observable_fact_is_equal(launched, probe, ours):
    """From argv and __main__ to descriptors, signals, threads and torch, all is as under torchrun."""
    theirs, mine = (launch.facts for launch in launched(probe, "torchrun", ours))
    assert theirs
    assert theirs.keys() == mine.keys()
    for rank in theirs:
        assert not unexpected(theirs[rank], mine[rank])


def test_a_forking_dataloader_works_alike(launched):
    """The usual loader gives the same batches as under torchrun."""
    theirs, mine = (launch.facts["0"]["loaders"] for launch in launched("unguarded", "torchrun", "forkserver"))
    assert mine == theirs
    assert isinstance(theirs["fork"], list)


@pytest.mark.parametrize("probe", ["guarded-loaders", pytest.param("unguarded-loaders", marks=pytest.mark.release)])
def test_dataloader_workers_succeed_and_fail_alike(launched, probe):
    """Loaders of every start method, guarded or not, with and without a lambda, end as under torchrun."""
    theirs, mine = (launch.facts["0"]["loaders"] for launch in launched(probe, "torchrun", "forkserver"))
    assert mine == theirs
    assert len(theirs) >= 3


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_random_numbers_differ_between_ranks(launched, launcher):
    """No generator of random, numpy or torch gives two ranks the same number."""
    (launch,) = launched("guarded", launcher)
    draws = [facts["draws"] for facts in launch.facts.values()]
    assert len(draws) == 2
    for name in draws[0]:
        assert draws[0][name] != draws[1][name], name


@pytest.mark.parametrize("ours", ["forkserver", "exec"])
def test_output_keeps_its_order_and_atexit_runs(launched, ours):
    """Prints are unbuffered, threads are waited for, and atexit handlers run in the end."""
    theirs, mine = launched("guarded", "torchrun", ours)
    assert mine.stdout == theirs.stdout
    assert mine.stdout["0"].endswith("atexit, first registered\n")
    assert mine.launcher.returncode == 0


def test_tracebacks_show_the_script_alone(launched):
    """An uncaught exception prints what it prints under torchrun, chained exceptions included."""
    theirs, mine = (launch.stderr["0"] for launch in launched("unguarded", "torchrun", "forkserver"))
    assert theirs.count("Traceback") == 2
    assert mine == theirs


def test_the_scripts_excepthook_gets_a_clean_traceback(launched):
    """A hook that the script installs is called once, with the frames that it has under torchrun."""
    theirs, mine = launched("module", "torchrun", "forkserver")
    assert mine.stderr == theirs.stderr
    assert "hook KeyboardInterrupt" in theirs.stderr["0"]


@pytest.mark.parametrize("probe", ["unguarded", pytest.param("module", marks=RELEASE)])
def test_the_agent_sees_the_same_exit_codes(launched, probe):
    """1 for an exception, death by SIGINT for a KeyboardInterrupt; the launcher fails as torchrun does."""
    theirs, mine = launched(probe, "torchrun", "forkserver")
    assert theirs.exit_codes
    assert mine.exit_codes == theirs.exit_codes
    assert mine.launcher.returncode == theirs.launcher.returncode == 1


def test_the_error_file_is_written_without_the_record_decorator(launched):
    """The reason is kept, where torchrun only says how to enable it."""
    theirs, mine = launched("unguarded", "torchrun", "forkserver")
    assert theirs.errors == {}
    message = mine.errors["0"]["message"]
    assert message["message"] == "ValueError: rank 0 failed on purpose"
    assert message["extraInfo"]["py_callstack"] in mine.stderr["0"]
    assert message["extraInfo"]["timestamp"].isdigit()


def test_a_watched_rank_differs_only_where_documented(launched):
    """The rank page costs descriptors, one sleeping thread and the dump signal; a script sees nothing else."""
    (theirs,), (mine,) = launched("guarded", "torchrun"), launched("watched", "forkserver")
    for rank, facts in theirs.facts.items():
        found = unexpected(facts, mine.facts[rank])
        del found["/environment/RESILIENCE_DISABLE"]
        visible = {path: both for path, both in found.items() if not path.startswith("/descriptors/")}
        assert set(visible) <= set(WATCHED)
        assert visible["/process/threads"][1] == ["MainThread", "resilience-helper"]
        assert visible["/task_count"] == (1, 2)
        for stream in ("/streams/stdout", "/streams/stderr"):
            assert [pair for pair in zip(*visible[stream], strict=True) if pair[0] != pair[1]] == [
                ("FileIO", "_KeptFile")
            ]
        assert mine.stdout[rank] == theirs.stdout[rank]
    assert mine.launcher.returncode == 0
