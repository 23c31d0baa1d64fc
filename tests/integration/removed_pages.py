"""A training of two ranks whose page directory is removed while it runs, and what must hold all the same."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from harness import Job, job

from resilience_sdk.checkpoint.store import verify_checkpoint

EVERY = 5  # steps between two checkpoints, which is no default
_HANG = ("--stuck-after", "6")


@contextlib.contextmanager
def training(folder: Path, *options: str) -> Iterator[Job]:
    """Start the training; it trains when this returns, and goes on for as long as a test may take."""
    settings = ("--nproc-per-node", "2", "--checkpoint-every", str(EVERY), *_HANG)
    with job(folder, *settings, *options, "preempted.py", "--steps", "1000", "--pause", "0.05") as run:
        run.wait(lambda: trained(run) > 2 * EVERY, "twelve steps")
        yield run


def trained(run: Job, rank: int = 0) -> int:
    """Return how many losses a rank has written: steps, replayed ones too."""
    with contextlib.suppress(OSError):
        return len((run.folder / "told" / f"losses-{rank}").read_text().splitlines())
    return 0


def steps_in_order(run: Job, rank: int = 0) -> list[int]:
    """Return the steps that a rank has made, as they came."""
    lines = (run.folder / "told" / f"losses-{rank}").read_text().splitlines()
    return [int(line.split()[0]) for line in lines]


def remove(run: Job, wait_s: float = 0.0, *, everything: bool = True) -> Path:
    """Remove the directory of this job (or of this user) after so long, and return where it was."""
    time.sleep(wait_s)  # a moment that nothing in the job chooses
    place = run.page_directory()
    shutil.rmtree(place.parent if everything else place)
    return place


def rank_pid(run: Job, rank: int) -> int:
    """Return the process of a rank in the newest attempt."""
    return int((run.folder / "told" / f"rank-{rank}").read_text())


def check_agreed_stop(run: Job) -> None:
    """After SIGTERM to one rank: all stopped at one step, saved it, and the job left with 75."""
    os.kill(rank_pid(run, 1), signal.SIGTERM)
    assert run.finish() == 75, run.screen
    stops = run.events("stop_agreed")
    assert len({event["rank"] for event in stops}) == 2, stops
    assert len({event["step"] for event in stops}) == 1, stops
    saved = max(int(path.name[5:]) for path in run.run_dir.glob("checkpoints/step-*"))
    assert run.outcome()["checkpoint"] == saved == stops[0]["step"]
    assert not run.events("attempt_start", attempt=1), "it was an agreed stop, and no restart"


def check_named(run: Job) -> None:
    """After SIGSTOP to a rank: it is named, and the job goes on."""
    os.kill(rank_pid(run, 1), signal.SIGSTOP)
    run.wait_event("attempt_start", attempt=1)
    (hang,) = (incident for incident in run.incidents() if incident["kind"] == "hang")
    assert [culprit["rank"] for culprit in hang["culprits"]] == [1], hang
    assert hang["cause"] == "hang_rank_stopped", hang
    check_resumed(run)


def check_resumed(run: Job) -> None:
    """The next attempt went on from a checkpoint of the interval that was set, and keeps to that interval."""
    before = len(run.events("ckpt_commit"))
    run.wait(lambda: len(run.events("ckpt_commit")) >= before + 3, "three checkpoints of the next attempt")
    steps = steps_in_order(run)
    made_again = [before - after + 1 for before, after in itertools.pairwise(steps) if after != before + 1]
    assert made_again in ([], *([lost] for lost in range(1, EVERY + 1))), made_again  # none: it was ended behind a save
    saved = sorted(event["step"] for event in run.events("ckpt_commit"))
    assert all(step % EVERY == 0 for step in saved), saved


def check_killed(run: Job) -> None:
    """After SIGKILL of a rank: it is named, and no step is lost beyond the last checkpoint."""
    os.kill(rank_pid(run, 1), signal.SIGKILL)
    run.wait_event("attempt_start", attempt=1)
    (crash,) = (incident for incident in run.incidents() if incident["kind"] == "crash")
    assert [culprit["rank"] for culprit in crash["culprits"]] == [1], crash
    check_resumed(run)


def check_told_once(run: Job) -> None:
    """The loss is said once on the screen, and journalled."""
    assert run.screen.count("was removed while the job runs") == 1, run.screen
    assert run.events("degraded", what="pages")


def newest_step(run: Job) -> int:
    """Return the step of the newest checkpoint, which can be read as a whole."""
    newest = max(run.run_dir.glob("checkpoints/step-*"))
    return verify_checkpoint(newest).step
