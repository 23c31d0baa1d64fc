"""What is asked of the kernel directly."""

import socket
import sys

import pytest

from resilience_sdk.system.linux import listens_on, opened

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_port_is_ours_while_this_process_listens_on_it(family):
    """A socket that is bound, connected or closed does not count, nor does the same port of another process."""
    if family == socket.AF_INET6 and not socket.has_ipv6:
        pytest.skip("no IPv6")
    with socket.socket(family) as server:
        server.bind(("127.0.0.1" if family == socket.AF_INET else "::1", 0))
        port = server.getsockname()[1]
        assert not listens_on(port)
        server.listen()
        assert listens_on(port)
    assert not listens_on(port)


def test_open_files_are_found_by_the_beginning_of_their_names(tmp_path):
    """As long as they are open."""
    path = tmp_path / "device"
    with path.open("w"):
        assert opened(str(tmp_path)) == [str(path)]
    assert opened(str(tmp_path)) == []
