"""Page directories of jobs that are gone are removed, and no other."""

from __future__ import annotations

import json
import os
import time

import attrs
import pytest

from resilience_sdk.core import job_config
from resilience_sdk.core.job_config import JobConfig
from resilience_sdk.monitor import spawn
from resilience_sdk.monitor.main import remove_ended, remove_stale
from resilience_sdk.rank.session import remove_unwatched
from resilience_sdk.recorder.page_directory import page_stem
from resilience_sdk.recorder.page_writer import RankPage
from resilience_sdk.system import hostinfo
from resilience_sdk.system.file_lock import file_lock

ME = os.getpid()
GONE = (ME, 1)


@pytest.fixture
def make(tmp_path):
    """Make the page directory of a job whose processes are gone, unless told otherwise."""

    def make(name: str, *, page_pid: int = 0, age_s: float = 3600.0, **changes: object):
        folder = tmp_path / name
        folder.mkdir(mode=0o700)
        config = JobConfig("job", "/run", True, {}, "report", "train.py", None, None, *GONE, 0, 0)
        (folder / job_config.FILE).write_text(json.dumps(attrs.asdict(attrs.evolve(config, **changes))))
        for suffix in ("page", "stack"):
            (folder / f"a0-r0-{page_pid or 4_000_000}.{suffix}").write_bytes(b"x")
        then = time.time() - age_s
        os.utime(folder, (then, then))
        return folder

    return make


def test_only_what_nobody_lives_in_is_removed(make, tmp_path):
    """A living creator, launcher, parent or rank, a young directory, another PID namespace: all of these stay."""
    alive = (ME, hostinfo.process_start_ticks(ME))
    own, dead = make("own"), make("dead")
    kept = [
        make("creator", creator_pid=alive[0], creator_ticks=alive[1]),
        make("launcher", launcher_pid=alive[0], launcher_ticks=alive[1]),
        make("parent", parent_pid=alive[0], parent_ticks=alive[1]),
        make("rank", page_pid=ME),
        make("young", age_s=0),
        make("container", pid_namespace="pid:[1]"),
    ]
    nothing_known = tmp_path / "unknown"
    nothing_known.mkdir(mode=0o700)
    assert remove_stale(own) == [dead]
    assert not dead.exists()
    assert all(folder.exists() for folder in [own, *kept, nothing_known])


def test_a_directory_with_a_monitor_stays(make):
    """Whoever holds the monitor's lock is still at work there."""
    own, other = make("own"), make("other")
    with file_lock(other / spawn.LOCK) as mine:
        os.utime(other, (0, 0))
        assert mine
        assert remove_stale(own) == []


def test_a_rank_that_no_monitor_saw_leaves_nothing(make):
    """Its directory goes with it, but not while another rank, or a monitor, is there."""
    alone = make("alone")
    remove_unwatched(alone, alone / "a0-r0-4000000")
    assert not alone.exists()
    shared, watched = make("shared"), make("watched")
    remove_unwatched(shared, shared / "a0-r1-4000001")
    with file_lock(watched / spawn.LOCK):
        remove_unwatched(watched, watched / "a0-r0-4000000")
    assert list(shared.glob("*.page"))
    assert list(watched.glob("*.page"))


def test_dead_ranks_of_an_earlier_start_are_not_those_of_this_one(tmp_path):
    """They would be its failed ranks, should it have fewer; who lives, or came since then, stays."""

    def page(rank, ticks, created_ns):
        identity = {"rank": rank, "local_rank": rank, "world_size": 4, "attempt": 0, "created_ns": created_ns}
        path = tmp_path / f"{page_stem(0, rank, ME)}.page"
        RankPage.create(path, pid=ME, start_ticks=ticks, facts={}, **identity)
        path.with_suffix(".stack").touch()

    page(0, GONE[1], 5)
    page(1, hostinfo.process_start_ticks(ME), 5)
    page(2, GONE[1], 15)
    (tmp_path / f"{page_stem(0, 3, ME)}.page").write_bytes(b"x")
    (tmp_path / job_config.FILE).touch()
    remove_ended(tmp_path, 10)
    left = {path.name for path in tmp_path.iterdir()}
    pages = [f"{page_stem(0, rank, ME)}{suffix}" for rank in (1, 2) for suffix in (".page", ".stack")]
    assert left == {*pages, f"{page_stem(0, 3, ME)}.page", job_config.FILE}
