"""The agent and a connection to the rendezvous that stands still for a while."""

import threading
from types import SimpleNamespace

import attrs

from resilience_sdk.launcher import env
from resilience_sdk.launcher.agent import Agent, free_port
from resilience_sdk.launcher.forkserver import WorkerStarter
from resilience_sdk.launcher.options import launch_config, parse_options
from resilience_sdk.launcher.rendezvous import WaitingNodes


@attrs.define
class Link:
    """A backend behind a cable: while it is out, nobody gets an answer; then all that was sent arrives."""

    inner: object
    plugged_in: threading.Event = attrs.field(factory=threading.Event)

    def get_state(self):
        self.plugged_in.wait()
        return self.inner.get_state()

    def set_state(self, state, token):
        self.plugged_in.wait()
        return self.inner.set_state(state, token)


def test_a_meeting_that_was_left_behind_changes_nothing_once_it_gets_through(tmp_path):
    """It must not take the node out of the attempt that has begun over a new connection meanwhile."""
    script = tmp_path / "never_started.py"
    script.touch()
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}", "--nnodes", "1")
    quick = "is_host=1,read_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=2"
    options = parse_options([*rendezvous, "--rdzv-conf", quick, str(script)])
    config = launch_config(options, str(tmp_path))
    agent = Agent(config, options.script, env.RankLogs(lambda: config.logs_specs, {}), WorkerStarter(options.script))
    agent.meet(0)
    place, behind = agent._place, set(threading.enumerate())
    link = place._backend._inner = Link(place._backend._inner)
    agent._waiting = WaitingNodes(SimpleNamespace(num_nodes_waiting=lambda: int(link.plugged_in.wait() and 0)))
    agent.nodes_waiting()  # asks in a thread; the meeting waits for the answer first
    assert agent.meet(1) == 1
    (left,) = (
        thread for thread in threading.enumerate() if thread.name == "resilience-meeting" and thread not in behind
    )
    holder = agent._rdzv_handler._state_holder
    holder.sync()
    round_of_the_attempt = holder.state.round
    link.plugged_in.set()
    left.join(30)
    assert not left.is_alive()
    holder.sync()
    assert holder.state.round == round_of_the_attempt
    agent.leave(closed=True)
