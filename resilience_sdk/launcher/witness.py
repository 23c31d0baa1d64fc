"""What is looked at before and after an attempt beside its ranks: memory kills, logs, the kernel, checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import attrs

from resilience_sdk import cgroups
from resilience_sdk.attribution.corroboration import VAGUE
from resilience_sdk.attribution.exits import Classification, classify_exit
from resilience_sdk.attribution.log_tail import LogFindings
from resilience_sdk.checkpoint.newest import newest_checkpoint
from resilience_sdk.launcher import log_ends
from resilience_sdk.launcher.attempt_files import RankTrace
from resilience_sdk.launcher.ranks import RankExit
from resilience_sdk.run_directory import RunDirectory

_WORKERS = re.compile(r"DataLoader worker \(pid(?:\(s\))? (\d+(?:, \d+)*)\)")


@attrs.frozen
class Seen:
    """What was seen of one attempt from outside its ranks; see `evidence.Facts`."""

    cgroup_oom: bool | None = None
    told: Mapping[int, Sequence[Classification]] = attrs.field(factory=dict)
    node_told: Sequence[Classification] = ()
    job_told: LogFindings | None = None


@attrs.frozen
class Witness:
    """How things stood when an attempt began. Call `close` when it is over."""

    checkpoint: int | None
    _kills: int | None
    _marked: log_ends.Mark

    @classmethod
    def begin(cls, run_dir: RunDirectory) -> Witness:
        """Look at everything now."""
        return cls(newest_checkpoint(run_dir), cgroups.oom_kills(), log_ends.mark())

    def close(self) -> None:
        """Give back what is open."""
        log_ends.close(self._marked)

    def look(
        self,
        exits: Sequence[RankExit],
        traces: Mapping[int, RankTrace],
        files: Mapping[int, Sequence[str]],
        *,
        hung: bool,
    ) -> Seen:
        """Return what was seen since then; takes well under a second. `files`: logs by local rank.

        Logs are read where the end of a rank alone does not tell enough, and not after a hang (`hung`), whose deaths
        are the monitor's doing.
        """
        kills = cgroups.oom_kills()
        oom = None if kills is None or self._kills is None else kills > self._kills
        pids = {end.rank: {end.pid, *_lost_workers(traces[end.rank])} for end in exits}
        kernel = log_ends.kernel_findings(self._marked, set().union(*pids.values()), oom_seen=oom)
        if hung:
            return Seen(oom, node_told=kernel.node)
        first_gone = sorted(exits, key=lambda end: end.order)
        unclear = [end for end in first_gone if not end.ended_by_us and _is_unclear(end, traces[end.rank])]
        logs = log_ends.rank_findings({end.rank: files.get(end.local_rank, ()) for end in unclear})
        told = {
            rank: tuple(word for pid in sorted(known) for word in kernel.processes.get(pid, ()))
            + ((logs[rank],) if rank in logs else ())
            for rank, known in pids.items()
        }
        return Seen(oom, told, kernel.node, log_ends.own_findings(self._marked) if unclear else None)


def _is_unclear(end: RankExit, trace: RankTrace) -> bool:
    """Tell whether the rank's log may say more than its end: an abort, a bare code, a loader whose worker is gone."""
    known = classify_exit(end.exit_code, trace.exception)
    return end.exit_code != 0 and (known.confidence <= VAGUE or known.cause == "dataloader_worker_killed")


def _lost_workers(trace: RankTrace) -> set[int]:
    """Return the process ids of the DataLoader workers that the rank's exception says are gone."""
    found = _WORKERS.search(str((trace.exception or {}).get("message", "")))
    return {int(pid) for pid in found[1].split(",")} if found else set()


def look_safely(look: Callable[[], Seen], note: Callable[[str], None]) -> Seen:
    """Return what was seen, or nothing and why in `note`: exit codes and exceptions alone still tell much."""
    try:
        return look()
    except Exception as error:  # noqa: BLE001 - what jobs write into logs must not cost them a restart
        note(f"{type(error).__name__}: {error}")
        return Seen()
