"""Runs of `scripts/straggling.py`: four ranks, of which some are made slow."""

import contextlib
import os
from pathlib import Path

import pytest
from harness import job

RANKS = 4


@contextlib.contextmanager
def training(folder, *args, fault="", options=(), ranks=RANKS, **env):
    """Start `straggling.py` with these arguments on four ranks."""
    env |= {"RESILIENCE_FAULT": fault} if fault else {}
    with job(folder, *options, "--nproc-per-node", str(ranks), "straggling.py", *args, env=env) as run:
        yield run


def enough(run):
    """Have the training end; it must end well."""
    (run.folder / "told" / "enough").touch()
    assert run.finish() == 0, run.screen


def least_of(injected_s):
    """Return from which excess on (seconds a step) somebody is the one who was made slower by that much."""
    return injected_s / 4


def found_events(run, *, least):
    """Return what was found, where it costs at least so many seconds in each step.

    On a busy machine another rank may lack a processor for some milliseconds in all of its steps, which is no mistake
    of ours; what was injected is far more.
    """
    return [event for event in run.events("straggler", what="found") if event["excess_s"] >= least]


def named(run, *, least):
    """Return who was found to be slow in what, by at least so many seconds a step; see `found_events`."""
    return {(tuple(event["ranks"]), event["section"]) for event in found_events(run, least=least)}


def named_by_incidents(run):
    """Return who is named by the incidents in what: everybody for whom something was done."""
    return {(culprit["rank"], culprit["section"]) for incident in run.incidents() for culprit in incident["culprits"]}


def make_nice(pid):
    """Give a process what the others leave, or skip where that is not to be had."""
    os.setpriority(os.PRIO_PROCESS, pid, 10)
    groups = Path("/proc/sys/kernel/sched_autogroup_enabled")
    if groups.exists() and groups.read_text().strip() == "1":  # then sessions compete, not processes
        try:
            Path(f"/proc/{pid}/autogroup").write_text("10")
        except OSError as error:
            pytest.skip(f"the kernel groups processes by session, and does not let us be nice: {error}")
