"""`adapters.megatron.around(pretrain)` where Megatron-LM is another version, or has other things in its places."""

from __future__ import annotations

import functools
import inspect
import subprocess
import sys
import types

import pytest

from resilience_sdk import preemption
from resilience_sdk.adapters import megatron
from resilience_sdk.adapters.megatron import attached
from resilience_sdk.adapters.megatron.pretraining import MonitorClient
from resilience_sdk.adapters.nvrx.client import RankMonitorClient
from resilience_sdk.core.settings import Settings
from resilience_sdk.errors import ConfigError, Preempted
from resilience_sdk.hang.timeouts import LearnedTimeouts, Limit
from resilience_sdk.rank import all_ranks


def forward_step(data_iterator, model):
    return data_iterator, model


def model_provider(pre_process=True):
    return "model"


def datasets_provider(samples):
    return samples


datasets_provider.is_distributed = True


class Timer:
    """A timer of Megatron that is off."""

    def start(self, barrier=False): ...

    def stop(self, barrier=False): ...


@pytest.fixture
def lm(monkeypatch):
    """Megatron-LM's globals, and its client of NVRx."""
    known = types.SimpleNamespace(
        _GLOBAL_ARGS=types.SimpleNamespace(
            exit_signal_handler=False, train_iters=6, iteration=0, curr_iteration=0, save="somewhere", rank=0
        ),
        _GLOBAL_TIMERS=lambda name, log_level=None: Timer(),
        _GLOBAL_SIGNAL_HANDLER=None,
    )
    known.ft = types.SimpleNamespace(_GLOBAL_RANK_MONITOR_CLIENT=None)
    monkeypatch.setitem(attached.sys.modules, "megatron.training.global_vars", known)
    monkeypatch.setitem(attached.sys.modules, "megatron.training.ft_integration", known.ft)
    return known


def pretrain_with(train):
    """Return a `pretrain` that calls its providers and then `train(forward_step_func)`."""

    def pretrain(cfg, train_valid_test_dataset_provider, model_type, forward_step_func, model_provider=None):
        if model_provider is not None:
            model_provider(pre_process=True)
        return train(forward_step_func, train_valid_test_dataset_provider)

    return pretrain


def run(train, provider=model_provider):
    """Call it as the newest Megatron-LM wants it."""
    return megatron.around(pretrain_with(train))("cfg", datasets_provider, "gpt", forward_step, model_provider=provider)


def left_with(train):
    """Return the code with which it leaves."""
    with pytest.raises(SystemExit) as left:
        run(train)
    return left.value.code


def test_what_is_handed_to_pretrain_stays_what_it_was(recording, lm):
    """Megatron asks functions for their parameters and marks."""

    def train(forward, provider):
        return forward(1, 2), provider([3]), provider.is_distributed, inspect.unwrap(forward)

    assert run(train) == ((1, 2), [3], True, forward_step)


def test_its_places_are_taken_while_it_runs_and_given_back(recording, lm):
    """Timers, signal handler and client; also where it raises."""
    timers = lm._GLOBAL_TIMERS

    def train(_forward, _provider):
        assert lm._GLOBAL_TIMERS is not timers
        assert lm._GLOBAL_SIGNAL_HANDLER.signals_received() == [False]
        assert lm._GLOBAL_ARGS.exit_signal_handler is True
        assert isinstance(lm.ft._GLOBAL_RANK_MONITOR_CLIENT, MonitorClient)
        raise LookupError("no such sample")

    with pytest.raises(LookupError):
        run(train)
    assert lm._GLOBAL_TIMERS is timers
    assert lm._GLOBAL_SIGNAL_HANDLER is None
    assert (lm._GLOBAL_ARGS.exit_signal_handler, lm.ft._GLOBAL_RANK_MONITOR_CLIENT) == (False, None)
    run(lambda *_: None)  # and again


def test_what_is_there_before_the_call_is_taken_at_once(recording, lm):
    """The load of a checkpoint is a section, and whoever installs a handler meanwhile finds a stop that is agreed."""

    def pretrain(train_valid_test_dataset_provider, forward_step_func):
        assert lm._GLOBAL_ARGS.exit_signal_handler is True
        assert lm.ft._GLOBAL_RANK_MONITOR_CLIENT is None  # Megatron-LM refuses to start NVRx's in the place of another
        timer = lm._GLOBAL_TIMERS("load-checkpoint")
        timer.start(barrier=True)
        assert recording.stack() == ["resume"]
        timer.stop(barrier=True)
        train_valid_test_dataset_provider([3])
        assert isinstance(lm.ft._GLOBAL_RANK_MONITOR_CLIENT, MonitorClient)

    megatron.around(pretrain)(datasets_provider, forward_step)


def test_what_comes_with_the_call_is_taken_with_the_first_forward(recording, lm):
    """Of an older version, without a provider that is called here.

    Other ranks may have begun: one that asked Megatron's own handler would wait for them for ever.
    """
    args, lm._GLOBAL_ARGS = lm._GLOBAL_ARGS, None

    def train(forward, _provider):
        lm._GLOBAL_ARGS = args
        assert lm._GLOBAL_SIGNAL_HANDLER is None
        forward(1, 2)
        return lm._GLOBAL_SIGNAL_HANDLER.signals_received(), lm._GLOBAL_ARGS.exit_signal_handler

    assert run(train, provider=None) == ([False], True)


def test_the_save_of_an_agreed_stop_keeps_its_deadline(recording, lm, monkeypatch):
    """It is a section: one that hangs is found. The deadlines end when Megatron has left."""
    monkeypatch.setattr(preemption, "check", lambda _step: True)

    def train(_forward, _provider):
        assert lm._GLOBAL_SIGNAL_HANDLER.signals_received() == [True]
        timer = lm._GLOBAL_TIMERS("save-checkpoint")
        timer.start(barrier=True)
        assert (recording.stack(), recording.snapshot().done) == (["checkpoint"], False)
        timer.stop()
        raise SystemExit(0)

    with pytest.raises(Preempted):
        run(train)
    assert recording.snapshot().done


def test_a_client_of_nvrx_stays(recording, lm, capsys):
    """It was asked for; two would contradict each other."""
    client = lm.ft._GLOBAL_RANK_MONITOR_CLIENT = object()
    assert run(lambda *_: lm.ft._GLOBAL_RANK_MONITOR_CLIENT) is client
    assert "--enable-ft-package" in capsys.readouterr().err


def test_a_client_of_ours_by_nvrxs_name_stays_without_a_word(recording, lm, capsys):
    """Its sections are those of the SDK."""
    client = lm.ft._GLOBAL_RANK_MONITOR_CLIENT = RankMonitorClient()
    assert run(lambda *_: lm.ft._GLOBAL_RANK_MONITOR_CLIENT) is client
    assert "--enable-ft-package" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("without", "said"),
    [("_GLOBAL_ARGS", "steps and preemption are not seen"), ("exit_signal_handler", "no exit_signal_handler")],
)
def test_a_version_without_what_is_needed_is_said(recording, lm, capsys, without, said):
    """It trains as ever, and nobody would save."""
    delattr(lm if hasattr(lm, without) else lm._GLOBAL_ARGS, without)
    assert run(lambda *_: "trained") == "trained"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("exits", [True, False])
def test_after_the_agreed_stop_it_leaves_with_75(recording, lm, monkeypatch, exits):
    """However this version of Megatron leaves."""
    monkeypatch.setattr(preemption, "check", lambda _step: True)

    def train(_forward, _provider):
        assert lm._GLOBAL_SIGNAL_HANDLER.signals_received() == [True]
        if exits:
            raise SystemExit(0)

    with pytest.raises(Preempted):
        run(train)


@pytest.mark.parametrize("iteration", [6, 3])
def test_a_rank_tells_the_others_how_it_has_ended(recording, lm, monkeypatch, iteration):
    """Whatever it has seen: a rank whose hooks have failed counts no steps, and the others ask it all the same."""
    told = []
    ranks = types.SimpleNamespace(rank=0, gather=lambda message: told.append(message) or [message, "clean"])
    monkeypatch.setattr(all_ranks, "has_peers", lambda: True)
    monkeypatch.setattr(all_ranks, "group_is_ready", lambda: True)
    monkeypatch.setattr(all_ranks, "find_ranks", lambda: ranks)
    lm._GLOBAL_ARGS.iteration = iteration
    run(lambda *_: None)
    assert told == ["not clean"]  # no session is in this process


@pytest.mark.parametrize(
    ("iteration", "skipped", "code"),
    [
        (6, None, 0),
        (5, [5], 0),
        (5, [6], 0),  # counted from 1, as newer versions do
        (4, [2, 4, 5], 0),
        (4, [5, 6], 0),
        (4, [4], 75),
        (4, [5], 75),  # the last one but one or the last one: the other is still to be trained
        (5, [], 75),
        (3, None, 75),
    ],
)
def test_an_exit_with_0_is_the_end_only_behind_the_last_iteration(recording, lm, iteration, skipped, code):
    """Else it is to be requeued, not finished. Of iterations that are skipped nothing is heard: they are none."""
    lm._GLOBAL_ARGS.iteration, lm._GLOBAL_ARGS.iterations_to_skip = iteration, skipped
    assert left_with(lambda *_: sys.exit(0)) == code


@pytest.mark.parametrize("code", [16, 17, 1])
def test_other_exit_codes_pass(recording, lm, code):
    """Schedulers know them."""
    assert left_with(lambda *_: sys.exit(code)) == code


PAGELESS = """
import sys, types
from resilience_sdk.adapters import megatron

args = types.SimpleNamespace(exit_signal_handler=False, train_iters=6, iteration=6, save="somewhere")
names = {"_GLOBAL_ARGS": args, "_GLOBAL_TIMERS": lambda *_: None, "_GLOBAL_SIGNAL_HANDLER": None}
sys.modules["megatron.training.global_vars"] = types.SimpleNamespace(**names)

def pretrain(dataset_provider, forward_step_func):
    dataset_provider()

megatron.around(pretrain)(lambda: None, lambda: None)
"""


def test_a_rank_without_a_page_has_a_finished_flag_too(tmp_path):
    """As with the other adapters: who starts the job again is told that it is complete."""
    env = {"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin", "RESILIENCE_PAGE_DIR": "/dev/null/nowhere"}
    command = [sys.executable, "-c", PAGELESS]
    done = subprocess.run(
        command, env=env | {"RESILIENCE_RUN_DIR": "run"}, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "finished").exists(), done.stderr


def test_switched_off_nothing_is_touched(lm, monkeypatch):
    """Not even its arguments are wrapped."""
    monkeypatch.setenv("RESILIENCE_DISABLE", "1")
    assert run(lambda forward, _provider: (forward, lm._GLOBAL_SIGNAL_HANDLER)) == (forward_step, None)


@pytest.mark.parametrize("given", [None, print, functools.partial(forward_step), lambda *args, **kwargs: None])
def test_what_is_no_pretrain_is_an_error(given):
    """It names what was given, and what to use for a loop of one's own."""
    with pytest.raises(ConfigError, match=r"megatron\.attach\(config, optimizer\)"):
        megatron.around(given)


def test_the_client_knows_a_save_in_the_background_from_a_save(recording):
    """Looks before each step take no time, and would teach a deadline of seconds; the last one waits for the save."""
    handle = attached.Attached()
    client = MonitorClient(handle)
    for _ in range(3):
        client.start_section("checkpointing")
        client.end_section("checkpointing")
    handle.spans["checkpoint"].begin()
    client.start_section("checkpointing")
    client.end_section("checkpointing")
    handle.spans["checkpoint"].end()
    assert {name: len(samples) for name, samples in recording.harvest().items()} == {"finalize": 3, "checkpoint": 1}
    client.start_section("checkpointing")
    [section] = recording.lane().stack
    book = LearnedTimeouts(Settings())
    book.add("finalize", "io", [0.001] * 100)
    assert book.limit(section) == Limit(3600.0, "set")


def test_the_client_answers_all_that_megatron_asks(recording):
    """Where `--calc-ft-timeouts` is on, too."""
    client = MonitorClient(attached.Attached())
    client.init_workload_monitoring(num_warmup_iters=5)
    client.load_state_dict({"a": 1})
    client.calculate_and_set_section_timeouts(selected_sections=["step"], calc_out_of_section=False)
    client.shutdown_workload_monitoring()
    assert (client.state_dict(), client.section_timeouts) == ({}, {})
