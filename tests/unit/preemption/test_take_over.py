"""Our handlers in the place of a framework's."""

import os
import signal

import pytest

from resilience_sdk.preemption.signals import Handlers
from resilience_sdk.recorder import page_layout as at

NUMBER = signal.SIGUSR2


@pytest.fixture(autouse=True)
def as_before():
    """The disposition of the signal is put back."""
    before = signal.getsignal(NUMBER)
    yield
    signal.signal(NUMBER, before)


@pytest.fixture
def handlers(tmp_path):
    return Handlers([0] * at.LANES_AT, tmp_path, 0, (NUMBER,))


def test_a_framework_s_handler_is_left_out_and_what_was_there_before_is_called(handlers):
    """As if the framework had installed none."""
    heard = []
    signal.signal(NUMBER, lambda *_: heard.append("user"))
    behind = {NUMBER: signal.getsignal(NUMBER)}
    signal.signal(NUMBER, lambda *_: heard.append("framework"))
    handlers.take_over(behind)
    os.kill(os.getpid(), NUMBER)
    assert heard == ["user"]
    assert handlers.noted_at is not None


def test_one_that_had_been_chained_is_left_out_too(handlers):
    """Where ours were installed behind the framework's."""
    heard = []
    signal.signal(NUMBER, lambda *_: heard.append("framework"))
    handlers.install()
    handlers.take_over({NUMBER: signal.SIG_DFL})
    os.kill(os.getpid(), NUMBER)
    assert heard == []


def test_a_second_time_ours_do_not_call_themselves(handlers):
    """A framework may have found ours there, and put its own around them."""
    handlers.take_over({NUMBER: signal.SIG_DFL})
    own = signal.getsignal(NUMBER)
    signal.signal(NUMBER, lambda number, frame: own(number, frame))
    handlers.take_over({NUMBER: own})
    os.kill(os.getpid(), NUMBER)
    assert signal.getsignal(NUMBER) == own


def test_a_signal_that_is_ignored_stays_so(handlers):
    """Somebody wants it to be."""
    signal.signal(NUMBER, signal.SIG_IGN)
    handlers.take_over({NUMBER: signal.SIG_IGN})
    assert signal.getsignal(NUMBER) is signal.SIG_IGN


def test_a_signal_that_only_the_framework_s_user_names_is_taken_too(handlers):
    """Beside those that the job was started with."""
    before = signal.getsignal(signal.SIGUSR1)
    handlers.take_over({}, (signal.SIGUSR1, NUMBER))
    assert handlers.numbers == (NUMBER, signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert handlers.heard == signal.SIGUSR1
    own = signal.getsignal(NUMBER)
    handlers.give_back(all_of_them=False)
    assert handlers.numbers == (NUMBER,)
    assert signal.getsignal(signal.SIGUSR1) == before
    assert signal.getsignal(NUMBER) == own != before


def test_a_training_in_a_process_that_lives_on_leaves_no_handler_behind(handlers):
    """Who listens again hears again; a handler that somebody has put over ours stays."""
    before = signal.getsignal(NUMBER)
    handlers.install()
    assert handlers.are_in_place()
    handlers.give_back(all_of_them=True)
    assert not handlers.are_in_place()
    assert signal.getsignal(NUMBER) == before
    handlers.take_over({})
    assert handlers.are_in_place()
    signal.signal(NUMBER, signal.SIG_IGN)
    handlers.give_back(all_of_them=True)
    assert signal.getsignal(NUMBER) is signal.SIG_IGN
