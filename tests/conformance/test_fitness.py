"""A server that must not fork is found out, said, and replaced by exec."""

import os

import pytest
from launches import light_server

from resilience_sdk.launcher.forkserver import WorkerStarter
from resilience_sdk.launcher.forkserver_wire import Script


@pytest.fixture
def starter():
    """A starter whose servers end with the test."""
    starter = WorkerStarter(Script("file", "train.py"))
    yield starter
    starter.close()


def environment(folder, code=""):
    """An environment whose servers start at once, and run `code` first, as site-wide tools do."""
    return {**os.environ, **light_server(folder, code), "OMP_NUM_THREADS": "1"}


def test_a_thread_in_the_server_means_exec(starter, tmp_path, capsys):
    """Forking beside a thread can deadlock: workers are executed, and one line says why."""
    thread = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    env = environment(tmp_path, thread)
    assert starter._server_for([env]).mode == "exec"
    assert "2 run" in starter.reason
    assert "workers are started by exec" in capsys.readouterr().err
    assert starter._server_for([env]).mode == "exec"
    assert capsys.readouterr().err == ""


def test_a_failed_preload_is_shown_and_not_fatal(starter, tmp_path, capsys):
    """A module that cannot be imported is named; the server forks all the same."""
    assert starter._server_for([environment(tmp_path)]).mode == "fork"
    assert "preload of torch.nn.parallel: ModuleNotFoundError" in capsys.readouterr().err


def test_the_server_is_replaced_when_what_it_loaded_with_changes(starter, tmp_path):
    """Variables read at load time hold for workers, so a server that has others cannot serve them."""
    env = environment(tmp_path)
    first = starter._server_for([env])
    assert starter._server_for([{**env, "RANK": "1"}]) is first
    second = starter._server_for([{**env, "OMP_NUM_THREADS": "2"}])
    assert second is not first
    assert not first.alive


def test_a_server_that_died_is_replaced(starter, tmp_path, capsys):
    """The next attempt gets a new one, and one line says so."""
    env = environment(tmp_path)
    first = starter._server_for([env])
    first._process.kill()
    first.exits(10.0)
    assert starter._server_for([env]).alive
    assert "starting another" in capsys.readouterr().err
