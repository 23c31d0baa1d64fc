"""A script cannot tell our workers from torchrun's: every fact that it can observe is compared."""

import pytest
from launches import LAUNCHERS, differences

OURS = [*((name, "forkserver") for name in ("guarded", "unguarded", "module")), ("guarded", "exec")]
# What the session of a rank adds to the interpreter: its record of uncaught exceptions, its wait for torch.optim.
SESSION_HOOKS = ("/excepthook_is_default", "/interpreter/meta_path")
# Per launch: the store's port, the run's name and what is derived from it, and the probe's own folder.
PER_LAUNCH = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "PROBE_OUT")


@pytest.mark.parametrize(("probe", "ours"), OURS)
def test_every_observable_fact_is_equal(launched, probe, ours):
    """From argv and __main__ to descriptors, signals, threads and torch, all is as under torchrun."""
    theirs, mine = launched[probe, "torchrun"].facts, launched[probe, ours].facts
    assert theirs
    assert theirs.keys() == mine.keys()
    allowed = {f"/environment/{name}" for name in PER_LAUNCH} | {"/environment/PROBE_LOADERS"}
    for rank in theirs:
        found = differences(theirs[rank], mine[rank])
        unexpected = {
            path: values
            for path, values in found.items()
            if path not in allowed and not path.startswith(("/draws/", "/loaders"))
        }
        assert not unexpected


@pytest.mark.parametrize("probe", ["guarded", "unguarded"])
def test_dataloader_workers_succeed_and_fail_alike(launched, probe):
    """Loaders of every start method, guarded or not, with and without a lambda, end as under torchrun."""
    theirs = launched[probe, "torchrun"].facts["0"]["loaders"]
    assert launched[probe, "forkserver"].facts["0"]["loaders"] == theirs
    assert isinstance(theirs["default"], list)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_random_numbers_differ_between_ranks(launched, launcher):
    """No generator of random, numpy or torch gives two ranks the same number."""
    draws = [facts["draws"] for facts in launched["guarded", launcher].facts.values()]
    assert len(draws) == 2
    for name in draws[0]:
        assert draws[0][name] != draws[1][name], name


@pytest.mark.parametrize("ours", ["forkserver", "exec"])
def test_output_keeps_its_order_and_atexit_runs(launched, ours):
    """Prints are unbuffered, threads are waited for, and atexit handlers run in the end."""
    assert launched["guarded", ours].stdout == launched["guarded", "torchrun"].stdout
    assert launched["guarded", ours].stdout["0"].endswith("atexit, first registered\n")
    assert launched["guarded", ours].launcher.returncode == 0


def test_tracebacks_show_the_script_alone(launched):
    """An uncaught exception prints what it prints under torchrun, chained exceptions included."""
    theirs = launched["unguarded", "torchrun"].stderr["0"]
    assert theirs.count("Traceback") >= 2
    assert _own_traceback(launched["unguarded", "forkserver"].stderr["0"]) == _own_traceback(theirs)


def test_the_scripts_excepthook_gets_a_clean_traceback(launched):
    """A hook that the script installs is called once, with the frames that it has under torchrun."""
    assert launched["module", "forkserver"].stderr == launched["module", "torchrun"].stderr
    assert "hook KeyboardInterrupt" in launched["module", "torchrun"].stderr["0"]


@pytest.mark.parametrize("probe", ["unguarded", "module"])
def test_the_agent_sees_the_same_exit_codes(launched, probe):
    """1 for an exception, death by SIGINT for a KeyboardInterrupt."""
    assert launched[probe, "torchrun"].exit_codes
    assert launched[probe, "forkserver"].exit_codes == launched[probe, "torchrun"].exit_codes


def test_the_error_file_is_written_without_the_record_decorator(launched):
    """The reason reaches torch's failure report, where torchrun only says how to enable it."""
    assert launched["unguarded", "torchrun"].errors == {}
    ours = launched["unguarded", "forkserver"]
    message = ours.errors["0"]["message"]
    assert message["message"] == "ValueError: rank 0 failed on purpose"
    assert message["extraInfo"]["py_callstack"] in ours.stderr["0"]
    assert message["extraInfo"]["timestamp"].isdigit()


def _own_traceback(stderr):
    """The last report; before it come those of DataLoader workers."""
    return stderr[stderr.rindex("Traceback", 0, stderr.rindex("The above exception")) :]


def test_a_watched_rank_differs_only_where_documented(launched):
    """The rank page costs descriptors, one sleeping thread and the dump signal; a script sees nothing else."""
    watched = launched["watched", "forkserver"]
    for rank, theirs in launched["guarded", "torchrun"].facts.items():
        found = differences(theirs, watched.facts[rank])
        visible = {
            path: values
            for path, values in found.items()
            if not path.startswith(("/draws/", "/environment/", "/loaders", "/descriptors/"))
        }
        assert set(visible) <= {"/task_count", "/process/threads", "/status/SigCgt", *SESSION_HOOKS}
        assert visible["/process/threads"][1] == ["MainThread", "resilience-helper"]
        assert visible["/task_count"] == (1, 2)
        assert watched.stdout[rank] == launched["guarded", "torchrun"].stdout[rank]
    assert watched.launcher.returncode == 0
