"""`--preflight` across nodes: when they have met, before the first attempt, they are compared and tried in pairs.

What does it is of the floor of the launcher, so it runs by name in a process of its own
(`resilience_sdk.health.nodes`); here is when it runs, and what its verdict means for this node.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from resilience_sdk.console import say
from resilience_sdk.events import Event
from resilience_sdk.journal import Journal
from resilience_sdk.launcher.agent import Agent
from resilience_sdk.launcher.decision import Decision
from resilience_sdk.launcher.peers import Peer
from resilience_sdk.launcher.preflight import Look, answer_of, say_finding
from resilience_sdk.launcher.signals import SignalInbox
from resilience_sdk.outcome import EXIT_HARDWARE, EXIT_STOP, Verdict

_LONGEST_S = 620.0  # its process ends itself before
_PROGRAM = "from resilience_sdk.health.nodes.__main__ import main; sys.exit(main())"


class NodesPreflight:
    """Asked whenever nodes have met. Main thread."""

    def __init__(self, agent: Agent, look: Look, least_nodes: int, inbox: SignalInbox, journal: Journal) -> None:
        """`look` is what this node found on itself; the job cannot do with less than `least_nodes`."""
        self._agent = agent
        self._look = look
        self._least_nodes = least_nodes
        self._inbox = inbox
        self._journal = journal

    def __call__(self) -> bool | Decision:
        """Return True to start, False to meet again without a node that leaves, a decision to end here.

        Raises:
            LeaveRequested: A signal asked to leave.
        """
        agent, refused = self._agent, self._look.refused
        place = meeting_place(agent.peers, agent.attempt)
        if place is not None:
            try:
                verdict = self._verdict(place)
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                why = " ".join(str(error).split())[:500]
                say(f"the preflight across nodes failed itself, the job starts without: {why}")
                self._journal.emit(Event.DEGRADED, what="preflight", why=why)
            else:
                return self._follow(verdict)
        return True if refused is None else refused.decision

    def _verdict(self, place: str) -> Mapping[str, Any]:
        agent, refused = self._agent, self._look.refused
        say(f"preflight: comparing {agent.nodes} nodes and trying them in pairs")
        host, port = _address(agent.store)
        task = {
            "host": host,
            "port": port,
            "prefix": f"resilience/preflight/{place}",
            "node": agent.node,
            "names": [peer.name for peer in agent.peers],
            "spare": agent.nodes - self._least_nodes,
            "holds_store": agent.holds_store,
            "findings": [finding for finding in self._look.findings if finding["data"].get("same")],
            "refusal": None
            if refused is None
            else {
                "reason": f"{refused.decision.reason}: {refused.what}",
                "of_the_node": refused.decision.exit_code == EXIT_HARDWARE,
            },
        }
        verdict: dict[str, Any] = json.loads(answer_of(_PROGRAM, task, self._inbox, _LONGEST_S))
        if "broken" in verdict:
            raise ValueError(str(verdict["broken"]))
        return verdict

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


def decide(verdict: Mapping[str, Any], node: int, names: Sequence[str], *, least_nodes: int) -> bool | Decision:
    """Return what a verdict means for a node: True to start, False to meet again, else how the job ends here. Pure."""
    out = {int(number): str(why) for number, why in verdict["leave_out"].items()}
    if verdict["stop"]:
        return Decision(
            Verdict.STOP, EXIT_STOP, f"the preflight found what has to be cured first ({verdict['stop']})", 0
        )
    if verdict["unnamed"]:
        reason = f"the preflight found nodes that cannot work together: {verdict['unnamed']}"
        return Decision(Verdict.HARDWARE, EXIT_HARDWARE, reason, 0)
    if not out:
        return True
    told = "; ".join(f"{names[number]}: {why}" for number, why in out.items())
    reason = f"the preflight leaves out {told}"
    if len(names) - len(out) < least_nodes:
        return Decision(Verdict.HARDWARE, EXIT_HARDWARE, reason, 0)
    if out.keys() & set(verdict["holds_store"]):
        reason = f"{reason}, and with it goes the store of the rendezvous"
        return Decision(Verdict.HARDWARE, EXIT_HARDWARE, reason, 0)
    return Decision(Verdict.HARDWARE, EXIT_HARDWARE, reason, 0, others_go_on=True) if node in out else False


def _address(store: Any) -> tuple[str, int]:
    """Return where the server of a store is; raises ValueError where it has none."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if not hasattr(store, "host"):
        raise ValueError(f"it needs a rendezvous with a TCP store, this one has a {type(store).__name__}")
    return str(store.host), int(store.port)
