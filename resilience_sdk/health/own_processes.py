"""Which processes of this node belong to the job of the process that asks: what they hold is held by nobody else."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from resilience_sdk import environ, kernel_files
from resilience_sdk.health.host.leftovers import processes, start_environment


def own_processes(pid: int, env: Mapping[str, str], root: str = "/") -> tuple[int, ...]:
    """Return the process ids of the job that process `pid` is of, as far as this machine's process table tells.

    Of a rank, which its variables `env` make it: whoever started it (the launcher, a scheduler's step) and everything
    below that. Of another process: what it has started itself.
    """
    parents = {process.pid: process.parent for process in processes(root)}
    proc = kernel_files.below(root, "/proc")

    def is_rank(other: int) -> bool:
        # A rank that was forked got its variables later than the kernel shows them.
        return environ.rank_identity(env if other == pid else start_environment(proc / str(other))) is not None

    return tuple(sorted(below(first_of_job(pid, parents, is_rank), parents)))


def first_of_job(pid: int, parents: Mapping[int, int], is_rank: Callable[[int], bool]) -> int:
    """Return the process that has started the ranks: the nearest ancestor of a rank that was not itself started as one.

    A wrapper script between them has a rank's variables. Pure, but for `is_rank`.
    """
    line = [pid]
    while is_rank(line[-1]) and (parent := parents.get(line[-1], 0)) > 1:  # whom init has adopted has no launcher
        if parent in line:
            break  # the table changed while it was read
        line.append(parent)
    return line[-1]


def below(first: int, parents: Mapping[int, int]) -> set[int]:
    """Return a process and all its descendants. Pure."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found, left = {first}, [first]
    while left:
        fresh = [child for child in children.get(left.pop(), ()) if child not in found]
        found.update(fresh)
        left += fresh
    return found
