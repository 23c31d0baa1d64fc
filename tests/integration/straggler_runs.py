"""Runs of `scripts/straggling.py`: four ranks, of which some are made slow."""

import contextlib

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


def named(run, **facts):
    """Return who was found to be slow in what."""
    return {(tuple(event["ranks"]), event["section"]) for event in run.events("straggler", what="found", **facts)}
