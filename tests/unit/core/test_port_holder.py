"""Who holds a port, on real sockets and real processes."""

import os
import socket
import subprocess
import sys

import pytest

from resilience_sdk.core.port_holder import find_port_holder, port_in, words_of_holder

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
_LISTEN = (
    "import socket, sys; s = socket.create_server((sys.argv[1], 0), family=int(sys.argv[2])); "
    "print(s.getsockname()[1], flush=True); sys.stdin.read()"
)


@pytest.mark.parametrize(("address", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_the_process_that_listens_is_named_with_command_and_user(address, family):
    """Of either family; a value that looks like a secret is not repeated."""
    command = [sys.executable, "-c", _LISTEN, address, str(int(family)), "--api-key", "hunter2hunter2"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        port = int(server.stdout.readline())
        holder = find_port_holder(port)
        assert (holder.pid, holder.uid, holder.state) == (server.pid, os.getuid(), "listens")
        assert "hunter2" not in holder.command
        said = words_of_holder(port)
        assert f"port {port} is held by process {server.pid} of user" in said
        server.stdin.close()
        server.wait()
    assert find_port_holder(port) is None
    assert "nobody" in words_of_holder(port)


def test_a_port_that_only_closes_is_said_to_be_free_soon():
    """No process has it any more: the kernel keeps it for a minute."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        peer, _ = server.accept()
    peer.close()  # who closes first waits
    client.recv(1)
    client.close()
    holder = find_port_holder(port)
    assert (holder.pid, holder.state) == (None, "closes")
    assert "closing connection" in str(holder)


def test_a_holder_that_proc_does_not_show_is_known_by_its_user(tmp_path):
    """As in a container that shares the network of its host, or for a process of another user."""
    (tmp_path / "self/net").mkdir(parents=True)
    row = "0: 00000000:733C 00000000:0000 0A 00000000:00000000 00:00000000 00000000  4242        0 99 1 0 100 0 0 10 0"
    (tmp_path / "self/net/tcp").write_text(f"header\n  {row}\n")
    holder = find_port_holder(0x733C, root=tmp_path)
    assert (holder.pid, holder.uid) == (None, 4242)
    assert "not visible from here" in str(holder)
    assert "4242" in str(holder)


@pytest.mark.parametrize(
    ("text", "port"),
    [
        ("failed to listen on any local network address. port: 29500, useIpv6: false, code: -98", 29500),
        ("The server socket has failed to bind to [::]:29611 (errno: 98 - Address already in use)", 29611),
        ("bind on 0.0.0.0:8080: address already in use", 8080),
        ("[Errno 98] error while attempting to bind on address ('127.0.0.1', 8888): address already in use", 8888),
        ("[Errno 98] Address already in use", None),
        ("port 99999 is taken", None),
        ("at 12:30:45 the address was in use", None),
    ],
)
def test_the_port_of_an_error(text, port):
    """As torch, C and asyncio say it."""
    assert port_in(text) == port
