"""The collection of evidence around an attempt: memory kills, ends of logs, the kernel's words, lost nodes.

Never raises for them.

What a rank prints is not captured unless the user asks for it: a pipe through the launcher could block a rank. It
is found where it went anyway: in the rank's own log file (`--redirects`, `--tee`), else in the file that the
launcher's own standard error is (`2> job.err`, or a scheduler's job log). Not on a terminal.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from resilience_sdk.attribution.diagnosis import MOST_BYTES, KernelFindings, LogFindings, read_kernel, read_tail
from resilience_sdk.attribution.exits import Classification, classification, classify_exit
from resilience_sdk.attribution.first_death import VAGUE, FirstDeath
from resilience_sdk.cluster.membership import Peer
from resilience_sdk.core.json_records import to_values
from resilience_sdk.core.plain_file import open_to_read
from resilience_sdk.hang.detect import ranks_text
from resilience_sdk.hang.evidence import FATAL
from resilience_sdk.incidents import Evidence
from resilience_sdk.postmortem.facts import RankExit, RankTrace
from resilience_sdk.system import hostinfo, procfs

ALONE_S = 2.0  # how long a node without a culprit waits for the word of another


AFTER_FAULT_S = 5.0  # beyond the time that ending ranks may take, when another node has seen a fault


@attrs.frozen
class NodeEnd:
    """How one node's part of an attempt ended."""

    node: int
    culprits: tuple[int, ...] = ()
    """Ranks that died of their own; empty where only lost connections and the like were seen."""
    order: int | None = None
    """Place among the nodes in the order in which they saw a rank fail; None where no rank failed."""
    headline: str = ""
    incident: str | None = None
    hang: bool = False
    """Whether the monitors ended the attempt for a hang: the incident is theirs."""
    free: bool = False
    """Whether that costs nothing of the budget."""
    final: str | None = None
    """Why no other attempt is to follow it."""
    stood: str | None = None
    """What stood still when the job was asked to leave."""
    fault: bool = False
    """Whether the fault is this node's though no rank is to blame for it: its fork server was killed."""
    joins: bool = False
    """Whether the ranks were ended because another node wants to join, which is no fault."""

    @property
    def is_cause(self) -> bool:
        """Whether this node knows why the attempt ended, so that no other one need tell."""
        return bool(self.culprits) or self.fault or self.hang or self.joins

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return to_values(self)


def read_end(node: int, data: Mapping[str, Any]) -> NodeEnd:
    """Return what a node has told; what does not fit counts as not told."""
    order, culprits = data.get("order"), data.get("culprits")
    headline, incident = data.get("headline"), data.get("incident")
    final, stood = data.get("final"), data.get("stood")
    return NodeEnd(
        node=node,
        culprits=tuple(rank for rank in culprits if isinstance(rank, int)) if isinstance(culprits, list) else (),
        order=order if isinstance(order, int) and order > 0 else None,
        headline=headline if isinstance(headline, str) else "",
        incident=incident if isinstance(incident, str) else None,
        hang=data.get("hang") is True,
        free=data.get("free") is True,
        final=final if isinstance(final, str) and final else None,
        stood=stood if isinstance(stood, str) and stood else None,
        fault=data.get("fault") is True,
        joins=data.get("joins") is True,
    )


def reporter(ends: Mapping[int, NodeEnd], nodes: int) -> int | None:
    """Return the node that reports the end of an attempt of that many nodes; None while that is open."""
    if any(end.hang or end.joins for end in ends.values()):
        return reporter_at_last(ends)
    first = _first_real(ends)
    if first is not None:
        # Whoever has a lower number may have seen the true cause before.
        earlier = sum(1 for end in ends.values() if first.order and end.order and end.order < first.order)
        return first.node if first.order is not None and earlier >= first.order - 1 else None
    return min(ends) if len(ends) >= nodes else None


def reporter_at_last(ends: Mapping[int, NodeEnd]) -> int | None:
    """Return the node that reports when nobody waits for more words; None when nothing was told."""
    hung = [end.node for end in ends.values() if end.hang]
    if hung:
        return min(hung)
    first = _first_real(ends)
    if first is not None:
        return first.node
    joins = [end.node for end in ends.values() if end.joins]
    return min(joins or ends, default=None)


def _first_real(ends: Mapping[int, NodeEnd]) -> NodeEnd | None:
    real = [end for end in ends.values() if end.culprits or end.fault]
    return min(real, key=lambda end: (end.order is None, end.order or 0, end.node), default=None)


def patience_s(faults: int, told: int, term_grace_s: float) -> float:
    """Return how long to wait for more words: longer while a node that saw a fault has not come to its end."""
    return term_grace_s + AFTER_FAULT_S if faults > told else ALONE_S


SILENT_S = 5.0  # a node gives a sign every second


PATIENCE_S = 8.0  # how long to look for signs; where nodes do not come back, the rendezvous takes longer anyway


CAUSE = "network_node_unreachable"


_CONFIDENCE = 0.75


_STORE_CONFIDENCE = 0.6  # the nodes cannot tell one another: whose host the store is on, was lost for certain


def all_settled(nodes: int, told: Mapping[int, object], silent_s: Mapping[int, float]) -> bool:
    """Tell whether each node has told how the attempt ended, or has been silent for long enough to be gone."""
    return all(node in told or silent_s.get(node, 0.0) >= SILENT_S for node in range(nodes))


def gone_nodes(
    peers: Sequence[Peer], told: Mapping[int, object], silent_s: Mapping[int, float], store_host: str | None
) -> tuple[Peer, ...]:
    """Return the nodes that are gone. `store_host`: where the store was, if it does not answer any more."""
    missing = {node: peer for node, peer in enumerate(peers) if node not in told}
    if store_host is None:
        return tuple(peer for node, peer in missing.items() if silent_s.get(node, 0.0) >= SILENT_S)
    hosts = [peer for peer in missing.values() if peer.name.partition("#")[0] == store_host]
    if len(hosts) == 1 or len(missing) == 1:
        return tuple(hosts[:1] or missing.values())
    return ()


def blame(first: FirstDeath, gone: Sequence[Peer], store_host: str | None) -> FirstDeath:
    """Return the verdict with the ranks of these nodes as culprits; what was seen before stays as evidence."""
    ranks = tuple(sorted(rank for peer in gone for rank in peer.ranks))
    why = "no sign of life since the connections broke"
    if store_host is not None:
        why = f"the store of the rendezvous at {store_host} does not answer either"
    told = Evidence("relay", f"{nodes_text(gone)} gone: {why}")
    confidence = _CONFIDENCE if store_host is None else _STORE_CONFIDENCE
    known = classification(CAUSE, confidence, told, *first.classification.evidence)
    victims = tuple(rank for rank in (*first.victims, *first.culprits) if rank not in ranks)
    return FirstDeath(ranks, tuple(sorted(victims)), attrs.evolve(known, action="restart"))


def headline_of_lost(gone: Sequence[Peer]) -> str:
    """Say in one line which node went away."""
    return f"{nodes_text(gone)} gone: it died, or the network to it is cut"


def nodes_text(gone: Sequence[Peer]) -> str:
    """Return `host2 (rank 2) is` or `host1 (rank 1), host2 (ranks 2, 3) are`."""
    named = ", ".join(f"{peer.name} ({ranks_text(peer.ranks)})" for peer in gone[:4])
    return f"{named} {'is' if len(gone) == 1 else 'are'}"


_KERNEL_LOG = "/dev/kmsg"
_MOST_RECORDS = 5000
_RECORD_BYTES = 8192  # the kernel gives one record a read, and none is longer
_STANDARD_ERROR = "/proc/self/fd/2"
_BUDGET_S = 0.6  # for all logs of one attempt: the next one waits for it


@attrs.frozen
class LogMark:
    """Where the logs stood when an attempt began."""

    kernel: int | None  # descriptor that stands at the newest record; None where the kernel's log may not be read
    own_size: int  # bytes in our standard error, where that is a file


def mark(kernel_log: str = _KERNEL_LOG) -> LogMark:
    """Note where the logs stand. `close` the mark when the attempt is over."""
    kernel: int | None = None
    with contextlib.suppress(OSError):
        kernel = os.open(kernel_log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.lseek(kernel, 0, os.SEEK_END)
    return LogMark(kernel, _own_size() or 0)


def close(marked: LogMark) -> None:
    """Give the descriptor back."""
    if marked.kernel is not None:
        with contextlib.suppress(OSError):
            os.close(marked.kernel)


def kernel_findings(marked: LogMark, pids: Iterable[int], *, oom_seen: bool | None) -> KernelFindings:
    """Return what the kernel said since then of these processes and of the node."""
    if marked.kernel is None:
        return KernelFindings()
    return read_kernel(_kernel_messages(marked.kernel), pids, oom_seen=oom_seen)


def rank_findings(files: Mapping[int, Sequence[str]]) -> dict[int, Classification]:
    """Return what the logs of these ranks say of their ends, by rank, in the order given, while there is time."""
    deadline = time.monotonic() + _BUDGET_S
    found: dict[int, Classification] = {}
    for rank, names in files.items():
        for name in names:
            if time.monotonic() > deadline:
                return found
            told = read_tail(_tail(name), f"log of rank {rank}", rank)
            if told is not None and (rank not in found or found[rank].symptom):
                found[rank] = told.known
    return found


def own_findings(marked: LogMark) -> LogFindings | None:
    """Return what all that was written to our standard error since then says, where that is a file."""
    size = _own_size()
    if size is None or size <= marked.own_size:
        return None
    return read_tail(_tail(_STANDARD_ERROR, marked.own_size), "the launcher's standard error")


def _own_size() -> int | None:
    with contextlib.suppress(OSError):
        status = os.fstat(2)
        return status.st_size if stat.S_ISREG(status.st_mode) else None
    return None


def _tail(name: str, since: int = 0) -> bytes:
    with contextlib.suppress(OSError), open_to_read(name) as file:
        file.seek(max(since, os.fstat(file.fileno()).st_size - MOST_BYTES))
        return file.read(MOST_BYTES)
    return b""


def _kernel_messages(fd: int) -> Iterator[str]:
    """Yield the messages of the records `prio,seq,time,flags;message` from where the descriptor stands."""
    for _ in range(_MOST_RECORDS):
        try:
            record = os.read(fd, _RECORD_BYTES)
        except BrokenPipeError:
            continue  # it was overwritten by newer ones; the next read goes on with those
        except OSError:
            return
        if not record:
            return
        for line in record.decode(errors="replace").splitlines():
            head, semicolon, message = line.partition(";")
            if semicolon and head[:1].isdigit():
                yield message


_WORKERS = re.compile(r"DataLoader worker \(pid(?:\(s\))? (\d+(?:, \d+)*)\)")


@attrs.frozen
class OutsideView:
    """What was seen of one attempt from outside its ranks; see `evidence.AttemptFacts`."""

    cgroup_oom: bool | None = None
    told: Mapping[int, Sequence[Classification]] = attrs.field(factory=dict)
    node_told: Sequence[Classification] = ()
    job_told: LogFindings | None = None
    server_told: Sequence[Classification] = ()
    stacks: Mapping[int, str] = attrs.field(factory=dict)
    """By rank what `faulthandler` of the program has written into a log as the rank died of a signal."""


@attrs.frozen
class Witness:
    """How things stood when an attempt began. Call `close` when it is over."""

    checkpoint: int | None
    _kills: int | None
    _marked: LogMark

    @classmethod
    def begin(cls, checkpoint: int | None) -> Witness:
        """Look at everything now; `checkpoint` is the newest good one."""
        return cls(checkpoint, procfs.oom_kills(), mark())

    def close(self) -> None:
        """Give back what is open."""
        close(self._marked)

    def look(
        self,
        exits: Sequence[RankExit],
        traces: Mapping[int, RankTrace],
        files: Mapping[int, Sequence[str]],
        *,
        hung: bool,
        server: int | None = None,
    ) -> OutsideView:
        """Return what was seen since then; takes well under a second. `files`: logs by local rank.

        Logs are read where the end of a rank alone does not tell enough, and not after a hang (`hung`), whose deaths
        are the monitor's doing. `server`: pid of the fork server, where it was lost.
        """
        kills = procfs.oom_kills()
        oom = None if kills is None or self._kills is None else kills > self._kills
        pids = {end.rank: {end.pid, *_lost_workers(traces[end.rank])} for end in exits}
        servers = set() if server is None else {server}
        numbers = servers.union(*pids.values()) if hostinfo.kernel_counts_as_we_do() else set()
        kernel = kernel_findings(self._marked, numbers, oom_seen=oom)
        if server is not None:  # the ranks were ended with it, and have nothing to tell
            return OutsideView(oom, node_told=kernel.node, server_told=tuple(kernel.processes.get(server, ())))
        if hung:
            return OutsideView(oom, node_told=kernel.node)
        first_gone = sorted(exits, key=lambda end: end.order)
        unclear = [end for end in first_gone if not end.ended_by_us and _is_unclear(end, traces[end.rank])]
        logs = rank_findings({end.rank: files.get(end.local_rank, ()) for end in unclear})
        told = {
            rank: tuple(word for pid in sorted(known) for word in kernel.processes.get(pid, ()))
            + ((logs[rank],) if rank in logs else ())
            for rank, known in pids.items()
        }
        own = own_findings(self._marked) if unclear else None
        return OutsideView(
            oom,
            told,
            kernel.node,
            own,
            stacks=self._stacks([end for end in first_gone if not end.ended_by_us], traces, files),
        )

    def _stacks(
        self, ends: Sequence[RankExit], traces: Mapping[int, RankTrace], files: Mapping[int, Sequence[str]]
    ) -> dict[int, str]:
        """Return the stacks of ranks that died of a signal and left none to us: the program has `faulthandler` itself.

        In what all ranks write into, it is told whose one is where one rank alone died so.
        """
        killed = [
            end for end in ends if (end.exit_code or 0) < 0 and FATAL not in (traces[end.rank].stacks or "")
        ]  # fmt: skip
        found = {}
        for end in killed:
            texts = [_tail(name) for name in files.get(end.local_rank, ())]
            if len(killed) == 1 and _own_size() is not None:
                texts.append(_tail(_STANDARD_ERROR, self._marked.own_size))
            dumps = [text[text.rfind(FATAL) :] for text in (t.decode(errors="replace") for t in texts) if FATAL in text]
            if dumps:
                found[end.rank] = dumps[-1]
        return found


def _is_unclear(end: RankExit, trace: RankTrace) -> bool:
    """Tell whether the rank's log may say more than its end: an abort, a bare code, a loader whose worker is gone."""
    known = classify_exit(end.exit_code, trace.exception)
    return end.exit_code != 0 and (known.confidence <= VAGUE or known.cause == "dataloader_worker_killed")


def _lost_workers(trace: RankTrace) -> set[int]:
    """Return the process ids of the DataLoader workers that the rank's exception says are gone."""
    found = _WORKERS.search(str((trace.exception or {}).get("message", "")))
    return {int(pid) for pid in found[1].split(",")} if found else set()


def look_safely(look: Callable[[], OutsideView], note: Callable[[str], None]) -> OutsideView:
    """Return what was seen, or nothing and why in `note`: exit codes and exceptions alone still tell much."""
    try:
        return look()
    except Exception as error:  # noqa: BLE001 - what jobs write into logs must not cost them a restart
        note(f"{type(error).__name__}: {error}")
        return OutsideView()
