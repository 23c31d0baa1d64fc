"""What a resume will not make exact is said once at the start, once more at a resume, by rank 0, and journalled."""

from __future__ import annotations

import pytest

from resilience_sdk.core import console, resume_limits
from resilience_sdk.core.journal import Event, Journal, read_journal
from resilience_sdk.report.event_words import sentence

ORDER = ("order", "the order of sampler Own", "samples come twice or not at all", "give the sampler to state")
START = "resilience: a resume will not repeat the order of sampler Own: samples come twice or not at all; give the"
NOW = "resilience: this resume does not repeat the order of sampler Own: samples come twice or not at all; give the"


@pytest.fixture(autouse=True)
def nothing_noted(monkeypatch):
    """As a process that has just begun, outside of a distributed job."""
    monkeypatch.setattr(resume_limits, "_noted", resume_limits._Noted())
    monkeypatch.setattr(console, "_said", set())
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def test_a_limit_is_said_once_and_once_more_at_the_resume(capsys):
    """However often it is met; a second resume of the process says nothing new."""
    for _ in range(3):
        resume_limits.note(*ORDER)
    assert capsys.readouterr().err == f"{START} sampler to state\n"
    resume_limits.resumed()
    resume_limits.resumed()
    resume_limits.note(*ORDER)
    assert capsys.readouterr().err == f"{NOW} sampler to state\n"


def test_what_is_found_behind_a_resume_is_worded_as_of_now(capsys):
    """There was no start to say it at."""
    resume_limits.resumed()
    resume_limits.note(*ORDER)
    assert capsys.readouterr().err == f"{NOW} sampler to state\n"
    assert [limit.key for limit in resume_limits.limits()] == ["order"]


def test_only_rank_0_of_the_job_says_it(capsys, monkeypatch):
    """By its environment, or by its session, which knows it better."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    resume_limits.note(*ORDER)
    resume_limits.record_in(lambda *_, **__: pytest.fail("a rank other than 0 journals it"), lambda: 1)
    resume_limits.note("other", *ORDER[1:])
    assert capsys.readouterr().err == ""
    assert len(resume_limits.limits()) == 2


def test_the_journal_has_it_also_where_it_was_said_before_there_was_one(tmp_path):
    """And gives it back, each limit once."""
    journal = Journal(tmp_path, writer="rank0", host="h", boot_id="b", job="j", rank=0)
    resume_limits.note(*ORDER)
    resume_limits.record_in(journal.emit, lambda: 0)
    resume_limits.note("b", "metrics of the open epoch", "their mean lacks what came before", "save at its end")
    resume_limits.resumed()
    events = read_journal(tmp_path).events
    assert [(event["limit"], event["at_resume"]) for event in events] == [
        ("order", False), ("b", False), ("order", True), ("b", True),
    ]  # fmt: skip
    assert resume_limits.read_limits(events) == resume_limits.limits()
    assert f"resilience: {sentence(events[0])}" == f"{START} sampler to state"
    assert f"resilience: {sentence(events[2])}" == f"{NOW} sampler to state"


def test_what_another_version_has_written_is_left_out():
    """Events may have fields of any type."""
    assert resume_limits.read_limits([{"event": Event.RESUME_LIMIT.value, "limit": 3}, {"event": "order"}]) == ()
