"""A port that is in use names who has it, wherever it was refused."""

import os
import socket
from contextlib import contextmanager

import pytest
from harness import job

from resilience_sdk.cli import dashboard
from resilience_sdk.errors import ConfigError

_ME = f"is held by process {os.getpid()} of user"


@contextmanager
def taken_port():
    """Yield a port that this very process listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.slow
def test_a_port_that_a_script_chose_itself(tmp_path):
    """An unchanged script's: on the screen, in the incident, with what to do."""
    with taken_port() as port, job(tmp_path, "--nproc-per-node", 2, "--max-restarts", 0, "own_port.py", port) as run:
        assert run.finish() != 0
        assert f"port {port} {_ME}" in run.screen
        (incident,) = run.incidents()
    assert incident["cause"] == "port_in_use"
    told = {item["source"]: item["text"] for item in incident["evidence"]}
    assert f"port {port} {_ME}" in told["proc"]
    assert "another port" in told["cure"]


@pytest.mark.slow
def test_a_port_of_the_nodes_rendezvous(tmp_path):
    """No rank was started: the launcher says it, and that one node alone needs no port."""
    with taken_port() as port, job(tmp_path, "--master-port", port, "own_port.py", port) as run:
        assert run.finish() == 1
        assert f"port {port} {_ME}" in run.last_lines()
        assert "leave it out" in run.last_lines()


def test_a_port_of_the_dashboard():
    """With the option that takes another one."""
    with taken_port() as port, pytest.raises(ConfigError, match=f"port {port} {_ME}.*--port 0"):
        dashboard._listen("127.0.0.1", port)
