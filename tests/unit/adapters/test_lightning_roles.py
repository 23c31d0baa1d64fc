"""Which callback does what in one trainer, when a training is complete, and what hangs on exceptions: all pure."""

from types import SimpleNamespace

import pytest

from resilience_sdk.adapters.lightning import roles, surroundings
from resilience_sdk.adapters.lightning.complete import is_complete
from resilience_sdk.adapters.lightning.fit import lines_of_stop
from resilience_sdk.errors import ConfigError

ALL = frozenset({roles.BEAT, roles.SECTIONS, roles.PREEMPTION, roles.CHECKPOINT, roles.FINISH})


class Callback:
    """What `roles` looks at."""

    def __init__(self, *duties, automatic=False, stops=False):
        self.duties = frozenset(duties)
        self.is_automatic = automatic
        self.stops_for_stragglers = stops


def test_alone_it_has_all_its_duties():
    """Callbacks of others do not matter."""
    mine = Callback(*ALL)
    assert roles.role_of(mine, [object(), mine]) == ALL


def test_two_that_do_the_same_are_an_error_that_names_both():
    """Whichever is asked."""
    one, two = Callback(*ALL), Callback(roles.PREEMPTION)
    for each in (one, two):
        with pytest.raises(ConfigError, match="both do the preemption: remove one"):
            roles.role_of(each, [one, two])


def test_sections_are_timed_once_for_all_that_want_them():
    """By the first of them."""
    one, two = Callback(roles.BEAT, roles.SECTIONS), Callback(roles.SECTIONS, roles.REPORT)
    assert roles.SECTIONS in roles.role_of(one, [one, two])
    assert roles.role_of(two, [one, two]) == {roles.REPORT}


def test_the_automatic_one_steps_aside():
    """Where there is one that somebody has asked for; of two automatic ones the first stays."""
    auto, asked = Callback(*ALL, automatic=True), Callback(roles.PREEMPTION)
    assert roles.role_of(auto, [auto, asked]) == frozenset()
    assert roles.role_of(asked, [auto, asked]) == {roles.PREEMPTION}
    other = Callback(*ALL, automatic=True)
    assert roles.role_of(auto, [auto, other]) == ALL
    assert roles.role_of(other, [auto, other]) == frozenset()


def test_one_that_stops_for_stragglers_checks_unless_another_does():
    """A stop takes somebody who checks."""
    stopping = Callback(roles.SECTIONS, roles.REPORT, stops=True)
    assert roles.PREEMPTION in roles.role_of(stopping, [stopping])
    assert roles.PREEMPTION not in roles.role_of(stopping, [stopping, Callback(roles.PREEMPTION)])


def trainer(**values):
    given = {"global_step": 5, "max_steps": -1, "current_epoch": 1, "max_epochs": None, "callbacks": []}
    return SimpleNamespace(**{**given, **values})


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"max_steps": 5}, True),
        ({"max_epochs": 1}, True),
        ({"max_epochs": 3}, True),  # ended early, by an EarlyStopping
        ({"max_epochs": 3, "callbacks": [SimpleNamespace(time_remaining=lambda: 0.0)]}, False),
        ({"max_epochs": 3, "callbacks": [SimpleNamespace(time_remaining=lambda: 9.0)]}, True),
        ({"max_epochs": 3, "callbacks": [SimpleNamespace(time_remaining=lambda: None)]}, True),
        ({"max_steps": 5, "callbacks": [SimpleNamespace(time_remaining=lambda: 0.0)]}, True),
    ],
)
def test_a_fit_is_complete_unless_its_time_was_up(values, expected):
    """Steps or epochs that are reached count first."""
    assert is_complete(trainer(**values), has_ended=True) is expected


def test_a_fit_that_was_only_begun_is_not_complete():
    """`Tuner.lr_find` begins one. Where nothing is left to do, none is begun."""
    assert not is_complete(trainer(max_epochs=3), has_ended=False)
    assert is_complete(trainer(max_steps=5), has_ended=False)


def test_a_trainer_of_another_kind_is_an_error_with_a_cure():
    """It names what is missing."""
    with pytest.raises(ConfigError, match=r"SimpleNamespace has no strategy, .*adapters\.pytorch\.attach"):
        surroundings.check(trainer())
    seams = {"profiler": 0, "fit_loop": 0, "save_checkpoint": 0, "fast_dev_run": 0}
    with pytest.raises(ConfigError, match=r"no strategy\.restore_checkpoint_after_setup"):
        surroundings.check(trainer(strategy=object(), **seams))


def test_the_signal_is_named_where_it_was_heard():
    """In NeMo's words; a rank that has heard none tells of the stop alone."""
    stop = "Preemption detected, saving checkpoint and exiting"
    assert lines_of_stop(SimpleNamespace(heard=15)) == ["Received signal 15, initiating graceful stop", stop]
    assert lines_of_stop(SimpleNamespace(heard=None)) == lines_of_stop(None) == [stop]


def test_what_saves_on_an_exception_is_named():
    """By its class, or a class above it, or its option."""
    base = type("OnExceptionCheckpoint", (), {})
    own = type("Own", (base,), {})
    saving = type("ModelCheckpoint", (), {"save_on_exception": True})
    plain = type("ModelCheckpoint", (), {"save_on_exception": False})
    assert surroundings.deadlocking([own(), plain(), saving(), object()]) == [
        "Own",
        "ModelCheckpoint(save_on_exception=True)",
    ]
