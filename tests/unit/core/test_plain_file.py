"""What is no file under the name of a file is refused at once, and files are opened as ever."""

import os
import socket
from pathlib import Path

import pytest

from resilience_sdk.core.atomic_write import write_whole
from resilience_sdk.core.plain_file import NotAPlainFileError, open_plain, private, read_bytes, read_text
from resilience_sdk.system import same_device

KINDS = {"a FIFO": os.mkfifo, "a directory": os.mkdir, "a device": lambda path: path.symlink_to("/dev/zero")}
FLAGS = [os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_CREAT | os.O_APPEND, os.O_RDWR | os.O_CREAT]


def listening(path: Path) -> None:
    """Put a socket there."""
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket may have 107 bytes
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)
    os.chdir(here)


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize(("kind", "make"), [*KINDS.items(), ("a socket", listening)])
def test_what_is_no_file_is_refused_at_once(tmp_path, kind, make, flags):
    """Nobody is waited for, and the error says what it is."""
    make(path := tmp_path / "name")
    with pytest.raises(NotAPlainFileError, match=f"it is {kind}, not a file"):
        open_plain(path, flags)


def test_a_file_is_made_and_read_as_ever(tmp_path):
    """With the mode that was asked for, and no descriptor for what the process starts."""
    fd = open_plain(tmp_path / "new", os.O_WRONLY | os.O_CREAT, 0o600)
    assert not os.get_inheritable(fd)
    os.write(fd, "für".encode())
    os.close(fd)
    assert read_text(tmp_path / "new") == "für"
    assert read_bytes(tmp_path / "new") == "für".encode()
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "other")


def test_a_link_is_followed_where_it_is_not_refused(tmp_path):
    """Owners may have put a file elsewhere; what only we write there is opened without links."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("file")
    assert read_text(tmp_path / "link") == "x"
    with pytest.raises(NotAPlainFileError, match="a symbolic link"):
        private(str(tmp_path / "link"), os.O_RDONLY)


def test_a_link_to_a_fifo_is_refused_like_the_fifo(tmp_path):
    """Else it would be waited for there."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    with pytest.raises(NotAPlainFileError, match="a FIFO"):
        read_bytes(tmp_path / "link")


def test_what_is_passed_over_is_reported_once(tmp_path, capsys):
    """Readers that live with a missing file say nothing of it; that a FIFO stands there does not pass by itself."""
    os.mkfifo(tmp_path / "timeouts.json")
    for _ in range(3):
        with pytest.raises(NotAPlainFileError):
            read_bytes(tmp_path / "timeouts.json")
    said = capsys.readouterr().err
    assert said.count("timeouts.json is not read: it is a FIFO, not a file; remove it") == 1


@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_a_whole_write_takes_the_place_of_what_is_no_file(tmp_path, kind):
    """The name then is a file; what a link pointed to stays as it was."""
    (tmp_path / "elsewhere").write_text("theirs")
    path = tmp_path / "lease.json"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("elsewhere")
    write_whole(path, "ours")
    assert path.read_text() == "ours"
    assert not path.is_symlink()
    assert (tmp_path / "elsewhere").read_text() == "theirs"


def test_a_whole_write_waits_for_nobody_at_its_temporary_name(tmp_path):
    """The name can be known before: it has the number of the process."""
    os.mkfifo(tmp_path / f".lease.json.{os.getpid()}")
    with pytest.raises(NotAPlainFileError):
        write_whole(tmp_path / "lease.json", "ours")


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_directory_that_cannot_be_written_stays_as_it_is(tmp_path):
    """The error is raised, for who can say it."""
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError):
        write_whole(tmp_path / "lease.json", "ours")
    tmp_path.chmod(0o700)


def test_another_file_system_in_the_place_of_a_run_directory_is_not_written(tmp_path):
    """As where its mount is gone: what is written below it would be found by nobody."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    same_device.remember(run_dir, run_dir.stat().st_dev + 1)
    try:
        with pytest.raises(OSError, match="another file system is there"):
            write_whole(run_dir / "outcome.json", "{}")
        run_dir.rmdir()  # then it would be made on the device above
        with pytest.raises(OSError, match="another file system is there"):
            same_device.check(run_dir / "journal")
    finally:
        same_device._devices.clear()
    same_device.check(run_dir)
