"""Files are replaced as a whole, are as private as their directory, and a failed write leaves nothing behind."""

from __future__ import annotations

import os
import stat

import pytest

from resilience_sdk.core.atomic_write import write_whole


def test_a_file_that_cannot_be_filled_leaves_nothing(tmp_path, monkeypatch):
    """On a full disk the old content stays, and no temporary file is left, however often it is tried."""
    path = tmp_path / "lease.json"
    write_whole(path, "old")

    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    for _ in range(3):
        with pytest.raises(OSError, match="space"):
            write_whole(path, "new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["lease.json"]
    assert path.read_text() == "old"


@pytest.mark.parametrize(("directory", "file"), [(0o700, 0o600), (0o750, 0o640), (0o755, 0o644), (0o777, 0o644)])
def test_a_file_is_as_private_as_its_directory(tmp_path, directory, file):
    """Who may read the run directory may read its files, whatever the umask; nobody else may write one."""
    tmp_path.chmod(directory)
    before = os.umask(0o077)
    try:
        write_whole(tmp_path / "outcome.json", "{}")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "outcome.json").stat().st_mode) == file
