"""The launcher and a store that does not answer."""

import threading
import time
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from resilience_sdk.core.journal import Journal, read_journal
from resilience_sdk.errors import ConfigError
from resilience_sdk.launcher.agent import free_port
from resilience_sdk.launcher.rendezvous import MeetingPlace, StoreLostError, WaitingNodes, first_line, within


def config(port, *, backend="c10d", **rendezvous):
    """What torch makes of the options."""
    return SimpleNamespace(
        rdzv_backend=backend,
        rdzv_endpoint=f"localhost:{port}",
        run_id="job",
        min_nodes=1,
        max_nodes=2,
        local_addr="localhost",
        rdzv_configs=rendezvous,
    )


class Refused(MeetingPlace):
    """Nobody listens there. Torch's own client takes seconds to find out."""

    def connect(self):
        raise RendezvousConnectionError("refused")


def test_an_answer_and_an_error_arrive_as_they_are():
    """As if the call had been made here."""
    assert within(5.0, lambda: 7) == 7
    with pytest.raises(KeyError, match="gone"):
        within(5.0, lambda: {}["gone"])


def test_a_call_that_does_not_return_is_left_behind():
    """After its time, or when somebody who looks has seen enough."""
    never = threading.Event()
    with pytest.raises(TimeoutError, match="no answer"):
        within(0.05, never.wait)

    def look(passed_s):
        raise StoreLostError(f"{passed_s:.0f}")

    with pytest.raises(StoreLostError):
        within(60.0, never.wait, look=look)
    never.set()


def test_asking_never_waits_and_knows_the_newest_answer():
    """A question that is out is not asked again."""
    may_answer, asked = threading.Event(), []

    def ask():
        asked.append(1)
        may_answer.wait()
        return 3

    question = WaitingNodes(SimpleNamespace(num_nodes_waiting=ask))
    assert [question.newest() for _ in range(5)] == [0] * 5
    assert asked == [1]
    may_answer.set()
    while not question.newest():
        time.sleep(0.001)
    assert question.newest() == 3
    question.settle()
    assert question._answer == 0


def test_nobody_answers_at_the_endpoint(tmp_path, capfd):
    """It is tried until the time is over, said once, and told to the journal."""
    place = Refused(config(29400), Journal(tmp_path, writer="launcher", host="b", boot_id="", job="job"))
    with pytest.raises(RendezvousConnectionError):
        place.reach(time.monotonic() + 0.5)
    (event,) = read_journal(tmp_path).events
    assert (event["event"], event["what"]) == ("degraded", "rendezvous")
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("resilience: ")]
    assert f"the rendezvous store at {place.endpoint} does not answer" in line
    assert "trying again for up to" in line


def test_a_request_without_an_answer_is_known_and_given_up():
    """As behind a cable that was pulled, where torch's client waits for ever; what is left behind cannot join."""
    place = MeetingPlace(config(free_port(), is_host="1", read_timeout=1))
    handler = place.connect()
    place.check()
    backend, held = place._backend, threading.Event()
    backend._inner = SimpleNamespace(name="c10d", get_state=held.wait, set_state=None)
    asking = threading.Thread(target=backend.get_state)
    asking.start()
    deadline = time.monotonic() + 10
    with pytest.raises(StoreLostError):
        while time.monotonic() < deadline:
            place.check()
            time.sleep(0.01)
    assert place.connect() is not handler
    place.check()
    with pytest.raises(RendezvousConnectionError, match="given up"):
        backend.get_state()
    held.set()
    asking.join()


def test_what_cannot_be_a_rendezvous_is_the_users_error():
    """Named with its backend."""
    place = MeetingPlace(config(1, backend="nonsense"))
    assert not place.may_come_again
    with pytest.raises(ConfigError, match="the rendezvous 'nonsense' cannot be used"):
        place.connect()
    with pytest.raises(ConfigError, match=r"'c10d' cannot be used.*join_timeout"):
        MeetingPlace(config(1, join_timeout="soon"))


def test_the_error_inside_is_shown():
    """Torch's own sentence says to look inside."""
    outer = RendezvousConnectionError("see inside")
    outer.__cause__ = OSError("refused\nmore")
    assert first_line(outer) == "OSError: refused"
    assert first_line(ValueError()) == "ValueError"
