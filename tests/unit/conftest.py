"""Helpers of this folder can be imported by its tests."""

import sys
from pathlib import Path

import pytest
from hypothesis import settings

from resilience_sdk.core import console, resume_limits
from resilience_sdk.recorder import lookup

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
from recording import Recording

# Fewer examples than usual: the fast suite runs at every change, so rare ones are met within a day. No deadline: a busy
# machine is no fault of what is tested.
settings.register_profile("fast", max_examples=40, deadline=None)
settings.load_profile("fast")

# Folders of tests whose subject opens sections, which would start a session in the process that runs them.
_UNRECORDED = frozenset({"adapters", "checkpoint", "numerics", "rank", "session"})


@pytest.fixture(autouse=True)
def nobody_records(request, monkeypatch):
    """Nothing is recorded in the tests of those folders, and no variable makes them a rank of a job."""
    if request.path.parent.name not in _UNRECORDED:
        yield
        return
    before = lookup.starter()
    lookup.disable()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    lifecycle = sys.modules.get("resilience_sdk.rank.lifecycle")
    if lifecycle is not None:  # whatever an earlier test has begun in this process
        monkeypatch.setattr(lifecycle, "_session", None)
        monkeypatch.setattr(lifecycle, "_lacks_page", False)
    yield
    lookup.set_starter(before)
    lookup.forget()


@pytest.fixture(autouse=True)
def nothing_was_said(monkeypatch):
    """What is said once in a process is said in a test, whichever ran before it; what one said lost is none's after."""
    monkeypatch.setattr(console, "_said", set())
    monkeypatch.setattr(resume_limits, "_noted", resume_limits._Noted())


@pytest.fixture
def recording(tmp_path):
    """This process records into a page of its own, which can be read back."""
    with Recording(tmp_path) as started:
        yield started
