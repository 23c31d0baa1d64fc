"""`--preflight` across nodes: when they have met, before the first attempt, they are compared and tried in pairs.

What does it is of the floor of the launcher, so it runs by name in a process of its own
(`resilience_sdk.health.pairwise`); here is when it runs, and what its verdict means for this node.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore

from resilience_sdk.cluster.membership import Peer
from resilience_sdk.core.console import say
from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.launcher.agent import Agent
from resilience_sdk.launcher.preflight import Look, say_finding
from resilience_sdk.launcher.rendezvous import StoreLostError, first_line, within
from resilience_sdk.launcher.restart_policy import Decision
from resilience_sdk.launcher.signals import SignalInbox
from resilience_sdk.launcher.task_programs import answer_of
from resilience_sdk.postmortem.exit_codes import JobVerdict
from resilience_sdk.system import programs

_LONGEST_S = 620.0  # its process ends itself before
_ASK_S, _MARGIN_S = 30.0, 10.0
_END = "end"  # the key of a meeting's end


class NodesPreflight:
    """The preflight across nodes, held whenever they have met. Main thread."""

    def __init__(self, agent: Agent, look: Look, least_nodes: int, inbox: SignalInbox, journal: Journal) -> None:
        """`look` is what this node found on itself; the job cannot do with less than `least_nodes`."""
        self._agent = agent
        self._look = look
        self._least_nodes = least_nodes
        self._inbox = inbox
        self._journal = journal
        self._asked_again = False

    def hold(self) -> bool | Decision:
        """Return True to start, False to meet again without a node that leaves, a decision to end here.

        Raises:
            LeaveRequested: A signal asked to leave.
        """
        refused = self._look.refused
        place = meeting_place(self._agent.peers, self._agent.attempt)
        if place is not None:
            try:
                end = self._held(place)
            except StoreLostError as error:
                if not self._asked_again:  # the others may be meeting again, too; who cannot ask cannot train
                    self._asked_again = True
                    say(f"how the preflight across nodes ended cannot be asked ({first_line(error)}); meeting again")
                    return False
                end = {"broken": first_line(error)}
            if "broken" not in end:
                return self._follow(end["verdict"])
            say(f"the preflight across nodes failed itself, the job starts without: {end['broken']}")
            self._journal.emit(Event.DEGRADED, what="preflight", why=end["broken"])
        return True if refused is None else refused.decision

    def _held(self, place: str) -> Mapping[str, Any]:
        """Return how the meeting ended: the same on all nodes, whatever became of this one's part in it.

        Raises:
            StoreLostError: The store did not tell.
        """
        agent = self._agent
        try:
            host, port = _address(agent.store)
        except ValueError as error:
            return {"broken": str(error)}
        prefix = f"resilience/preflight/{place}"
        say(f"preflight: comparing {agent.nodes} nodes and trying them in pairs")
        try:
            task = self._task(host, port, prefix)
            end: Mapping[str, Any] = answer_of(programs.PAIRWISE_PREFLIGHT, task, self._inbox, _LONGEST_S)
        except (OSError, ValueError, AttributeError, subprocess.SubprocessError) as error:
            why = f"{agent.node_name}: {' '.join(str(error).split())[:500]}"
            with self._inbox.raising():
                end = give_up(host, port, prefix, why, _ASK_S)
        return end

    def _task(self, host: str, port: int, prefix: str) -> dict[str, Any]:
        agent, refused = self._agent, self._look.refused
        return {
            "host": host,
            "port": port,
            "prefix": prefix,
            "end": _END,
            "node": agent.node,
            "names": [peer.name for peer in agent.peers],
            "spare": agent.nodes - self._least_nodes,
            "holds_store": agent.holds_store,
            "findings": [finding for finding in self._look.findings if finding["data"].get("same")],
            "refusal": None
            if refused is None
            else {
                "reason": f"{refused.decision.reason}: {refused.what}",
                "of_the_node": refused.decision.verdict is JobVerdict.HARDWARE,
            },
        }

    def _follow(self, verdict: Mapping[str, Any]) -> bool | Decision:
        agent = self._agent
        out = {int(node): str(why) for node, why in verdict["leave_out"].items()}
        for finding in verdict["findings"]:
            say_finding(finding)
        if agent.node == next((node for node in range(agent.nodes) if node not in out), 0):
            for event in verdict["events"]:  # of all nodes one journals it
                self._journal.emit(Event.HEALTH, **event)
        decision = decide(verdict, agent.node, [peer.name for peer in agent.peers], least_nodes=self._least_nodes)
        if isinstance(decision, bool):
            agent.cleared = True
            if not decision:
                say(f"going on without {', '.join(agent.peers[node].name for node in out)}")
        return decision


def meeting_place(peers: Sequence[Peer], attempt: int) -> str | None:
    """Return where in the store these nodes hold a preflight, None where they hold none; says so if only some ask.

    All nodes come to the same answer. After the first attempt none is held: what failed then is known from how it
    failed. Nodes that were through one hold another only with one that was not.
    """
    if attempt > 0 or len(peers) < 2 or not any(peer.preflight for peer in peers):
        return None
    if others := [peer.name for peer in peers if not peer.preflight]:
        say(f"no preflight across nodes: {', '.join(others)} was started without --preflight")
        return None
    return None if all(peer.cleared for peer in peers) else peers[0].preflight


def give_up(host: str, port: int, prefix: str, why: str, limit_s: float) -> dict[str, Any]:
    """End a meeting for this node's process, which is gone; return how it ended, which may have been well before.

    Raises:
        StoreLostError: The store does not answer.
    """

    def ask() -> bytes:
        client = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=limit_s))
        told: bytes = PrefixStore(prefix, client).compare_set(_END, "", json.dumps({"broken": why}))
        return told

    try:
        return dict(json.loads(within(limit_s + _MARGIN_S, ask)))
    except (RuntimeError, TimeoutError) as error:
        raise StoreLostError(first_line(error)) from None


def decide(verdict: Mapping[str, Any], node: int, names: Sequence[str], *, least_nodes: int) -> bool | Decision:
    """Return what a verdict means for a node: True to start, False to meet again, else how the job ends here. Pure."""
    out = {int(number): str(why) for number, why in verdict["leave_out"].items()}
    if verdict["stop"]:
        return Decision(JobVerdict.STOP, f"the preflight found what has to be cured first ({verdict['stop']})")
    if verdict["unnamed"]:
        reason = f"the preflight found nodes that cannot work together: {verdict['unnamed']}"
        return Decision(JobVerdict.HARDWARE, reason)
    if not out:
        return True
    told = "; ".join(f"{names[number]}: {why}" for number, why in out.items())
    reason = f"the preflight leaves out {told}"
    if len(names) - len(out) < least_nodes:
        return Decision(JobVerdict.HARDWARE, reason)
    if out.keys() & set(verdict["holds_store"]):
        reason = f"{reason}, and with it goes the store of the rendezvous"
        return Decision(JobVerdict.HARDWARE, reason)
    return Decision(JobVerdict.HARDWARE, reason, others_go_on=True) if node in out else False


def _address(store: Any) -> tuple[str, int]:
    """Return where the server of a store is; raises ValueError where it has none."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if not hasattr(store, "host"):
        raise ValueError(f"it needs a rendezvous with a TCP store, this one has a {type(store).__name__}")
    return str(store.host), int(store.port)
