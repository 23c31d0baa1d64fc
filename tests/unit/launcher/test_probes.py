"""Trying what failed, and waiting for it, on real files, sockets and names."""

import socket

import pytest

from resilience_sdk.attribution.exits import NAME, PORT, STORAGE, Resource
from resilience_sdk.core.journal import Journal, read_journal
from resilience_sdk.launcher.job import await_resource, try_resource


def test_a_place_that_takes_writes_works_and_nothing_is_left_in_it(tmp_path):
    """A path that is not there yet is tried in the nearest directory above it."""
    for name in (None, str(tmp_path / "not" / "there" / "yet.pt")):
        assert try_resource(Resource(STORAGE, name), tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_a_place_that_takes_no_writes_is_told_with_the_reason():
    """As the operating system says it."""
    assert try_resource(Resource(STORAGE, "/proc/x"), None)


def test_a_port_is_free_when_nobody_listens_on_it(tmp_path):
    """And without a number there is nothing to try."""
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = Resource(PORT, str(server.getsockname()[1]))
        assert "in use" in try_resource(port, tmp_path)
    assert try_resource(port, tmp_path) is None
    assert try_resource(Resource(PORT), tmp_path) is None
    assert try_resource(Resource(PORT, "99999"), tmp_path) is None


def test_a_name_resolves_or_not(tmp_path):
    """Without a name there is nothing to try."""
    assert try_resource(Resource(NAME, "localhost"), tmp_path) is None
    assert try_resource(Resource(NAME), tmp_path) is None


@pytest.fixture
def journal(tmp_path):
    """A journal of its own."""
    (tmp_path / "journal").mkdir()
    journal = Journal(tmp_path / "journal", writer="launcher", host="h", boot_id="b", job="j")
    yield journal
    journal.close()


def wait(tmp_path, journal, port, sleep, limit_s=60.0):
    """Wait for the port, and return whether it came free; the journal says the same."""
    resource = Resource(PORT, str(port))
    worked = await_resource(resource, tmp_path, limit_s, sleep, journal)
    (event,) = [e for e in read_journal(tmp_path / "journal").events if e["event"] == "health"]
    assert event["ok"] is worked
    return worked


def test_it_is_tried_again_until_it_works(tmp_path, journal, capfd):
    """Less and less often; the reason is said once."""
    pauses = []
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]

        def sleep(seconds):
            pauses.append(seconds)
            if len(pauses) == 7:
                server.close()
            return True

        assert wait(tmp_path, journal, port, sleep)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert capfd.readouterr().err.count(f"waiting for port {port} to be free") == 1


@pytest.mark.parametrize("why", ["limit", "asked to leave"])
def test_it_ends_at_the_limit_and_when_the_launcher_is_to_leave(tmp_path, journal, why):
    """Then the next attempt is made all the same, or none."""
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]
        assert not wait(tmp_path, journal, port, lambda _: why == "limit", limit_s=0.0 if why == "limit" else 60.0)
