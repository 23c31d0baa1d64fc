"""A machine that is not this one: files of /proc and /sys below a directory."""

import pytest


@pytest.fixture
def machine(tmp_path):
    """Return a function that writes `{"/proc/loadavg": text}` and returns the root of that machine."""
    root = tmp_path / "machine"

    def write(files):
        for name, text in files.items():
            path = root / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(text))
        root.mkdir(exist_ok=True)
        return str(root)

    return write
