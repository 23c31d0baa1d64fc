"""Who this process is: rank, local rank, world size, and the key of its job."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import attrs

from resilience_sdk import environ, hostinfo
from resilience_sdk.environ import RankIdentity
from resilience_sdk.rank_page import parse_stem
from resilience_sdk.session.earlier_start import read_page


@attrs.frozen
class Identity:
    """A rank identity, and whether a process group may still correct it."""

    rank: int
    local_rank: int
    world_size: int
    provisional: bool


def find_identity(env: Mapping[str, str]) -> Identity:
    """Return who this process is, by its environment, else its process group, else a guess to be corrected."""
    found = environ.rank_identity(env) or group_identity()
    if found is not None:
        return Identity(found.rank, found.local_rank, found.world_size, provisional=False)
    # Children of mp.spawn are numbered from 1 in the order of their start, which is their rank.
    numbers = multiprocessing.current_process()._identity
    guess = numbers[0] - 1 if numbers else 0
    return Identity(guess, guess, guess + 1, provisional=True)


def group_identity() -> RankIdentity | None:
    """Return the identity in an initialised default process group, without importing torch."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not getattr(distributed, "is_initialized", bool)():
        return None
    rank = distributed.get_rank()
    return RankIdentity(rank=rank, local_rank=rank, world_size=distributed.get_world_size(), source="torch.distributed")


def parent_process() -> tuple[int, int]:
    """Return `(pid, start ticks)` of the process that started the ranks, as far as it can be told."""
    parent = multiprocessing.parent_process()
    pid = os.getppid() if parent is None or parent.pid is None else parent.pid
    return pid, hostinfo.process_start_ticks(pid) or 0


def is_dataloader_worker() -> bool:
    """Tell whether this process is a DataLoader worker, which is no rank."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None


def process_of_rank(pages: Path, attempt: int, rank: int) -> int | None:
    """Return the living process, not this one, that records as this rank already; None when there is none.

    What a rank starts (an evaluation, a pool of helpers) inherits its environment, and would pass for the rank. A
    process that has recorded nothing so far may be a wrapper around the one that trains, so it does not count; nor
    does one that only guessed its rank.
    """
    for path in pages.glob(f"a{attempt}-r{rank}-*.page"):
        stem = parse_stem(path.stem)
        if stem is None or stem[2] == os.getpid():
            continue
        page = read_page(path)
        recorded = page is not None and any(lane.last_ns or lane.stack for lane in page.lanes)
        if page is None or page.provisional or not recorded:
            continue
        if not hostinfo.process_is_gone(page.pid, page.start_ticks):
            return page.pid
    return None


def is_alone(env: Mapping[str, str]) -> bool:
    """Tell whether nothing shows that a launcher started this process together with others."""
    return environ.rank_identity(env) is None and multiprocessing.parent_process() is None


def shares_key(job: str, env: Mapping[str, str]) -> bool:
    """Tell whether all ranks of this job have its key: not on several nodes, where each launcher made up its own."""
    return job != fallback_job_key(env) or not environ.has_several_nodes(env)


def fallback_job_key(env: Mapping[str, str]) -> str:
    """Return the key of a job whose launcher sets no variable: its launching process.

    A plain `python train.py` has no launcher; its parent is a shell that may run several, so it is its own. So is
    the one that Lightning's other ranks are children of.
    """
    is_first = is_alone(env) or environ.lightning_local_rank(env) == 0
    pid = os.getpid() if is_first else parent_process()[0]
    return f"pid-{hostinfo.host_name()}-{pid}-{hostinfo.process_start_ticks(pid)}"
