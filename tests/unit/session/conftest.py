from __future__ import annotations

import pytest

from resilience_sdk import lanes


@pytest.fixture(autouse=True)
def nobody_records(monkeypatch):
    """Sections inside the checkpointer must not start a session in the process that runs the tests."""
    before = lanes.starter()
    lanes.disable()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    yield
    lanes.set_starter(before)
    lanes.forget()
